"""Section 6.5 with real drafters that are wrong on purpose: the whole ladder, in a whole cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from sdcpd.engine.api import Draft, DraftWork
from sdcpd.engine.fake import FakeDrafter
from sdcpd.protocol.codec import decode
from sdcpd.protocol.messages import Event, Proposal, Sampling, Verdict
from sdcpd.protocol.router import RouterSettings
from sdcpd.protocol.verifier_state import VerifierSettings
from sdcpd.roles.generation import GenerationError, GenerationRequest
from sdcpd.transport.http import Request, Response
from tests.kit.cluster import ROUTER, Cluster

V0, D0, D1 = "https://v0.test/", "https://d0.test/", "https://d1.test/"


class WrongDrafter(FakeDrafter):
    """Proposes what the target would not write."""

    async def draft(self, work: DraftWork, **options: Any) -> Draft:
        """The right tokens, each off by one."""
        draft = await super().draft(work, **options)
        return Draft(tuple((token + 1) % work.vocab for token in draft.tokens))


@dataclass
class Watched:
    """A cluster, and what went over the wire between verifier, drafters and router."""

    cluster: Cluster
    rounds: list[tuple[str, Proposal, Verdict]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    refuse_events: int = 0
    after: Callable[[], None] = lambda: None

    def watch(self) -> None:
        """Stand between the roles."""
        verifier, router = self.cluster.network[V0], self.cluster.network[ROUTER]

        async def at_verifier(request: Request) -> Response:
            response = await verifier(request)
            if request.path == "/proposals" and response.status == 200:
                proposal = decode(Proposal, request.body)
                self.rounds.append((proposal.drafter, proposal, decode(Verdict, response.body)))
                self.after()
            return response

        async def at_router(request: Request) -> Response:
            if request.path == "/events":
                self.events.append(decode(Event, request.body))
                if self.refuse_events:
                    self.refuse_events -= 1
                    return Response(503)
            return await router(request)

        self.cluster.network[V0], self.cluster.network[ROUTER] = at_verifier, at_router

    async def text(self, count: int = 60) -> tuple[list[int], bool]:
        """What a client gets, and whether the text came to its end."""
        request = GenerationRequest((1, 2, 3), count, (), Sampling(temperature_milli=0))
        tokens: list[int] = []
        reader = await self.cluster.router.generate(request)
        try:
            async for part in reader:
                tokens += part.tokens
        except GenerationError:
            return tokens, False
        return tokens, True

    @property
    def actions(self) -> list[int]:
        """Of the verdicts, in order."""
        return [int(verdict.action) for _, _, verdict in self.rounds]


@asynccontextmanager
async def wrong(*, load: int = 0, **router: object) -> AsyncIterator[Watched]:
    made = Cluster()
    made.add_router(machine=RouterSettings(switch_grace_s=0.05), **router)
    made.add_verifier(machine=VerifierSettings(None, None), load=load)
    for name in ("d0", "d1"):
        made.add_drafter(name, engine=WrongDrafter(made.model, name=name))
    try:
        await made.ready()
        watched = Watched(made)
        watched.watch()
        yield watched
    finally:
        await made.aclose()


async def test_the_whole_ladder() -> None:
    """R-6.5.2-5, R-6.5.2-9, R-6.5.2-18, R-6.5.2-24, R-6.5.2-33, R-10-3: reduce, switch to the other
    drafter, self-decode, one named again, and fail; what was committed is the target's own text.
    """
    ladder = {"low_rounds": 2, "fallback": (1, 2, 3, 5), "self_max": 3}
    async with wrong(**ladder) as w:
        tokens, whole = await w.text()
        assert w.actions == [0, 1, 0, 2, 0, 3, 0, 5] and not whole
        rounds = [verdict.round for _, _, verdict in w.rounds]
        assert rounds == [1, 2, 3, 4, 5, 6, 10, 11], "three rounds of self-decoding between"
        first, second = w.rounds[0][0], w.rounds[4][0]
        assert [drafter for drafter, _, _ in w.rounds[:6]] == [first] * 4 + [second] * 2
        assert {first, second} == {D0, D1}
        assert [int(event.kind) for event in w.events[:2]] == [2, 3]
        assert [verdict.low for _, _, verdict in w.rounds] == [1, 0] * 4
        assert tokens == w.cluster.model.text((1, 2, 3), 11)
        caps = [verdict.m_cap for _, _, verdict in w.rounds]
        for (_, proposal, _), cap in zip(w.rounds[1:4], caps, strict=False):
            assert len(proposal.tokens) <= cap


async def test_self_decoding_is_skipped_under_load() -> None:
    """R-6.5.2-6, R-6.5.2-19: load above self_load: switch is next, then fail."""
    ladder = {"low_rounds": 1, "fallback": (3, 2, 5), "self_load": 40}
    async with wrong(load=41, **ladder) as w:
        tokens, whole = await w.text()
        assert w.actions == [2, 5] and not whole
        assert w.rounds[0][0] != w.rounds[1][0]
        assert tokens == w.cluster.model.text((1, 2, 3), 2)


async def test_fail_alone() -> None:
    """R-6.5.2-30: the last round's token is delivered, and the client is told."""
    async with wrong(low_rounds=3, fallback=(5,)) as w:
        tokens, whole = await w.text()
        assert w.actions == [0, 0, 5] and not whole
        assert tokens == w.cluster.model.text((1, 2, 3), 3)


async def test_c_counts_on_with_another_drafter() -> None:
    """R-6.5.2-10: two low rounds, that drafter dies, the other's first low round escalates."""
    async with wrong(low_rounds=3, fallback=(1, 5)) as w:

        def kill_the_first() -> None:
            if len(w.rounds) == 2:
                w.cluster.kill(w.rounds[0][0])

        w.after = kill_the_first
        await w.text()
        assert w.actions[:3] == [0, 0, 1]
        assert [verdict.low for _, _, verdict in w.rounds[:3]] == [1, 2, 0]
        assert w.rounds[2][0] != w.rounds[0][0]


async def test_the_event_of_a_switch_arrives_in_the_end() -> None:
    """R-6.5.2-32, R-6.5.2-15: 503 twice, then taken; one reassignment, and the text goes on."""
    async with wrong(low_rounds=1, fallback=(2, 5)) as w:
        w.refuse_events = 2
        await w.text()
        await asyncio.sleep(0)
        assert [int(event.kind) for event in w.events[:3]] == [2, 2, 2]
        assert len(set(w.events[:3])) == 1
        assert w.actions == [2, 5] and w.rounds[0][0] != w.rounds[1][0]
