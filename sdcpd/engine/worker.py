"""One thread owns the device: it gathers waiting work into passes and hands results back.

Sessions' KV lives in that thread alone.  It is a cache: when it outgrows its budget the session
used longest ago is dropped and, should it come back, computed again from its tokens.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar

from sdcpd.engine.api import ContextFull, EngineError
from sdcpd.engine.scheduler import plan

log = logging.getLogger("sdcpd.engine")
T = TypeVar("T")


class Kv(Protocol):
    """Per-session state of a model."""

    @property
    def octets(self) -> int: ...


class Job(Protocol):
    """A piece of work that is fed to the model in one or more passes."""

    @property
    def key(self) -> Hashable:
        """Which session's KV it works on."""

    def begin(self, kv: Any) -> None:
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

    def new_kv(self) -> Any: ...

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
        self, runner: Pass, *, rows_max: int, kv_octets_max: int, name: str = "engine"
    ) -> None:
        self._runner = runner
        self._rows_max = rows_max
        self._kv_octets_max = kv_octets_max
        self._inbox: queue.SimpleQueue[_Ticket | Callable[[], None] | None] = queue.SimpleQueue()
        self._kv: OrderedDict[Hashable, Any] = OrderedDict()
        self._waiting: list[_Ticket] = []
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

    async def read(self, key: Hashable, use: Callable[[Any], T]) -> T | None:
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
                if (kv := self._kv.get(key)) is not None:
                    found = use(kv)
            except Exception as e:
                log.exception("a session's KV could not be read")
                error = EngineError(f"the KV could not be read: {e}")
            _settle(future, found, error)

        self._inbox.put(look)
        return await future

    def forget(self, key: Hashable) -> None:
        """Drop a session's KV once no pass uses it."""
        self._inbox.put(lambda: self._kv.pop(key, None) and None)

    async def aclose(self) -> None:
        """Finish the pass at hand and end the thread; waiting work fails."""
        self._closing = True  # nothing is put behind the end of the inbox, where nobody looks
        self._inbox.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def _main(self) -> None:
        while self._collect():
            if self._waiting:
                self._step()
            self._shrink()  # also where all was loaded and nothing had to be computed
            self.beat = time.monotonic()
        for ticket in self._waiting:
            ticket.finish(EngineError("the engine is stopping"))

    def _collect(self) -> bool:
        """Take in what has arrived; blocks when there is nothing to do. False to stop."""
        block = not self._waiting
        while True:
            try:
                item = self._inbox.get(block=block, timeout=1.0 if block else None)
            except queue.Empty:
                return True
            block = False
            if item is None:
                return False
            if isinstance(item, _Ticket):
                self._admit(item)
            else:
                item()

    def _admit(self, ticket: _Ticket) -> None:
        if ticket.future.cancelled():
            return
        key = ticket.job.key
        try:
            kv = self._kv.pop(key, None) or self._runner.new_kv()
            self._kv[key] = kv
            ticket.job.begin(kv)
            left = ticket.rows_left
        except Exception as e:
            log.exception("a job could not begin")
            self._kv.pop(key, None)
            ticket.finish(EngineError(f"the work could not begin: {e}"))
            return
        if left > 0:
            self._waiting.append(ticket)
        else:
            ticket.finish()  # all of it was computed before; an empty pass is none

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
            self._waiting.remove(ticket)
            ticket.finish()

    def _fail(self, ticket: _Ticket, error: Exception) -> None:
        if not isinstance(error, ContextFull):
            log.error("a pass failed", exc_info=error)
        if not isinstance(error, EngineError):
            error = EngineError(f"the pass failed: {error}")
        # What the pass left behind is unknown: the next job computes from the tokens.
        self._kv.pop(ticket.job.key, None)
        self._waiting.remove(ticket)
        ticket.finish(error)

    def _shrink(self) -> None:
        busy = {ticket.job.key for ticket in self._waiting}
        total = sum(kv.octets for kv in self._kv.values())
        for key in [k for k in self._kv if k not in busy]:
            if total <= self._kv_octets_max:
                return
            total -= self._kv.pop(key).octets
