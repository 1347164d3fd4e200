"""Who holds how many bytes of a tier, for how long, and who has to go next.

Shared by the tiers of this host. Time is read from the clock given. Invariants, told by `check`:
used = sum over all accounts; leased = sum over those with a deadline; idle are exactly the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from tiers.api import Key, TierFull
from tiers.chains import Chains
from tiers.deadlines import Deadlines
from tiers.s3fifo import S3Fifo
from tiers.scopes import ScopeBooks


@dataclass(slots=True)
class _Account:
    size_bytes: int
    generation: int
    deadline: float | None = None
    reads: int = 0
    outlived: bool = False


@dataclass(frozen=True, slots=True)
class Victim:
    """An object that has to go; `keep` tells whether the next tier should have it.

    What was put with a lease was wanted for that long (rows live one round), so after it only a
    second use earns a place below. What was put without one is worth keeping at once.
    """

    key: Key
    keep: bool


@dataclass(frozen=True, slots=True)
class Holding:
    """One object on a tier's books."""

    key: Key
    size_bytes: int
    leased: bool


@dataclass(frozen=True, slots=True)
class Admission:
    """Room was made: the victims are off the books, `generation` names this version of the key."""

    generation: int
    victims: tuple[Victim, ...]


class Ledger:
    """Byte budget, leases and eviction order; holds no data and does no I/O."""

    def __init__(
        self,
        size_bytes: int,
        *,
        clock: Callable[[], float],
        scope_bytes_max: int | None = None,
    ) -> None:
        """`scope_bytes_max` bounds what one scope may hold of `size_bytes`."""
        self.size_bytes = size_bytes
        # One that may hold all is bounded by the tier alone, and goes by the tier's order.
        share_bytes = size_bytes if scope_bytes_max is None else scope_bytes_max
        self._scopes = ScopeBooks(share_bytes if share_bytes < size_bytes else math.inf)
        self.used_bytes = 0
        self._leased_bytes = 0
        self._clock = clock
        self._accounts: dict[Key, _Account] = {}
        self._idle = S3Fifo(size_bytes)
        self._chains = Chains(self._idle.__contains__)
        self._deadlines = Deadlines(self._deadline)
        self._generation = 0

    def __len__(self) -> int:
        return len(self._accounts)

    def __contains__(self, key: Key) -> bool:
        return key in self._accounts

    @property
    def leased_bytes(self) -> int:
        """What can't be evicted now."""
        self._lapse()
        return self._leased_bytes

    @property
    def leases(self) -> int:
        """How many objects can't be evicted now."""
        self._lapse()
        return len(self._accounts) - len(self._idle)

    def is_leased(self, key: Key) -> bool:
        """Whether an object can't be evicted now."""
        self._lapse()
        return key in self._accounts and key not in self._idle

    def holdings(self) -> Iterator[Holding]:
        """All that is on the books."""
        self._lapse()
        for key, account in self._accounts.items():
            yield Holding(key, account.size_bytes, account.deadline is not None)

    def generation(self, key: Key) -> int | None:
        """The number of the version that is on the books, None if there is none."""
        account = self._accounts.get(key)
        return None if account is None else account.generation

    def add(
        self,
        key: Key,
        size_bytes: int,
        *,
        lease_s: float,
        after: str = "",
        generation: int | None = None,
    ) -> Admission:
        """Enter an object, evicting what is not leased; raises TierFull and changes nothing.

        `after` as in Entry; `generation` is given for what an earlier run left.
        """
        before = Key(key.scope, after) if after not in ("", key.name) else None
        spared = self._check_room(key, size_bytes, before)
        self.remove(key)
        victims = self._make_room(key.scope, size_bytes, spared, math.inf)
        self._generation = max(self._generation + 1, generation or 0)
        number = generation or self._generation
        self._accounts[key] = _Account(size_bytes, number)
        self._chains.add(key, before)
        self._idle.add(key, size_bytes)
        self._scopes.add(key, size_bytes)
        self.used_bytes += size_bytes
        if lease_s > 0:
            self.renew(key, lease_s)
        return Admission(number, victims)

    def make_room(
        self, key: Key, size_bytes: int, *, after: str = "", objects_max: int
    ) -> tuple[Victim, ...]:
        """Evict as `add` would for an object, but not more than so many at a time.

        Where fewer went, `add` finds its room. Raises TierFull, and has evicted nothing then.
        """
        before = Key(key.scope, after) if after not in ("", key.name) else None
        spared = self._check_room(key, size_bytes, before)
        back_bytes = self._accounts[key].size_bytes if key in self._accounts else 0
        return self._make_room(key.scope, size_bytes - back_bytes, spared, objects_max)

    def shed(
        self,
        size_bytes: int,
        *,
        sparing: Collection[Key] = frozenset(),
        count_max: float = math.inf,
    ) -> tuple[Victim, ...]:
        """Take objects without a lease off the books until that many bytes were, or none is left.

        `sparing` are those that the room is made for; `count_max` bounds how many go.
        """
        self._lapse()
        victims: list[Victim] = []
        spared = []
        while size_bytes > 0 and len(victims) < count_max:
            if (key := self._idle.evict(self._chains.last)) is None:
                break
            if key in sparing:
                self._scopes.set_aside(key)
                spared.append(key)
                continue
            size_bytes -= self._accounts[key].size_bytes
            victims.append(self._gone(key))
        self._put_back(spared)
        return tuple(victims)

    def touch(self, key: Key) -> None:
        """Count a use, which keeps the object longer than those that are not used."""
        account = self._accounts.get(key)
        if account is not None:
            account.reads += 1
            self._idle.use(key)
            self._scopes.use(key)

    def renew(self, key: Key, lease_s: float) -> bool:
        """Let the lease end `lease_s` seconds from now, 0 to release; False for no such object."""
        assert lease_s >= 0, "a lease lasts no negative time"
        self._lapse()
        account = self._accounts.get(key)
        if account is None:
            return False
        if lease_s == 0:
            if account.deadline is not None:
                self._release(key, account)
            return True
        if account.deadline is None:
            self._idle.remove(key)
            self._scopes.lease(key, account.size_bytes)
            self._leased_bytes += account.size_bytes
        account.deadline = self._clock() + lease_s
        self._deadlines.set(key, account.deadline, objects=len(self._accounts))
        return True

    def remove(self, key: Key) -> bool:
        """Take an object off the books; False if it was not on them."""
        account = self._accounts.pop(key, None)
        if account is None:
            return False
        self._chains.remove(key)
        self.used_bytes -= account.size_bytes
        self._scopes.remove(key, account.size_bytes)
        if account.deadline is None:
            self._idle.remove(key)
        else:
            self._leased_bytes -= account.size_bytes
        return True

    def check(self) -> None:
        """Assert the invariants of this module."""
        self._lapse()
        leased = {key for key, account in self._accounts.items() if account.deadline is not None}
        sizes = {key: account.size_bytes for key, account in self._accounts.items()}
        assert self.used_bytes == sum(sizes.values()) <= self.size_bytes
        assert self._leased_bytes == sum(sizes[key] for key in leased)
        assert self._idle.keys() == set(sizes) - leased
        self._chains.check(set(sizes))
        self._idle.check()
        self._scopes.check(sizes, leased)
        assert self._deadlines.keys() >= leased

    def _check_room(self, key: Key, size_bytes: int, before: Key | None) -> set[Key]:
        """Return what stays for the object's sake: what it continues, where something has to go.

        Raises TierFull where it doesn't fit, though all went that may go for it.
        """
        self._lapse()
        old = self._accounts.get(key)
        back_bytes = old.size_bytes if old else 0
        spared: set[Key] = set()
        spared_bytes = 0
        if self._has_to_go(key.scope, size_bytes - back_bytes):
            spared = self._chains.beginning(before, key)
            idle = (self._accounts[one].size_bytes for one in spared if one in self._idle)
            spared_bytes = sum(idle)
        if old is not None and old.deadline is None:
            back_bytes = 0  # it is among what may go anyway
        room_bytes = self.size_bytes - self._leased_bytes - spared_bytes + back_bytes
        if size_bytes > room_bytes:
            raise TierFull(f"{size_bytes} octets asked, {room_bytes} may go")
        scope_bytes = self._scopes.room_bytes(key.scope) - spared_bytes + back_bytes
        if size_bytes > scope_bytes:
            raise TierFull(f"{size_bytes} octets asked, {scope_bytes:.0f} left to the scope")
        return spared

    def _has_to_go(self, scope: str, more_bytes: int) -> bool:
        """Whether something has to go for so much more."""
        over = self.used_bytes + more_bytes > self.size_bytes
        return over or self._scopes.is_over(scope, more_bytes)

    def _make_room(
        self, scope: str, size_bytes: int, sparing: Collection[Key], count_max: float
    ) -> tuple[Victim, ...]:
        victims = self._shed_of_scope(scope, size_bytes, sparing, count_max)
        missing_bytes = size_bytes - (self.size_bytes - self.used_bytes)
        left = count_max - len(victims)
        return victims + self.shed(missing_bytes, sparing=sparing, count_max=left)

    def _shed_of_scope(
        self, scope: str, size_bytes: int, sparing: Collection[Key], count_max: float
    ) -> tuple[Victim, ...]:
        """Make room for so much more of a scope, among what is its own."""
        victims: list[Victim] = []
        spared = []
        while len(victims) < count_max:
            if (key := self._scopes.next_over(scope, size_bytes)) is None:
                break
            key = self._chains.last(key)
            if key in sparing:
                self._idle.remove(key)
                self._scopes.set_aside(key)
                spared.append(key)
                continue
            victims.append(self._gone(key))
        self._put_back(spared)
        return tuple(victims)

    def _put_back(self, spared: Sequence[Key]) -> None:
        for key in reversed(spared):  # the last of a chain came first
            account = self._accounts[key]
            self._idle.add(key, account.size_bytes, uses=account.reads)
            self._scopes.put_back(key)

    def _gone(self, key: Key) -> Victim:
        account = self._accounts[key]
        self.remove(key)
        return Victim(key, not account.outlived or account.reads > 1)

    def _release(self, key: Key, account: _Account) -> None:
        account.deadline = None
        account.outlived = True
        self._leased_bytes -= account.size_bytes
        # Its writer asked for that long and no longer, so it goes before what is merely old.
        self._idle.add_first(key, account.size_bytes)
        self._scopes.release(key, account.size_bytes)

    def _lapse(self) -> None:
        for key in self._deadlines.take(self._clock()):
            self._release(key, self._accounts[key])

    def _deadline(self, key: Key) -> float | None:
        account = self._accounts.get(key)
        return None if account is None else account.deadline
