"""The tier in one arena of memory, registered with CUDA where there is CUDA.

A put is one copy into the arena. A get returns a view of it, whose checksum was compared with the
object's tag: no copy at all. Objects of many MiB are copied and summed up piece by piece, and many
small ones handed down so, that others have their turn; until the last piece is there nobody sees
the object, and one put at a time makes room.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import xxhash

from tiers.api import Entry, Key, TierFull, TierStats
from tiers.arena import CHUNK_BYTES, Arena, Slot
from tiers.arena_slots import rounded
from tiers.checksum import checksum, pieces, told
from tiers.cuda_memory import Registration, Runtime, TorchRuntime
from tiers.host import EVICTED_AT_ONCE, Evicted
from tiers.ledger import Holding, Ledger, Victim
from tiers.meter import Metered

OBJECT_BYTES = 512  # what an object costs beside its slot, as in the tier of plain memory
PIECE_BYTES = 8 << 20  # copied in about a millisecond
PIECE_OBJECTS = 256  # handed down in about as long, where they are small


@dataclass(frozen=True, slots=True)
class _Kept:
    slot: Slot
    etag: str
    media_type: str
    coding: str
    after: str
    checksum: str


def cost_bytes(size_bytes: int) -> int:
    """Return what an object of that size counts for."""
    return rounded(size_bytes) + OBJECT_BYTES


class PinnedTier(Metered):
    """Keeps objects in memory that was taken whole at the start; lost when the process ends."""

    def __init__(
        self,
        size_bytes: int,
        *,
        scope_bytes_max: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        runtime: Callable[[], Runtime] = TorchRuntime,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Take the memory and have it registered meanwhile; raises TierError."""
        super().__init__()
        self._arena = Arena(size_bytes, chunk_bytes=chunk_bytes)
        self._ledger = Ledger(size_bytes, clock=clock, scope_bytes_max=scope_bytes_max)
        self._clock = clock
        self._kept: dict[Key, _Kept] = {}
        self._copying: dict[Key, Slot] = {}
        self._leaving: dict[Key, _Kept] = {}
        self._slotless: dict[Key, float] = {}  # when their leases end
        self._making_room = asyncio.Lock()
        self._handed_bytes = 0  # since others had their turn
        self._on_evicted: Evicted | None = None
        self._evicted = self._corrupt = 0
        self._registration = Registration(
            self._arena.address, self._arena.size_bytes, chunk_bytes=chunk_bytes, runtime=runtime
        )

    def on_evicted(self, callback: Evicted) -> None:
        """Have objects that were evicted, and are worth it, offered to the tier below."""
        self._on_evicted = callback

    async def _get(self, key: Key) -> Entry | None:
        kept = self._kept.get(key)
        if kept is None:
            return None
        entry = _entry(kept)
        if await checksum(entry.data) != kept.checksum:
            self._corrupt += 1
            if self._kept.get(key) is kept:
                await self.delete(key)
            return None
        self._ledger.touch(key)
        return entry

    async def _put(self, key: Key, entry: Entry, *, lease_s: float) -> None:
        async with self._making_room:
            admitted = await self._admitted(key, entry, lease_s)
        if admitted is None:
            return
        slot, generation = admitted
        being_written = slot.view()  # so that no other put counts on its place
        try:
            checksum = await self._copied(slot, entry)
        except BaseException:
            if self._ledger.generation(key) == generation:
                await self.delete(key)
            raise
        del being_written
        if self._ledger.generation(key) != generation:
            return  # replaced, deleted or evicted meanwhile
        del self._copying[key]
        self._kept[key] = _Kept(
            slot, entry.etag, entry.media_type, entry.coding, entry.after, checksum
        )

    async def delete(self, key: Key) -> None:
        self._ledger.remove(key)
        self._forget(key)

    async def renew(self, key: Key, lease_s: float) -> bool:
        if not self._ledger.renew(key, lease_s):
            return False
        self._hold(key, self._clock() + lease_s)
        return True

    async def holds(self, key: Key) -> bool:
        return key in self._kept

    def holdings(self) -> Iterator[Holding]:
        """See Listing."""
        return self._ledger.holdings()

    def stats(self) -> TierStats:
        return TierStats(
            kind="pinned",
            size_bytes=self._ledger.size_bytes,
            used_bytes=self._ledger.used_bytes,
            leased_bytes=self._ledger.leased_bytes,
            leases=self._ledger.leases,
            objects=len(self._kept),
            hits=self.meter.hits.total(),
            misses=self.meter.misses.total(),
            meter=self.meter,
            evicted=self._evicted,
            corrupt=self._corrupt,
            pinned=self._registration.pinned,
        )

    async def aclose(self) -> None:
        for key in list(self._kept):
            await self.delete(key)
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Unregister, and give the memory back; blocks for as long as CUDA needs."""
        if self._registration.close():
            self._arena.close()

    def check(self) -> None:
        """Assert that books, objects and slots agree; only while nothing is being written."""
        self._ledger.check()
        self._arena.check()
        assert len(self._ledger) == len(self._kept)
        assert all(key in self._ledger for key in self._kept)
        assert not self._copying
        slots = [kept.slot for kept in self._kept.values()]
        leased = {k.slot.offset for key, k in self._kept.items() if self._ledger.is_leased(key)}
        held = set(self._arena.held(self._clock()))
        assert leased == held & {slot.offset for slot in slots}
        assert self._ledger.used_bytes == sum(cost_bytes(slot.size_bytes) for slot in slots)
        assert self._arena.held_bytes() >= sum(rounded(slot.size_bytes) for slot in slots)

    async def _admitted(self, key: Key, entry: Entry, lease_s: float) -> tuple[Slot, int] | None:
        """A slot and the version that it is for; None where that was deleted meanwhile."""
        size_bytes, old = len(entry.data), self._kept.get(key)
        replaced = old.slot if old else None
        if not self._arena.could_take(size_bytes, self._clock(), replaced=replaced):
            raise TierFull(f"what stays lies so that no {size_bytes} octets fit between")
        del old, replaced
        cost = cost_bytes(size_bytes)
        room = partial(
            self._ledger.make_room, key, cost, after=entry.after, objects_max=EVICTED_AT_ONCE
        )
        while len(victims := room()) == EVICTED_AT_ONCE:
            await self._hand_down(victims)
        victims = tuple(one for one in victims if one.key != key)  # that version is replaced
        admission = self._ledger.add(key, cost, lease_s=lease_s, after=entry.after)
        self._forget(key)
        self._slotless[key] = self._clock() + lease_s
        try:
            await self._hand_down(victims + admission.victims)
            slot = await self._slot(key, size_bytes, admission.generation)
        except BaseException:
            if self._ledger.generation(key) == admission.generation:
                await self.delete(key)
            raise
        if slot is None:
            return None
        self._copying[key] = slot
        self._hold(key, self._slotless.pop(key))
        return slot, admission.generation

    def _hold(self, key: Key, until: float) -> None:
        """Have the arena know how long an object that is on the books stays where it is."""
        kept = self._kept.get(key)
        slot = kept.slot if kept else self._copying.get(key)
        if slot is None:
            self._slotless[key] = until
        elif until > self._clock():
            self._arena.hold(slot, until)
        else:
            self._arena.let_go(slot)

    def _forget(self, key: Key) -> None:
        self._kept.pop(key, None)
        self._leaving.pop(key, None)
        self._copying.pop(key, None)
        self._slotless.pop(key, None)

    async def _copied(self, slot: Slot, entry: Entry) -> str:
        for at, piece in pieces(entry.data):
            if at:
                await asyncio.sleep(0)
            self._arena.write(slot, at, piece)
        return told(entry) or await checksum(entry.data)

    async def _slot(self, key: Key, size_bytes: int, generation: int) -> Slot | None:
        """A slot for an object that is on the books, None if it no longer is; raises TierFull.

        What the books have room for may lie in pieces, so that more has to go, or be held by who
        still reads it.
        """
        while self._ledger.generation(key) == generation:
            if (slot := self._arena.take(size_bytes)) is not None:
                return slot
            victims = self._ledger.shed(1, sparing={key})
            if not victims:
                raise TierFull(f"no {size_bytes} octets of the arena lie together")
            await self._hand_down(victims)
        return None

    async def _hand_down(self, victims: tuple[Victim, ...]) -> None:
        """Offer what is off the books to the tier below, unless it is deleted before its turn."""
        self._evicted += len(victims)
        for victim in victims:
            kept = self._kept.get(victim.key)
            self._forget(victim.key)
            if kept is not None:
                self._leaving[victim.key] = kept
        try:
            for victim in victims:
                kept = self._leaving.pop(victim.key, None)
                if kept is None:
                    continue
                if victim.keep and self._on_evicted is not None:
                    self._offer(self._on_evicted, victim.key, kept)
                self._handed_bytes += max(kept.slot.size_bytes, PIECE_BYTES // PIECE_OBJECTS)
                if self._handed_bytes > PIECE_BYTES:
                    self._handed_bytes = 0
                    await asyncio.sleep(0)
        finally:
            self._leaving.clear()

    def _offer(self, below: Evicted, key: Key, kept: _Kept) -> None:
        entry = _entry(kept)
        # A copy: what waits to be written below must not keep the room that is needed here.
        data = bytes(entry.data)
        if xxhash.xxh3_128_hexdigest(data) == kept.checksum:
            below(key, replace(entry, data=data))
        else:
            self._corrupt += 1


def _entry(kept: _Kept) -> Entry:
    return Entry(kept.slot.view(), kept.etag, kept.media_type, kept.coding, kept.after)
