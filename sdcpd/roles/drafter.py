"""The drafter's resource: takes assignments, and drafts until told to stop (sections 5.1, 6.2)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from sdcpd.engine.api import DraftEngine, KvUsage
from sdcpd.protocol.codec import decode
from sdcpd.protocol.contract import check_contract
from sdcpd.protocol.drafter import DrafterSession, DrafterSettings, check_digest
from sdcpd.protocol.limits import ASSIGNMENT_BYTES_MAX
from sdcpd.protocol.messages import (
    Assignment,
    InstanceRole,
    Output,
    Rule,
    Status,
    Verdict,
)
from sdcpd.protocol.preparation import Payoff
from sdcpd.protocol.problems import (
    BadContract,
    ProblemDocument,
    StaleEpoch,
    Unavailable,
    Unprocessable,
)
from sdcpd.protocol.uris import base_uri_equal, join, session_path_id
from sdcpd.roles.base import Call, Listener, Mlc, Route, message_response
from sdcpd.roles.calls import BadAnswer, Declined, call, read_answer
from sdcpd.roles.counts import DrafterCounts
from sdcpd.roles.drafter_session import DraftContext, DraftingSession
from sdcpd.roles.health import Health, Level, engine_check
from sdcpd.roles.objects import Objects
from sdcpd.roles.peers import PeerTable
from sdcpd.roles.prefix_kv import PrefixKv, draft_kind
from sdcpd.roles.session_trace import trace_of
from sdcpd.roles.tasks import Tasks
from sdcpd.traces import Tracer
from sdcpd.transport.http import Client, Response, TransportError
from tiers.api import Tier

log = logging.getLogger("sdcpd.drafter")
CAPACITY = 64  # sessions at which the load reading is 100
DROPPED_MAX = 64  # of one report
# Sessions whose tokens one smallest pass drafts at once; more of them wait for each other.
CROWD = 4
VOCAB_UNKNOWN = 1 << 32  # tokens are 32-bit values (D-E6)
ACCEPT_MEMORY = 0.05  # weight of a round in the instance's acceptance (D-R7)


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """`[drafter]` as the role needs it."""

    base_uri: str
    machine: DrafterSettings = field(default_factory=DrafterSettings)
    status_ttl_s: float = 3.0
    engine_silence_s: float = 20.0
    """How long the engine's thread may show no sign of life."""
    verify_s: float = 0.03
    """Expected time of a round before one was measured."""


