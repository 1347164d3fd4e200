"""The tier in one arena of memory, registered with CUDA where there is CUDA.

A put is one copy into the arena. A get returns a view of it, whose checksum was compared with the
object's tag: no copy at all. Objects of many MiB are copied and summed up piece by piece, so that
others have their turn; until the last piece is there nobody sees the object.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import xxhash

from tiers.api import Entry, Key, Octets, TierFull, TierStats
from tiers.arena import CHUNK_BYTES, Arena, Slot
from tiers.arena_slots import rounded
from tiers.checksum import told
from tiers.cuda_memory import Registration, Runtime, TorchRuntime
from tiers.host import Evicted
from tiers.ledger import Ledger, Victim

OBJECT_BYTES = 512  # what an object costs beside its slot, as in the tier of plain memory
PIECE_BYTES = 8 << 20  # copied in about a millisecond


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


class PinnedTier:
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
        self._arena = Arena(size_bytes, chunk_bytes=chunk_bytes)
        self._ledger = Ledger(size_bytes, clock=clock, scope_bytes_max=scope_bytes_max)
        self._kept: dict[Key, _Kept] = {}
        self._on_evicted: Evicted | None = None
        self._hits = self._misses = self._evicted = self._corrupt = 0
        self._registration = Registration(
            self._arena.address, self._arena.size_bytes, chunk_bytes=chunk_bytes, runtime=runtime
        )

    def on_evicted(self, callback: Evicted) -> None:
        """Have objects that were evicted, and are worth it, offered to the tier below."""
        self._on_evicted = callback

    async def get(self, key: Key) -> Entry | None:
        kept = self._kept.get(key)
        if kept is None:
            self._misses += 1
            return None
        entry = _entry(kept)
        if await _checksum(entry.data) != kept.checksum:
            self._corrupt += 1
            self._misses += 1
            if self._kept.get(key) is kept:
                await self.delete(key)
            return None
        self._hits += 1
        self._ledger.touch(key)
        return entry

    async def put(self, key: Key, entry: Entry, *, lease_s: float) -> None:
        size_bytes = len(entry.data)
        staying = (
            kept.slot
            for other, kept in self._kept.items()
            if other != key and self._ledger.is_leased(other)
        )
        if not self._arena.could_take(size_bytes, keeping=staying):
            raise TierFull(f"leased objects lie so that no {size_bytes} octets fit between them")
        admission = self._ledger.add(
            key, cost_bytes(size_bytes), lease_s=lease_s, after=entry.after
        )
        self._kept.pop(key, None)
        self._hand_down(admission.victims)
        slot = self._slot(key, size_bytes)
        try:
            checksum = await self._copied(slot, entry)
        except BaseException:
            if self._ledger.generation(key) == admission.generation:
                self._ledger.remove(key)
            raise
        if self._ledger.generation(key) != admission.generation:
            return  # replaced, deleted or evicted meanwhile
        self._kept[key] = _Kept(
            slot, entry.etag, entry.media_type, entry.coding, entry.after, checksum
        )

    async def delete(self, key: Key) -> None:
        self._ledger.remove(key)
        self._kept.pop(key, None)

    async def renew(self, key: Key, lease_s: float) -> bool:
        return self._ledger.renew(key, lease_s)

    async def holds(self, key: Key) -> bool:
        return key in self._kept

    def stats(self) -> TierStats:
        return TierStats(
            kind="pinned",
            size_bytes=self._ledger.size_bytes,
            used_bytes=self._ledger.used_bytes,
            leased_bytes=self._ledger.leased_bytes,
            objects=len(self._kept),
            hits=self._hits,
            misses=self._misses,
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
        slots = [kept.slot for kept in self._kept.values()]
        assert self._ledger.used_bytes == sum(cost_bytes(slot.size_bytes) for slot in slots)
        assert self._arena.held_bytes() >= sum(rounded(slot.size_bytes) for slot in slots)

    async def _copied(self, slot: Slot, entry: Entry) -> str:
        for at, piece in _pieces(entry.data):
            if at:
                await asyncio.sleep(0)
            self._arena.write(slot, at, piece)
        return told(entry) or await _checksum(entry.data)

    def _slot(self, key: Key, size_bytes: int) -> Slot:
        """A slot for an object that is on the books; off them and TierFull if there is none.

        What the books have room for may lie in pieces, so that more has to go, or be held by who
        still reads it.
        """
        while (slot := self._arena.take(size_bytes)) is None:
            victims = self._ledger.shed(1, sparing=key)
            if not victims:
                self._ledger.remove(key)
                raise TierFull(f"no {size_bytes} octets of the arena lie together")
            self._hand_down(victims)
        return slot

    def _hand_down(self, victims: tuple[Victim, ...]) -> None:
        for victim in victims:
            self._evicted += 1
            kept = self._kept.pop(victim.key, None)
            if kept is None or not victim.keep or self._on_evicted is None:
                continue
            entry = _entry(kept)
            # A copy: what waits to be written below must not keep the room that is needed here.
            data = bytes(entry.data)
            if xxhash.xxh3_128_hexdigest(data) != kept.checksum:
                self._corrupt += 1
                continue
            self._on_evicted(victim.key, replace(entry, data=data))


def _entry(kept: _Kept) -> Entry:
    return Entry(kept.slot.view(), kept.etag, kept.media_type, kept.coding, kept.after)


async def _checksum(data: Octets) -> str:
    digest = xxhash.xxh3_128()
    for at, piece in _pieces(data):
        if at:
            await asyncio.sleep(0)
        digest.update(piece)
    return digest.hexdigest()


def _pieces(data: Octets) -> Iterator[tuple[int, Octets]]:
    """The octets with their places, as they are where that is no long work."""
    if len(data) <= PIECE_BYTES:
        yield 0, data
        return
    whole = memoryview(data)
    for at in range(0, len(data), PIECE_BYTES):
        yield at, whole[at : at + PIECE_BYTES]
