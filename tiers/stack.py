"""Several tiers that look like one: the fastest first.

A put goes to the first tier with room, a hit below is copied up, and what a tier evicts is handed
down by a bounded queue in the background: it is a cache, so what does not fit there is dropped.
Below a tier that tells nothing of what it evicts, the next gets at once what that one is handed.
Everything that changes where a key lies is done under that key's lock.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

from tiers.api import Entry, Key, Tier, TierFull, TierStats
from tiers.meter import kind_of

# Octets that wait to be written below; more are dropped, so that a slow disk can't fill memory.
DEMOTE_BYTES_MAX = 64 * 1024 * 1024
_STRIPES = 64  # locks; two keys that share one only wait for each other


@runtime_checkable
class Evicting(Protocol):
    """A tier that tells what it evicts."""

    def on_evicted(self, callback: Callable[[Key, Entry], None]) -> None: ...


@runtime_checkable
class Choosing(Protocol):
    """A tier that takes only some objects, and to which a deletion is dear.

    Where a tier above takes a put, it is told instead of having the key deleted.
    """

    def takes(self, key: Key, entry: Entry, *, lease_s: float) -> bool: ...

    async def superseded(self, key: Key, entry: Entry, *, lease_s: float) -> None: ...


class KeyLocks:
    """A bounded number of locks, one of which is a key's."""

    def __init__(self) -> None:
        self._locks = tuple(asyncio.Lock() for _ in range(_STRIPES))

    def of(self, key: Key) -> asyncio.Lock:
        """Return the lock that guards this key, and perhaps others."""
        return self._locks[hash(key) % _STRIPES]


@dataclass(frozen=True, slots=True)
class _Pending:
    below: Sequence[Tier]
    entry: Entry


