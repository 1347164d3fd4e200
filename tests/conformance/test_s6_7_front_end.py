"""Section 6.7 from the reader's side: every committed token once, whatever verifiers answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sdcpd.protocol.codec import MEDIA_TYPE, encode
from sdcpd.protocol.commit_log import FenceRecord, decode_log, read_log
from sdcpd.protocol.messages import Action, Output
from sdcpd.protocol.problems import NotFound, SessionClosed, StaleEpoch, Unavailable
from sdcpd.protocol.router import RouterSettings
from sdcpd.roles.generation import GenerationError
from sdcpd.roles.output_reader import OutputReader
from sdcpd.transport.http import Response
from tests.kit.router_rig import RouterRig, router_rig, texts
from tests.kit.scripted import DROP, Answer, ScriptedVerifier, Seen

OUTPUT = "sessions/.*/output"
PATIENT = RouterSettings(switch_grace_s=0.05, failover_after_s=0.15)


@pytest.fixture
async def rig() -> AsyncIterator[RouterRig]:
    async with router_rig(machine=PATIENT) as made:
        yield made


def since(seen: Seen) -> int:
    """The index that an output request asks from."""
    return int(seen.request.query.removeprefix("from="))


def from_log(rig: RouterRig) -> list[int]:
    """What the session's commit log holds."""
    _, octets = rig.mlc.logs[rig.log_name]
    return list(read_log(decode_log(octets)).tokens)


async def until_failed(reader: OutputReader) -> tuple[list[int], str]:
    """The tokens that came before the failure, and what it said."""
    tokens: list[int] = []
    with pytest.raises(GenerationError) as failure:
        async for part in reader:
            tokens += part.tokens
    return tokens, str(failure.value)


async def test_reads_on_from_what_it_has(rig: RouterRig) -> None:
    """R-6.7-9, D-G1: the next request is from + len(tokens), until final."""
    reader = await rig.running()
    reading = asyncio.ensure_future(texts(reader))
    for tokens in ((4, 5), (6,), (7, 8, 9)):
        await rig.v0.next("GET", OUTPUT)
        rig.commit(tokens, finish=Action.FINISH if len(tokens) == 3 else None)
    assert await reading == [4, 5, 6, 7, 8, 9] == from_log(rig)
    reads = [since(seen) for seen in rig.v0.seen if seen.method == "GET"]
    assert reads == [0, 2, 3] and not rig.router.sessions


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed > 1 else ()) for seed in range(8)]
)
async def test_broken_connections_lose_and_repeat_nothing(rig: RouterRig, seed: int) -> None:
    """R-6.7-9: answers lost, errors, empty answers and parts at random; the text is the log."""
    chance, broken = random.Random(seed), 0

    def answers(seen: Seen) -> Answer:
        nonlocal broken
        n, from_ = len(rig.v0.tokens), since(seen)
        choice = chance.choice(["lost", "error", "empty", "later", "part", "part", "more"])
        if choice in ("lost", "error") and broken < 2:
            broken += 1
            return DROP if choice == "lost" else Response(500)
        broken = 0
        if choice == "later":
            return Unavailable("", retry_after_s=1)
        if choice == "more":
            rig.commit(tuple(chance.choices(range(30), k=chance.randint(1, 5))))
        if n >= 40:
            rig.v0.finish = Action.FINISH
            return rig.v0.output(from_)
        count = chance.randint(0, 3) if choice == "part" else 0
        return rig.v0.output(from_, tokens=rig.v0.tokens[from_ : from_ + count])

    rig.v0.always("GET", OUTPUT, answers)
    reader = await rig.running()
    assert await texts(reader) == from_log(rig)
    assert rig.v1.seen == []


