"""The tier in this process's memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tiers.api import Entry, Key, TierStats
from tiers.checksum import checksum, told
from tiers.ledger import Holding, Ledger, Victim
from tiers.meter import Metered

# What an object costs beside its octets (dictionaries, account, names), so that very many very
# small ones count as what they are.
OBJECT_BYTES = 1024
EVICTED_AT_ONCE = 256  # some milliseconds of work

Evicted = Callable[[Key, Entry], None]


class HostTier(Metered):
    """Keeps objects in memory within a byte budget; all of it is lost when the process ends."""

    def __init__(
        self,
        size_bytes: int,
        *,
        scope_bytes_max: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._ledger = Ledger(size_bytes, clock=clock, scope_bytes_max=scope_bytes_max)
        self._entries: dict[Key, Entry] = {}
        self._checksums: dict[Key, str] = {}
        self._on_evicted: Evicted | None = None
        self._evicted = self._corrupt = 0

    def on_evicted(self, callback: Evicted) -> None:
        """Have objects that were evicted, and are worth it, offered to the tier below."""
        self._on_evicted = callback

    async def _get(self, key: Key) -> Entry | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if await checksum(entry.data) != self._checksums.get(key):
            if self._entries.get(key) is entry:
                self._corrupt += 1
                await self.delete(key)
                return None
            return await self._get(key)  # replaced or gone meanwhile
        self._ledger.touch(key)
        return entry

    async def _put(self, key: Key, entry: Entry, *, lease_s: float) -> None:
        known = told(entry) or await checksum(entry.data)
        cost_bytes = len(entry.data) + OBJECT_BYTES
        await self._make_room(key, cost_bytes, entry.after)
        admission = self._ledger.add(key, cost_bytes, lease_s=lease_s, after=entry.after)
        if not isinstance(entry.data, bytes):
            # A view would hold the memory of the tier that it is of.
            entry = replace(entry, data=bytes(entry.data))
        self._entries[key], self._checksums[key] = entry, known
        self._hand_down(admission.victims)

    async def _make_room(self, key: Key, cost_bytes: int, after: str) -> None:
        """Evict the most of very many small objects, and let others have their turn between."""
        count = EVICTED_AT_ONCE
        while count == EVICTED_AT_ONCE:
            victims = self._ledger.make_room(
                key, cost_bytes, after=after, objects_max=EVICTED_AT_ONCE
            )
            self._hand_down(victims)
            if (count := len(victims)) == EVICTED_AT_ONCE:
                await asyncio.sleep(0)

    def _hand_down(self, victims: Sequence[Victim]) -> None:
        for victim in victims:
            self._evicted += 1
            gone = self._entries.pop(victim.key)
            del self._checksums[victim.key]
            if victim.keep and self._on_evicted is not None:
                self._on_evicted(victim.key, gone)

    async def delete(self, key: Key) -> None:
        if self._ledger.remove(key):
            del self._entries[key], self._checksums[key]

    async def renew(self, key: Key, lease_s: float) -> bool:
        return self._ledger.renew(key, lease_s)

    async def holds(self, key: Key) -> bool:
        return key in self._entries

    def holdings(self) -> Iterator[Holding]:
        """See Listing."""
        return self._ledger.holdings()

    def stats(self) -> TierStats:
        return TierStats(
            kind="host",
            size_bytes=self._ledger.size_bytes,
            used_bytes=self._ledger.used_bytes,
            leased_bytes=self._ledger.leased_bytes,
            leases=self._ledger.leases,
            objects=len(self._entries),
            hits=self.meter.hits.total(),
            misses=self.meter.misses.total(),
            meter=self.meter,
            evicted=self._evicted,
            corrupt=self._corrupt,
        )

    async def aclose(self) -> None:
        for key in list(self._entries):
            await self.delete(key)

    def check(self) -> None:
        """Assert that books and objects agree."""
        self._ledger.check()
        used_bytes = sum(len(entry.data) + OBJECT_BYTES for entry in self._entries.values())
        assert self._ledger.used_bytes == used_bytes
        assert all(key in self._ledger for key in self._entries)
        assert self._checksums.keys() == self._entries.keys()
