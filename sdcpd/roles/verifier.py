"""The verifier's resources: the only role that commits (sections 5.1, 6.1, 6.3, 6.6, 6.7)."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import weakref
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from sdcpd.engine.api import KvUsage, TargetEngine
from sdcpd.protocol.codec import decode
from sdcpd.protocol.contract import check_contract, contract_digest
from sdcpd.protocol.limits import (
    CLOSED_RETENTION_S,
    OUTPUT_WAIT_S,
    PROPOSAL_BYTES_MAX,
    ROUND_WAIT_S,
    SESSION_OPEN_BYTES_MAX,
    TOMBSTONE_S,
)
from sdcpd.protocol.messages import (
    Assignment,
    InstanceRole,
    Output,
    Policy,
    Proposal,
    Rule,
    SessionOpen,
    State,
    Status,
)
from sdcpd.protocol.problems import (
    Conflict,
    Forbidden,
    Malformed,
    NotFound,
    Problem,
    SessionClosed,
    StaleEpoch,
    TooManyRequests,
)
from sdcpd.protocol.uris import join, parse_from_query, session_path_id
from sdcpd.protocol.verifier import VerifierSession
from sdcpd.protocol.verifier_io import NameDrafter, Propose, RoundDone, SetPolicy
from sdcpd.protocol.verifier_state import VerifierSettings
from sdcpd.roles.base import Call, Listener, Mlc, Route, message_response
from sdcpd.roles.counts import VerifierCounts
from sdcpd.roles.events import EventSender
from sdcpd.roles.health import Health, Level, engine_check
from sdcpd.roles.log_stalls import LogStalls
from sdcpd.roles.objects import Objects
from sdcpd.roles.peers import PeerTable
from sdcpd.roles.prefix_kv import PrefixKv
from sdcpd.roles.rates import RateLimit
from sdcpd.roles.session_trace import trace_of
from sdcpd.roles.target_kv import TargetKv
from sdcpd.roles.tasks import Tasks
from sdcpd.roles.verifier_logprobs import LogprobsResource
from sdcpd.roles.verifier_opening import Opener
from sdcpd.roles.verifier_session import Busy, ServedSession, SessionContext
from sdcpd.traces import Tracer
from sdcpd.transport.http import Client, Request, Response
from tiers.api import Tier

log = logging.getLogger("sdcpd.verifier")
RULES = (Rule.GREEDY, Rule.SPECULATIVE_SAMPLING, Rule.RACE)
_DIGITS = re.compile("[0-9]+")  # str.isdigit also takes digits that float() does not
SWEEP_S = 1.0  # how often ended sessions are looked through; a fraction of what they are kept
LOAD_HIGH = 80  # percent above which long proposals are made shorter (D-K2)


@dataclass(frozen=True, slots=True)
class VerifierConfig:
    """`[verifier]` as the role needs it; durations in seconds."""

    base_uri: str
    router: str
    max_sessions: int = 64
    machine: VerifierSettings = field(default_factory=VerifierSettings)
    round_rate: float = 200.0
    output_wait_s: float = OUTPUT_WAIT_S
    enforcing_logs: bool = False
    publish_kv: bool = False
    """Whether the KV of long prompts is written to the router's cache."""
    engine_silence_s: float = 20.0
    """How long the engine's thread may show no sign of life."""
    load: int | None = None
    """Pins the load reading, for tests (D-K9)."""


