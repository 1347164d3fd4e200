"""Commit logs in an LMDB environment of their own: durable, appended in groups (D-M5 to D-M9).

One thread takes all that waits and writes it in one transaction; each outcome stands for itself,
and is told after the transaction is on the disk. If the disk ever fails to flush, nothing is known
of its state any more, so the store takes no records from then on (StoreFailed); what was written
can still be read. A disk without room is no such failure: it may have some later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import lmdb

from sdcpd.protocol.commit_log import Record
from tiers.api import (
    LogAppend,
    LogContent,
    LogEntry,
    LogError,
    LogHead,
    NotExtending,
    StoreFailed,
    StoreFull,
)
from tiers.disk_room import Spare, is_full
from tiers.folder import Folder
from tiers.lmdb_file import FileDamaged, check_file, trouble
from tiers.log_head import Head
from tiers.log_rows import LogRows
from tiers.log_rules import (
    check_condition,
    check_group,
    check_log_id,
    check_tag,
    highest_epoch,
    parse_records,
)
from tiers.writer import GroupWriter

READERS = 2
MAP_BYTES_MIN = 64 * 1024
DELETION_BYTES = 1 << 20  # of the map, which appends leave to deletions

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Append:
    item: LogAppend
    records: Sequence[Record]


@dataclass(frozen=True, slots=True)
class _Put:
    log_id: str
    data: bytes
    if_match: str | None


@dataclass(frozen=True, slots=True)
class _Delete:
    log_id: str
    if_match: str | None


_Op = _Append | _Put | _Delete


class LmdbLogStore:
    """The log store of one router (`commit_log = "lmdb"`)."""

    def __init__(self, path: Path, *, map_bytes: int) -> None:
        """Open or create; raises TierError. `map_bytes` bounds all logs together (sparse)."""
        self._failure: str | None = None
        self._room_bytes = 0  # left to the transaction that runs
        self._folder = Folder(path, setting="[mlc] log_path")
        try:
            check_file(path, used=self._folder.used)
            self._bytes_max = max(map_bytes, MAP_BYTES_MIN)
            self._env = _open(path, self._bytes_max + DELETION_BYTES)
            self._rows = LogRows(self._env)
            self._folder.mark_used()
            self._spare = Spare(path)
            self._spare.keep()
        except (lmdb.Error, FileDamaged, OSError) as error:
            self._folder.release()
            raise trouble("commit logs", path, error, setting="[mlc] log_path") from error
        self._writer = GroupWriter[_Op, str | None]("mlc-logs", self._perform)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="mlc-log-read")

    async def read(self, log_id: str) -> LogContent | None:
        check_log_id(log_id)
        return await self._reading(self._rows.read, log_id)

    async def head(self, log_id: str) -> LogHead | None:
        check_log_id(log_id)
        head = await self._reading(self._rows.head, log_id)
        return None if head is None else LogHead(head.etag, head.size_bytes, head.epoch)

    async def put(
        self, log_id: str, data: bytes, *, if_match: str | None, if_none_match: bool
    ) -> str:
        check_log_id(log_id)
        check_condition(if_match=if_match, create=if_none_match)
        return _tag(await self._write([_Put(log_id, data, if_match)]))

    async def append(
        self,
        log_id: str,
        record_bytes: bytes,
        *,
        offset: int | None,
        if_match: str | None,
        create: bool = False,
    ) -> str:
        check_log_id(log_id)
        check_condition(if_match=if_match, create=create)
        item = LogAppend(
            log_id=log_id,
            record_bytes=record_bytes,
            if_match=if_match,
            create=create,
            offset=offset,
        )
        return _tag(await self._write([_Append(item, parse_records(record_bytes))]))

    async def append_many(self, items: Sequence[LogAppend]) -> list[str | LogError]:
        check_group(items)
        parsed = [_parsed(item) for item in items]
        ops = [op for op in parsed if isinstance(op, _Append)]
        written = iter(await self._write(ops) if ops else [])
        outcomes: list[str | LogError] = []
        for op in parsed:
            outcome = next(written) if isinstance(op, _Append) else op
            assert outcome is not None, "an append has a tag or an error"
            outcomes.append(outcome)
        return outcomes

    async def entries(self, *, after: str = "", count_max: int) -> Sequence[LogEntry]:
        return await self._reading(partial(self._rows.entries, count_max=count_max), after)

    async def delete(self, log_id: str, *, if_match: str | None = None) -> None:
        check_log_id(log_id)
        outcome = (await self._write([_Delete(log_id, if_match)]))[0]
        if isinstance(outcome, LogError):
            raise outcome

    async def aclose(self) -> None:
        self._writer.stop()
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """As `aclose`, blocking."""
        self._writer.stop()
        self._writer.join()
        self._readers.shutdown()
        self._env.close()
        self._folder.release()

    async def _reading(self, read: Callable[[str], T], log_id: str) -> T:
        if self._writer.closed:
            raise StoreFailed("the log store is closed")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._readers, read, log_id)
        except lmdb.Error as error:
            raise StoreFailed(f"the log cannot be read: {error}") from error

    async def _write(self, ops: Sequence[_Op]) -> list[str | LogError | None]:
        self._check_writable()
        if self._writer.busy:
            raise StoreFailed("too many appends are waiting")
        outcomes: list[str | LogError | None] = []
        for outcome in await self._writer.submit(ops):
            if isinstance(outcome, Exception) and not isinstance(outcome, LogError):
                raise outcome
            outcomes.append(outcome)
        return outcomes

    def _check_writable(self) -> None:
        if self._failure is not None:
            raise StoreFailed(self._failure)
        if self._writer.closed:
            raise StoreFailed("the log store is closed")

    # From here on: the writer's thread.

    def _perform(self, ops: list[_Op]) -> Sequence[str | Exception | None]:
        if self._failure is not None:
            return [StoreFailed(self._failure)] * len(ops)
        try:
            with self._env.begin(write=True) as txn:
                self._room_bytes = self._bytes_max - self._rows.used_bytes(txn)
                return [self._outcome(txn, op) for op in ops]
        except lmdb.Error as error:
            if not is_full(error, self._folder.path):
                self._failure = f"the disk of the commit logs failed ({error}); see its state"
                return [StoreFailed(self._failure)] * len(ops)
        # Full, and nothing of the group was written: whose record still has room shows one by one.
        if len(ops) > 1:
            return [outcome for op in ops for outcome in self._perform([op])]
        if isinstance(ops[0], _Delete) and self._spare.give():
            outcomes = self._perform(ops)
            self._spare.keep()
            return outcomes
        return [_full()]

    def _outcome(self, txn: lmdb.Transaction, op: _Op) -> str | LogError | None:
        try:
            match op:
                case _Append(item, records):
                    return self._append(txn, item, records)
                case _Put():
                    return self._put(txn, op)
                case _Delete(log_id, if_match):
                    if if_match is not None:
                        check_tag(_etag(self._rows.head_in(txn, log_id)), if_match=if_match)
                    self._rows.delete(txn, log_id)
                    return None
        except LogError as refusal:
            return refusal

    def _append(self, txn: lmdb.Transaction, item: LogAppend, records: Sequence[Record]) -> str:
        head = self._rows.head_in(txn, item.log_id)
        check_tag(_etag(head), if_match=item.if_match)
        head = head or Head()
        if item.offset not in (None, head.size_bytes):
            raise NotExtending(f"the log is {head.size_bytes} octets long, not {item.offset}")
        return self._extend(txn, item.log_id, head, item.record_bytes, records)

    def _put(self, txn: lmdb.Transaction, op: _Put) -> str:
        head = self._rows.head_in(txn, op.log_id)
        check_tag(_etag(head), if_match=op.if_match)
        old = b"" if head is None else self._rows.content_in(txn, op.log_id, head)
        if not op.data.startswith(old):
            raise NotExtending("the new content does not begin with the old")
        new = op.data[len(old) :]
        if head is not None and not new:
            return head.etag
        return self._extend(txn, op.log_id, head or Head(), new, parse_records(new))

    def _extend(
        self,
        txn: lmdb.Transaction,
        log_id: str,
        head: Head,
        octets: bytes,
        records: Sequence[Record],
    ) -> str:
        if len(octets) > self._room_bytes:
            raise _full()
        self._room_bytes -= len(octets)
        # All that can be refused was checked before the first row is written: a refusal leaves
        # the transaction, which it shares with others, as it was.
        epoch = highest_epoch(head.epoch, records)
        return self._rows.extend(txn, log_id, head, octets, epoch=epoch).etag


def _full() -> StoreFull:
    return StoreFull("the commit logs have no room for another record")


def _etag(head: Head | None) -> str | None:
    return None if head is None else head.etag


def _open(path: Path, map_bytes: int) -> lmdb.Environment:
    env = lmdb.open(str(path), map_size=map_bytes, max_dbs=2, sync=True, metasync=True, mode=0o600)
    env.reader_check()
    return env


def _parsed(item: LogAppend) -> _Append | LogError:
    try:
        records = parse_records(item.record_bytes)
    except LogError as refusal:
        return refusal
    return _Append(item, records)


def _tag(outcomes: Sequence[str | LogError | None]) -> str:
    (outcome,) = outcomes
    if isinstance(outcome, LogError):
        raise outcome
    assert outcome is not None, "a write has a tag or an error"
    return outcome
