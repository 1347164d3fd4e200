"""One thread that writes for everybody: while one group is being written, the next one gathers.

So groups have the size of the load by themselves, with no timer (design of the commit log: 64
waiting appends cost the flush of one).
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

# Operations that may wait; more would mean that storage is minutes behind, and a caller that is
# told so can act.
WAITING_MAX = 4096
# Operations in one group, so that the first of a burst isn't told after the last.
GROUP_MAX = 512

Op = TypeVar("Op")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Unit(Generic[Op, Result]):
    ops: tuple[Op, ...]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[list[Result | Exception]]


class GroupWriter(Generic[Op, Result]):
    """Hands groups of operations to `perform` in a thread of its own.

    `perform` gets operations in the order of submission, all those of one submission in the same
    group, and returns one result or exception for each.
    """

    def __init__(
        self, name: str, perform: Callable[[list[Op]], Sequence[Result | Exception]]
    ) -> None:
        self._perform = perform
        self._queue: queue.SimpleQueue[Sequence[_Unit[Op, Result]] | None] = queue.SimpleQueue()
        self._fresh: dict[asyncio.AbstractEventLoop, list[_Unit[Op, Result]]] = {}
        self._waiting = 0
        self._closed = False
        # A daemon thread: a process that is going down without closing is not held up, and what
        # was acknowledged is complete at any instant.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether so much is waiting that new work should be refused."""
        return self._waiting >= WAITING_MAX

    @property
    def closed(self) -> bool:
        """Whether `stop` was called."""
        return self._closed

    def enqueue(self, ops: Sequence[Op]) -> asyncio.Future[list[Result | Exception]]:
        """Have operations performed in one group; the future is of their results.

        Submissions are ordered as the calls. They are performed whatever becomes of the future.
        """
        assert not self._closed, "nothing is submitted after stop"
        loop = asyncio.get_running_loop()
        unit: _Unit[Op, Result] = _Unit(tuple(ops), loop, loop.create_future())
        self._waiting += len(ops)
        fresh = self._fresh.get(loop)
        if fresh is None:
            # When all that run in this turn of the loop have submitted: those that were told of the
            # last group at once come at once, and the first of them must not be a group of its own.
            fresh = self._fresh[loop] = []
            loop.call_soon(self._hand_over, loop)
        fresh.append(unit)
        return unit.done

    async def submit(self, ops: Sequence[Op]) -> list[Result | Exception]:
        """Have operations performed as `enqueue` does, and return their results.

        A caller that is cancelled meanwhile does not know whether they were performed.
        """
        return await self.enqueue(ops)

    def stop(self) -> None:
        """Take nothing more; called where `submit` is, so that nothing comes after the end mark."""
        if not self._closed:
            self._closed = True
            for loop in list(self._fresh):
                self._hand_over(loop)
            self._queue.put(None)

    def join(self) -> None:
        """Wait, after `stop`, until all that was submitted is performed; blocks."""
        self._thread.join()

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        units = self._fresh.pop(loop, [])
        begin = size = 0
        for end, unit in enumerate(units, 1):
            size += len(unit.ops)
            if size >= GROUP_MAX or end == len(units):
                self._queue.put(units[begin:end])
                begin, size = end, 0

    def _run(self) -> None:
        last = False
        while not last:
            units, last = self._gather()
            ops = [op for unit in units for op in unit.ops]
            if ops:
                self._deliver(units, self._outcomes(ops))

    def _gather(self) -> tuple[list[_Unit[Op, Result]], bool]:
        units: list[_Unit[Op, Result]] = []
        size = 0
        some = self._queue.get()
        while some is not None:
            units += some
            size += sum(len(unit.ops) for unit in some)
            if size >= GROUP_MAX:
                return units, False
            try:
                some = self._queue.get_nowait()
            except queue.Empty:
                return units, False
        return units, True

    def _outcomes(self, ops: list[Op]) -> Sequence[Result | Exception]:
        try:
            outcomes = self._perform(ops)
        except Exception as error:  # told to every caller: the thread must live on
            return [error] * len(ops)
        assert len(outcomes) == len(ops), "one outcome for each operation"
        return outcomes

    def _deliver(
        self, units: list[_Unit[Op, Result]], outcomes: Sequence[Result | Exception]
    ) -> None:
        told: dict[asyncio.AbstractEventLoop, list[tuple[_Unit[Op, Result], slice]]]
        told = defaultdict(list)
        start = 0
        for unit in units:
            told[unit.loop].append((unit, slice(start, start + len(unit.ops))))
            start += len(unit.ops)
        for loop, parts in told.items():
            try:
                loop.call_soon_threadsafe(self._resolve, parts, outcomes)
            except RuntimeError:
                # The loop was closed under its callers: nobody is left to be told.
                continue

    def _resolve(
        self,
        parts: list[tuple[_Unit[Op, Result], slice]],
        outcomes: Sequence[Result | Exception],
    ) -> None:
        for unit, part in parts:
            self._waiting -= len(unit.ops)
            if not unit.done.done():
                unit.done.set_result(list(outcomes[part]))
