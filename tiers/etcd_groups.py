"""One group of operations in flight: while etcd is at one, the next one gathers, with no timer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tiers.api import StoreFailed
from tiers.etcd_commit import Outcome
from tiers.etcd_ops import Append, Op
from tiers.etcd_requests import APPEND_OPS_MAX, GROUP_BYTES_MAX, GROUP_MAX

# As many may wait as for the store on a disk.
WAITING_MAX = 4096
# Octets of an operation beside keys and records, on the safe side.
OP_BYTES = 128

Perform = Callable[[Sequence[Op]], Awaitable[list[Outcome]]]


@dataclass(frozen=True, slots=True)
class _Waiting:
    op: Op
    done: asyncio.Future[Outcome]
    until: float


class Groups:
    """Hands operations to `perform` in groups, each log once a group, in the order they came."""

    def __init__(self, perform: Perform, *, prefix: str, patience_s: float) -> None:
        """`patience_s` bounds how long an operation may wait for its turn."""
        self._perform = perform
        self._patience_s = patience_s
        # An append names seven keys at most: conditions, writes and reads.
        self._key_bytes = 2 * APPEND_OPS_MAX * (len(prefix) + OP_BYTES)
        self._waiting: deque[_Waiting] = deque()
        self._running: asyncio.Task[None] | None = None
        self.closed = False

    async def submit(self, ops: Sequence[Op]) -> list[Outcome]:
        """Have operations performed and return their outcomes; raises StoreFailed.

        They are in the queue before the first wait. A caller that is cancelled meanwhile does not
        know whether they were performed.
        """
        if self.closed:
            raise StoreFailed("the log store is closed")
        if len(self._waiting) + len(ops) > WAITING_MAX:
            raise StoreFailed("too many appends are waiting")
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience_s
        entries = [_Waiting(op, loop.create_future(), until) for op in ops]
        self._waiting += entries
        if self._running is None:
            self._running = loop.create_task(self._run(), name="etcd logs")
        # All are waited for before one is told as failed: none is left without a listener.
        await asyncio.wait([entry.done for entry in entries])
        return [entry.done.result() for entry in entries]

    async def aclose(self) -> None:
        """Take nothing more, and wait until all that was accepted is done."""
        self.closed = True
        if self._running is not None:
            # Not the task itself: who is cancelled while closing must not cut it short.
            await asyncio.wait([self._running])

    async def _run(self) -> None:
        try:
            while self._waiting:
                self._dismiss()
                if group := self._gather():
                    await self._perform_group(group)
        finally:
            self._running = None

    async def _perform_group(self, group: list[_Waiting]) -> None:
        try:
            outcomes = await self._perform([entry.op for entry in group])
        except Exception as error:  # told to every caller: the next group must go on
            for entry in group:
                if not entry.done.done():
                    entry.done.set_exception(error)
            return
        for entry, outcome in zip(group, outcomes, strict=True):
            if not entry.done.done():
                entry.done.set_result(outcome)

    def _dismiss(self) -> None:
        """Fail what has waited too long: behind groups that fail it would wait for minutes."""
        now = asyncio.get_running_loop().time()
        while self._waiting and self._waiting[0].until < now:
            entry = self._waiting.popleft()
            if not entry.done.done():
                entry.done.set_result(StoreFailed("etcd has not answered those before for long"))

    def _gather(self) -> list[_Waiting]:
        group: list[_Waiting] = []
        later: list[_Waiting] = []
        logs: set[str] = set()
        size_bytes = 0
        while self._waiting and len(group) < GROUP_MAX:
            size_bytes += self._size_bytes(self._waiting[0].op)
            if group and size_bytes > GROUP_BYTES_MAX:
                break
            entry = self._waiting.popleft()
            # What comes for a log twice waits for the next group, and so keeps its order.
            (later if entry.op.log_id in logs else group).append(entry)
            logs.add(entry.op.log_id)
        self._waiting.extendleft(reversed(later))
        return group

    def _size_bytes(self, op: Op) -> int:
        if not isinstance(op, Append) or op.staged is not None:
            return self._key_bytes
        return self._key_bytes + len(op.octets)
