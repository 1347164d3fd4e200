"""Reads of commit logs in etcd: states, whole logs in pages, and rows to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from aetcd.rpc import rpc_pb2 as pb

from tiers.api import Corrupt, LogContent, LogEntry, LogError
from tiers.etcd_client import Budget, EtcdClient
from tiers.etcd_errors import Compacted
from tiers.etcd_requests import (
    STATES_MAX,
    Keys,
    LogState,
    after_log,
    entry_of,
    next_log_request,
    rows_of,
    rows_request,
    state_of,
    state_requests,
)
from tiers.log_head import Head, content_of

# What a page should have at most, judged by the log's mean row, and rows whatever their size.
PAGE_BYTES = 1 << 20
PAGE_ROWS_MAX = 4096
FIRST_PAGE_ROWS = 256
# How often a read may find that its revision was compacted away under it.
COMPACTIONS_MAX = 3


class EtcdReader:
    """Linearizable reads through one client; every method raises EtcdError and LogError."""

    def __init__(self, client: EtcdClient, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    async def states(self, log_ids: Sequence[str], budget: Budget) -> list[LogState | LogError]:
        """Return what etcd holds of each log now, Corrupt where that is damaged."""
        found: list[LogState | LogError] = []
        for start in range(0, len(log_ids), STATES_MAX):
            part = log_ids[start : start + STATES_MAX]
            reads = [op for log_id in part for op in state_requests(Keys(self._prefix, log_id))]
            answer = await self._read(pb.TxnRequest(success=reads), budget)
            pairs = zip(answer.responses[::2], answer.responses[1::2], strict=True)
            found += [_state_or_error(*pair) for pair in pairs]
        return found

    async def state(self, log_id: str, budget: Budget) -> LogState:
        """Return what etcd holds of a log now."""
        (found,) = await self.states([log_id], budget)
        if isinstance(found, LogError):
            raise found
        return found

    async def entries(self, after: str, count_max: int) -> list[LogEntry]:
        """Return logs that follow one: a small read for each, which steps over its rows."""
        start = after_log(self._prefix, after.encode()) if after else f"{self._prefix}/".encode()
        found: list[LogEntry] = []
        while len(found) < count_max:
            request = next_log_request(self._prefix, start)
            answer = await self._client.patiently(
                partial(self._client.range, request), self._client.budget()
            )
            if not answer.kvs:
                break
            name, entry = entry_of(self._prefix, answer.kvs)
            start = after_log(self._prefix, name)
            if entry is not None:
                found.append(entry)
        return found

    async def content(self, log_id: str, budget: Budget) -> tuple[LogState, LogContent | None]:
        """Return a log as it was at one moment, and its state then."""
        for _ in range(COMPACTIONS_MAX - 1):
            try:
                return await self._content(Keys(self._prefix, log_id), budget)
            except Compacted:
                continue
        return await self._content(Keys(self._prefix, log_id), budget)

    async def holds(self, log_id: str, first: int, rows: Sequence[bytes], budget: Budget) -> bool:
        """Tell whether a log's rows from `first` on are these, octet for octet."""
        keys, end = Keys(self._prefix, log_id), first + len(rows)
        stored = await self._pages(keys, first, end, 1, 0, budget)
        return stored == list(rows)

    async def _content(self, keys: Keys, budget: Budget) -> tuple[LogState, LogContent | None]:
        page = rows_request(keys, 0, limit=FIRST_PAGE_ROWS, end=None, revision=0)
        reads = [*state_requests(keys), pb.RequestOp(request_range=page)]
        answer = await self._read(pb.TxnRequest(success=reads), budget)
        state = state_of(*answer.responses[:2])
        if state.head is None:
            return state, None
        head = state.head
        rows = rows_of(keys, 0, answer.responses[2].response_range.kvs)[: head.rows]
        if len(rows) == FIRST_PAGE_ROWS:
            # The rest as of the same revision: what was read belongs together.
            limit, revision = _page_rows(head), answer.header.revision
            rows += await self._pages(keys, len(rows), head.rows, limit, revision, budget)
        return state, LogContent(content_of(rows, head), head.etag)

    async def _pages(
        self, keys: Keys, first: int, end: int, limit: int, revision: int, budget: Budget
    ) -> list[bytes]:
        rows: list[bytes] = []
        while first < end:
            request = rows_request(keys, first, limit=limit, end=end, revision=revision)
            answer = await self._client.patiently(partial(self._client.range, request), budget)
            page = rows_of(keys, first, answer.kvs)
            if not page:
                break
            rows += page
            first += len(page)
        return rows

    async def _read(self, request: Any, budget: Budget) -> Any:
        return await self._client.patiently(lambda: self._client.txn(request), budget)


def _page_rows(head: Head) -> int:
    mean_bytes = max(1, head.size_bytes // max(1, head.rows))
    return max(1, min(PAGE_ROWS_MAX, PAGE_BYTES // mean_bytes))


def _state_or_error(head_read: Any, fence_read: Any) -> LogState | LogError:
    try:
        return state_of(head_read, fence_read)
    except Corrupt as damage:
        return damage