class Verifier:
    """Serves sessions; everything it needs is given to it."""

    def __init__(
        self,
        config: VerifierConfig,
        *,
        engine: TargetEngine,
        client: Client,
        objects: Objects,
        peers: PeerTable,
        mlc: Mlc | None,
        name: str,
        status_ttl_s: float,
        kv_tier: Tier | None = None,
        health: Health | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """`kv_tier` keeps KV for later prompts that begin alike; None keeps none.

        `tracer` takes the spans of sessions that a router traces; None drops them.
        """
        self.config = config
        self.instance = name
        self.health = health or Health(name)
        self.health.watch(
            "engine", Level.WEDGED, engine_check(engine.silence_s, config.engine_silence_s)
        )
        self.counts: Counter[str] = Counter()
        self.rounds = VerifierCounts()
        self._engine, self._client, self._objects = engine, client, objects
        self._status_ttl_s, self._tracer = status_ttl_s, tracer
        target_kv = TargetKv(
            engine, objects, publish_to=config.router if config.publish_kv else None
        )
        info = engine.info
        prefix_kv = PrefixKv(
            # Where rows depend on what stands beside them, KV of another pass would change output.
            kv_tier if info.exact else None,
            kind="target_kv",
            fingerprint=info.model + info.fingerprint.encode(),
        )
        self._prefix_kv = prefix_kv
        engine.on_eviction(self._evicted)
        self._opener = Opener(
            engine,
            client=client,
            objects=objects,
            target_kv=target_kv,
            prefix_kv=prefix_kv,
            enforcing=config.enforcing_logs,
            reused=self._count_reused,
        )
        self._tasks = Tasks()
        self._sessions: dict[bytes, ServedSession] = {}
        self._serving: set[ServedSession] = set()
        # A lock lives as long as a request holds it or waits for it.
        self._locks: weakref.WeakValueDictionary[bytes, asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )
        self._opening = 0
        self._tombstones: dict[bytes, float] = {}
        self._swept_at = -SWEEP_S
        self._in_work = Busy()
        self._rates = RateLimit(config.round_rate)
        self._context = SessionContext(
            engine=engine,
            objects=objects,
            target_kv=target_kv,
            prefix_kv=prefix_kv,
            tasks=self._tasks,
            busy=self._in_work,
            load=self.load,
            lower=lambda: self.load() > LOAD_HIGH,
            observe=self._observe,
            counts=self.rounds,
            ended=self._serving.discard,
            stalls=LogStalls(self.health),
            round_wait_s=ROUND_WAIT_S,
        )
        self._logprobs = LogprobsResource(engine)
        self.listener = Listener(config.base_uri, self._routes(), peers=peers, mlc=mlc)

    def configure(self, config: VerifierConfig) -> None:
        """Go by other settings from the next session on, and by another rate at once."""
        if config.round_rate != self.config.round_rate:
            self._rates = RateLimit(config.round_rate)
        self.config = config

    def _count_reused(self, tokens: int) -> None:
        self.counts["kv_tokens_reused"] += tokens

    def _evicted(self, key: Hashable, tokens: Sequence[int], blocks: Sequence[bytes]) -> None:
        """The engine has freed a session's KV to make room: keep it for when it comes back."""
        assert isinstance(key, tuple), "of a target, a session and its epoch"
        session, epoch = key
        served = self._sessions.get(session)
        if served is not None and served.machine.epoch == epoch:
            kept = self._prefix_kv.keep_evicted(tokens, served.machine.contract.scope, blocks)
            self._tasks.spawn(kept, name=f"evicted {served.label}")

    def _routes(self) -> list[Route]:
        return [
            Route("POST", "sessions", self._open, ("router",), True, SESSION_OPEN_BYTES_MAX),
            Route("DELETE", "sessions/{session}", self._cancel, ("router",), False),
            Route(
                "PUT",
                "sessions/{session}/drafter",
                self._name,
                ("router",),
                True,
                SESSION_OPEN_BYTES_MAX,
            ),
            Route("POST", "sessions/{session}/policy", self._policy, ("router",)),
            Route("GET", "sessions/{session}/output", self._output, (), False),
            Route("POST", "proposals", self._propose, (), True, PROPOSAL_BYTES_MAX),
            Route(
                "POST",
                "logprobs",
                self._logprobs.answer,
                ("router",),
                True,
                SESSION_OPEN_BYTES_MAX,
            ),
        ]

    # ---- what others read

    def load(self) -> int:
        """Percent of capacity: sessions with a round in work or waiting (D-K9)."""
        if self.config.load is not None:
            return self.config.load
        busy = self._busy()
        return min(100, 100 * busy // self.config.max_sessions)

    def status(self) -> Status:
        """The report to the routers (D-R7, D-Z5); withdrawn while the engine is stuck (D-R1)."""
        info = self._engine.info
        stuck = self.health.wedged is not None
        return Status(
            instance=self.instance,
            role=InstanceRole.VERIFIER,
            load=self.load(),
            queue=self._busy(),
            ttl_ms=0 if stuck else int(self._status_ttl_s * 1000),
            engine=info.fingerprint,
            model=info.model,
            ready=not stuck,
            rules=tuple(int(rule) for rule in RULES),
            vocab=info.vocab,
        )

    def kv_usage(self) -> KvUsage | None:
        """How the engine's memory for keys and values is used."""
        return self._engine.kv_usage()

    def session_states(self) -> Counter[State]:
        """How many sessions that have not ended are in which state."""
        return Counter(served.machine.state for served in self._serving)

    @property
    def sessions(self) -> Sequence[ServedSession]:
        """The sessions kept, ended ones included."""
        return list(self._sessions.values())

    async def aclose(self) -> None:
        """Stop all work."""
        for served in self._sessions.values():
            served.close()
        await self._tasks.aclose()

    # ---- resources

    async def _open(self, call: Call) -> Response:
        opened = decode(SessionOpen, call.request.body)
        if opened.epoch == 0:
            raise Malformed("epoch 0 does not exist")
        check_contract(opened.contract)
        self._opener.check_models(opened)
        self._forget_old()
        lock = self._locks.setdefault(opened.session, asyncio.Lock())
        async with lock:  # a retry waits for the first to be processed (D-O1)
            status, served = await self._open_locked(opened, call.request)
        response = message_response(served.machine.state_message(), status=status)
        if status == 200:
            return response
        location = join(self.config.base_uri, f"sessions/{session_path_id(opened.session)}")
        return Response(201, (*response.headers, ("location", location)), response.body)

    async def _open_locked(
        self, opened: SessionOpen, request: Request
    ) -> tuple[int, ServedSession]:
        known = self._sessions.get(opened.session)
        if known is not None and opened.epoch < known.machine.epoch:
            raise StaleEpoch(f"the session's epoch is {known.machine.epoch}")
        if known is not None and opened.epoch == known.machine.epoch:
            if known.machine.fenced:
                raise known.stale()
            if not _same_content(known.opened, opened):
                raise Conflict("the session is open with other content")
            return 200, known
        others = len(self._serving) - (known in self._serving) + self._opening
        if others >= self.config.max_sessions:
            raise TooManyRequests("all sessions of this verifier are in use", retry_after_s=1)
        self._opening += 1
        try:
            machine, commit_log = await self._opener.open(
                opened, settings=self._machine_settings(opened)
            )
        finally:
            self._opening -= 1
        served = ServedSession(
            machine,
            opened,
            commit_log=commit_log,
            events=EventSender(self._client, self.config.router, opened.session),
            context=self._context,
            trace=trace_of(self._tracer, request, opened),
        )
        if known is not None:
            known.supersede()
            known.close()
        self._tombstones.pop(opened.session, None)
        self._sessions[opened.session] = served
        if not machine.closed:
            self._serving.add(served)
        self.counts["opened"] += 1
        return 201, served

    def _machine_settings(self, opened: SessionOpen) -> VerifierSettings:
        settings = self.config.machine
        hint = opened.self_decode_after_ms
        if hint is None or settings.self_decode_after_s is None:
            return settings
        return VerifierSettings(hint / 1000, settings.drafter_silence_s, settings.idle_s)

    async def _name(self, call: Call) -> Response:
        assignment = decode(Assignment, call.request.body)
        served = self._find(call.session, assignment.session)
        state = await served.change(lambda n: NameDrafter(n, assignment))
        return message_response(state)

    async def _policy(self, call: Call) -> Response:
        policy = decode(Policy, call.request.body)
        served = self._find(call.session, policy.session)
        state = await served.change(lambda n: SetPolicy(n, policy))
        return message_response(state)

    async def _cancel(self, call: Call) -> Response:
        self._forget_old()
        if call.session in self._tombstones:
            return message_response(None)
        await self._find(call.session).cancel()
        return message_response(None)

    async def _propose(self, call: Call) -> Response:
        proposal = decode(Proposal, call.request.body)
        served = self._find(proposal.session)
        identity = call.identity
        drafter = served.machine.drafter
        named = drafter is not None and identity.is_instance(drafter)
        if not self._rates.allow(proposal.session if named else None, identity.name):
            raise TooManyRequests("too many rounds a second", retry_after_s=1)
        try:
            verdict = await served.propose(lambda n: Propose(n, proposal, identity.is_instance))
        except Problem as problem:
            self.rounds.reject(problem.suffix, problem.status)
            raise
        return message_response(verdict)

    async def _output(self, call: Call) -> Response:
        request = call.request
        from_ = parse_from_query(request.query)
        served = self._find(call.session)
        drafter = served.machine.drafter
        if not call.identity.roles & {"front_end", "router"} and not (
            drafter is not None and call.identity.is_instance(drafter)
        ):
            raise Forbidden("output is for the front end, the router and the assigned drafter")
        wait_s = 0.0 if request.method == "HEAD" else _wait_s(request, self.config.output_wait_s)
        until = time.monotonic() + wait_s
        while (output := served.output(from_)) is None:
            left = until - time.monotonic()
            if left <= 0:
                output = _nothing_yet(served.machine, from_)
                break
            await served.wait_for_output(left)
            served = self._find(call.session)
        return message_response(output)

    def _find(self, session: bytes, named: bytes | None = None) -> ServedSession:
        if named is not None and named != session:
            raise Malformed("the body names another session than the path")
        self._forget_old()
        served = self._sessions.get(session)
        if served is None:
            if session in self._tombstones:
                raise SessionClosed("the session has ended")
            raise NotFound("no such session here")
        return served

    # ---- housekeeping

    def _busy(self) -> int:
        return self._in_work.sessions + self._logprobs.active

    def _forget_old(self) -> None:
        """Ended sessions become tombstones, and those go in their turn (D-H12)."""
        now = time.monotonic()
        if now < self._swept_at + SWEEP_S:
            return
        self._swept_at = now
        for session, served in list(self._sessions.items()):
            ended = served.machine.ended_at
            if ended is not None and now > ended + CLOSED_RETENTION_S:
                served.close()
                del self._sessions[session]
                self._tombstones[session] = ended + CLOSED_RETENTION_S + TOMBSTONE_S
        for session, until in list(self._tombstones.items()):
            if now > until:
                del self._tombstones[session]

    def _observe(self, done: RoundDone) -> None:
        if done.verdict is None:
            self.rounds.self_decoded += 1
        else:
            self.rounds.count(done.verdict, done.proposed, skipped=done.skipped)


def _same_content(a: SessionOpen, b: SessionOpen) -> bool:
    """Whether one opening repeats the other: hints and accelerators may differ (D-O1)."""

    def content(opened: SessionOpen) -> tuple[object, ...]:
        resume = opened.resume and replace(opened.resume, target_kv=None)
        return contract_digest(opened.contract), opened.prompt, opened.commit_log, resume

    return content(a) == content(b)


def _wait_s(request: Request, longest_s: float) -> float:
    """The wait a client prefers (RFC 7240), never longer than ours (D-G4)."""
    for part in (request.header("prefer") or "").replace(";", ",").split(","):
        name, _, value = part.strip().partition("=")
        if name.lower() == "wait" and _DIGITS.fullmatch(value.strip()):
            return min(longest_s, float(value.strip()))
    return longest_s


def _nothing_yet(machine: VerifierSession, from_: int) -> Output:
    return Output(session=machine.session, epoch=machine.epoch, from_=from_, tokens=(), final=False)
