"""The tier in an S3 bucket: the lowest of a stack, shared by machines, kept over restarts.

It takes what is worth a request: objects of 64 KiB and more that nobody holds a lease on. Objects
are immutable, so what another machine put under a key is as good as one's own; what this process
knows to be replaced or deleted it doesn't see again, whatever the server still has.

Two things are of this process alone. Its budget is for what it put since it was opened, and makes
room by deleting that; what others put, or an earlier run, is left to them, or to a lifecycle rule
of the bucket. Leases hold back its own eviction only: S3 has none, and other machines delete what
they want. A server that fails is left alone for a while (pause.py), and all is a miss.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tiers.api import Entry, Key, TierFull, TierStats
from tiers.ledger import Holding, Ledger, Victim
from tiers.meter import Metered
from tiers.s3_format import Torn, head_bytes, pack, path_of, unpack, unpack_head
from tiers.s3_server import S3Server, Stored
from tiers.stack import KeyLocks

OBJECT_BYTES_MIN = 64 << 10
# Written under a fresh name for one round or one session (D-M9): no other machine has them, so a
# request would be wasted, and a round would wait for it.
PASSING = ("q_rows.", "tokens.", "prompt.")
_TAGS_MAX = 16384  # keys of which it is remembered what they hold
_OWED_MAX = 16384  # deletions that the server did not take
_OWED_AT_ONCE = 8
_NOTHING = ""  # the tag of a key that holds nothing


@dataclass(slots=True)
class _Counts:
    evicted: int = 0
    corrupt: int = 0


class S3Tier(Metered):
    """Keeps objects below a prefix of a bucket; takes over the server."""

    def __init__(
        self,
        server: S3Server,
        size_bytes: int,
        *,
        prefix: str,
        object_bytes_min: int = OBJECT_BYTES_MIN,
        scope_bytes_max: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._server = server
        self._prefix = prefix
        self._object_bytes_min = object_bytes_min
        self._ledger = Ledger(size_bytes, clock=clock, scope_bytes_max=scope_bytes_max)
        self._locks = KeyLocks()
        self._counts = _Counts()
        self._tags: OrderedDict[Key, str] = OrderedDict()
        self._owed: OrderedDict[Key, None] = OrderedDict()

    def takes(self, key: Key, entry: Entry, *, lease_s: float) -> bool:
        """Whether a put of that kind is taken at all."""
        return lease_s == 0 and len(entry.data) >= self._object_bytes_min and not _passing(key)

    async def superseded(self, key: Key, entry: Entry, *, lease_s: float) -> None:
        """Learn what the key holds from now on, which a tier above has taken."""
        if _passing(key):
            return
        etag = entry.etag if self.takes(key, entry, lease_s=lease_s) else _NOTHING
        if key in self._ledger and self._tags.get(key) != etag:
            await self.delete(key)
        self._remember(key, etag)

    async def _get(self, key: Key) -> Entry | None:
        entry = None
        if not self._empty(key):
            stored = await self._server.read(path_of(self._prefix, key))
            entry = None if stored is None else await self._checked(key, stored)
        if entry is None:
            return None
        self._ledger.touch(key)
        return entry

    async def _put(self, key: Key, entry: Entry, *, lease_s: float) -> None:
        if not self.takes(key, entry, lease_s=lease_s):
            raise TierFull("only large objects without a lease are kept in the bucket")
        if self._server.resting:
            raise TierFull("the bucket's server fails and is left alone for a while")
        size_bytes = len(entry.data) + head_bytes(key, entry)
        admission = self._ledger.add(key, size_bytes, lease_s=0, after=entry.after)
        self._owed.pop(key, None)
        await self._remove(admission.victims)
        async with self._locks.of(key):
            if self._ledger.generation(key) != admission.generation:
                return  # replaced or deleted meanwhile
            stored = await self._server.write(path_of(self._prefix, key), pack(key, entry))
            if self._ledger.generation(key) != admission.generation:
                return  # who did that waits for the lock, and deletes or writes then
            if stored:
                self._remember(key, entry.etag)
                return
            # It may be there or not, so for this process there is nothing.
            self._ledger.remove(key)
            self._owe(key)
        raise TierFull("the object could not be written to the bucket")

    async def delete(self, key: Key) -> None:
        self._ledger.remove(key)
        if self._empty(key):
            return
        self._remember(key, _NOTHING)
        await self._delete(key)

    async def renew(self, key: Key, lease_s: float) -> bool:
        """As the protocol says of what this process put; of others' nothing can be promised."""
        return self._ledger.renew(key, lease_s)

    async def holds(self, key: Key) -> bool:
        if self._empty(key):
            return False
        stored = await self._server.read_head(path_of(self._prefix, key))
        if stored is None:
            return False
        try:
            head = unpack_head(stored.octets, key=key, stored_bytes=stored.size_bytes)
        except Torn:
            return False  # the next read deletes it
        return self._current(key, head.etag)

    def holdings(self) -> Iterator[Holding]:
        """See Listing."""
        return self._ledger.holdings()

    def stats(self) -> TierStats:
        return TierStats(
            kind="s3",
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
            failures=self._server.failures,
        )

    async def aclose(self) -> None:
        """Nothing is left to do: what was put is stored, and leases end here."""

    def check(self) -> None:
        """Assert that the books agree and their bounds hold."""
        self._ledger.check()
        assert len(self._tags) <= _TAGS_MAX and len(self._owed) <= _OWED_MAX
        assert all(key not in self._ledger for key in self._owed)

    async def _checked(self, key: Key, stored: Stored) -> Entry | None:
        """The object, if it is what was written and not an old version."""
        generation = self._ledger.generation(key)
        try:
            entry = unpack(stored.octets, key=key)
        except Torn:
            self._counts.corrupt += 1
            if self._ledger.generation(key) == generation:
                self._ledger.remove(key)
                await self._delete(key)
            return None
        return entry if self._current(key, entry.etag) else None

    def _empty(self, key: Key) -> bool:
        """Whether the bucket holds nothing under the key that this process wants to see."""
        return _passing(key) or self._tags.get(key) == _NOTHING

    def _current(self, key: Key, etag: str) -> bool:
        """Whether that is no old version; read after the request, for it may just have changed."""
        return self._tags.get(key, etag) == etag

    def _remember(self, key: Key, etag: str) -> None:
        self._tags[key] = etag
        self._tags.move_to_end(key)
        if len(self._tags) > _TAGS_MAX:
            self._tags.popitem(last=False)

    def _owe(self, key: Key) -> None:
        self._remember(key, _NOTHING)
        self._owed[key] = None
        if len(self._owed) > _OWED_MAX:
            self._owed.popitem(last=False)

    async def _remove(self, victims: Sequence[Victim]) -> None:
        """Delete what has to go, and some of what a server that failed did not delete before."""
        self._counts.evicted += len(victims)
        keys = [victim.key for victim in victims]
        if not self._server.resting:
            keys += list(self._owed)[:_OWED_AT_ONCE]
        for key in keys:
            await self._delete(key)

    async def _delete(self, key: Key) -> None:
        """Delete from the bucket what is not on the books; what fails is owed."""
        async with self._locks.of(key):
            if key in self._ledger:
                return  # put again meanwhile
            self._owed.pop(key, None)
            if not await self._server.delete(path_of(self._prefix, key)):
                self._owe(key)
            elif self._tags.get(key) == _NOTHING:
                del self._tags[key]  # from here on it may be another machine's


def _passing(key: Key) -> bool:
    return key.name.startswith(PASSING)