@pytest.mark.parametrize("cut", [0, 1, 3])
async def test_a_failover_loses_and_repeats_nothing(rig: RouterRig, cut: int) -> None:
    """R-6.7-9, R-6.9-12: tokens committed but not read are read at the next verifier."""
    rig.v0.always("GET", OUTPUT, lambda seen: part(rig.v0, seen, cut))
    reader = await rig.running()
    await rig.report("v1")
    for tokens in ((4, 5), (6,)):
        rig.commit(tokens)
    reading = asyncio.ensure_future(texts(reader))
    await rig.until(lambda: any(since(s) == cut for s in rig.v0.seen if s.method == "GET"))
    await rig.report("v0", ttl_ms=0)
    await rig.v1.next("PUT", ".*/drafter")
    rig.v1.commit((7, 8), finish=Action.FINISH)
    assert await reading == [4, 5, 6, 7, 8]
    assert rig.v1.epoch == 2


async def test_a_second_reader_that_is_behind_takes_nothing_back(rig: RouterRig) -> None:
    """R-6.7-9: what the router knows of the session only grows, and each reader gets everything."""
    reader = await rig.running()
    for tokens in ((4, 5), (6, 7), (8, 9)):
        rig.commit(tokens)
    first = aiter(reader)
    assert (await anext(first)).tokens == (4, 5, 6, 7, 8, 9)
    machine = rig.session.machine
    assert machine.committed == 6 and machine._progress_at is not None
    progress_at, calls = machine._progress_at, len(rig.asked())

    def one_by_one(seen: Seen) -> Answer:
        from_ = since(seen)
        if from_ < len(rig.v0.tokens):
            return rig.v0.output(from_, tokens=rig.v0.tokens[from_ : from_ + 1], final=False)
        return rig.v0.output(from_)

    rig.v0.always("GET", OUTPUT, one_by_one)
    output = await rig.router.output(reader.session)
    assert output is not None
    second = aiter(output)
    for token in (4, 5, 6):
        assert (await anext(second)).tokens == (token,)
        assert (machine.committed, machine._progress_at) == (6, progress_at)
    assert rig.session.readers == 1 and len(rig.asked()) == calls
    rig.commit((10,), finish=Action.FINISH)
    assert [part.tokens async for part in second] == [(7,), (8,), (9,), (10,), ()]
    assert [token async for part in first for token in part.tokens] == [10]
    assert reader.stats.committed == 7 and not rig.router.sessions


async def part(verifier: ScriptedVerifier, seen: Seen, cut: int) -> Answer:
    """Output up to `cut`; then nothing for a while."""
    if since(seen) < cut:
        return verifier.output(since(seen), tokens=verifier.tokens[since(seen) : cut])
    await asyncio.sleep(0)
    return Unavailable("")


async def test_output_of_a_lower_epoch_is_discarded(rig: RouterRig) -> None:
    """R-6.7-8, D-G9: after epoch 2 was seen, epoch 1 is another verifier's dream."""
    old, good = (31, 31, 31), (4, 5)

    def lags(seen: Seen) -> Output:
        return rig.v0.output(since(seen), epoch=1, tokens=old, final=False, finish=None)

    def ahead(seen: Seen) -> Output:
        return rig.v0.output(since(seen), epoch=2, tokens=good, final=False, finish=None)

    rig.v0.script("GET", OUTPUT, ahead, lags, lags)
    reader = await rig.running()
    rig.v0.epoch = 2
    rig.v0.tokens = good
    rig.v0.commit((6,), finish=Action.FINISH)
    assert await texts(reader) == [4, 5, 6]
    reads = [since(seen) for seen in rig.v0.seen if seen.method == "GET"]
    assert reads == [0, 2, 2, 2]
    assert rig.router.totals.stale_outputs == 2


async def test_a_final_of_a_lower_epoch_ends_nothing(rig: RouterRig) -> None:
    """R-6.7-8: nor does an old verifier's end count."""
    rig.v0.script(
        "GET",
        OUTPUT,
        lambda s: rig.v0.output(since(s), epoch=2, tokens=(4,), final=False, finish=None),
        lambda seen: rig.v0.output(since(seen), epoch=1, tokens=(), final=True, finish=Action.FAIL),
    )
    reader = await rig.running()
    rig.v0.epoch, rig.v0.tokens = 2, (4,)
    rig.v0.commit((6,), finish=Action.FINISH)
    assert await texts(reader) == [4, 6]


