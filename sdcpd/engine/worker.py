"""One thread owns the device: it gathers waiting work into passes and hands results back.

Sessions' KV lives in that thread alone (kv_memory.py).  Work for which there is no room now is
parked, and tried again whenever something has ended.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar

from sdcpd.engine.api import ContextFull, EngineError
from sdcpd.engine.kv import SessionKv
from sdcpd.engine.kv_memory import KvMemory
from sdcpd.engine.scheduler import plan

log = logging.getLogger("sdcpd.engine")
T = TypeVar("T")


PARKED_S = 0.05  # how often parked work is looked at where nothing ends


class Job(Protocol):
    """A piece of work that is fed to the model in one or more passes."""

    @property
    def key(self) -> Hashable:
        """Which session's KV it works on."""

    @property
    def text(self) -> Sequence[int]:
        """The tokens that are its session's for good; another's may begin alike."""

    @property
    def scope(self) -> bytes:
        """Whose texts may begin with each other's KV."""

    @property
    def positions(self) -> int:
        """How many positions its session has at most when it is done."""

    def begin(self, kv: SessionKv) -> None:
        """Attach the session's KV and find out what is still to be fed."""

    @property
    def rows_left(self) -> int: ...

    def feed(self, rows: int) -> Any:
        """The next `rows` tokens for the pass."""

    def take(self, scores: Any, pass_s: float) -> bool:
        """Use the pass's scores; True when the job is finished and `result` is set."""

    result: Any


class Pass(Protocol):
    """What runs a pass: `engine.runner.Runner`, or a fake."""

    def run(self, feeds: Sequence[Any]) -> Sequence[Any]: ...


