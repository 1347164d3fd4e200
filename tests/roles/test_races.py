"""What two things at once do to the roles' shells."""

from __future__ import annotations

import asyncio

import pytest

from sdcpd.protocol.messages import Action, InstanceRole, Proposal, Sampling, SessionOpen
from sdcpd.protocol.problems import NotFound, to_json
from sdcpd.protocol.router import RouterSettings
from sdcpd.roles.generation import GenerationError, GenerationRequest
from sdcpd.roles.output_reader import OutputReader
from sdcpd.transport.http import Request, Response
from tests.kit.cluster import cluster
from tests.roles.test_drafter import Rig
from tests.roles.test_router import GREEDY, V0, Scripted

BRISK = RouterSettings(switch_grace_s=0.2, failover_after_s=0.06)


async def test_assignments_of_one_session_at_once_make_one_session() -> None:
    """D-N9: both are still fetching tokens when they are first looked at."""
    rig = Rig()
    rig.committed = (5, 6)
    try:
        answers = await asyncio.gather(*(rig.assign(round=1) for _ in range(3)))
        assert [answer.status for answer in answers] == [204] * 3
        assert rig.drafter.counts["assigned"] == 1 and len(rig.drafter.sessions) == 1
        first = await rig.proposals.get()
        assert isinstance(first, Proposal) and rig.proposals.empty()
    finally:
        await rig.drafter.aclose()


class Restarted(Scripted):
    """Its verifier forgets its sessions once, and then takes its time to open them again."""

    def __init__(self) -> None:
        super().__init__(machine=BRISK)
        self.reads = 0
        self.may_open = asyncio.Event()

    async def verifier(self, request: Request) -> Response:
        if request.path.endswith("/output"):
            self.reads += 1
            problem = (("content-type", "application/problem+json"),)
            return Response(404, problem, to_json(NotFound("no such session here")))
        if request.path == "/sessions" and any(kind == "open" for kind, _ in self.seen):
            await super().verifier(request)
            await self.may_open.wait()
        return await super().verifier(request)


async def test_a_restarted_verifier_is_given_time_to_open() -> None:
    """D-F1: while it computes the prompt's KV the front end's reads get 404 there."""
    scripted = Restarted()
    try:
        await scripted.report(InstanceRole.VERIFIER, V0)
        reader = await scripted.cluster.router.generate(GREEDY)
        task = asyncio.ensure_future(anext(aiter(reader)))
        while scripted.reads < 12:
            await asyncio.sleep(0.01)
        opened = [m for kind, m in scripted.seen if kind == "open"]
        assert {m.epoch for m in opened if isinstance(m, SessionOpen)} == {1, 2}
        task.cancel()
        scripted.may_open.set()
    finally:
        await scripted.cluster.aclose()


async def test_output_that_died_with_its_verifier_is_an_error() -> None:
    """A session that has ended is not moved: who reads it must not wait for ever."""
    scripted = Scripted(machine=BRISK)
    try:
        await scripted.report(InstanceRole.VERIFIER, V0)
        reader = await scripted.cluster.router.generate(GREEDY)
        await scripted.event(reader.session, Action.FINISH)
        scripted.cluster.network.pop(V0)
        with pytest.raises(GenerationError):
            await asyncio.wait_for(anext(aiter(reader)), 5)
    finally:
        await scripted.cluster.aclose()


async def test_a_burst_is_spread_over_the_verifiers() -> None:
    """D-R6: between two reports too."""
    scripted = Scripted()
    other = "https://v1.test/"
    scripted.cluster.network[other] = scripted.verifier
    try:
        for base in (V0, other):
            await scripted.report(InstanceRole.VERIFIER, base)
        router = scripted.cluster.router
        await asyncio.gather(*(router.generate(GREEDY) for _ in range(8)))
        places = [routed.machine.verifier for routed in router.sessions]
        assert sorted(places) == [V0] * 4 + [other] * 4
        for routed in router.sessions:
            await scripted.event(
                routed.machine.session, Action.FINISH, base=routed.machine.verifier
            )
        assert [i.sessions for i in router.board.all()] == [0, 0]
    finally:
        await scripted.cluster.aclose()


async def test_a_finished_text_is_read_to_its_end_though_its_verifier_died() -> None:
    """R-6.7-6: what is in the log is committed, and the end event may overtake the reader."""
    async with cluster(verifiers=1) as made:
        request = GenerationRequest((1, 2, 3), 24, (), Sampling(temperature_milli=0))
        reader = await made.router.generate(request)
        while not reader._session.machine.closed:
            await asyncio.sleep(0.01)
        made.kill(V0)
        tokens = [token async for part in reader for token in part.tokens]
        assert tokens == made.model.text((1, 2, 3), 24)
        assert reader.stats.committed == 24


async def test_a_poll_at_a_frozen_verifier_ends_when_the_session_moves() -> None:
    """Section 6.9: the front end follows at once, and not after the poll's time."""
    scripted = Scripted()
    made = scripted.cluster
    frozen = asyncio.Event()

    async def verifier(request: Request) -> Response:
        if request.path.endswith("/output"):
            frozen.set()
        return await scripted.verifier(request)

    made.network[V0] = verifier
    try:
        await scripted.report(InstanceRole.VERIFIER, V0)
        made.add_verifier("v1")
        router = made.router
        request = GenerationRequest((1, 2, 3), 8, (), Sampling(temperature_milli=0))
        while router.board.choose_verifier(now=0.0, exclude={V0}) == V0:
            await asyncio.sleep(0.01)
        target = made.verifiers["https://v1.test/"].status().model
        await scripted.report(InstanceRole.VERIFIER, V0, model=target)
        made.router.board.assigned("https://v1.test/", InstanceRole.VERIFIER, 5)
        reader = await router.generate(request)
        assert reader._session.machine.verifier == V0
        read = asyncio.ensure_future(_tokens(reader))
        await frozen.wait()
        await scripted.report(InstanceRole.VERIFIER, V0, model=target, ttl_ms=0)
        assert await asyncio.wait_for(read, 5) == made.model.text((1, 2, 3), 8)
    finally:
        await made.aclose()


async def _tokens(reader: OutputReader) -> list[int]:
    return [token async for part in reader for token in part.tokens]
