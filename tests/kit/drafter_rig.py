"""A real drafter between a scripted router and a scripted verifier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sdcpd.engine.api import Draft, DraftWork
from sdcpd.engine.fake import FakeDrafter, FakeModel
from sdcpd.protocol.codec import MEDIA_TYPE, encode
from sdcpd.protocol.messages import Assignment, Contract, Proposal, Rule, Sampling
from sdcpd.protocol.problems import ProblemDocument, parse_problem
from sdcpd.roles.drafter import Drafter, DrafterConfig
from sdcpd.roles.objects import Objects
from sdcpd.transport.http import Response
from tests.kit.cluster import PEERS
from tests.kit.mlc import MemoryMlc
from tests.kit.network import MemoryNetwork, Network
from tests.kit.scripted import Script, ScriptedPeer, ScriptedVerifier, Seen, hold
from tests.kit.verifier_machine import SESSION, contract

PROMPT = (1, 2)
RULE_2 = contract(rule=Rule.SPECULATIVE_SAMPLING, sampling=Sampling(temperature_milli=1000))


class TimedDrafter(FakeDrafter):
    """Says how long a token took, whatever the clock says."""

    token_s = 0.0

    def __init__(self, model: FakeModel) -> None:
        super().__init__(model)
        self.forgotten: list[bytes] = []

    def forget(self, session: bytes) -> None:
        """See DraftEngine."""
        self.forgotten.append(session)

    async def draft(self, work: DraftWork, **options: Any) -> Draft:
        """See DraftEngine."""
        draft = await super().draft(work, **options)
        return Draft(draft.tokens, draft.q_rows, self.token_s * len(draft.tokens))


class DrafterRig:
    """The drafter d0, the router r0 and the verifier v0; a contract that `assign` uses."""

    def __init__(self, network: Network, config: dict[str, Any]) -> None:
        self.network = network
        self.base = network.base("drafter", "d0")
        self.router = ScriptedPeer(network.base("router", "r0"))
        self.verifier = ScriptedVerifier(network.base("verifier", "v0"))
        self.verifier.session = SESSION
        self.verifier.always("POST", "proposals", hold)
        self.model = FakeModel()
        self.engine = TimedDrafter(self.model)
        self.contract: Contract = contract()
        self.mlc = MemoryMlc()
        client = network.client("drafter", "d0")
        bases = (self.router.base, self.verifier.base, self.base)
        self.objects = Objects(client, bases=bases, own=self.base)
        self.drafter = Drafter(
            DrafterConfig(self.base, **config),
            engine=self.engine,
            client=client,
            objects=self.objects,
            peers=PEERS,
            mlc=self.mlc,
            name="d0.x",
        )
        self._clients = {who: network.client(who, f"{who}-x") for who in ("verifier", "front_end")}
        self._clients["router"] = network.client("router", "r0")

    async def start(self) -> None:
        """Serve all three."""
        await self.network.serve("drafter", "d0", self.drafter.listener.handle)
        await self.network.serve("router", "r0", self.router.handle)
        await self.network.serve("verifier", "v0", self.verifier.handle)

    def holds(self, tokens: tuple[int, ...] = (), *, round_: int = 0) -> None:
        """The verifier has committed these tokens of the session."""
        self.verifier.holds(self.contract, PROMPT, tokens, round_)

    def assignment(self, **changes: Any) -> Assignment:
        """The assignment that follows from what the verifier holds."""
        verifier = self.verifier
        members: dict[str, Any] = {
            "session": SESSION,
            "epoch": verifier.epoch,
            "contract": self.contract,
            "verifier": verifier.base,
            "drafter": self.base,
            "prompt": PROMPT,
            "round": verifier.round,
            "committed": len(verifier.tokens),
            "digest": verifier.digest,
            "m_init": 4,
            "vocab": self.model.vocab,
        }
        return Assignment(**{**members, **changes})

    async def post(self, octets: bytes, *, who: str = "router") -> Response:
        """POST assignments."""
        return await self._clients[who].request(
            "POST",
            self.base + "assignments",
            headers=(("content-type", MEDIA_TYPE),),
            body=octets,
        )

    async def assign(self, *, who: str = "router", **changes: Any) -> ProblemDocument | None:
        """Assign the session; None is 204, else the problem."""
        answer = await self.post(encode(self.assignment(**changes)), who=who)
        if answer.status == 204 and not answer.body:
            return None
        return parse_problem(answer.status, answer.body, answer.header("content-type"))

    async def begin(self, **changes: Any) -> Seen:
        """Assign the session as the verifier holds it; the first proposal."""
        if not self.verifier.tokens:
            self.holds(round_=self.verifier.round)
        assert await self.assign(**changes) is None
        return await self.verifier.next("POST", "proposals")

    def answers(self, *answers: Script) -> None:
        """What the verifier answers to the next proposals; then it answers none."""
        self.verifier.script("POST", "proposals", *answers)

    def keeps(self, count: int, extra: int, **changes: Any) -> Script:
        """A verdict that keeps `count` proposed tokens and adds `extra`."""
        return lambda seen: self.verifier.accepts(seen.as_(Proposal), count, extra, **changes)

    async def dropped(self) -> bool:
        """Wait until the session is given up for good; whether the router will hear of it."""
        async with asyncio.timeout(10):
            while self.drafter.sessions:
                await asyncio.sleep(0)
        assert self.verifier.unread("POST", "proposals") == 0
        return self.drafter.status().dropped == (SESSION,)

    async def proposal(self) -> Proposal:
        """The next proposal."""
        return (await self.verifier.next("POST", "proposals")).as_(Proposal)


@asynccontextmanager
async def drafter_rig(network: Network | None = None, **config: Any) -> AsyncIterator[DrafterRig]:
    """A rig that serves; `config` are members of DrafterConfig."""
    made = DrafterRig(network or MemoryNetwork(), config)
    await made.start()
    try:
        yield made
    finally:
        await made.drafter.aclose()
    assert [made.verifier.errors, made.router.errors] == [[], []]