class _Ticket:
    """A job and the future that waits for it."""

    def __init__(self, job: Job, future: asyncio.Future[Any]) -> None:
        self.job = job
        self.future = future

    @property
    def rows_left(self) -> int:
        return self.job.rows_left

    def finish(self, error: Exception | None = None) -> None:
        _settle(self.future, self.job.result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    """Hand a result, or an error, from the thread to whoever waits in an event loop."""

    def settle() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    try:
        future.get_loop().call_soon_threadsafe(settle)
    except RuntimeError:
        log.debug("a result came after its event loop had ended")


class Worker:
    """Runs jobs in batches on a thread of its own."""

    def __init__(
        self, runner: Pass, memory: KvMemory, *, rows_max: int, name: str = "engine"
    ) -> None:
        self._runner, self._memory = runner, memory
        self._rows_max = rows_max
        self._inbox: queue.SimpleQueue[_Ticket | Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: list[_Ticket] = []
        self._parked: list[_Ticket] = []
        self.pass_s = 0.0
        """Smoothed duration of a pass in seconds."""
        self.passes = 0
        self._closing = False
        self.beat = time.monotonic()
        """When the thread last showed a sign of life; a wedged device stops it."""
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    async def run(self, job: Job) -> Any:
        """Wait for a job's result; raises EngineError when its pass failed."""
        if self._closing:
            raise EngineError("the engine is stopping")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._inbox.put(_Ticket(job, future))
        return await future

    @property
    def parked(self) -> int:
        """How many pieces of work wait for memory."""
        return len(self._parked)

    async def read(self, key: Hashable, use: Callable[[SessionKv], T]) -> T | None:
        """What `use` makes, on the thread, of a session's KV; None where there is none.

        Raises EngineError when `use` fails or the engine is stopping.
        """
        if self._closing:
            raise EngineError("the engine is stopping")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T | None] = loop.create_future()

        def look() -> None:
            found, error = None, None
            try:
                if (kv := self._memory.get(key)) is not None:
                    found = use(kv)
            except Exception as e:
                log.exception("a session's KV could not be read")
                error = EngineError(f"the KV could not be read: {e}")
            _settle(future, found, error)

        self._inbox.put(look)
        return await future

    def forget(self, key: Hashable) -> None:
        """Drop a session's KV once no pass uses it."""
        self._inbox.put(lambda: self._memory.forget(key))

    async def aclose(self) -> None:
        """Finish the pass at hand and end the thread; waiting work fails."""
        self._closing = True  # nothing is put behind the end of the inbox, where nobody looks
        self._inbox.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def _main(self) -> None:
        while self._collect():
            self._unpark()
            if self._waiting:
                self._step()
            self.beat = time.monotonic()
        for ticket in self._waiting + self._parked:
            ticket.finish(EngineError("the engine is stopping"))

    def _collect(self) -> bool:
        """Take in what has arrived; blocks when there is nothing to do. False to stop."""
        block = not self._waiting
        while True:
            limit_s = PARKED_S if self._parked else 1.0
            try:
                item = self._inbox.get(block=block, timeout=limit_s if block else None)
            except queue.Empty:
                return True
            block = False
            if item is None:
                return False
            if isinstance(item, _Ticket):
                self._parked.append(item)
            else:
                item()

    def _unpark(self) -> None:
        """Let in what there is room for; who is new here waits behind those that wait already."""
        behind = False
        for ticket in list(self._parked):
            new = ticket.job.key not in self._memory
            if ticket.future.cancelled():
                self._parked.remove(ticket)
            elif not (new and behind):
                behind = not self._admit(ticket) or behind

    def _admit(self, ticket: _Ticket) -> bool:
        """Begin a job, or fail it; False if there is no room for it yet."""
        job = ticket.job
        busy = {other.job.key for other in self._waiting}
        try:
            kv = self._memory.enter(
                job.key, job.text, positions=job.positions, scope=job.scope, busy=busy
            )
            if kv is None:
                return False
            job.begin(kv)
            left = job.rows_left
        except Exception as e:
            self._refuse(ticket, e)
            return True
        self._parked.remove(ticket)
        if left > 0:
            self._waiting.append(ticket)
        else:
            ticket.finish()  # all of it was computed before; an empty pass is none
        return True

    def _refuse(self, ticket: _Ticket, error: Exception) -> None:
        self._parked.remove(ticket)
        if not isinstance(error, EngineError):
            log.error("work could not begin", exc_info=error)
            error = EngineError(f"the work could not begin: {error}")
        self._memory.drop(ticket.job.key)
        ticket.finish(error)

    def _step(self) -> None:
        self._waiting = [t for t in self._waiting if not t.future.cancelled()]
        chosen = plan(self._waiting, rows_max=self._rows_max)
        if not chosen:
            return
        self._pass(chosen)

    def _pass(self, chosen: Sequence[tuple[_Ticket, int]]) -> None:
        begin = time.monotonic()
        try:
            results = self._runner.run([ticket.job.feed(rows) for ticket, rows in chosen])
        except Exception as e:
            if len(chosen) == 1:
                self._fail(chosen[0][0], e)
                return
            # One session must not take the others down: each gets a pass of its own.
            for one in chosen:
                self._pass([one])
            return
        spent = time.monotonic() - begin
        self.passes += 1
        self.pass_s = spent if self.pass_s == 0 else 0.9 * self.pass_s + 0.1 * spent
        for (ticket, _), scores in zip(chosen, results, strict=True):
            self._settle(ticket, scores, spent)

    def _settle(self, ticket: _Ticket, scores: Any, spent: float) -> None:
        try:
            done = ticket.job.take(scores, spent)
        except Exception as e:
            self._fail(ticket, e)
            return
        if done:
            job = ticket.job
            self._memory.settle(job.key, len(job.text), job.scope)
            self._waiting.remove(ticket)
            ticket.finish()

    def _fail(self, ticket: _Ticket, error: Exception) -> None:
        if not isinstance(error, ContextFull):
            log.error("a pass failed", exc_info=error)
        if not isinstance(error, EngineError):
            error = EngineError(f"the pass failed: {error}")
        # What the pass left behind is unknown: the next job computes from the tokens.
        self._memory.drop(ticket.job.key)
        self._waiting.remove(ticket)
        ticket.finish(error)