class TierStack:
    """Tiers in order of speed; closes them with itself."""

    def __init__(self, tiers: Sequence[Tier], *, demote_bytes_max: int = DEMOTE_BYTES_MAX) -> None:
        """Take over the tiers; they are used through the stack only from here on."""
        assert tiers, "a stack has a tier"
        self._tiers = tuple(tiers)
        self._locks = KeyLocks()
        self._demote_bytes_max = demote_bytes_max
        self._pending: dict[Key, _Pending] = {}
        self._pending_bytes = 0
        self._demoting: asyncio.Task[None] | None = None
        self._hits = self._misses = self._dropped = 0
        self._missed_twice: Counter[str] = (
            Counter()
        )  # by the first tier, which is asked again under the key's lock
        for depth, upper in enumerate(self._tiers[:-1]):
            if isinstance(upper, Evicting):
                upper.on_evicted(partial(self._offer, self._handed_down_to(depth)))

    @property
    def levels(self) -> tuple[Tier, ...]:
        """The tiers, fastest first; to be looked at, and changed through the stack alone."""
        return self._tiers

    async def get(self, key: Key) -> Entry | None:
        entry = await self._tiers[0].get(key)
        if entry is None:
            entry = await self._get_below(key)
        if entry is None:
            self._misses += 1
        else:
            self._hits += 1
        return entry

    async def put(self, key: Key, entry: Entry, *, lease_s: float) -> None:
        async with self._locks.of(key):
            taker = await self._put_first(key, entry, lease_s=lease_s)
            self._take_pending(key)
            for tier in self._tiers:
                if tier is taker:
                    continue
                if isinstance(tier, Choosing):
                    await tier.superseded(key, entry, lease_s=lease_s)
                else:
                    await tier.delete(key)

    async def delete(self, key: Key) -> None:
        async with self._locks.of(key):
            self._take_pending(key)
            for tier in self._tiers:
                await tier.delete(key)

    async def renew(self, key: Key, lease_s: float) -> bool:
        async with self._locks.of(key):
            held = False
            for tier in self._tiers:
                held = await tier.renew(key, lease_s) or held
                if held and lease_s > 0:
                    break  # one copy that stays is enough; a release is for all of them
            return held

    async def holds(self, key: Key) -> bool:
        for tier in self._tiers:
            if await tier.holds(key):
                return True
        return False

    def stats(self) -> TierStats:
        first, *below = (tier.stats() for tier in self._tiers)
        parts = (self._asked_once(first), *below)
        return TierStats(
            kind="stack",
            size_bytes=sum(part.size_bytes for part in parts),
            used_bytes=sum(part.used_bytes for part in parts),
            leased_bytes=sum(part.leased_bytes for part in parts),
            objects=sum(part.objects for part in parts),
            leases=sum(part.leases for part in parts),
            hits=self._hits,
            misses=self._misses,
            evicted=parts[-1].evicted,
            corrupt=sum(part.corrupt for part in parts),
            dropped=self._dropped,
            failures=sum(part.failures for part in parts),
            parts=parts,
        )

    def _asked_once(self, first: TierStats) -> TierStats:
        twice, meter = self._missed_twice, first.meter
        return replace(
            first, misses=first.misses - twice.total(), meter=meter and meter.without(twice)
        )

    async def aclose(self) -> None:
        await self.settled()
        for tier in self._tiers:
            await tier.aclose()

    async def settled(self) -> None:
        """Wait until all that was evicted so far is handed down or dropped."""
        if self._demoting is not None:
            await self._demoting

    def check(self) -> None:
        """Assert that what waits is counted right and within its bound."""
        waiting = sum(len(item.entry.data) for item in self._pending.values())
        assert self._pending_bytes == waiting <= self._demote_bytes_max
        assert not self._pending or (self._demoting is not None and not self._demoting.done())

    async def _get_below(self, key: Key) -> Entry | None:
        async with self._locks.of(key):
            # From the top again: somebody else may have copied it up while we waited.
            for depth, tier in enumerate(self._tiers):
                entry = await tier.get(key)
                if entry is not None:
                    if depth:
                        await self._promote(key, entry)
                    return entry
                if not depth:
                    self._missed_twice[kind_of(key)] += 1
        return None

    async def _promote(self, key: Key, entry: Entry) -> None:
        try:
            await self._tiers[0].put(key, entry, lease_s=0)
        except TierFull:
            return  # all above is leased; the copy below answers the next read too

    async def _put_first(self, key: Key, entry: Entry, *, lease_s: float) -> Tier:
        for tier in self._tiers[:-1]:
            try:
                await tier.put(key, entry, lease_s=lease_s)
            except TierFull:
                continue
            return tier
        await self._tiers[-1].put(key, entry, lease_s=lease_s)
        return self._tiers[-1]

    def _handed_down_to(self, depth: int) -> tuple[Tier, ...]:
        """The tiers that get what that one evicts: the next, and those that it would hide."""
        below: list[Tier] = []
        for tier in self._tiers[depth + 1 :]:
            below.append(tier)
            if isinstance(tier, Evicting):
                break
        return tuple(below)

    def _offer(self, below: Sequence[Tier], key: Key, entry: Entry) -> None:
        self._take_pending(key)
        below = [tier for tier in below if _takes(tier, key, entry)]
        if not below:
            return
        if self._pending_bytes + len(entry.data) > self._demote_bytes_max:
            self._dropped += 1
            return
        self._pending[key] = _Pending(below, entry)
        self._pending_bytes += len(entry.data)
        if self._demoting is None or self._demoting.done():
            self._demoting = asyncio.get_running_loop().create_task(self._demote())

    def _take_pending(self, key: Key) -> _Pending | None:
        item = self._pending.pop(key, None)
        if item is not None:
            self._pending_bytes -= len(item.entry.data)
        return item

    async def _demote(self) -> None:
        while self._pending:
            key = next(iter(self._pending))
            async with self._locks.of(key):
                item = self._take_pending(key)
                if item is not None:
                    for tier in item.below:
                        await self._hand_to(tier, key, item.entry)

    async def _hand_to(self, tier: Tier, key: Key, entry: Entry) -> None:
        if await tier.holds(key):
            return
        try:
            await tier.put(key, entry, lease_s=0)
        except TierFull:
            self._dropped += 1


def _takes(tier: Tier, key: Key, entry: Entry) -> bool:
    return not isinstance(tier, Choosing) or tier.takes(key, entry, lease_s=0)
