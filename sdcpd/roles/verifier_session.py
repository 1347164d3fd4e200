"""One session at the verifier: performs what its machine asks, in order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import anyio

from sdcpd.engine.api import ContextFull, EngineError, Prefix, Score, TargetEngine
from sdcpd.protocol.commit_log import CommitRecord
from sdcpd.protocol.logprobs import Row
from sdcpd.protocol.messages import Message, Output, SessionOpen, SessionState, Verdict
from sdcpd.protocol.problems import BadProposal, Problem, QUnavailable, StaleEpoch
from sdcpd.protocol.uris import session_path_id
from sdcpd.protocol.verifier import FENCED, VerifierSession
from sdcpd.protocol.verifier_io import (
    Abandon,
    Append,
    Appended,
    AppendFenced,
    AppendStalled,
    Cancel,
    Ended,
    FetchRows,
    NameDrafter,
    OutputChanged,
    PeriodDone,
    Propose,
    Refuse,
    Reply,
    RoundDone,
    RoundScored,
    RowsReady,
    ScoreFailed,
    ScoreRound,
    SendEvent,
    SetPolicy,
    Superseded,
    Tick,
    VerifierAction,
    VerifierEvent,
    WithdrawEvents,
)
from sdcpd.roles.commit_log import CommitLog, LogUnavailable, Outcome
from sdcpd.roles.counts import VerifierCounts
from sdcpd.roles.events import EventSender
from sdcpd.roles.log_stalls import LogStalls
from sdcpd.roles.objects import NotTrusted, ObjectGone, Objects, ObjectTooLarge
from sdcpd.roles.prefix_kv import PrefixKv
from sdcpd.roles.round_times import RoundTimes, Taken
from sdcpd.roles.session_trace import SessionTrace
from sdcpd.roles.target_kv import TargetKv
from sdcpd.roles.tasks import Tasks
from sdcpd.transport.http import TransportError

log = logging.getLogger("sdcpd.verifier")
STALL_RETRY_S = 0.5


@dataclass(slots=True)
class Busy:
    """How many sessions have a round in work; kept, because it is asked for in every round."""

    sessions: int = 0


@dataclass(frozen=True, slots=True)
class SessionContext:
    """What all sessions of a verifier share."""

    engine: TargetEngine
    objects: Objects
    target_kv: TargetKv
    prefix_kv: PrefixKv
    tasks: Tasks
    busy: Busy
    load: Callable[[], int]
    lower: Callable[[], bool]
    observe: Callable[[RoundDone], None]
    counts: VerifierCounts
    ended: Callable[[ServedSession], None]
    stalls: LogStalls
    round_wait_s: float


class ServedSession:
    """The machine, its log, its engine work, and those who wait for it."""

    def __init__(
        self,
        machine: VerifierSession,
        opened: SessionOpen,
        *,
        commit_log: CommitLog,
        events: EventSender,
        context: SessionContext,
        trace: SessionTrace | None = None,
    ) -> None:
        """`trace` is None for one that nobody traces."""
        self.machine = machine
        self.opened = opened
        self.label = session_path_id(machine.session)
        self._log, self._events, self._context = commit_log, events, context
        self._publish_kv = context.target_kv.wanted(machine.prompt_length)
        self._keep_kv = True
        self._logprobs: dict[int, Row] = {}  # by the index of the output token
        self._times = RoundTimes(context.counts.stages)
        self._trace = trace
        self._busy = self._over = False
        self._requests = 0
        self._answers: dict[int, asyncio.Future[Message | None]] = {}
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._event_task = context.tasks.spawn(events.run(), name=f"events {self.label}")
        if machine.closed:
            events.finish()  # opened at its end: there is nothing to tell
        self._arm()

    # ---- requests

    async def propose(self, event: Callable[[int], Propose]) -> Verdict:
        """Process a proposal; raises Problem."""
        answer = await self._ask(event)
        assert isinstance(answer, Verdict), "a proposal is answered with a verdict"
        return answer

    async def change(self, event: Callable[[int], NameDrafter | SetPolicy]) -> SessionState:
        """Name a drafter or set a policy; raises Problem."""
        answer = await self._ask(event)
        assert isinstance(answer, SessionState), "answered with the session's state"
        return answer

    async def cancel(self) -> None:
        """End the session at the next round boundary (D-Z2)."""
        await self._ask(Cancel)

    def output(self, from_: int) -> Output | None:
        """As the machine's, with log-probabilities if all of them are known here (D-Z5)."""
        output = self.machine.output(from_)
        if output is None or self.opened.logprobs is None:
            return output
        # What was read needs no keeping: a router that wants it again has it scored.
        while self._logprobs and (oldest := next(iter(self._logprobs))) < from_:
            del self._logprobs[oldest]
        rows = [self._logprobs.get(from_ + index) for index in range(len(output.tokens))]
        known = tuple(row for row in rows if row is not None)
        return replace(output, logprobs=known if len(known) == len(rows) else None)

    async def wait_for_output(self, wait_s: float) -> None:
        """Wait until output or the session's end changes, at most that long."""
        with anyio.move_on_after(wait_s):
            await self._changed.wait()

    def supersede(self) -> None:
        """Another epoch takes over; whoever waits here is told."""
        self.step(Superseded())

    async def _ask(self, event: Callable[[int], VerifierEvent]) -> Message | None:
        self._requests += 1
        number = self._requests
        future: asyncio.Future[Message | None] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        self.step(event(number))
        try:
            with anyio.move_on_after(self._context.round_wait_s):
                # Shielded: a client that goes away does not end the round (D-H15).
                return await asyncio.shield(future)
            self.step(Abandon(number))
            return await future
        finally:
            self._answers.pop(number, None)

    # ---- the machine and its actions

    def step(self, event: VerifierEvent) -> None:
        """Feed the machine and perform what it asks for."""
        for action in self.machine.step(event, now=time.monotonic()):
            self._perform(action)
        self._arm()
        busy = self.machine.busy and not self._over
        if busy is not self._busy:
            self._context.busy.sessions += 1 if busy else -1
            self._busy = busy

    def _perform(self, action: VerifierAction) -> None:
        match action:
            case Reply():
                self._answer(action.request, action.message, None)
            case Refuse():
                self._answer(action.request, None, action.problem)
            case ScoreRound():
                self._times.begun(action.work, proposal=bool(action.tokens))
                if self._trace is not None and not action.tokens:
                    self._trace.decodes_alone()
                self._spawn(self._score(action), "score")
            case Append():
                self._spawn(self._append(action.work, action.record), "append")
            case FetchRows():
                self._times.begun(action.work, proposal=True)
                self._spawn(self._fetch_rows(action), "rows")
            case OutputChanged():
                self._changed.set()
                self._changed = asyncio.Event()
            case SendEvent():
                self._events.send(action.event)
            case WithdrawEvents():
                self._events.withdraw()
            case PeriodDone():
                self._context.counts.periods[action.end] += 1
                if self._trace is not None:
                    self._trace.period_over(action.end)
            case RoundDone():
                taken = self._times.over()
                if self._trace is not None:
                    self._tell(self._trace, action, taken)
                self._context.observe(action)
                if self._publish_kv:  # once: the first round has had its turn of the engine
                    self._publish_kv = False
                    self._spawn(self._context.target_kv.publish(self.machine), "publish")
                if self._keep_kv:  # so that whoever comes meanwhile with the same beginning has it
                    self._keep_kv = False
                    self._spawn(self._keep(), "keep")
            case Ended():
                log.info("session %s: %s", self.label, action.reason)
                self._over = True
                self._context.counts.end(action.reason)
                self._spawn(self._keep_and_forget(), "forget")
                self._events.finish()
                self._log.drop_content()
                self._context.ended(self)

    def _tell(self, trace: SessionTrace, done: RoundDone, taken: Taken | None) -> None:
        if done.verdict is None or taken is None:
            trace.decoded_alone()
            return
        machine = self.machine
        trace.round(
            done.verdict,
            taken,
            rule=machine.contract.rule,
            drafted=done.proposed,
            drafter=machine.drafter,
        )

    async def _keep_and_forget(self) -> None:
        """Keep the KV of the text, with which the next turn of a chat begins; then free it."""
        try:
            await self._keep()
        finally:
            self._context.engine.forget(self.machine.session, self.machine.epoch)

    async def _keep(self) -> None:
        machine = self.machine
        read = partial(self._context.engine.blocks, machine.session, machine.epoch)
        await self._context.prefix_kv.keep(machine, machine.contract.scope, read)

    def _spawn(self, coroutine: object, what: str) -> None:
        self._context.tasks.spawn(coroutine, name=f"{what} {self.label}")  # type: ignore[arg-type]

    def _answer(self, number: int, message: Message | None, problem: Problem | None) -> None:
        future = self._answers.get(number)
        if future is None or future.done():
            return  # its client was told to come again; a retry finds the recorded verdict
        if problem is not None:
            future.set_exception(problem)
        else:
            future.set_result(message)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.machine.deadline()
        if deadline is not None:
            delay = max(0.0, deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.step(Tick(self._context.load()))

    # ---- work for the round at hand

    async def _score(self, action: ScoreRound) -> None:
        machine, info = self.machine, self._context.engine.info
        # What lies beyond the context can't be scored, and a proposal must not end a session: the
        # tokens that fit are a proposal too.  (An empty prompt costs a position, D-O9.)
        room = info.context_max - action.length - (0 if machine.prompt_length else 1)
        proposed = action.tokens[: max(0, room)]
        rows = action.q_rows
        work = Score(
            session=machine.session,
            epoch=machine.epoch,
            prefix=self._prefix(action.length),
            proposed=proposed,
            rule=action.rule,
            sampling=action.sampling,
            base=action.base,
            draw=action.draw,
            q_rows=rows[: 4 * info.vocab * len(proposed)] if rows else rows,
            logprobs=self.opened.logprobs,
        )
        try:
            await self._bring_back(action.length)
            begin = time.monotonic()
            scored = await self._context.engine.score(work)
        except EngineError as e:
            log.warning("session %s: %s", self.label, e)
            self.step(ScoreFailed(action.work, str(e), fatal=isinstance(e, ContextFull)))
            return
        except Exception:
            log.exception("session %s: scoring failed", self.label)
            self.step(ScoreFailed(action.work, "scoring failed; see the log"))
            return
        self._times.scored(action.work, scored, time.monotonic() - begin)
        self._logprobs.update(enumerate(scored.logprobs, action.base))
        self.step(RoundScored(action.work, scored.accepted, scored.additional))

    def _prefix(self, length: int) -> Prefix:
        machine = self.machine
        scope = machine.contract.scope or b""
        return Prefix(machine.tokens, length, machine.prompt_length, scope)

    async def _bring_back(self, length: int) -> None:
        """Fetch the KV of a session that had to make room for others; raises EngineError."""
        machine, context = self.machine, self._context
        if not machine.prompt_length or context.engine.resident(machine.session, machine.epoch):
            return
        tokens = machine.tokens[:length]
        blocks = await context.prefix_kv.find(tokens, machine.contract.scope)
        if blocks:  # otherwise it is computed with the round
            await context.engine.prepare(
                machine.session, machine.epoch, self._prefix(length), blocks=blocks
            )

    async def _append(self, work: int, record: CommitRecord) -> None:
        begin = time.monotonic()
        try:
            outcome = await self._appended(work, record)
        finally:
            self._context.stalls.over(self._log.uri, self)
        if outcome is Outcome.COMMITTED:
            self._times.took(work, "commit", time.monotonic() - begin)
            self.step(Appended(work, self._context.load(), self._context.lower()))
        else:
            log.warning("session %s: fenced, its round is discarded", self.label)
            self._context.counts.fenced += outcome is Outcome.FENCED
            self.step(AppendFenced(work))

    async def _appended(self, work: int, record: CommitRecord) -> Outcome:
        """Append until the outcome is known (D-P16)."""
        outcome, stalled, begun = Outcome.UNKNOWN, False, False
        stalls, noted = self._context.stalls, False
        while outcome is Outcome.UNKNOWN and not self.machine.fenced:
            try:
                outcome = await (self._log.settle(record) if begun else self._log.append(record))
                if begun and outcome is Outcome.UNKNOWN:
                    outcome = await self._log.append(record)
                begun = outcome is Outcome.UNKNOWN
            except LogUnavailable as e:
                log.warning("session %s: %s", self.label, e)
                stalls.failed(self._log.uri, self, str(e), first=not noted)
                begun = noted = True
            if outcome is Outcome.UNKNOWN:
                if not stalled:
                    stalled = True
                    self.step(AppendStalled(work))
                await asyncio.sleep(STALL_RETRY_S)  # backoff while the log does not answer
        if outcome is Outcome.COMMITTED:
            stalls.worked(self._log.uri)
        return outcome

    async def _fetch_rows(self, action: FetchRows) -> None:
        vocab, begin = self._context.engine.info.vocab, time.monotonic()
        try:
            octets = await self._context.objects.fetch(
                action.reference,
                scope=self.machine.contract.scope,
                octets_max=4 * vocab * len(action.tokens),
            )
            await self._context.engine.check_rows(octets, action.tokens)
        except ObjectTooLarge as e:
            self.step(RowsReady(action.work, None, BadProposal(f"q_rows: {e}")))
        except (NotTrusted, ObjectGone, TransportError) as e:
            problem = QUnavailable(f"the rows cannot be had: {e}")
            self.step(RowsReady(action.work, None, problem))
        except Problem as problem:
            self.step(RowsReady(action.work, None, problem))
        else:
            self._times.took(action.work, "fetch_q", time.monotonic() - begin)
            self.step(RowsReady(action.work, octets))

    def stale(self) -> StaleEpoch:
        """What a fenced session answers."""
        return StaleEpoch(FENCED)

    def close(self) -> None:
        """Forget the session: stop its timer and its events."""
        if self._timer is not None:
            self._timer.cancel()
        self._event_task.cancel()