async def test_output_from_another_index_is_not_taken(rig: RouterRig) -> None:
    """R-6.7-9: an answer that does not continue would repeat or lose tokens."""
    rig.v0.script("GET", OUTPUT, lambda _: rig.v0.output(1, tokens=(9,), final=False, finish=None))
    reader = await rig.running()
    rig.commit((4, 5), finish=Action.FINISH)
    assert await texts(reader) == [4, 5]


@pytest.mark.parametrize("finish", [5, 6, 9, 255])
async def test_fail_and_unknown_finishes_are_failures(rig: RouterRig, finish: int) -> None:
    """R-5.2-5, D-E4: the text is reported as failed, after the tokens that it has."""

    def ends(seen: Seen) -> Any:
        octets = encode(rig.v0.output(since(seen), final=True, finish=Action.FINISH))
        number = bytes([finish]) if finish < 24 else bytes([0x18, finish])
        changed = octets.replace(b"\x66finish\x04", b"\x66finish" + number)
        assert changed != octets
        return Response(200, (("content-type", MEDIA_TYPE),), changed)

    rig.v0.script("GET", OUTPUT, lambda seen: rig.v0.output(since(seen)), ends)
    reader = await rig.running()
    rig.commit((4, 5))
    tokens, said = await until_failed(reader)
    assert tokens == [4, 5] and "failed" in said
    assert not rig.router.sessions


@pytest.mark.parametrize("read", [0, 2, 3])
async def test_a_fence_of_somebody_else_s_ends_the_text_after_all_that_was_committed(
    rig: RouterRig, read: int
) -> None:
    """D-F1: a fenced verifier gives nothing out, so the rest is read from the log."""

    def up_to_the_fence(seen: Seen) -> Answer:
        if since(seen) < read:
            return rig.v0.output(since(seen), tokens=rig.v0.tokens[since(seen) : read])
        return StaleEpoch("the log was fenced")

    rig.v0.always("GET", OUTPUT, up_to_the_fence)
    reader = await rig.running()
    rig.commit((4, 5, 6))
    rig.append(FenceRecord(epoch=2))
    tokens, said = await until_failed(reader)
    assert tokens == [4, 5, 6] == from_log(rig)
    assert "fence in its commit log, at epoch 2" in said and "sdcpctl log fence" in said
    assert "lost" not in said and not rig.router.sessions and rig.v1.seen == []


async def test_finish_is_no_failure(rig: RouterRig) -> None:
    """R-5.2-5: 4 alone is the end that a client hopes for."""
    reader = await rig.running()
    rig.commit((4, 5), finish=Action.FINISH)
    assert await texts(reader) == [4, 5]


@pytest.mark.parametrize(
    "answer",
    [NotFound(""), StaleEpoch(""), SessionClosed("")],
    ids=["404", "stale-epoch", "410"],
)
async def test_a_verifier_that_lost_the_session_is_replaced(rig: RouterRig, answer: Any) -> None:
    """R-6.9-16, R-6.7-9, D-G9: the reader tells the router, and goes on with the same from."""
    rig.v0.script("GET", OUTPUT, lambda seen: rig.v0.output(since(seen)))
    rig.v0.always("GET", OUTPUT, answer)
    reader = await rig.running()
    await rig.report("v1")
    rig.commit((4, 5))
    reading = asyncio.ensure_future(texts(reader))
    await rig.v1.next("PUT", ".*/drafter")
    rig.v1.commit((6,), finish=Action.FINISH)
    assert await reading == [4, 5, 6]
    assert [since(seen) for seen in rig.v1.seen if seen.method == "GET"] == [2]


async def test_a_silent_verifier_is_replaced_after_three_attempts(rig: RouterRig) -> None:
    """R-6.9-16, D-F1: connections that break, three times over."""
    rig.v0.always("GET", OUTPUT, DROP)
    reader = await rig.running()
    await rig.report("v1")
    rig.commit((4, 5))
    reading = asyncio.ensure_future(texts(reader))
    await rig.v1.next("PUT", ".*/drafter")
    rig.v1.commit((6,), finish=Action.FINISH)
    assert await reading == [4, 5, 6]
    assert len([seen for seen in rig.v0.seen if seen.method == "GET"]) == 3
