"""One session at the drafter: performs what its machine asks, one request at a time (D-D3)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sdcpd.engine.api import DraftEngine, EngineError
from sdcpd.protocol.drafter import DrafterSession
from sdcpd.protocol.drafter_io import (
    AssumeToken,
    DrafterAction,
    DrafterEvent,
    DraftFailed,
    DraftTokens,
    DropPrepared,
    FetchOutput,
    NoAnswer,
    OutputArrived,
    Pause,
    PrepareTokens,
    ProblemArrived,
    Published,
    PublishFailed,
    PublishRows,
    ReleaseRows,
    SendProposal,
    Stop,
    TakePrepared,
    VerdictArrived,
    Woken,
)
from sdcpd.protocol.messages import Output, Proposal, Status, Verdict
from sdcpd.protocol.problems import ProblemDocument
from sdcpd.protocol.sparse import SparseRows
from sdcpd.protocol.uris import join, session_path_id
from sdcpd.roles.calls import BadAnswer, Declined, call, read_answer
from sdcpd.roles.counts import DrafterCounts
from sdcpd.roles.objects import ObjectGone, Objects
from sdcpd.roles.prefix_kv import PrefixKv
from sdcpd.roles.preparing import Preparing, Rows, draft_work, drafted
from sdcpd.roles.session_trace import Made, SessionTrace
from sdcpd.roles.tasks import Tasks
from sdcpd.transport.http import Client, ConnectFailed, TransportError
from tiers.api import Octets

log = logging.getLogger("sdcpd.drafter")
ROUND_TIMEOUT_S = 60.0  # longer than a verifier keeps a round waiting


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What all sessions of a drafter share."""

    engine: DraftEngine
    client: Client
    objects: Objects
    tasks: Tasks
    base_uri: str
    status: Callable[[], Status]
    stopped: Callable[[DraftingSession, bool], None]
    observe: Callable[[Verdict, int], None]
    counts: DrafterCounts
    refused: Callable[[ProblemDocument], None]
    prefix_kv: PrefixKv
    assigned: Callable[[bytes], bool]
    """Whether a session is being drafted for."""
    reused: Callable[[int], None]
    """Told how many tokens' KV a session did not have to compute."""
    crowded: Callable[[], bool]
    """Whether more work for one session delays the others."""
    prepared: Callable[[bool], None]
    """Told of each preparation whether it was used."""