class Drafter:
    """Drafts for the sessions assigned to it; everything it needs is given to it."""

    def __init__(
        self,
        config: DrafterConfig,
        *,
        engine: DraftEngine,
        client: Client,
        objects: Objects,
        peers: PeerTable,
        mlc: Mlc | None,
        name: str,
        kv_tier: Tier | None = None,
        kv_owner: str = "",
        health: Health | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """`kv_tier` keeps KV for later texts that begin alike; None keeps none.

        `kv_owner` is this drafter as its certificate names it; `tracer` takes the spans of
        sessions that a router traces, None drops them.
        """
        self.config = config
        self.instance = name
        self.health = health or Health(name)
        self.health.watch(
            "engine", Level.WEDGED, engine_check(engine.silence_s, config.engine_silence_s)
        )
        self.counts: Counter[str] = Counter()
        self.rounds = DrafterCounts()
        self._engine, self._client, self._objects = engine, client, objects
        self._tasks, self._tracer = Tasks(), tracer
        self._sessions: dict[bytes, DraftingSession] = {}
        self._dropped: list[bytes] = []
        self._accept: float | None = None
        self._payoff = Payoff()
        self._context = DraftContext(
            engine=engine,
            client=client,
            objects=objects,
            tasks=self._tasks,
            base_uri=config.base_uri,
            status=self._short_status,
            stopped=self._stopped,
            observe=self._observe,
            counts=self.rounds,
            refused=self._refused,
            prefix_kv=PrefixKv(
                kv_tier, kind=draft_kind(kv_owner), fingerprint=engine.kv_fingerprint
            ),
            assigned=lambda session: session in self._sessions,
            reused=self._count_reused,
            crowded=lambda: len(self._sessions) > CROWD,
            prepared=self.rounds.count_prepared,
        )
        engine.on_eviction(self._evicted)
        routes = [
            Route("POST", "assignments", self._assign, ("router",), True, ASSIGNMENT_BYTES_MAX)
        ]
        self.listener = Listener(config.base_uri, routes, peers=peers, mlc=mlc)

    def _evicted(self, key: Hashable, tokens: Sequence[int], blocks: Sequence[bytes]) -> None:
        """The engine has freed a session's KV to make room: keep it for when it comes back."""
        session = self._sessions.get(key)  # type: ignore[call-overload]
        if session is not None:
            scope = session.machine.assignment.contract.scope
            kept = self._context.prefix_kv.keep_evicted(tokens, scope, blocks)
            self._tasks.spawn(kept, name=f"evicted {session.label}")

    def status(self) -> Status:
        """The report to the routers; withdrawn while the engine is stuck (D-R1).

        What was dropped is told once (D-R7, D-Z5).
        """
        dropped, self._dropped = self._dropped[:DROPPED_MAX], self._dropped[DROPPED_MAX:]
        status = self._status(dropped=tuple(dropped) or None, hints=True)
        return replace(status, ttl_ms=0, ready=False) if self.health.wedged else status

    def kv_usage(self) -> KvUsage | None:
        """How the engine's memory for keys and values is used; None if it has none."""
        return self._engine.kv_usage()

    def alpha(self) -> float | None:
        """The mean of what its sessions expect of a proposed token; None where it has none."""
        alphas = [one.machine.alpha.value for one in self._sessions.values()]
        return sum(alphas) / len(alphas) if alphas else None

    @property
    def sessions(self) -> Sequence[DraftingSession]:
        """The sessions being drafted for."""
        return list(self._sessions.values())

    async def aclose(self) -> None:
        """Stop all work."""
        for session in list(self._sessions.values()):
            session.abandon()
        await self._tasks.aclose()

    def _short_status(self) -> Status:
        return self._status(dropped=None, hints=False)

    def _status(self, *, dropped: tuple[bytes, ...] | None, hints: bool) -> Status:
        return Status(
            instance=self.instance,
            role=InstanceRole.DRAFTER,
            load=min(100, 100 * len(self._sessions) // CAPACITY),
            queue=0,
            accept_milli=None if self._accept is None else round(1000 * self._accept),
            ttl_ms=int(self.config.status_ttl_s * 1000),
            model=self._engine.model if hints else None,
            ready=True if hints else None,
            rules=(Rule.GREEDY, Rule.SPECULATIVE_SAMPLING, Rule.RACE) if hints else None,
            dropped=dropped,
        )

    # ---- assignments

    async def _assign(self, request: Call) -> Response:
        assignment = decode(Assignment, request.request.body)
        self._check(assignment)
        if self._known(assignment):
            return message_response(None)
        prompt = await self._prompt(assignment)
        committed = await self._committed(assignment)
        if not check_digest(assignment, prompt, committed):
            raise Unprocessable("the digest is not that of the prompt and committed tokens")
        # Another assignment of the session may have come while this one's tokens were fetched.
        if self._known(assignment):
            return message_response(None)
        if (known := self._sessions.get(assignment.session)) is not None:
            known.abandon()
        self._dropped = [dropped for dropped in self._dropped if dropped != assignment.session]
        machine = DrafterSession(
            assignment,
            prompt=prompt,
            committed=committed,
            settings=self.config.machine,
            verify_s=self.config.verify_s,
            payoff=self._payoff,
        )
        vocab = self._vocab(assignment) or VOCAB_UNKNOWN
        trace = trace_of(self._tracer, request.request, assignment)
        session = DraftingSession(machine, vocab=vocab, context=self._context, trace=trace)
        self._sessions[assignment.session] = session
        self.counts["assigned"] += 1
        session.start()
        return message_response(None)

    def _known(self, assignment: Assignment) -> bool:
        """Whether it is a delayed duplicate, which must not rewind (D-N9); raises StaleEpoch."""
        known = self._sessions.get(assignment.session)
        if known is None:
            return False
        if assignment.epoch < known.machine.epoch:
            raise StaleEpoch(f"the session's epoch is {known.machine.epoch}")
        return assignment.epoch == known.machine.epoch and assignment.round <= known.machine.round

    def _check(self, assignment: Assignment) -> None:
        """The checks of D-N8 that need nothing from elsewhere."""
        contract = assignment.contract
        check_contract(contract)
        if contract.drafters is not None and self._engine.model not in contract.drafters:
            raise BadContract("the contract does not permit the model drafting here")
        if self._engine.tokenizer is not None and contract.tokenizer != self._engine.tokenizer:
            raise BadContract("the contract's tokenizer is not the one used here")
        if not base_uri_equal(assignment.drafter, self.config.base_uri):
            raise Unprocessable("the assignment names another drafter")
        if contract.rule == Rule.SPECULATIVE_SAMPLING and self._vocab(assignment) is None:
            raise Unprocessable("rule 2 needs rows, and the vocabulary size is not known here")
        if assignment.m_init == 0:
            raise Unprocessable("m_init is 0; at least 1 is needed")

    async def _prompt(self, assignment: Assignment) -> tuple[int, ...]:
        if not isinstance(assignment.prompt, str):
            return assignment.prompt
        return await self._objects.fetch_tokens(assignment.prompt, scope=assignment.contract.scope)

    async def _committed(self, assignment: Assignment) -> tuple[int, ...]:
        """The committed tokens: the object, else the verifier's output (D-N7)."""
        if assignment.committed == 0:
            return ()
        if assignment.committed_tokens is not None:
            try:
                tokens = await self._objects.fetch_tokens(
                    assignment.committed_tokens, scope=assignment.contract.scope
                )
                if len(tokens) == assignment.committed:
                    return tokens
            except (Unavailable, Unprocessable) as e:
                log.info("committed tokens taken from the verifier's output: %s", e)
        return await self._output(assignment)

    async def _output(self, assignment: Assignment) -> tuple[int, ...]:
        tokens: tuple[int, ...] = ()
        label = session_path_id(assignment.session)
        while len(tokens) < assignment.committed:
            uri = join(assignment.verifier, f"sessions/{label}/output?from={len(tokens)}")
            try:
                answer = await call(self._client, "GET", uri, headers=(("prefer", "wait=0"),))
                part = read_answer(Output, answer).tokens
            except (Declined, TransportError, BadAnswer) as e:
                raise Unavailable(
                    f"the verifier's output cannot be had: {e}", retry_after_s=1
                ) from e
            if not part:
                raise Unprocessable("the verifier has fewer tokens than the assignment says")
            tokens += part
        return tokens[: assignment.committed]

    def _vocab(self, assignment: Assignment) -> int | None:
        """The target's V: from the assignment, else the own model's (D-E6)."""
        return assignment.vocab or self._engine.vocab

    def _stopped(self, session: DraftingSession, dropped: bool) -> None:
        if self._sessions.get(session.machine.session) is session:
            del self._sessions[session.machine.session]
        if dropped:
            self.counts["dropped"] += 1
            self._dropped.append(session.machine.session)

    def _count_reused(self, tokens: int) -> None:
        self.counts["kv_tokens_reused"] += tokens

    def _refused(self, problem: ProblemDocument) -> None:
        self.rounds.reject(problem.suffix, problem.status)

    def _observe(self, verdict: Verdict, proposed: int) -> None:
        ratio = min(1.0, verdict.accepted / proposed)
        old = self._accept
        self._accept = ratio if old is None else old + ACCEPT_MEMORY * (ratio - old)
        self.rounds.count(verdict, proposed)
