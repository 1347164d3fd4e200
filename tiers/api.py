"""What a cache tier and a log store are: the interfaces, their values and their errors.

Objects may vanish at any time unless leased (D-M10); logs never do (Section 6.8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import xxhash

if TYPE_CHECKING:
    from tiers.meter import Meter


@dataclass(frozen=True, slots=True)
class Key:
    """The name of an object: scope as it stands in the path, and a name within it (D-M3)."""

    scope: str
    name: str


Octets = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Entry:
    """An object's octets with what HTTP says of them; `etag` is strong and has its quotes.

    With a `coding` the octets are coded so (coding.py); the tag is that of what they decode to.
    `after` names the object of the same scope that this one continues: without it this one is worth
    nothing, and goes first. Octets that are a memoryview lie in a tier's own memory, which is held
    for as long as the view is: who keeps them for long makes a copy.
    """

    data: Octets
    etag: str
    media_type: str
    coding: str = ""
    after: str = ""


def entry_of(data: Octets, *, media_type: str) -> Entry:
    """Return an entry whose tag is a function of its octets."""
    return Entry(data, f'"{xxhash.xxh3_128_hexdigest(data)}-{len(data)}"', media_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """A tier's counters since it was opened; `parts` are those of the tiers of a stack.

    `used_bytes` includes what each object costs beside its octets. `dropped` counts objects that
    a stack could not hand down, `failures` errors of the storage below. `pinned` tells whether the
    memory is registered with the GPU's driver. `meter` goes on counting, unlike the rest.
    """

    kind: str
    size_bytes: int
    used_bytes: int
    leased_bytes: int
    objects: int
    leases: int = 0
    hits: int = 0
    misses: int = 0
    evicted: int = 0
    corrupt: int = 0
    dropped: int = 0
    failures: int = 0
    pinned: bool = False
    meter: Meter | None = None
    parts: tuple[TierStats, ...] = ()


class TierError(Exception):
    """A tier or store can't be opened or used; one sentence says which, why and what to do."""


class TierUnreachable(TierError):
    """What a tier or store needs does not answer now; a later start may find it."""


class TierFull(Exception):
    """No room now: what is not leased is not enough, or the storage refused to grow."""


class Tier(Protocol):
    """One cache level, or several that look like one. Used from one event loop."""

    async def get(self, key: Key) -> Entry | None:
        """Return the object, None for a miss; every failure below is a miss that is counted.

        Counts as a use (eviction order), renews no lease.
        """
        ...

    async def put(self, key: Key, entry: Entry, *, lease_s: float) -> None:
        """Store an object, visible to others only when complete; what the key held is replaced.

        `lease_s` in seconds, 0 for none; while it lasts the object stays. Raises TierFull at once
        when there is no room, and then the key holds what it held before, or nothing.
        """
        ...

    async def delete(self, key: Key) -> None:
        """Forget an object, leased or not; nothing happens if there is none."""
        ...

    async def renew(self, key: Key, lease_s: float) -> bool:
        """Let the lease end `lease_s` seconds from now, 0 to release; False if not held."""
        ...

    async def holds(self, key: Key) -> bool:
        """Tell whether the object is here; no use, renews nothing, promises nothing."""
        ...

    def stats(self) -> TierStats:
        """Return the counters as they are now."""
        ...

    async def aclose(self) -> None:
        """Close; a persistent tier has written what it holds. Nothing may be called after."""
        ...


@dataclass(frozen=True, slots=True)
class LogContent:
    """A whole log and its tag."""

    data: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class LogHead:
    """What a log is without its records: tag, length in octets, highest epoch (0 if none)."""

    etag: str
    size_bytes: int
    highest_epoch: int


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A log in a listing; its tag is None where what is stored of it is damaged."""

    log_id: str
    etag: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogAppend:
    """One append of a group: exactly one of `if_match` and `create` is its precondition.

    `offset`, if given, is the length that the log must have.
    """

    log_id: str
    record_bytes: bytes
    if_match: str | None = None
    create: bool = False
    offset: int | None = None


class LogError(Exception):
    """A log operation that was refused or failed; the text names no user data."""


class Mismatch(LogError):
    """The precondition does not hold (412); `etag` is the log's tag, None if there is no log."""

    def __init__(self, etag: str | None) -> None:
        super().__init__("there is no such log" if etag is None else "the log has another tag")
        self.etag = etag


class NotExtending(LogError):
    """The new content does not begin with the old, or does not start at its end (409)."""


class StaleEpoch(LogError):
    """A fence whose epoch is not above the highest, or any record below it (409)."""

    def __init__(self, text: str, *, highest_epoch: int) -> None:
        super().__init__(text)
        self.highest_epoch = highest_epoch


class Fenced(StaleEpoch):
    """A commit record below the highest epoch: its writer has lost authority (409)."""


class BadRecords(LogError):
    """What is to be appended does not parse as records (400)."""


class Corrupt(LogError):
    """What is stored is damaged; it is never overwritten (503, D-M6)."""


class StoreFull(LogError):
    """No room for the records; nothing was written (507)."""


class StoreFailed(LogError):
    """The storage failed; whether a pending append was written is unknown (503)."""


class LogStore(Protocol):
    """Commit logs that enforce preconditions and fences (D-M7); acknowledged is durable.

    Every method raises StoreFailed, and ValueError for a log id that is no path segment or a
    write without exactly one precondition.
    """

    async def read(self, log_id: str) -> LogContent | None:
        """Return the whole log, None if there is none; raises Corrupt."""
        ...

    async def head(self, log_id: str) -> LogHead | None:
        """Return tag and length without reading the records, None if there is no log."""
        ...

    async def put(
        self, log_id: str, data: bytes, *, if_match: str | None, if_none_match: bool
    ) -> str:
        """Replace the log by content that extends it and return the new tag (D-M6, D-M7).

        Raises Mismatch, NotExtending, BadRecords, Fenced, StaleEpoch, Corrupt, StoreFull.
        """
        ...

    async def append(
        self,
        log_id: str,
        record_bytes: bytes,
        *,
        offset: int | None,
        if_match: str | None,
        create: bool = False,
    ) -> str:
        """Append one or more whole records and return the new tag (D-Z3); raises as `put`."""
        ...

    async def append_many(self, items: Sequence[LogAppend]) -> list[str | LogError]:
        """Append to several logs, each at most once, in one group commit (D-Z3).

        Returns for each its new tag or why it was refused; raises ValueError for a log twice.
        """
        ...

    async def entries(self, *, after: str = "", count_max: int) -> Sequence[LogEntry]:
        """Return some of the logs that follow `after` in the store's own order, none at the end."""
        ...

    async def delete(self, log_id: str, *, if_match: str | None = None) -> None:
        """Forget a log after its retention; nothing happens if there is none.

        With `if_match` only while it has that tag; raises Mismatch, Corrupt.
        """
        ...

    async def aclose(self) -> None:
        """Close after all that was accepted is done."""
        ...


class Records(Protocol):
    """What one process must find again after a restart, by key."""

    def all(self) -> Mapping[bytes, bytes]:
        """Return everything stored; to be called once, before anything is. Raises TierError."""
        ...

    async def keys_of_all(self) -> Set[bytes]:
        """Return the keys now stored by all processes that share the logs; raises TierError."""
        ...

    async def put(self, key: bytes, value: bytes) -> None:
        """Store a value, durable when this returns; raises TierError."""
        ...

    async def delete(self, key: bytes) -> None:
        """Remove a value, if it is there; raises TierError."""
        ...