class DraftingSession:
    """The machine, its engine work, its rows' leases, and its one request in flight."""

    def __init__(
        self,
        machine: DrafterSession,
        *,
        vocab: int,
        context: DraftContext,
        trace: SessionTrace | None = None,
    ) -> None:
        """`trace` is None for one that nobody traces."""
        self.machine = machine
        self._trace = trace
        self._made: Made | None = None  # the proposal at hand, until it is told of
        self.label = session_path_id(machine.session)
        self._vocab, self._context = vocab, context
        self._task: asyncio.Task[Any] | None = None
        self._rows: Rows = b""
        self._preparing = Preparing(
            machine,
            vocab=vocab,
            engine=context.engine,
            spawn=context.tasks.spawn,
            crowded=context.crowded,
            step=self._step,
        )
        self._find_kv = self._keep_kv = True
        self._leased: list[str] = []
        self._renewal: asyncio.Task[Any] | None = None

    def start(self) -> None:
        """Begin to draft."""
        self._perform(self.machine.start(now=time.monotonic()))

    def abandon(self) -> None:
        """A newer assignment has replaced this one: stop without a word to anybody."""
        if self._task is not None:
            self._task.cancel()
        self._preparing.drop()
        self._release()
        self.machine.stopped = self.machine.stopped or "replaced by a newer assignment"

    def _step(self, event: DrafterEvent) -> None:
        self._perform(self.machine.step(event, now=time.monotonic()))

    def _perform(self, actions: list[DrafterAction]) -> None:
        for action in actions:
            match action:
                case DraftTokens():
                    self._run(self._draft(action))
                case AssumeToken() | PrepareTokens():
                    self._preparing.run(action)
                case TakePrepared():
                    self._rows = self._preparing.take()
                    self._made = (*self._preparing.took, True)
                    self._context.prepared(True)
                case DropPrepared():
                    self._preparing.drop()
                    self._context.prepared(False)
                case PublishRows():
                    self._run(self._publish(action))
                case SendProposal():
                    if self._trace is not None and self._made is not None:
                        self._trace.proposes(action, self._made)
                        self._made = None  # a repetition was not drafted again
                    self._run(self._propose(action))
                case FetchOutput():
                    self._run(self._fetch_output(action.from_))
                case Pause():
                    self._run(self._pause(action.seconds))
                case ReleaseRows():
                    self._release()
                case Stop():
                    log.info("session %s: stopped: %s", self.label, action.reason)
                    self._release()
                    self._context.tasks.spawn(self._keep_and_forget(), name=f"forget {self.label}")
                    self._context.stopped(self, action.dropped)

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """One thing at a time: the machine never asks for the next before the last is done."""
        self._task = self._context.tasks.spawn(coroutine, name=f"session {self.label}")

    async def _draft(self, action: DraftTokens) -> None:
        machine = self.machine
        work = draft_work(machine, action, vocab=self._vocab)
        scope = machine.assignment.contract.scope
        blocks: Sequence[Octets] = ()
        # Once, and when it had to make room for others.
        find_kv = self._find_kv or not self._context.engine.resident(machine.session)
        if find_kv and work.prefix.prompt:
            blocks = await self._context.prefix_kv.find(machine.tokens[: action.length], scope)
        begin = time.monotonic()
        try:
            draft = await self._context.engine.draft(work, blocks=blocks)
        except EngineError as e:
            self._step(DraftFailed(action.work, str(e)))
            return
        if find_kv:  # from here on the engine has all but the newest
            self._find_kv = False
            self._context.prefix_kv.cost.computed(action.length - draft.reused, draft.seconds)
            self._context.reused(draft.reused)
        self._rows, self._made = draft.q_rows or b"", (begin, time.monotonic(), False)
        self._context.counts.token_s.add(draft.seconds / max(1, len(draft.tokens)))
        self._step(drafted(action.work, draft, crowded=self._context.crowded()))

    async def _publish(self, action: PublishRows) -> None:
        """Rows are pushed to the verifier's cache, so that they travel beside the proposal."""
        machine = self.machine
        rows = self._rows
        if isinstance(rows, SparseRows):
            rows = rows.first(action.count)
        else:
            rows = rows[: 4 * self._vocab * action.count]
        scope = machine.assignment.contract.scope
        begin = time.monotonic()
        for base in (machine.assignment.verifier, self._context.base_uri):
            try:
                reference = await self._context.objects.write(
                    machine.session, scope, "q_rows", rows, base=base
                )
            except (ObjectGone, TransportError) as e:
                reason = str(e)
                continue
            self._leased.append(reference)
            if self._renewal is None:
                self._renewal = self._context.tasks.spawn(
                    self._renew(), name=f"leases {self.label}"
                )
            self._step(Published(action.work, reference, time.monotonic() - begin))
            return
        self._step(PublishFailed(action.work, reason))

    async def _renew(self) -> None:
        """Hold the leases until the verdict (section 6.2, D-M10)."""
        lease_ms = self._context.objects.lease_ms
        while self._leased:
            await asyncio.sleep(lease_ms / 2000)  # renewed at half time
            for reference in list(self._leased):
                await self._lease(reference, lease_ms)

    def _release(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None
        for reference in self._leased:
            self._context.tasks.spawn(self._lease(reference, 0), name=f"release {self.label}")
        self._leased = []

    async def _lease(self, reference: str, lease_ms: int) -> None:
        try:
            await self._context.objects.lease(reference, lease_ms)
        except TransportError as e:
            log.debug("session %s: lease not changed: %s", self.label, e)

    async def _propose(self, action: SendProposal) -> None:
        machine = self.machine
        message = Proposal(
            session=machine.session,
            epoch=machine.epoch,
            round=action.round,
            drafter=self._context.base_uri,
            base=action.base,
            base_digest=action.base_digest,
            tokens=action.tokens,
            q_rows=action.q_rows,
            status=self._context.status(),
        )
        begin = time.monotonic()
        uri = join(machine.assignment.verifier, "proposals")
        try:
            response = await call(
                self._context.client, "POST", uri, message=message, timeout_s=ROUND_TIMEOUT_S
            )
            verdict = read_answer(Verdict, response)
        except (Declined, TransportError, BadAnswer) as e:
            if isinstance(e, Declined):
                self._context.refused(e.problem)
            self._step(self._failure(e))
            return
        rtt_s = time.monotonic() - begin
        self._context.counts.rtt_s.add(rtt_s)
        self._context.observe(verdict, len(action.tokens))
        if self._keep_kv:  # so that whoever comes meanwhile with the same beginning has it
            self._keep_kv = False
            self._context.tasks.spawn(self._keep(), name=f"keep {self.label}")
        self._step(VerdictArrived(verdict, rtt_s))

    async def _keep_and_forget(self) -> None:
        """Keep the KV of the text, with which the next turn of a chat begins; then free it."""
        try:
            await self._keep()
        finally:
            if not self._context.assigned(self.machine.session):  # anew, meanwhile
                self._context.engine.forget(self.machine.session)

    async def _keep(self) -> None:
        read = partial(self._context.engine.blocks, self.machine.session)
        scope = self.machine.assignment.contract.scope
        await self._context.prefix_kv.keep(self.machine, scope, read)

    async def _fetch_output(self, from_: int) -> None:
        machine = self.machine
        path = f"sessions/{self.label}/output?from={from_}"
        uri = join(machine.assignment.verifier, path)
        try:
            response = await call(self._context.client, "GET", uri, headers=(("prefer", "wait=1"),))
            output = read_answer(Output, response)
        except (Declined, TransportError, BadAnswer) as e:
            self._step(self._failure(e))
            return
        self._step(OutputArrived(output))

    def _failure(self, error: Exception) -> DrafterEvent:
        if isinstance(error, Declined):
            return ProblemArrived(error.problem)
        if isinstance(error, BadAnswer):
            return ProblemArrived(ProblemDocument(status=400, detail=str(error)))
        if isinstance(error, ConnectFailed):
            log.info("session %s: %s", self.label, error)
        return NoAnswer()

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)  # the machine's own backoff
        self._step(Woken())
