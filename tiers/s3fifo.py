"""Who has to go next: S3-FIFO (Yang et al., "FIFO queues are all you need", SOSP 2023).

Most objects of a cache are used once. What is new stands in a small queue and is soon gone again if
nobody uses it; what was used meanwhile moves to the main queue, where a use is worth another round.
Of what has gone the names are kept for a while: who comes again was missed, and goes to the main
queue at once. A use only counts, and moves nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from tiers.api import Key

SMALL_SHARE = 0.1
USES_MAX = 3


@dataclass(slots=True)
class _Place:
    size_bytes: int
    uses: int = 0


_Queue = OrderedDict[Key, _Place]


class S3Fifo:
    """The order of a tier's objects that may be evicted; sizes in octets."""

    def __init__(self, size_bytes: int) -> None:
        """`size_bytes` is the tier's."""
        self._size_bytes = size_bytes
        self._small: _Queue = OrderedDict()
        self._main: _Queue = OrderedDict()
        self._small_bytes = 0
        self._ghosts: OrderedDict[Key, int] = OrderedDict()
        self._ghost_bytes = 0

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, key: Key) -> bool:
        return key in self._small or key in self._main

    def keys(self) -> set[Key]:
        """All of them."""
        return {*self._small, *self._main}

    def add(self, key: Key, size_bytes: int, *, uses: int = 0) -> None:
        """Enter an object that is not here; `uses` it has had already keep it a while longer."""
        place = _Place(size_bytes, min(uses, USES_MAX))
        ghost_bytes = self._ghosts.pop(key, None)
        if ghost_bytes is not None:
            self._ghost_bytes -= ghost_bytes
            self._main[key] = place
        else:
            self._small[key] = place
            self._small_bytes += size_bytes

    def add_first(self, key: Key, size_bytes: int) -> None:
        """Enter an object that goes before all others, unless it is used."""
        self._small[key] = _Place(size_bytes)
        self._small.move_to_end(key, last=False)
        self._small_bytes += size_bytes

    def use(self, key: Key) -> None:
        """Count a use; nothing happens for what is not here."""
        place = self._small.get(key) or self._main.get(key)
        if place is not None:
            place.uses = min(place.uses + 1, USES_MAX)

    def remove(self, key: Key) -> None:
        """Take an object out; nothing happens for what is not here."""
        place = self._small.pop(key, None)
        if place is not None:
            self._small_bytes -= place.size_bytes
        else:
            self._main.pop(key, None)

    def evict(self, instead: Callable[[Key], Key] = lambda key: key) -> Key | None:
        """Take out the next that has to go, and return it; None if there is none.

        `instead` may name another one of these that goes before it.
        """
        while self._small or self._main:
            small_is_full = self._small_bytes > SMALL_SHARE * self._size_bytes
            from_small = self._small and (small_is_full or not self._main)
            key = self._from_small(instead) if from_small else self._from_main(instead)
            if key is not None:
                return key
        return None

    def _from_small(self, instead: Callable[[Key], Key]) -> Key | None:
        """The oldest of the new ones, None if it was used and so has moved."""
        key, place = self._small.popitem(last=False)
        self._small_bytes -= place.size_bytes
        if place.uses:
            place.uses = 0
            self._main[key] = place
            return None
        if (other := instead(key)) != key:
            self._small[key] = place
            self._small.move_to_end(key, last=False)
            self._small_bytes += place.size_bytes
            return self._out_of_turn(other)
        self._remember(key, place.size_bytes)
        return key

    def _from_main(self, instead: Callable[[Key], Key]) -> Key | None:
        """The oldest of the proven ones, None if its uses earn it another round."""
        key, place = self._main.popitem(last=False)
        if place.uses:
            place.uses -= 1
            self._main[key] = place
            return None
        if (other := instead(key)) != key:
            self._main[key] = place
            self._main.move_to_end(key, last=False)
            return self._out_of_turn(other)
        return key

    def _out_of_turn(self, key: Key) -> Key:
        if (place := self._small.get(key)) is not None:
            self._remember(key, place.size_bytes)
        self.remove(key)
        return key

    def _remember(self, key: Key, size_bytes: int) -> None:
        self._ghost_bytes += size_bytes - self._ghosts.pop(key, 0)
        self._ghosts[key] = size_bytes
        while self._ghost_bytes > self._size_bytes:
            _, gone = self._ghosts.popitem(last=False)
            self._ghost_bytes -= gone

    def check(self) -> None:
        """Assert that sizes agree with what is here."""
        assert self._small_bytes == sum(place.size_bytes for place in self._small.values())
        assert self._ghost_bytes == sum(self._ghosts.values()) <= self._size_bytes
        assert self._small.keys().isdisjoint(self._main)
