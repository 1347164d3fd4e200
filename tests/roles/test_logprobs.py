"""Log-probabilities from verifier to front end: over rounds, failures and other makes (D-Z5)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import cbor2
import pytest

from sdcpd.engine.api import EngineBusy
from sdcpd.engine.fake import FakeModel, FakeTarget
from sdcpd.protocol.codec import decode, encode
from sdcpd.protocol.logprobs import LogprobsAnswer, LogprobsRequest, Row, logprob_row
from sdcpd.protocol.messages import Message, Output, Sampling
from sdcpd.roles.generation import GenerationError, GenerationRequest, Tokens
from sdcpd.transport.http import Handler, Request, Response
from tests.kit.cluster import Cluster, cluster, peer

PROMPT = (1, 2, 3)
V0 = "https://v0.test/"


def wanted(count: int, **changes: object) -> GenerationRequest:
    profile = Sampling(temperature_milli=0)
    request = GenerationRequest(PROMPT, count, (), profile, logprobs=3)
    return replace(request, **changes)  # type: ignore[arg-type]


def rows_of(model: FakeModel, tokens: Sequence[int]) -> list[Row]:
    """What every token after the prompt must be told with."""
    text = [*PROMPT, *tokens]
    return [logprob_row(model.scores(text[:at]), text[at], 3) for at in range(3, len(text))]


async def read(c: Cluster, request: GenerationRequest) -> tuple[list[int], list[Row], list[Tokens]]:
    parts = [part async for part in await c.router.generate(request)]
    return (
        [token for part in parts for token in part.tokens],
        [row for part in parts for row in part.logprobs],
        parts,
    )


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature_milli=0), Sampling(temperature_milli=900, top_k=4, seed=7)],
)
async def test_each_token_has_its_row(sampling: Sampling) -> None:
    """Drafted, rejected and self-decoded alike, under every rule."""
    for noise, speculate, rejection in ((0.0, True, False), (0.3, True, True), (0.0, False, False)):
        async with cluster(noise=noise, trust_drafters=True) as c:
            request = wanted(60, sampling=sampling, speculate=speculate, rejection=rejection)
            tokens, rows, _ = await read(c, request)
            assert len(tokens) == 60
            assert rows == rows_of(c.model, tokens)


async def test_nobody_is_told_who_has_not_asked() -> None:
    async with cluster() as c:
        tokens, rows, _ = await read(c, wanted(20, logprobs=None))
        assert len(tokens) == 20
        assert rows == []


async def test_after_a_failover_the_rows_are_the_same() -> None:
    """The new verifier has not written the tokens that were committed and not yet read."""
    async with cluster(verifiers=2) as c:
        asked: list[str] = []
        for base, handle in list(c.network.items()):
            c.network[base] = partial(_mute_after_some, c, handle, asked)
        tokens, rows, _ = await read(c, wanted(200))
        assert len(tokens) == 200
        assert rows == rows_of(c.model, tokens)
        assert asked, "there were tokens that the new verifier had not written"


async def _mute_after_some(
    c: Cluster, handle: Handler, asked: list[str], request: Request
) -> Response:
    """A verifier whose first output is read, and that dies once it has committed more."""
    if request.path == "/logprobs":
        asked.append(request.path)
    if request.path.endswith("/output") and "from=0" not in request.query and len(c.network) == 4:
        (routed,) = c.router.sessions
        verifier = c.verifiers[routed.machine.verifier]
        (served,) = verifier.sessions
        while served.machine.committed < 100:
            await asyncio.sleep(0)
        c.kill(routed.machine.verifier)
        return Response(503)
    return await handle(request)


async def test_a_verifier_of_another_make_tells_none() -> None:
    """ux 1.3: never 0.0 for what is not known; the text fails with a sentence."""
    async with cluster() as c:
        handle = c.network[V0]

        async def foreign(request: Request) -> Response:
            if request.path == "/logprobs":
                return Response(404)
            response = await handle(request)
            if request.path.endswith("/output") and response.status == 200:
                output = replace(decode(Output, response.body), logprobs=None, parts=None)
                return replace(response, body=encode(output))
            return response

        c.network[V0] = foreign
        with pytest.raises(GenerationError, match="of a make that tells no"):
            await read(c, wanted(20))
        with pytest.raises(GenerationError, match="of a make"):
            await c.router.logprobs((1, 2, 3), 0)
        assert (await read(c, wanted(20, logprobs=None)))[2][0].parts == ()


async def test_any_ready_verifier_is_asked_about_a_text() -> None:
    async with cluster(verifiers=2) as c:
        text = (1, 2, 3, 9, 30, 4)
        expected = tuple(logprob_row(c.model.scores(text[:at]), text[at], 2) for at in range(1, 6))
        assert await c.router.logprobs(text, 2) == expected
        for verifier in list(c.verifiers)[:1]:
            c.kill(verifier)
        for _ in range(3):
            assert await c.router.logprobs(text, 2) == expected
        assert await c.router.logprobs((5,), 2) == ()


async def test_when_none_can_tell_the_client_may_come_again() -> None:
    class Full(FakeTarget):
        async def logprobs(
            self, tokens: Sequence[int], from_: int, alternatives: int, *, scope: bytes = b""
        ) -> tuple[Row, ...]:
            raise EngineBusy("the memory for keys and values is full")

    c = Cluster()
    c.add_router()
    c.add_verifier(engine=Full(c.model))
    try:
        await c.ready()
        with pytest.raises(GenerationError, match="memory for keys and values is full") as e:
            await c.router.logprobs((1, 2), 0)
        assert e.value.retry_after_s
    finally:
        await c.aclose()


async def ask(c: Cluster, body: bytes, *, role: str = "router") -> Response:
    request = Request(
        method="POST",
        path="/logprobs",
        query="",
        authority="v0.test",
        headers=(("content-type", "application/sdcp+cbor"),),
        body=body,
        peer=peer(role, "x0", f"https://{role}.test/"),
    )
    return await c.network[V0](request)


async def test_what_a_verifier_refuses_to_score() -> None:
    async with cluster() as c:
        info = FakeTarget(c.model).info

        def message(**changes: object) -> bytes:
            values = {"target": info.model, "tokens": (1, 2, 3), "from_": 1, "alternatives": 0}
            made: Message = LogprobsRequest(**(values | changes))  # type: ignore[arg-type]
            return encode(made)

        good = await ask(c, message())
        assert good.status == 200
        assert len(decode(LogprobsAnswer, good.body).rows) == 2
        for changes, status in (
            ({"from_": 0}, 400),
            ({"from_": 3}, 400),
            ({"from_": 2**64 - 1}, 400),
            ({"tokens": ()}, 400),
            ({"tokens": (1, 32)}, 422),
            ({"target": bytes(32)}, 422),
        ):
            assert (await ask(c, message(**changes))).status == status, changes
        assert (await ask(c, b"\xa0")).status == 400
        whole = cbor2.loads(message())
        assert (await ask(c, cbor2.dumps(whole | {"alternatives": 21}))).status == 400
        assert (await ask(c, message(), role="drafter")).status == 403


async def test_long_texts_are_asked_about_in_pieces_at_one_verifier() -> None:
    """So that nobody computes much for a client that has gone."""
    async with cluster(verifiers=2) as c:
        asked: list[tuple[str, int]] = []
        for base, handle in list(c.network.items()):
            c.network[base] = partial(_noted, base, handle, asked)
        text = tuple(at % 32 for at in range(600))
        rows = await c.router.logprobs(text, 1)
        assert rows == tuple(
            logprob_row(c.model.scores(text[:at]), text[at], 1) for at in range(1, 600)
        )
        assert [count for _, count in asked] == [257, 513, 600]
        assert len({base for base, _ in asked}) == 1
        await asyncio.gather(*(c.router.logprobs(text, 0) for _ in range(6)))
        assert {base for base, _ in asked} == set(c.verifiers), "many go to all"


async def _noted(
    base: str, handle: Handler, asked: list[tuple[str, int]], request: Request
) -> Response:
    if request.path == "/logprobs":
        asked.append((base, len(decode(LogprobsRequest, request.body).tokens)))
    return await handle(request)


async def test_a_verifier_scores_a_few_at_a_time_and_says_that_it_is_busy() -> None:
    go_on = asyncio.Event()

    class Slow(FakeTarget):
        running = most = 0

        async def logprobs(
            self, tokens: Sequence[int], from_: int, alternatives: int, *, scope: bytes = b""
        ) -> tuple[Row, ...]:
            Slow.running += 1
            Slow.most = max(Slow.most, Slow.running)
            await go_on.wait()
            Slow.running -= 1
            return await super().logprobs(tokens, from_, alternatives, scope=scope)

    c = Cluster()
    c.add_router()
    verifier = c.add_verifier(engine=Slow(c.model))
    try:
        await c.ready()
        idle = verifier.load()
        tasks = [asyncio.ensure_future(c.router.logprobs((1, 2, 3), 0)) for _ in range(64)]
        async with asyncio.timeout(5):
            while verifier._logprobs.active < 64:
                await asyncio.sleep(0)
        assert verifier.load() > idle
        info = FakeTarget(c.model).info
        message = LogprobsRequest(target=info.model, tokens=(1, 2), from_=1, alternatives=0)
        assert (await ask(c, encode(message))).status == 429
        go_on.set()
        assert len(await asyncio.gather(*tasks)) == 64
        assert Slow.most == 4
        assert verifier.load() == idle
    finally:
        await c.aclose()


async def test_a_verifier_keeps_rows_until_they_are_read() -> None:
    async with cluster() as c:
        tokens, _, _ = await read(c, wanted(300))
        assert len(tokens) == 300
        (served,) = c.verifiers[V0].sessions
        assert len(served._logprobs) < 60, "of the last rounds"
