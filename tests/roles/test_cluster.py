"""The roles together, in memory: the committed text never depends on who drafted it."""

from __future__ import annotations

import asyncio

import pytest

from sdcpd.protocol.acceptance import target_distribution, winner
from sdcpd.protocol.messages import Sampling
from sdcpd.roles.generation import GenerationRequest
from sdcpd.transport.http import Request, Response
from tests.kit.cluster import Cluster, cluster

PROMPT = (1, 2, 3)


@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
async def test_greedy_text_is_the_targets_whatever_the_drafter(noise: float) -> None:
    """R-6.4-4, R-6.3-24: perfect, middling and useless drafters give one text."""
    async with cluster(noise=noise) as c:
        assert await c.text() == c.model.text(PROMPT, 40)


async def test_no_drafter_at_all() -> None:
    """R-8-4, D-R5: the verifier decodes by itself."""
    async with cluster(drafters=0) as c:
        assert await c.text() == c.model.text(PROMPT, 40)
        assert c.verifiers["https://v0.test/"].rounds.self_decoded == 40


async def test_perfect_drafter_has_every_token_accepted() -> None:
    """R-6.4-3: a round of M accepted tokens commits M + 1."""
    async with cluster() as c:
        await c.text()
        counts = c.verifiers["https://v0.test/"].rounds.as_json()
        assert counts["accepted"] == counts["drafted"] > 0
        assert counts["self_decoded"] == 0


def _raced(c: Cluster, seed: int, count: int) -> list[int]:
    tokens = list(PROMPT)
    profile = Sampling(temperature_milli=1000, seed=seed)
    for k in range(1, count + 1):
        p = target_distribution(c.model.scores(tokens), profile)
        tokens.append(winner(p, seed, k))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize(("drafters", "noise"), [(1, 0.0), (1, 0.4), (0, 0.0)])
async def test_rule_200_gives_one_text_a_seed(drafters: int, noise: float) -> None:
    """R-Z-2: seed, target and prompt alone decide."""
    async with cluster(drafters=drafters, noise=noise) as c:
        for seed in (7, 8):
            text = await c.text(temperature_milli=1000, seed=seed)
            assert text == _raced(c, seed, 40)


async def test_rule_2_commits_through_published_rows() -> None:
    """R-3-3, R-6.2-3: rows are objects, and a perfect drafter is mostly accepted."""
    async with cluster(sampling_rule="rejection", trust_drafters=True) as c:
        assert len(await c.text(temperature_milli=1000)) == 40
        counts = c.verifiers["https://v0.test/"].rounds.as_json()
        assert counts["accepted"] == counts["drafted"] > 0


async def test_many_sessions_at_once() -> None:
    """R-6.3-25: outputs equal those of one at a time."""
    async with cluster(drafters=2, noise=0.2) as c:
        prompts = [(i, i + 1) for i in range(20)]
        texts = await asyncio.gather(*(c.text(prompt, 20) for prompt in prompts))
        assert texts == [c.model.text(prompt, 20) for prompt in prompts]


async def test_log_is_a_clean_chain() -> None:
    """R-6.3-32, R-6.7-9: what the front end read is what the log holds."""
    async with cluster(noise=0.3) as c:
        text = await c.text()
        (name,) = c.mlc.logs
        assert list(c.mlc.tokens(name)) == text


async def test_verifier_killed_in_the_middle_is_invisible() -> None:
    """R-6.9-9: the text goes on at another verifier, token for token."""
    async with cluster(verifiers=2, noise=0.3) as c:
        for verifier in c.verifiers.values():
            verifier._engine._pass_time_s = 0.01  # type: ignore[attr-defined]
        profile = Sampling(temperature_milli=0)
        reader = await c.router.generate(GenerationRequest(PROMPT, 60, (), profile))
        tokens: list[int] = []
        async for part in reader:
            if len(tokens) < 10 <= len(tokens) + len(part.tokens):
                place = c.router.sessions[0].place
                assert place is not None
                c.kill(place[0])
            tokens += part.tokens
        assert tokens == c.model.text(PROMPT, 60)


async def test_drafter_killed_in_the_middle() -> None:
    """R-6.9-1, D-R9: another drafter, or the verifier itself, goes on."""
    async with cluster(drafters=1, noise=0.1) as c:
        c.verifiers["https://v0.test/"]._engine._pass_time_s = 0.01  # type: ignore[attr-defined]
        profile = Sampling(temperature_milli=0)
        reader = await c.router.generate(GenerationRequest(PROMPT, 60, (), profile))
        tokens: list[int] = []
        async for part in reader:
            if len(tokens) < 10 <= len(tokens) + len(part.tokens):
                c.kill("https://d0.test/")
            tokens += part.tokens
        assert tokens == c.model.text(PROMPT, 60)


async def test_cancel_ends_the_session() -> None:
    """D-Z2: nothing more is committed after a cancellation."""
    async with cluster() as c:
        verifier = c.verifiers["https://v0.test/"]
        verifier._engine._pass_time_s = 0.01  # type: ignore[attr-defined]
        profile = Sampling(temperature_milli=0)
        reader = await c.router.generate(GenerationRequest(PROMPT, 10_000, (), profile))
        async for _ in reader:
            await reader.cancel()
        served = verifier.sessions[0]
        while not served.machine.closed or c.router.sessions:
            await asyncio.sleep(0)
        assert served.machine.end_reason == "cancelled"


async def test_cancelled_while_opening() -> None:
    """D-Z2: a client that goes away before its session is open leaves nothing running."""
    async with cluster() as c:
        base = "https://v0.test/"
        handle, opened, go_on = c.network[base], asyncio.Event(), asyncio.Event()

        async def slow(request: Request) -> Response:
            if request.path == "/sessions":
                opened.set()
                await go_on.wait()
            return await handle(request)

        c.network[base] = slow
        profile = Sampling(temperature_milli=0)
        task = asyncio.ensure_future(
            c.router.generate(GenerationRequest(PROMPT, 10_000, (), profile))
        )
        await opened.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        go_on.set()
        while c.router.sessions:
            await asyncio.sleep(0)
        served = c.verifiers[base].sessions[0]
        while not served.machine.closed:
            await asyncio.sleep(0)
        assert served.machine.end_reason == "cancelled"
