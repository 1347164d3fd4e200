"""A real verifier shell with a fake engine, asked by a scripted router and drafters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from sdcpd.engine.fake import FakeModel, FakeTarget
from sdcpd.protocol.codec import MEDIA_TYPE, decode, encode
from sdcpd.protocol.commit_log import CommitRecord, Record, decode_log
from sdcpd.protocol.messages import (
    Assignment,
    Contract,
    Event,
    Message,
    Output,
    Policy,
    Proposal,
    Sampling,
    SessionOpen,
    SessionState,
    Verdict,
)
from sdcpd.protocol.problems import ProblemDocument, parse_problem
from sdcpd.protocol.uris import session_path_id
from sdcpd.protocol.verifier_state import VerifierSettings
from sdcpd.roles.objects import Objects
from sdcpd.roles.verifier import Verifier, VerifierConfig
from sdcpd.roles.verifier_session import ServedSession
from sdcpd.transport.http import Client, Handler, Request, Response
from sdcpd.transport.loopback import LoopbackClient
from tests.kit.answers import state_of
from tests.kit.cluster import PEERS, ROUTER, peer
from tests.kit.mlc import LossyClient, MemoryMlc
from tests.kit.verifier_machine import SESSION, STATUS, contract
from tiers.api import Tier

BASE, DRAFTER, OTHER = "https://v0.test/", "https://d0.test/", "https://d1.test/"
NAMED = {"drafter": DRAFTER, "other": OTHER}
M = TypeVar("M", bound=Message)


@dataclass
class Wire:
    """Requests as the scripted peers send them, answers as messages or problem documents."""

    mlc: MemoryMlc = field(default_factory=MemoryMlc)
    enforcing: bool = True
    base: str = BASE
    model: FakeModel = field(default_factory=FakeModel)
    engine_kind: Callable[[FakeModel], FakeTarget] = FakeTarget
    members: dict[str, object] = field(default_factory=dict)
    """Members of the contract that differ from the kit's."""
    config: dict[str, object] = field(default_factory=dict)
    """Of VerifierConfig; `load` pins the reading."""
    kv_tier: Tier | None = None

    def __post_init__(self) -> None:
        self.network: dict[str, Handler] = {ROUTER: self._router}
        self.events: list[Event] = []
        self.deliveries: list[Event] = []
        """Every attempt to deliver an event, also those that were not taken."""
        self.event_answers: list[int] = []
        client = LossyClient(LoopbackClient(self.network, peer("verifier", "v0", self.base)))
        self.own_client = client
        self.engine = self.engine_kind(self.model)
        config = {
            "machine": VerifierSettings(None, None),
            "enforcing_logs": self.enforcing,
            "output_wait_s": 0.2,
            "round_rate": 1e9,
            **self.config,
        }
        self.verifier = Verifier(
            VerifierConfig(self.base, ROUTER, **config),  # type: ignore[arg-type]
            engine=self.engine,
            client=client,
            objects=Objects(client, bases=(ROUTER, self.base), own=self.base),
            peers=PEERS,
            mlc=MemoryMlc(),
            name="v0.x",
            status_ttl_s=3.0,
            kv_tier=self.kv_tier,
        )
        self.network[self.base] = self.verifier.listener.handle
        self.clients: dict[str, Client] = {
            "router": LoopbackClient(self.network, peer("router", "r0", ROUTER)),
            "drafter": LoopbackClient(self.network, peer("drafter", "d0", DRAFTER)),
            "other": LoopbackClient(self.network, peer("drafter", "d1", OTHER)),
            "front_end": LoopbackClient(self.network, peer("front_end", "f0")),
        }
        self.contract = with_contract(self, **self.members)

    async def _router(self, request: Request) -> Response:
        """The router's listener: takes events as the test says, and serves the MLC."""
        if request.path != "/events":
            return await self.mlc.handle(request)
        event = decode(Event, request.body)
        self.deliveries.append(event)
        status = self.event_answers.pop(0) if self.event_answers else 204
        if status == 204:
            self.events.append(event)
        return Response(status)

    def path_of(self, session: object, resource: str) -> str:
        """The path of a session's resource."""
        assert isinstance(session, bytes)
        return f"sessions/{session_path_id(session)}/{resource}"

    @property
    def log_name(self) -> str:
        return session_path_id(SESSION)

    async def send(
        self,
        who: str,
        method: str,
        path: str,
        body: bytes = b"",
        headers: tuple[tuple[str, str], ...] = (("content-type", MEDIA_TYPE),),
    ) -> Response:
        return await self.clients[who].request(
            method, self.base + path, headers=headers, body=body, timeout_s=10
        )

    async def ask(
        self,
        who: str,
        method: str,
        path: str,
        message: Message | None,
        kind: type[M],
        **headers: str,
    ) -> M | ProblemDocument:
        body = encode(message) if message else b""
        fields = (("content-type", MEDIA_TYPE), *headers.items())
        response = await self.send(who, method, path, body, fields)
        if response.status >= 300:
            return parse_problem(response.status, response.body, response.header("content-type"))
        return decode(kind, response.body)

    async def open(self, **changes: object) -> SessionState | ProblemDocument:
        members: dict[str, object] = {
            "session": SESSION,
            "epoch": 1,
            "contract": self.contract,
            "prompt": (1, 2, 3),
            "commit_log": f"{ROUTER}logs/{self.log_name}",
            **changes,
        }
        message = SessionOpen(**members)  # type: ignore[arg-type]
        return await self.ask("router", "POST", "sessions", message, SessionState)

    async def name(self, **changes: object) -> SessionState | ProblemDocument:
        path = self.path_of(changes.get("session", SESSION), "drafter")
        return await self.ask("router", "PUT", path, self.assignment(**changes), SessionState)

    def assignment(self, **changes: object) -> Assignment:
        """Right in every respect that `changes` does not change."""
        members: dict[str, object] = {
            "session": SESSION,
            "epoch": 1,
            "contract": self.contract,
            "verifier": self.base,
            "drafter": DRAFTER,
            "prompt": (1, 2, 3),
            "round": 0,
            "committed": 0,
            "digest": bytes(32),
            "m_init": 4,
            **changes,
        }
        return Assignment(**members)  # type: ignore[arg-type]

    async def propose(
        self, tokens: Sequence[int], *, who: str = "drafter", **changes: object
    ) -> Verdict | ProblemDocument:
        return await self.ask(
            who, "POST", "proposals", self.proposal(tokens, who, **changes), Verdict
        )

    def proposal(self, tokens: Sequence[int], who: str = "drafter", **changes: object) -> Proposal:
        """Right in every respect that `changes` does not change."""
        machine = self.served(changes.get("session", SESSION)).machine
        members: dict[str, object] = {
            "session": SESSION,
            "epoch": 1,
            "round": machine.round + 1,
            "drafter": NAMED.get(who, DRAFTER),
            "base": machine.committed,
            "base_digest": machine.chain.digest,
            "tokens": tuple(tokens),
            "status": STATUS,
            **changes,
        }
        return Proposal(**members)  # type: ignore[arg-type]

    async def policy(self, from_round: int, **sampling: int) -> SessionState | ProblemDocument:
        message = Policy(session=SESSION, from_round=from_round, sampling=Sampling(**sampling))
        path = f"sessions/{self.log_name}/policy"
        return await self.ask("router", "POST", path, message, SessionState)

    async def output(
        self, from_: int = 0, who: str = "front_end", *, wait_s: int | None = None
    ) -> Output | ProblemDocument:
        path = f"sessions/{self.log_name}/output?from={from_}"
        prefer = {} if wait_s is None else {"prefer": f"wait={wait_s}"}
        return await self.ask(who, "GET", path, None, Output, **prefer)

    async def ready(self, **named: object) -> None:
        """Open the session and name the drafter."""
        state_of(await self.open())
        state_of(await self.name(**named))

    def served(self, session: object = SESSION) -> ServedSession:
        """The session as the verifier has it."""
        return next(s for s in self.verifier.sessions if s.machine.session == session)

    def good(self, count: int) -> list[int]:
        """What the target would write next."""
        return self.model.text(self.served().machine.tokens, count)

    def bad(self, count: int, good: int = 0) -> list[int]:
        """Some tokens that the target would write, then wrong ones."""
        right = self.good(good + 1)
        return [*right[:good], *[(right[good] + 1) % self.model.vocab] * (count - good)]

    def pin_load(self, percent: int) -> None:
        """What the load reads from now on."""
        self.verifier.config = replace(self.verifier.config, load=percent)

    def records(self) -> list[Record]:
        """The commit log."""
        return decode_log(self.mlc.logs[self.log_name][1]) if self.log_name in self.mlc.logs else []

    def commits(self) -> list[CommitRecord]:
        """The commit log's commit records."""
        return [record for record in self.records() if isinstance(record, CommitRecord)]

    def put(self, name: str, octets: bytes) -> str:
        """An object in the MLC, as another role would have written it; returns its reference."""
        self.mlc.objects[f"{self.log_name}/{name}"] = octets
        return f"{ROUTER}objects/{self.log_name}/{name}"

    def snapshot(self) -> tuple[object, ...]:
        """All that a refused request must leave as it was (D-P9)."""
        machine = self.served().machine
        state = (machine.state_message(), dict(machine.verdicts), machine._control, machine._limit)
        return (*state, self.mlc.logs.get(self.log_name), len(self.engine.scored))


def with_contract(wire: Wire, **changes: object) -> Contract:
    """The wire's contract with some members changed."""
    return contract(
        **{"target": wire.engine.info.model, "tokenizer": wire.engine.info.tokenizer, **changes}
    )
