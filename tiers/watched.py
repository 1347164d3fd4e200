"""Whether a router's logs and records work: told as they are used, and tried while they do not.

Nobody sends texts to a router that is not ready, so that a store that has failed may not be used
again: while its last use failed, something of nobody's is written and removed once a second.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from typing import TypeVar

from sdcpd.protocol.commit_log import FenceRecord, encode_record
from sdcpd.protocol.uris import session_path_id
from tiers.api import (
    LogAppend,
    LogContent,
    LogEntry,
    LogError,
    LogHead,
    LogStore,
    Records,
    StoreFailed,
    StoreFull,
    TierError,
)

log = logging.getLogger("tiers.watched")
TRY_S = 1.0
TRY_BYTES_MAX = 64 << 10  # of a record that is tried; a round's has some hundred octets
READ, WRITE = "read", "write"

T = TypeVar("T")


class _Watched(ABC):
    """What last failed; `failed` is told why, `worked` that it is over."""

    def __init__(self, failed: Callable[[str], None], worked: Callable[[], None]) -> None:
        self._failed, self._worked = failed, worked
        self._broken: dict[str, str] = {}
        self._troubled = asyncio.Event()

    async def run(self) -> None:
        """Try once a second whether what has failed works again."""
        while True:
            await self._troubled.wait()
            await asyncio.sleep(TRY_S)  # a clock tick, not a wait for something
            try:
                await self._try(set(self._broken))
            except (LogError, TierError) as error:  # noted where it was raised
                log.debug("still: %s", error)

    @abstractmethod
    async def _try(self, broken: Set[str]) -> None:
        """Do of nobody's data what has failed; raises LogError or TierError."""

    def _fails(self, what: str, error: Exception) -> None:
        self._broken[what] = str(error)
        self._troubled.set()
        self._failed("; ".join(dict.fromkeys(self._broken.values())))

    def _works(self, what: str) -> None:
        if self._broken.pop(what, None) is None:
            return
        if self._broken:
            self._failed("; ".join(dict.fromkeys(self._broken.values())))
        else:
            self._troubled.clear()
            self._worked()


class WatchedLogs(_Watched):
    """A log store as it is; see LogStore.

    Refusals and a single log that is damaged (Corrupt) are not the store's trouble.
    """

    def __init__(
        self, store: LogStore, *, failed: Callable[[str], None], worked: Callable[[], None]
    ) -> None:
        super().__init__(failed, worked)
        self._store = store
        self._wanted_bytes = 1

    async def read(self, log_id: str) -> LogContent | None:
        return await self._reading(self._store.read(log_id))

    async def head(self, log_id: str) -> LogHead | None:
        return await self._reading(self._store.head(log_id))

    async def entries(self, *, after: str = "", count_max: int) -> Sequence[LogEntry]:
        return await self._reading(self._store.entries(after=after, count_max=count_max))

    async def put(
        self, log_id: str, data: bytes, *, if_match: str | None, if_none_match: bool
    ) -> str:
        writing = self._store.put(log_id, data, if_match=if_match, if_none_match=if_none_match)
        return await self._writing(writing)

    async def append(
        self,
        log_id: str,
        record_bytes: bytes,
        *,
        offset: int | None,
        if_match: str | None,
        create: bool = False,
    ) -> str:
        writing = self._store.append(
            log_id, record_bytes, offset=offset, if_match=if_match, create=create
        )
        return await self._writing(writing, len(record_bytes))

    async def append_many(self, items: Sequence[LogAppend]) -> list[str | LogError]:
        try:
            outcomes = await self._store.append_many(items)
        except StoreFailed as error:
            self._fails(WRITE, error)
            raise
        for item, outcome in zip(items, outcomes, strict=True):
            self._wrote(outcome, len(item.record_bytes))
        return outcomes

    async def delete(self, log_id: str, *, if_match: str | None = None) -> None:
        # That one can be deleted does not say that there is room for another.
        await self._store.delete(log_id, if_match=if_match)

    async def aclose(self) -> None:
        await self._store.aclose()

    async def _reading(self, reading: Awaitable[T]) -> T:
        try:
            found = await reading
        except StoreFailed as error:
            self._fails(READ, error)
            raise
        self._works(READ)
        return found

    async def _writing(self, writing: Awaitable[str], size_bytes: int = 1) -> str:
        try:
            tag = await writing
        except LogError as error:
            self._wrote(error, size_bytes)
            raise
        self._wrote(tag, size_bytes)
        return tag

    def _wrote(self, outcome: str | LogError, size_bytes: int) -> None:
        if isinstance(outcome, str):
            self._works(WRITE)
        elif isinstance(outcome, StoreFull | StoreFailed):
            self._wanted_bytes = min(size_bytes, TRY_BYTES_MAX)
            self._fails(WRITE, outcome)

    async def _try(self, broken: Set[str]) -> None:
        # An id that no session has: should it be left behind, it goes with the old logs.
        log_id = session_path_id(secrets.token_bytes(16))
        await self.head(log_id)
        if WRITE in broken:
            await self._writing(self._appended_and_deleted(log_id), self._wanted_bytes)

    async def _appended_and_deleted(self, log_id: str) -> str:
        records = _records(self._wanted_bytes)
        tag = await self._store.append(log_id, records, offset=None, if_match=None, create=True)
        await self._store.delete(log_id)
        return tag


class WatchedRecords(_Watched):
    """Records as they are; see Records."""

    def __init__(
        self, records: Records, *, failed: Callable[[str], None], worked: Callable[[], None]
    ) -> None:
        super().__init__(failed, worked)
        self._records = records
        self._tried = secrets.token_bytes(16)  # one key a process: at most one is left behind

    def all(self) -> Mapping[bytes, bytes]:
        # An empty one was only tried, by a process that has died in the middle of it.
        return {key: value for key, value in self._records.all().items() if value}

    async def keys_of_all(self) -> Set[bytes]:
        return await self._told(READ, self._records.keys_of_all())

    async def put(self, key: bytes, value: bytes) -> None:
        await self._told(WRITE, self._records.put(key, value))

    async def delete(self, key: bytes) -> None:
        await self._records.delete(key)

    async def _told(self, what: str, work: Awaitable[T]) -> T:
        try:
            found = await work
        except TierError as error:
            self._fails(what, error)
            raise
        self._works(what)
        return found

    async def _try(self, broken: Set[str]) -> None:
        if READ in broken:
            await self.keys_of_all()
        if WRITE in broken:
            await self._told(WRITE, self._put_and_deleted())

    async def _put_and_deleted(self) -> None:
        await self._records.put(self._tried, b"")
        await self._records.delete(self._tried)


def _records(size_bytes: int) -> bytes:
    """Fences that are so long together: whether a record fits depends on its length."""
    octets, epoch = b"", 0
    while len(octets) < size_bytes:
        epoch += 1
        octets += encode_record(FenceRecord(epoch=epoch))
    return octets
