"""What each scope holds of a tier, so that one cannot push out all others (D-M3)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from tiers.api import Key


@dataclass(slots=True)
class _Holding:
    used_bytes: int = 0
    leased_bytes: int = 0
    idle: OrderedDict[Key, None] = field(default_factory=OrderedDict)
    """What may go, that which was used longest ago first."""


class ScopeBooks:
    """Octets by scope, with a bound for each; a scope over it makes room among its own."""

    def __init__(self, bytes_max: float) -> None:
        """`bytes_max` of one scope; infinite for no bound."""
        self.bytes_max = bytes_max
        self._holdings: dict[str, _Holding] = {}

    def room_bytes(self, scope: str) -> float:
        """What a scope may still hold, were all that it has no lease on gone."""
        held = self._holdings.get(scope)
        return self.bytes_max - (held.leased_bytes if held else 0)

    def is_over(self, scope: str, more_bytes: int) -> bool:
        """Whether a scope would hold more than it may with so much more."""
        held = self._holdings.get(scope)
        return (held.used_bytes if held else 0) + more_bytes > self.bytes_max

    def next_over(self, scope: str, size_bytes: int) -> Key | None:
        """What has to go before a scope can take so much more; None when nothing has to."""
        held = self._holdings.get(scope)
        if held is None or held.used_bytes + size_bytes <= self.bytes_max:
            return None
        return next(iter(held.idle), None)

    def add(self, key: Key, size_bytes: int) -> None:
        """Enter an object without a lease."""
        held = self._holdings.setdefault(key.scope, _Holding())
        held.used_bytes += size_bytes
        held.idle[key] = None

    def use(self, key: Key) -> None:
        """Count a use."""
        held = self._holdings[key.scope]
        if key in held.idle:
            held.idle.move_to_end(key)

    def lease(self, key: Key, size_bytes: int) -> None:
        """An object may not go any more."""
        held = self._holdings[key.scope]
        del held.idle[key]
        held.leased_bytes += size_bytes

    def set_aside(self, key: Key) -> None:
        """An object is not among those that may go, until it is put back."""
        del self._holdings[key.scope].idle[key]

    def put_back(self, key: Key) -> None:
        """It may go again, the last of all."""
        self._holdings[key.scope].idle[key] = None

    def release(self, key: Key, size_bytes: int) -> None:
        """An object may go again, and does so first."""
        held = self._holdings[key.scope]
        held.leased_bytes -= size_bytes
        held.idle[key] = None
        held.idle.move_to_end(key, last=False)

    def remove(self, key: Key, size_bytes: int) -> None:
        """Take an object out, leased or not."""
        held = self._holdings[key.scope]
        held.used_bytes -= size_bytes
        if key in held.idle:
            del held.idle[key]
        else:
            held.leased_bytes -= size_bytes
        if not held.used_bytes and not held.idle:
            del self._holdings[key.scope]

    def check(self, sizes: dict[Key, int], leased: set[Key]) -> None:
        """Assert that this is what the tier holds."""
        for scope in {key.scope for key in sizes} | set(self._holdings):
            own = {key: size for key, size in sizes.items() if key.scope == scope}
            held = self._holdings[scope]
            assert held.used_bytes == sum(own.values()) <= self.bytes_max
            assert held.leased_bytes == sum(own[key] for key in own.keys() & leased)
            assert set(held.idle) == own.keys() - leased
