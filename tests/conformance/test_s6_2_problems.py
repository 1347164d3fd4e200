"""What a real drafter does with each answer to a proposal (D-D1, D-D2; 5.1, 5.2, 6.9, 7)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sdcpd.protocol.codec import MEDIA_TYPE, encode
from sdcpd.protocol.drafter import DrafterSettings
from sdcpd.protocol.messages import Proposal
from sdcpd.protocol.problems import BadProposal, LimitExceeded
from sdcpd.transport.http import Response
from tests.kit.drafter_rig import DrafterRig, drafter_rig
from tests.kit.scripted import DROP, Script, Seen, problem
from tests.kit.verifier_machine import SESSION


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DrafterRig]:
    monkeypatch.setattr("sdcpd.protocol.drafter.REPEAT_FIRST_S", 0.001)
    async with drafter_rig() as made:
        yield made


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (problem(403, "sdcp-not-assigned"), True),
        (problem(409, "sdcp-stale-epoch"), True),
        (problem(410, "sdcp-session-closed"), False),
        (problem(422, "sdcp-bad-contract"), True),
        (problem(409, "sdcp-q-unavailable"), True),  # under rule 1 there are none to write again
        (problem(404), True),
        (problem(409), True),
        (Response(409, (("content-type", "text/html"),), b"<p>conflict"), True),
        (Response(418), True),
        (Response(400), True),
        (Response(302, (("location", "https://elsewhere.test/proposals"),)), True),
        (Response(200, (("content-type", MEDIA_TYPE),), b"\xff"), True),
        (Response(204), True),
    ],
    ids=lambda v: f"{v.status}-{v.body[38:60].decode()}" if isinstance(v, Response) else "",
)
async def test_answers_that_end_the_session(rig: DrafterRig, answer: Response, told: bool) -> None:
    """R-5.1-12, R-7-10, D-D1, D-H9: by type, and by the class of the status otherwise."""
    rig.answers(answer)
    await rig.begin()
    assert await rig.dropped() is told
    assert len(rig.verifier.seen) == 1


@pytest.mark.parametrize("status", [201, 202, 203, 206, 299])
async def test_a_verdict_counts_with_any_2xx(rig: DrafterRig, status: int) -> None:
    """R-5.1-12: a status of the class of success that nobody listed is success."""

    def kept(seen: Seen) -> Response:
        verdict = rig.verifier.accepts(seen.as_(Proposal), 2, 30)
        return Response(status, (("content-type", MEDIA_TYPE),), encode(verdict))

    rig.answers(kept)
    await rig.begin()
    following = await rig.proposal()
    assert (following.round, following.base) == (2, 3)


@pytest.mark.parametrize(
    "answer",
    [
        DROP,
        problem(429),
        problem(500),
        problem(503),
        problem(503, "sdcp-unheard-of"),
        *(Response(status) for status in (502, 507, 599)),
    ],
    ids=lambda answer: str(answer.status),
)
async def test_answers_after_which_the_identical_proposal_is_repeated(
    rig: DrafterRig, answer: Script
) -> None:
    """R-6.9-17, R-5.1-12, R-7-10: octet for octet, and the session goes on without loss."""
    rig.answers(answer, answer, rig.keeps(2, 1))
    first = await rig.begin()
    again = [await rig.verifier.next("POST", "proposals") for _ in range(2)]
    assert [seen.request.body for seen in again] == [first.request.body] * 2
    following = await rig.proposal()
    assert (following.round, following.base) == (2, 3)


async def test_a_verdict_whose_answer_was_lost_is_taken_from_the_repetition(
    rig: DrafterRig,
) -> None:
    """R-6.9-17: the verifier has committed; the recorded verdict comes with the retry."""
    recorded: list[Any] = []

    def commits(seen: Seen) -> Response:
        recorded.append(rig.verifier.accepts(seen.as_(Proposal), 1, 7))
        return DROP

    rig.answers(commits, lambda _: recorded[0])
    first = (await rig.begin()).as_(Proposal)
    assert (await rig.proposal()).tokens == first.tokens
    following = await rig.proposal()
    assert (following.round, following.base, following.base_digest) == (2, 2, rig.verifier.digest)


async def test_repeating_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """D-D1: after the idle time the session is dropped."""
    monkeypatch.setattr("sdcpd.protocol.drafter.REPEAT_FIRST_S", 0.001)
    async with drafter_rig(machine=DrafterSettings(idle_s=0.02)) as rig:
        rig.verifier.always("POST", "proposals", problem(503))
        await rig.begin()
        async with asyncio.timeout(10):
            while rig.drafter.sessions:
                await asyncio.sleep(0)
        assert rig.drafter.status().dropped == (SESSION,)


async def test_a_limit_cuts_the_same_tokens(rig: DrafterRig) -> None:
    """D-D1 sdcp-limit: to m_cap, else to half; at one token it is over."""
    rig.answers(LimitExceeded("", m_cap=3), LimitExceeded(""), LimitExceeded(""))
    first = (await rig.begin()).as_(Proposal)
    second, third = await rig.proposal(), await rig.proposal()
    assert second.tokens == first.tokens[:3] and third.tokens == first.tokens[:1]
    assert {first.round, second.round, third.round} == {1}
    assert await rig.dropped()


async def test_a_bad_proposal_is_drafted_anew_once(rig: DrafterRig) -> None:
    """D-D1 sdcp-bad-proposal"""
    rig.answers(BadProposal(""), BadProposal(""))
    await rig.begin()
    assert (await rig.proposal()).round == 1
    assert await rig.dropped()


async def test_a_session_taken_up_again_is_not_reported_as_dropped(rig: DrafterRig) -> None:
    """D-D1, D-Z5: the router has named the drafter again since."""
    rig.answers(problem(404))
    await rig.begin()
    async with asyncio.timeout(10):
        while rig.drafter.sessions:
            await asyncio.sleep(0)
    assert await rig.assign() is None
    assert (await rig.proposal()).round == 1
    assert rig.drafter.status().dropped is None


@pytest.mark.parametrize("action", [6, 77, 191, 255])
async def test_an_unknown_action_is_fail(rig: DrafterRig, action: int) -> None:
    """R-5.2-3, D-E4: the tokens were committed, and nothing is proposed any more."""

    def answer(seen: Seen) -> Response:
        verdict = encode(rig.verifier.accepts(seen.as_(Proposal), 1, 4))
        changed = verdict.replace(b"\x66action\x00", b"\x66action" + _uint(action))
        assert changed != verdict
        return Response(200, (("content-type", MEDIA_TYPE),), changed)

    rig.answers(answer)
    await rig.begin()
    assert await rig.dropped() is False
    assert sum(rig.drafter.rounds.rounds.values()) == 1


def _uint(value: int) -> bytes:
    return bytes([value]) if value < 24 else bytes([0x18, value])


async def test_an_action_that_is_no_number_is_no_verdict(rig: DrafterRig) -> None:
    """R-5.2-3, D-E4: malformed, so it is not followed at all."""

    def answer(seen: Seen) -> Response:
        verdict = encode(rig.verifier.accepts(seen.as_(Proposal), 1, 4))
        return Response(200, (), verdict.replace(b"\x66action\x00", b"\x66action\x20"))

    rig.answers(answer)
    await rig.begin()
    assert await rig.dropped()
