"""A real verifier shell with a fake engine, asked by a scripted router and drafter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from sdcpd.engine.fake import FakeModel, FakeTarget
from sdcpd.protocol.codec import MEDIA_TYPE, decode, encode
from sdcpd.protocol.messages import (
    Assignment,
    Contract,
    Message,
    Output,
    Proposal,
    SessionOpen,
    SessionState,
    Verdict,
)
from sdcpd.protocol.problems import ProblemDocument, parse_problem
from sdcpd.protocol.uris import session_path_id
from sdcpd.protocol.verifier_state import VerifierSettings
from sdcpd.roles.objects import Objects
from sdcpd.roles.verifier import Verifier, VerifierConfig
from sdcpd.transport.http import Client, Handler, Response
from sdcpd.transport.loopback import LoopbackClient
from tests.kit.cluster import PEERS, ROUTER, peer
from tests.kit.mlc import LossyClient, MemoryMlc
from tests.kit.verifier_machine import SESSION, STATUS, contract

BASE, DRAFTER = "https://v0.test/", "https://d0.test/"
M = TypeVar("M", bound=Message)


@dataclass
class Wire:
    """Requests as the scripted peers send them, answers as messages or problem documents."""

    mlc: MemoryMlc = field(default_factory=MemoryMlc)
    enforcing: bool = True
    base: str = BASE
    model: FakeModel = field(default_factory=FakeModel)

    def __post_init__(self) -> None:
        self.network: dict[str, Handler] = {ROUTER: self.mlc.handle}
        client = LossyClient(LoopbackClient(self.network, peer("verifier", "v0", self.base)))
        self.own_client = client
        self.engine = FakeTarget(self.model)
        self.verifier = Verifier(
            VerifierConfig(
                self.base,
                ROUTER,
                machine=VerifierSettings(None, None),
                enforcing_logs=self.enforcing,
                output_wait_s=0.2,
            ),
            engine=self.engine,
            client=client,
            objects=Objects(client, bases=(ROUTER, self.base), own=self.base),
            peers=PEERS,
            mlc=MemoryMlc(),
            name="v0.x",
            status_ttl_s=3.0,
        )
        self.network[self.base] = self.verifier.listener.handle
        self.clients: dict[str, Client] = {
            "router": LoopbackClient(self.network, peer("router", "r0", ROUTER)),
            "drafter": LoopbackClient(self.network, peer("drafter", "d0", DRAFTER)),
            "front_end": LoopbackClient(self.network, peer("front_end", "f0")),
        }
        self.contract = contract(
            target=self.engine.info.model, tokenizer=self.engine.info.tokenizer
        )
        self.tokens: list[int] = [1, 2, 3]

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
        self, who: str, method: str, path: str, message: Message | None, kind: type[M]
    ) -> M | ProblemDocument:
        body = encode(message) if message else b""
        response = await self.send(who, method, path, body)
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
        message = Assignment(**members)  # type: ignore[arg-type]
        path = f"sessions/{self.log_name}/drafter"
        return await self.ask("router", "PUT", path, message, SessionState)

    async def propose(self, tokens: list[int], **changes: object) -> Verdict | ProblemDocument:
        machine = self.verifier.sessions[0].machine
        members: dict[str, object] = {
            "session": SESSION,
            "epoch": 1,
            "round": machine.round + 1,
            "drafter": DRAFTER,
            "base": machine.committed,
            "base_digest": machine.chain.digest,
            "tokens": tuple(tokens),
            "status": STATUS,
            **changes,
        }
        message = Proposal(**members)  # type: ignore[arg-type]
        return await self.ask("drafter", "POST", "proposals", message, Verdict)

    async def output(self, from_: int = 0, who: str = "front_end") -> Output | ProblemDocument:
        path = f"sessions/{self.log_name}/output?from={from_}"
        return await self.ask(who, "GET", path, None, Output)

    async def ready(self) -> None:
        """Open the session and name the drafter."""
        assert isinstance(await self.open(), SessionState)
        assert isinstance(await self.name(), SessionState)

    def good(self, count: int) -> list[int]:
        """What the target would write next."""
        return self.model.text(self.verifier.sessions[0].machine.tokens, count)


def with_contract(wire: Wire, **changes: object) -> Contract:
    """The wire's contract with some members changed."""
    return contract(
        **{"target": wire.engine.info.model, "tokenizer": wire.engine.info.tokenizer, **changes}
    )
