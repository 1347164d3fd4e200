"""One group of appends to etcd: one transaction with an outcome for each, and the truth of each.

1. A refusal is only given on a state that was read after the append was asked for. What is
   remembered of a log can make an append faster, not wrong: etcd compares again.
2. After a transaction without an answer the log is read. If its head is as it was, the same
   transaction goes out again: the head's revision lets only one of the two happen. If the head has
   moved, the first can't happen any more, and the head's mark, or the octets at its place, tell
   whether it did; that holds after a second refusal as well, when the first came late.
3. What does not come to an outcome in the time of an operation is StoreFailed: unknown.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sdcpd.protocol.commit_log import FenceRecord
from tiers.api import LogError, Mismatch, StoreFailed, StoreFull
from tiers.etcd_client import Budget, EtcdClient
from tiers.etcd_errors import EtcdError, Lost, NoSpace
from tiers.etcd_ops import Append, Delete, Op, write_of
from tiers.etcd_reader import EtcdReader
from tiers.etcd_requests import (
    Keys,
    LogState,
    Write,
    delete_log_request,
    delete_unchanged_request,
    group_answers,
    group_request,
    state_of,
    write_request,
)
from tiers.log_rules import check_tag

# Logs whose state is remembered, so that an append needs no read before it.
REMEMBERED_MAX = 4096

Outcome = str | LogError | None


@dataclass(slots=True)
class _Work:
    """One append on its way to an outcome."""

    append: Append
    state: LogState | None
    """None: to be read."""
    fresh: bool = False
    """Whether `state` was read after the append was asked for."""
    write: Write | None = None
    sent: Write | None = None
    """A write of which it is not known whether it happened."""
    lost: bool = False
    full: bool = False
    outcome: str | LogError | None = None


class Committer:
    """Performs groups, one after the other, for one store."""

    def __init__(self, client: EtcdClient, reader: EtcdReader, prefix: str) -> None:
        self._client = client
        self._reader = reader
        self._prefix = prefix
        self._remembered: OrderedDict[str, LogState] = OrderedDict()

    async def perform(self, ops: Sequence[Op]) -> list[Outcome]:
        """Perform operations on different logs; returns the outcome of each, None for a delete."""
        works = [_Work(op, self._recall(op)) for op in ops if isinstance(op, Append)]
        deletes = [op for op in ops if isinstance(op, Delete)]
        try:
            await self._append_all(works)
        except BaseException:
            for work in works:
                self._remembered.pop(work.append.log_id, None)
            raise
        outcomes = {work.append.log_id: work.outcome for work in works}
        for op in deletes:
            outcomes[op.log_id] = await self._delete(op)
        return [outcomes[op.log_id] for op in ops]

    async def _append_all(self, works: list[_Work]) -> None:
        budget = self._client.budget()
        failure: EtcdError | None = None
        while open_works := [work for work in works if work.outcome is None]:
            if budget.spent:
                busy = Lost("the log is changed by others all the time")
                self._give_up(open_works, failure or busy)
                return
            try:
                if await self._plan(open_works, budget):
                    await self._commit([work for work in open_works if work.write])
            except Lost as lost:
                failure = lost
                await budget.pause()
            except EtcdError as error:
                self._give_up(open_works, error)

    async def _plan(self, works: list[_Work], budget: Budget) -> bool:
        """Give every work a write or an outcome; False if one must first be read anew."""
        await self._read_states([work for work in works if work.state is None], budget)
        for work in works:
            work.write = None
            if work.outcome is None:
                await self._plan_one(work, budget)
        return all(work.write or work.outcome is not None for work in works)

    async def _read_states(self, works: list[_Work], budget: Budget) -> None:
        states = await self._reader.states([work.append.log_id for work in works], budget)
        for work, state in zip(works, states, strict=True):
            if isinstance(state, LogError):
                work.outcome = state
            else:
                work.state, work.fresh = state, True

    async def _plan_one(self, work: _Work, budget: Budget) -> None:
        assert work.state is not None, "states were read"
        if work.sent is not None and await self._settle(work, work.sent, budget):
            return
        try:
            work.write = write_of(work.append, work.state, self._prefix)
        except LogError as refusal:
            if work.fresh:
                work.outcome = refusal
                self._remember(work.append.log_id, work.state)
            else:
                work.state = None

    async def _settle(self, work: _Work, sent: Write, budget: Budget) -> bool:
        """Find out whether what was sent happened; True if that is the outcome."""
        state = work.state
        assert state is not None and work.fresh, "read after it was sent"
        if state.revision == sent.old.revision:
            if work.full:
                work.outcome = (
                    StoreFailed("etcd is full, and does not tell what became of the append")
                    if work.lost
                    else StoreFull("etcd has no room for another record: see its NOSPACE alarm")
                )
            return work.full
        if await self._happened(work.append, sent, state, budget):
            work.outcome = sent.new.etag
            self._remember(work.append.log_id, state)
            return True
        work.sent = None
        return False

    async def _happened(self, append: Append, sent: Write, state: LogState, budget: Budget) -> bool:
        if state.head is None or state.head.rows < sent.new.rows:
            return False
        if sent.old.created not in (0, state.created):
            return False  # deleted, and begun anew by somebody else
        if state.mark == append.mark:
            return True
        if any(isinstance(record, FenceRecord) for record in append.records):
            # Another router's fence of the same epoch has the same octets, and one of the two must
            # be refused. If it was ours, what came behind it has ended its use.
            return False
        first = sent.new.rows - len(append.rows)
        return await self._reader.holds(append.log_id, first, append.rows, budget)

    async def _commit(self, works: list[_Work]) -> None:
        if not works:
            return
        writes = [work.write for work in works if work.write is not None]
        try:
            requests = [write_request(write) for write in writes]
            answer = await self._client.txn(group_request(self._prefix, requests))
        except (Lost, NoSpace) as error:
            for work in works:
                work.sent, work.state, work.fresh = work.write, None, False
                work.full = isinstance(error, NoSpace)
                work.lost |= isinstance(error, Lost)
            if isinstance(error, Lost):
                raise
            return
        parts = group_answers(answer, len(works))
        for work, write, part in zip(works, writes, parts, strict=True):
            self._take(work, write, part, answer.header.revision)

    def _take(self, work: _Work, write: Write, answer: Any, revision: int) -> None:
        if answer.succeeded:
            created = write.old.created or revision
            state = LogState(write.new, write.new.epoch, revision, created, write.mark)
            self._remember(work.append.log_id, state)
            work.outcome = write.new.etag
            return
        try:
            work.state, work.fresh = state_of(*answer.responses), True
        except LogError as damage:
            work.outcome = damage
            return
        if write.nonce and work.sent is None and work.state == write.old:
            work.outcome = StoreFailed("another writer writes a long append to this log")

    async def _delete(self, op: Delete) -> Outcome:
        self._remembered.pop(op.log_id, None)
        try:
            if op.if_match is None:
                request = delete_log_request(Keys(self._prefix, op.log_id))
                await self._client.patiently(
                    lambda: self._client.delete_range(request), self._client.budget()
                )
            else:
                await self._delete_matching(op.log_id, op.if_match)
        except EtcdError as error:
            return StoreFailed(f"the log was perhaps not deleted: {error}")
        except LogError as refusal:
            return refusal
        return None

    async def _delete_matching(self, log_id: str, etag: str) -> None:
        budget = self._client.budget()
        state = await self._reader.state(log_id, budget)
        check_tag(state.head.etag if state.head else None, if_match=etag)
        request = delete_unchanged_request(Keys(self._prefix, log_id), state)
        answer = await self._client.patiently(lambda: self._client.txn(request), budget)
        if not answer.succeeded:
            # Also where the answer to a first try was lost: then it is gone.
            state = await self._reader.state(log_id, budget)
            if state.head is not None:
                raise Mismatch(state.head.etag)

    def _give_up(self, works: list[_Work], error: EtcdError) -> None:
        for work in works:
            if work.outcome is None:
                self._remembered.pop(work.append.log_id, None)
                work.outcome = StoreFailed(str(error))

    def _recall(self, append: Append) -> LogState | None:
        if append.staged is not None:
            return append.staged.old
        if append.if_match is None:
            return self._remembered.get(append.log_id, LogState())
        return self._remembered.get(append.log_id)

    def _remember(self, log_id: str, state: LogState) -> None:
        self._remembered[log_id] = state
        self._remembered.move_to_end(log_id)
        if len(self._remembered) > REMEMBERED_MAX:
            self._remembered.popitem(last=False)
