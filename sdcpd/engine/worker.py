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
from typing import Any, TypeVar

from sdcpd.engine.api import KV_BLOCK_TOKENS, ContextFull, EngineBusy, EngineError, KvUsage
from sdcpd.engine.batching import BatchWindow
from sdcpd.engine.jobs import Job, Pass, Ticket, settle
from sdcpd.engine.kv import SessionKv
from sdcpd.engine.kv_memory import KvMemory
from sdcpd.engine.scheduler import SHORT_ROWS_MAX, PrefillPace, plan
from sdcpd.protocol.histogram import Histogram

log = logging.getLogger("sdcpd.engine")
T = TypeVar("T")


OVERTAKEN_MAX = 16  # sessions that go before one that waits for more memory than they need
IDLE_S = 1.0  # how often a thread without work shows that it lives
PARKED_S = 0.05  # how often parked work is looked at where nothing ends
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


class Worker:
    """Runs jobs in batches on a thread of its own."""

    def __init__(
        self,
        runner: Pass,
        memory: KvMemory,
        *,
        rows_max: int,
        window: BatchWindow | None = None,
        name: str = "engine",
    ) -> None:
        """`window`: how long passes wait for rounds that are due; None: never."""
        self._window = window or BatchWindow(0.0)
        self._runner, self._memory = runner, memory
        self._rows_max = rows_max
        self._inbox: queue.SimpleQueue[Ticket | Callable[[], None] | None] = queue.SimpleQueue()
        self._pace = PrefillPace()
        self._waiting: list[Ticket] = []
        self._parked: list[Ticket] = []
        self._gone: set[Hashable] = set()
        self._overtaken = 0
        self.pass_s = 0.0
        """Smoothed duration of a pass in seconds."""
        self.passes = 0
        self.batches = Histogram(BATCHES)
        """Passes by how many rounds they completed, where there were any."""
        self._closing = False
        self._ready_at: float | None = None
        self._since = 0.0  # when the pass at hand could have begun
        self.beat = time.monotonic()
        """When the thread last showed a sign of life; a wedged device stops it."""
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    async def run(self, job: Job, *, room_within_s: float | None = None) -> Any:
        """Wait for a job's result; raises EngineError when its pass failed.

        Raises EngineBusy if there was no memory for it in that time.
        """
        until = None if room_within_s is None else time.monotonic() + room_within_s
        return await self.submit(job, until=until).future

    def submit(self, job: Job, *, until: float | None = None, is_round: bool = False) -> Ticket:
        """Have a job done; the ticket's future has its result, as `run` does, and raises alike."""
        if self._closing:
            raise EngineError("the engine is stopping")
        future = asyncio.get_running_loop().create_future()
        ticket = Ticket(job, future, until, is_round=is_round)
        self._inbox.put(ticket)
        return ticket

    def silence_s(self) -> float:
        """For how many seconds the thread has shown no sign of life."""
        return max(0.0, time.monotonic() - self.beat)

    def kv_usage(self) -> KvUsage:
        """How the memory for KV is used, at a moment near now."""
        memory = self._memory
        return KvUsage(
            memory.pool.tokens_max,
            (memory.pool.blocks - memory.pool.free) * KV_BLOCK_TOKENS,
            len(self._parked),
            memory.evictions,
            memory.adopted_tokens,
        )

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
            settle(future, found, error)

        self._inbox.put(look)
        return await future

    def forget(self, key: Hashable) -> None:
        """Drop a session's KV once no pass uses it."""

        def drop() -> None:
            for ticket in [one for one in self._parked if one.job.key == key]:
                self._parked.remove(ticket)
                ticket.finish(EngineError("the session has ended"))
            self._gone.add(key)
            self._forget_gone()

        self._inbox.put(drop)

    async def aclose(self) -> None:
        """Finish the pass at hand and end the thread; waiting work fails."""
        self._closing = True  # nothing is put behind the end of the inbox, where nobody looks
        self._inbox.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def _forget_gone(self) -> None:
        """Forget sessions that have ended and whose work has left the passes."""
        busy = {ticket.job.key for ticket in self._waiting}
        for key in self._gone - busy:
            self._gone.discard(key)
            self._window.forget(key)
            self._memory.forget(key)

    def _main(self) -> None:
        while self._collect():
            self._unpark()
            if self._waiting and not self._due_s():
                self._since, self._ready_at = self._ready_at or 0.0, None
                self._step()
            if self._gone:
                self._forget_gone()
            self.beat = time.monotonic()
        for ticket in self._waiting + self._parked:
            ticket.finish(EngineError("the engine is stopping"))

    def _collect(self) -> bool:
        """Take in what has arrived; blocks when there is nothing to do. False to stop."""
        wait_s = self._due_s() if self._waiting else PARKED_S if self._parked else IDLE_S
        while True:
            try:
                item = self._inbox.get(block=wait_s > 0, timeout=wait_s or None)
            except queue.Empty:
                return True
            wait_s = 0.0
            if item is None:
                return False
            if isinstance(item, Ticket):
                self._window.arrived(item.job.key, time.monotonic())
                self._parked.append(item)
            else:
                item()

    def _due_s(self) -> float:
        """How long the next pass waits for rounds that are about to come."""
        now = time.monotonic()
        self._ready_at = now if self._ready_at is None else self._ready_at
        return self._window.left_s(now, since=self._ready_at, pass_s=self.pass_s)

    def _unpark(self) -> None:
        """Let in what there is room for; who is new here waits behind those that wait already."""
        behind = False
        for ticket in sorted(self._parked, key=lambda one: self._memory.turn(one.job.key)):
            new = ticket.job.key not in self._memory
            if ticket.future.cancelled():
                self._parked.remove(ticket)
            elif not self._admit(ticket, overtakes=new and behind):
                behind = True
                if ticket.wait_until is not None and time.monotonic() > ticket.wait_until:
                    self._parked.remove(ticket)
                    ticket.finish(EngineBusy("the memory for keys and values is full"))

    def _admit(self, ticket: Ticket, *, overtakes: bool = False) -> bool:
        """Begin a job, or fail it; False if there is no room for it yet.

        Who `overtakes` others that wait has what is free, and nobody makes room for it; and only so
        many do.
        """
        job = ticket.job
        if overtakes and self._overtaken >= OVERTAKEN_MAX:
            return False
        busy = {other.job.key for other in self._waiting}
        try:
            kv = self._memory.enter(
                job.key,
                job.text,
                positions=job.positions,
                scope=job.scope,
                busy=busy,
                evict=not overtakes,
            )
            if kv is None:
                return False
            self._overtaken = self._overtaken + 1 if overtakes else 0
            job.begin(kv)
            left = job.rows_left
        except Exception as e:
            self._refuse(ticket, e)
            return True
        self._parked.remove(ticket)
        ticket.entered()
        if left > 0:
            self._waiting.append(ticket)
        else:
            ticket.finish()  # all of it was computed before; an empty pass is none
        return True

    def _refuse(self, ticket: Ticket, error: Exception) -> None:
        self._parked.remove(ticket)
        if not isinstance(error, EngineError):
            log.error("work could not begin", exc_info=error)
            error = EngineError(f"the work could not begin: {error}")
        self._memory.drop(ticket.job.key)
        ticket.finish(error)

    def _step(self) -> None:
        self._waiting = [t for t in self._waiting if not t.future.cancelled()]
        chosen = plan(self._waiting, rows_max=self._rows_max, prefill_max=self._pace.rows)
        if not chosen:
            return
        self._pass(chosen)

    def _pass(self, chosen: Sequence[tuple[Ticket, int]]) -> None:
        begin = time.monotonic()
        for ticket, _ in chosen:
            ticket.passes(begin, since=self._since)
        prefill = [rows for one, rows in chosen if one.rows_left > SHORT_ROWS_MAX]
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
        self.beat = time.monotonic()
        spent = self.beat - begin
        self.passes += 1
        self._pace.passed(spent, rounds=len(chosen) - len(prefill), prefill_rows=sum(prefill))
        self.pass_s = spent if self.pass_s == 0 else 0.9 * self.pass_s + 0.1 * spent
        rounds = 0
        for (ticket, _), scores in zip(chosen, results, strict=True):
            rounds += self._settle(ticket, scores, spent) and ticket.is_round
        if rounds:
            self.batches.add(rounds)

    def _settle(self, ticket: Ticket, scores: Any, spent: float) -> bool:
        """Hand a job its scores; True if it is done."""
        try:
            done = ticket.job.take(scores, spent)
        except Exception as e:
            self._fail(ticket, e)
            return False
        if done:
            job = ticket.job
            self._memory.settle(job.key, len(job.text), job.scope)
            self._window.done(job.key, time.monotonic())
            self._waiting.remove(ticket)
            ticket.finish()
        return done

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        if not isinstance(error, ContextFull):
            log.error("a pass failed", exc_info=error)
        if not isinstance(error, EngineError):
            error = EngineError(f"the pass failed: {error}")
        # What the pass left behind is unknown: the next job computes from the tokens.
        self._memory.drop(ticket.job.key)
        self._waiting.remove(ticket)
        ticket.finish(error)
