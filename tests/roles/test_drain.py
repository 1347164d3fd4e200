"""Instances taken out of service and back: nobody who reads notices, and nobody new comes."""

from __future__ import annotations

import asyncio

import pytest

from sdcpd.admin_cluster import ClusterAdmin, ClusterRefused, ClusterUnknown
from sdcpd.protocol.messages import InstanceRole, Sampling
from sdcpd.roles.generation import GenerationError, GenerationRequest
from tests.kit.api import text_model
from tests.kit.cluster import Cluster, cluster

PROMPT = (1, 2, 3)
REQUEST = GenerationRequest(PROMPT, 120, (), Sampling(temperature_milli=0))


async def drained_in_the_middle(c: Cluster, what: str, **body: object) -> list[int]:
    """A text during which the verifier or the drafter of its session is drained."""
    admin = ClusterAdmin(c.router, text_model())
    for verifier in c.verifiers.values():
        verifier._engine._pass_time_s = 0.002  # type: ignore[attr-defined]
    tokens: list[int] = []
    base: str | None = None
    async for part in await c.router.generate(REQUEST):
        tokens += part.tokens
        if base is None and len(tokens) > 10 and c.router.sessions:
            base = getattr(c.router.sessions[0].machine, what)
            await admin.drain({"instance": base} | body)
            if what == "drafter":
                c.kill(str(base))  # as is done with what was drained
    assert base is not None
    role = InstanceRole.DRAFTER if what == "drafter" else InstanceRole.VERIFIER
    assert c.router.board.drained(base, role)
    return tokens


async def test_a_drained_drafter_can_be_stopped_at_once() -> None:
    async with cluster(drafters=2) as c:
        assert await drained_in_the_middle(c, "drafter") == c.model.text(PROMPT, 120)
        assert c.router.counts["event_fail"] == 0


@pytest.mark.parametrize("move", [False, True])
async def test_a_drained_verifier_keeps_its_session_or_hands_it_over(move: bool) -> None:
    async with cluster(verifiers=2) as c:
        text = await drained_in_the_middle(c, "verifier", move=move)
        assert text == c.model.text(PROMPT, 120)
        (routed,) = c.router.ended_sessions
        assert routed.machine.failovers == move
        (left,) = [b for b in c.verifiers if not c.router.board.drained(b, InstanceRole.VERIFIER)]
        for _ in range(3):
            await c.text(count=3)
        assert [one.machine.verifier for one in c.router.ended_sessions][1:] == [left] * 3


async def test_the_last_verifier_can_be_drained_but_its_sessions_can_not_move() -> None:
    async with cluster() as c:
        admin = ClusterAdmin(c.router, text_model())
        with pytest.raises(ClusterRefused, match="no other verifier"):
            await admin.drain({"instance": "v0", "move": True})
        assert c.router.readiness().ready
        await admin.drain({"instance": "v0"})
        with pytest.raises(GenerationError, match="no verifier is ready"):
            await c.text()
        await admin.drain({"instance": "v0", "on": False})
        assert len(await c.text()) == 40


@pytest.mark.parametrize("name", ["v9", "v", "", None, 5, "https://v9.test/"])
async def test_names_that_are_of_nobody(name: object) -> None:
    async with cluster(verifiers=2) as c:
        unknown = isinstance(name, str) and name != ""
        with pytest.raises(ClusterUnknown if unknown else ClusterRefused):
            await ClusterAdmin(c.router, text_model()).drain({"instance": name})
        await asyncio.sleep(0)
