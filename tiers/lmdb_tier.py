"""The tier on a local disk: LMDB without flushing, so a cache that a restart keeps.

Within one boot nothing is lost, by a killed process either; after a power loss all is thrown away,
since LMDB without flushing may then be damaged. One big sparse map, never grown in flight; one
thread writes; what is read is copied out inside its transaction and checked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import lmdb

from tiers.api import Entry, Key, TierFull, TierStats
from tiers.folder import Folder, boot_id
from tiers.ledger import Holding, Ledger, Victim
from tiers.lmdb_objects import Objects, Remove, Store, Tick, Torn
from tiers.meter import Metered
from tiers.sizes import LMDB_MAP_FACTOR
from tiers.writer import GroupWriter

READERS = 4
PAGE_BYTES = 4096
OBJECT_BYTES = 512  # header row, account, and its share of inner pages
MAP_BYTES_MIN = 1 << 20

_Op = Store | Remove | Tick
_Outcomes = asyncio.Future[list[Exception | None]]


@dataclass(slots=True)
class _Counts:
    evicted: int = 0
    corrupt: int = 0
    failures: int = 0


def cost_bytes(size_bytes: int) -> int:
    """Return what an object of that size takes in the file, in whole pages."""
    return -(-(size_bytes + 16) // PAGE_BYTES) * PAGE_BYTES + OBJECT_BYTES


class LmdbTier(Metered):
    """Keeps objects in an LMDB environment of its own; leases end with the process."""

    def __init__(
        self,
        path: Path,
        size_bytes: int,
        *,
        map_bytes: int | None = None,
        scope_bytes_max: int | None = None,
        boot: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open or create; raises TierError. `map_bytes` is the size of the map (sparse)."""
        super().__init__()
        self._boot = boot_id() if boot is None else boot
        self._ledger = Ledger(size_bytes, clock=clock, scope_bytes_max=scope_bytes_max)
        self._counts = _Counts()
        self._folder = Folder(path, setting="[mlc] tiers")
        try:
            self._objects = Objects(
                self._folder,
                map_bytes=map_bytes or max(LMDB_MAP_FACTOR * size_bytes, MAP_BYTES_MIN),
                boot=self._boot,
            )
            self._load()
        except BaseException:
            self._folder.release()
            raise
        self._writer = GroupWriter[_Op, None]("mlc-objects", self._objects.perform)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="mlc-read")
        self._storing: dict[Key, int] = {}  # generations that the file need not have yet
        self._puts: set[asyncio.Task[bool]] = set()
        self._undeleted: set[Key] = set()  # off the books, and perhaps still in the file

    async def _get(self, key: Key) -> Entry | None:
        generation = self._ledger.generation(key)
        found: Entry | None = None
        if generation is not None:
            written = self._storing.get(key) != generation
            loop = asyncio.get_running_loop()
            try:
                found = await loop.run_in_executor(self._readers, self._objects.read, key)
                lost = found is None and written and self._ledger.generation(key) == generation
            except Torn:
                lost = True
            except lmdb.Error:
                self._counts.failures += 1
                lost = False
            if lost:
                self._counts.corrupt += 1
                await self._forget(key, generation)
        if found is None:
            return None
        self._ledger.touch(key)
        return found

    async def _put(self, key: Key, entry: Entry, *, lease_s: float) -> None:
        if self._writer.busy:
            raise TierFull("too many objects wait to be written")
        size_bytes = cost_bytes(len(entry.data))
        admission = self._ledger.add(key, size_bytes, lease_s=lease_s, after=entry.after)
        store = Store(key, entry, admission.generation)
        self._storing[key] = store.generation
        first = self._begin(store, admission.victims)
        # It comes to its end, and the books with it, whatever becomes of the caller.
        task = asyncio.create_task(self._stored(store, first))
        self._puts.add(task)
        task.add_done_callback(self._puts.discard)
        if not await asyncio.shield(task):
            raise TierFull("the object could not be written to the disk")

    async def delete(self, key: Key) -> None:
        if self._ledger.remove(key):
            await self._write(Remove(key))

    async def renew(self, key: Key, lease_s: float) -> bool:
        return self._ledger.renew(key, lease_s)

    async def holds(self, key: Key) -> bool:
        return key in self._ledger

    def holdings(self) -> Iterator[Holding]:
        """See Listing."""
        return self._ledger.holdings()

    def stats(self) -> TierStats:
        return TierStats(
            kind="lmdb",
            size_bytes=self._ledger.size_bytes,
            used_bytes=self._ledger.used_bytes,
            leased_bytes=self._ledger.leased_bytes,
            leases=self._ledger.leases,
            objects=len(self._ledger),
            hits=self.meter.hits.total(),
            misses=self.meter.misses.total(),
            meter=self.meter,
            evicted=self._counts.evicted,
            corrupt=self._counts.corrupt,
            failures=self._counts.failures,
        )

    async def aclose(self) -> None:
        if self._puts:
            await asyncio.wait(self._puts)
        self._writer.stop()
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Write what is waiting, flush, and give the directory up; blocks. Raises OSError."""
        self._writer.stop()
        self._writer.join()
        self._readers.shutdown()
        try:
            self._objects.close()
            self._folder.mark(self._boot, clean=True)
        finally:
            self._folder.release()

    def check(self) -> None:
        """Assert that books and file agree; only while nothing is being written."""
        self._ledger.check()
        listing = [row for row in self._objects.listing() if row[0] not in self._undeleted]
        assert len(self._ledger) == len(listing)
        for key, size_bytes, generation, _ in listing:
            assert self._ledger.generation(key) == generation
            entry = self._objects.read(key)
            assert entry is not None and len(entry.data) == size_bytes

    def _load(self) -> None:
        """Enter what an earlier run left, oldest first, within today's budget."""
        for key, size_bytes, generation, after in self._objects.listing():
            try:
                admission = self._ledger.add(
                    key, cost_bytes(size_bytes), lease_s=0, after=after, generation=generation
                )
                gone = [victim.key for victim in admission.victims]
            except TierFull:
                gone = [key]
            if gone:
                self._objects.perform([Remove(key) for key in gone])

    async def _stored(self, store: Store, first: _Outcomes) -> bool:
        """Tell whether an object was stored; if it was not, it is off the books."""
        key, generation = store.key, store.generation
        try:
            if (await first)[-1] is None:
                return True
            # The map is full although the budget is not: free pages don't lie together, or aren't
            # free yet. Evict once more, let two transactions pass, and try one last time.
            size_bytes = cost_bytes(len(store.entry.data))
            await self._write(Tick(), self._ledger.shed(2 * size_bytes, sparing={key}))
            await self._write(Tick())
            if self._ledger.generation(key) != generation:
                return True  # replaced or deleted meanwhile
            if await self._write(store):
                return True
            await self._forget(key, generation)
            return False
        finally:
            if self._storing.get(key) == generation:
                del self._storing[key]

    async def _write(self, op: _Op, victims: Sequence[Victim] = ()) -> bool:
        """Delete the victims, then do `op`; tells whether that succeeded."""
        return (await asyncio.shield(self._begin(op, victims)))[-1] is None

    def _begin(self, op: _Op, victims: Sequence[Victim] = ()) -> _Outcomes:
        """Submit at once, so that the file sees what the books do in their order."""
        self._counts.evicted += len(victims)
        gone = [victim.key for victim in victims]
        # The file may be too full even for a deletion, which is then done with the next write.
        again = [key for key in self._undeleted if key not in self._ledger]
        self._undeleted.clear()
        ops: list[_Op] = [*(Remove(key) for key in (*again, *gone)), op]
        outcomes = self._writer.enqueue(ops)
        outcomes.add_done_callback(partial(self._note, ops))
        return outcomes

    def _note(self, ops: list[_Op], outcomes: _Outcomes) -> None:
        """Count what failed, and keep in mind what is to be deleted still."""
        if outcomes.cancelled():
            return
        for op, error in zip(ops, outcomes.result(), strict=True):
            if error is None:
                continue
            self._counts.failures += not isinstance(error, lmdb.MapFullError)
            # A key that no file can have needs no deletion.
            may_be_there = not isinstance(error, lmdb.BadValsizeError)
            if isinstance(op, Remove) and may_be_there and op.key not in self._ledger:
                self._undeleted.add(op.key)

    async def _forget(self, key: Key, generation: int) -> None:
        """Delete that version of the object; a newer one stays."""
        if self._ledger.generation(key) == generation:
            await self.delete(key)
