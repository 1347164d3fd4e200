"""The router: admits texts, opens sessions, names drafters, follows failures (6.1, 6.9)."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sdcpd.protocol.instances import Board
from sdcpd.protocol.logprobs import Row
from sdcpd.protocol.messages import InstanceRole, Rule
from sdcpd.protocol.router import RouterSession
from sdcpd.protocol.router_record import RecordCorrupt, decode_record
from sdcpd.protocol.uris import base_uri_equal, join, session_path_id
from sdcpd.roles.base import Listener, Mlc
from sdcpd.roles.contracts import ContractMaker, RouterConfig
from sdcpd.roles.generation import (
    GenerationError,
    GenerationRequest,
    Readiness,
    SessionOutput,
)
from sdcpd.roles.health import Health, Level
from sdcpd.roles.logprobs import LogprobSource
from sdcpd.roles.objects import Objects
from sdcpd.roles.output_reader import OutputReader, Told
from sdcpd.roles.overview import overview_of
from sdcpd.roles.peers import PeerTable
from sdcpd.roles.router_counts import RouterCounts
from sdcpd.roles.router_reports import Reports
from sdcpd.roles.router_session import RouteContext, RoutedSession
from sdcpd.roles.session_output import KnownOutput, Traces
from sdcpd.roles.tasks import Tasks
from sdcpd.transport.http import Client
from tiers.api import Records

log = logging.getLogger("sdcpd.router")
WATCH_S = 0.1  # how often expired statuses are looked for; a fraction of any ttl
VERIFIERS = "verifiers"  # of the router's troubles: that there is none
ENDED_MAX = 1024  # ended sessions remembered so that late events are answered


class Router:
    """Holds the board of instances and all sessions; everything it needs is given to it."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        client: Client,
        objects: Objects,
        peers: PeerTable,
        mlc: Mlc | None,
        records: Records | None = None,
        health: Health | None = None,
    ) -> None:
        """Without `records` the open sessions do not survive this process (D-F5)."""
        self.config = config
        self.health = health or Health("router")
        self.health.watch(VERIFIERS, Level.UNREADY, self._without_verifier)
        self.counts: Counter[str] = Counter()
        self.totals = RouterCounts()
        self._since = time.monotonic()
        self.board = Board(config.permitted, trust_all=config.trust_drafters)
        self._client, self._objects = client, objects
        self._tasks = Tasks()
        self._sessions: dict[bytes, RoutedSession] = {}
        self._ended: dict[bytes, RoutedSession] = {}
        self._context = RouteContext(
            client=client,
            objects=objects,
            tasks=self._tasks,
            board=self.board,
            records=records,
            kv_objects=config.base_uri if config.kv_objects else None,
            closed=self._closed,
            totals=self.totals,
        )
        self.reports = Reports(
            self.board, self._sessions, self._ended, self.counts, self._may_verify
        )
        self.listener = Listener(config.base_uri, self.reports.routes(), peers=peers, mlc=mlc)

    def configure(self, config: RouterConfig) -> None:
        """Go by other settings from the next session on."""
        self.config = config

    def _may_verify(self, base: str) -> bool:
        named = self.config.verifiers
        return not named or any(base_uri_equal(base, one) for one in named)

    @property
    def missing_verifiers(self) -> list[str]:
        """Those that the operator has named and that have never reported."""
        here = [one.base for one in self.board.all() if one.status.role == InstanceRole.VERIFIER]
        return [
            named
            for named in self.config.verifiers
            if not any(base_uri_equal(named, base) for base in here)
        ]

    @property
    def _contracts(self) -> ContractMaker:
        return ContractMaker(self.config, self.board)

    @property
    def sessions(self) -> Sequence[RoutedSession]:
        """The sessions that are open."""
        return list(self._sessions.values())

    @property
    def ended_sessions(self) -> Sequence[RoutedSession]:
        """The sessions that ended last, the latest at the end."""
        return list(self._ended.values())

    def restore(self) -> int:
        """Take up the sessions that were open when the router stopped; returns how many (D-F5).

        Raises TierError. Called before the listener: events of these sessions are served.
        """
        if self._context.records is None:
            return 0
        for session, octets in self._context.records.all().items():
            try:
                record = decode_record(octets)
            except RecordCorrupt as e:
                log.error("session %s is not taken up: %s", session_path_id(session), e)
                continue
            machine = RouterSession.restored(record, board=self.board, settings=self.config.machine)
            routed = RoutedSession(machine, context=self._context)
            self._sessions[session] = routed
            routed.start()
        if self._sessions:
            log.warning("%d sessions taken up again after a restart", len(self._sessions))
        return len(self._sessions)

    async def open_logs(self) -> set[str]:
        """Names of the logs of all sessions open here, or at routers that share the records.

        Raises TierError.
        """
        sessions = set(self._sessions)
        if self._context.records is not None:
            sessions |= await self._context.records.keys_of_all()
        return {session_path_id(session) for session in sessions}

    def reader(self, session: bytes, from_: int = 0) -> OutputReader | None:
        """Read an open session's output from token `from_` on; None if it is not known here."""
        routed = self._sessions.get(session)
        return None if routed is None else self._reader(routed, from_)

    def _reader(
        self, routed: RoutedSession, from_: int = 0, *, told: Told | None = None
    ) -> OutputReader:
        pause_s = self.config.machine.retry_s
        return OutputReader(routed, client=self._client, pause_s=pause_s, from_=from_, told=told)

    async def run(self) -> None:
        """Watch for statuses that expire."""
        while True:
            await asyncio.sleep(WATCH_S)  # a clock tick, not a wait for something
            self.reports.watch()

    async def aclose(self) -> None:
        """Stop all work."""
        for session in self._sessions.values():
            session.close()
        await self._tasks.aclose()

    # ---- texts

    def readiness(self) -> Readiness:
        """Whether a text can be generated now."""
        reasons = [
            # Clients are told what, and not where it lies, which the admin socket tells.
            one.text if one.name == VERIFIERS else f"the {one.name} cannot be used now"
            for one in self.health.troubles()
            if one.level >= Level.UNREADY
        ]
        return Readiness(not reasons, "; ".join(reasons) or "ready")

    def overview(self) -> dict[str, Any]:
        """What clients may know of the cluster."""
        return overview_of(self.board, sessions=len(self._sessions), counts=self.counts)

    def _without_verifier(self) -> str | None:
        if self.board.choose_verifier(now=time.monotonic()) is not None:
            return None
        if any(one.status.role == InstanceRole.VERIFIER for one in self.board.all()):
            return "no verifier is ready; sdcpctl status says which there were"
        return "no verifier has reported; is one running, and is it allowed?"

    async def generate(self, request: GenerationRequest) -> OutputReader:
        """Open a session for a text; raises GenerationError."""
        if len(self._sessions) >= self.config.sessions_max:
            raise GenerationError("too many texts are being generated", retry_after_s=1)
        if not (found := self.readiness()).ready:
            raise GenerationError(found.reason, retry_after_s=1)
        reader = self._begin(request, self._contracts.rule(request))
        try:
            await self._opened(reader)
        except GenerationError:
            ended = self._ended.get(reader.session)
            failed = ended.failed if ended else None
            refused = failed is not None and failed.suffix == "sdcp-bad-contract"
            if not refused or self._contracts.rule(request) != Rule.RACE:
                raise
            # Another make of verifier knows no rule 200 (D-Z7).
            reader = self._begin(request, Rule.SPECULATIVE_SAMPLING)
            await self._opened(reader)
        return reader

    async def _opened(self, reader: OutputReader) -> None:
        try:
            await reader.opened()
        except asyncio.CancelledError:
            # The client went away: nobody will read what the session writes.
            self._tasks.spawn(reader.cancel(), name="cancel")
            raise

    def _begin(self, request: GenerationRequest, rule: Rule) -> OutputReader:
        now = time.monotonic()
        verifier = self.board.choose_verifier(now=now)
        if verifier is None:
            raise GenerationError(self.readiness().reason, retry_after_s=1)
        session = secrets.token_bytes(16)
        contract = self._contracts.make(request, rule, verifier)
        machine = RouterSession(
            session=session,
            contract=contract,
            prompt=request.prompt,
            commit_log=join(self.config.base_uri, f"logs/{session_path_id(session)}"),
            verifier=verifier,
            board=self.board,
            settings=self.config.machine,
            drafter_wanted=request.speculate,
            logprobs=request.logprobs,
        )
        routed = RoutedSession(machine, context=self._context, traceparent=request.traceparent)
        self._sessions[session] = routed
        self.counts["sessions"] += 1
        routed.start()
        if request.logprobs is None:
            return self._reader(routed)
        return self._reader(routed, told=Told(self._logprobs, request.prompt, request.logprobs))

    @property
    def _logprobs(self) -> LogprobSource:
        return LogprobSource(self._client, self.board, self._contracts.target_of)

    async def logprobs(self, tokens: Sequence[int], alternatives: int) -> tuple[Row, ...]:
        """How probable tokens[1:] are, each after those before it; raises GenerationError."""
        return await self._logprobs.rows(tokens, 1, alternatives)

    async def output(self, session: bytes) -> SessionOutput | None:
        """What a session commits, open or not; None if it has no log; raises GenerationError."""
        routed = self._sessions.get(session) or self._ended.get(session)
        if routed is not None:
            return KnownOutput(routed, self._reader(routed))
        traces = Traces(
            self._client, self.board, self._context.records, self.config.base_uri, self._since
        )
        return await traces.output(session)

    def _closed(self, routed: RoutedSession) -> None:
        self._sessions.pop(routed.machine.session, None)
        self._ended[routed.machine.session] = routed
        while len(self._ended) > ENDED_MAX:
            self._ended.pop(next(iter(self._ended)))
