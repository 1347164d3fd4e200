"""What a real drafter does with each answer to a proposal (D-D1, D-D2; 5.1, 5.2, 6.9, 7)."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sdcpd.protocol.codec import MEDIA_TYPE, encode
from sdcpd.protocol.drafter import DrafterSettings
from sdcpd.protocol.messages import Proposal
from sdcpd.protocol.problems import TYPE_PREFIX, BadProposal, LimitExceeded, StaleBase
from sdcpd.transport.http import Response
from tests.kit.drafter_rig import PROMPT, DrafterRig, drafter_rig
from tests.kit.scripted import DROP, Script, Seen
from tests.kit.verifier_machine import SESSION


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DrafterRig]:
    monkeypatch.setattr("sdcpd.protocol.drafter.REPEAT_FIRST_S", 0.001)
    async with drafter_rig() as made:
        yield made


def problem(status: int, suffix: str | None = None, **members: Any) -> Response:
    """An error answer; `suffix` None sends a type that nobody registered."""
    kind = TYPE_PREFIX + suffix if suffix else "https://verifier.example/private"
    document = {"type": kind, "title": "x", "status": status, **members}
    octets = json.dumps(document).encode()
    return Response(status, (("content-type", "application/problem+json"),), octets)


async def dropped(rig: DrafterRig) -> bool:
    """Wait until the session is given up; whether the router will hear of it."""
    async with asyncio.timeout(10):
        while rig.drafter.sessions:
            await asyncio.sleep(0)
    assert rig.verifier.unread("POST", "proposals") == 0
    return rig.drafter.status().dropped == (SESSION,)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (problem(403, "sdcp-not-assigned"), True),
        (problem(409, "sdcp-stale-epoch"), True),
        (problem(410, "sdcp-session-closed"), False),
        (problem(422, "sdcp-bad-contract"), True),
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
    assert await dropped(rig) is told
    assert len(rig.verifier.seen) == 1


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
    assert await dropped(rig)


async def test_a_bad_proposal_is_drafted_anew_once(rig: DrafterRig) -> None:
    """D-D1 sdcp-bad-proposal"""
    rig.answers(BadProposal(""), BadProposal(""))
    await rig.begin()
    assert (await rig.proposal()).round == 1
    assert await dropped(rig)


def hexadecimal(octets: bytes) -> str:
    return octets.hex()


def base64url(octets: bytes) -> str:
    return base64.urlsafe_b64encode(octets).rstrip(b"=").decode()


def padded(octets: bytes) -> str:
    return base64.b64encode(octets).decode()


def stale(rig: DrafterRig, written: Any = base64url, **changes: Any) -> Response:
    """What a verifier that is further on answers."""
    state = rig.verifier.state()
    members = {
        "session": written(state.session),
        "epoch": state.epoch,
        "round": state.round,
        "committed": state.committed,
        "digest": written(state.digest),
        **changes,
    }
    return problem(409, "sdcp-stale-base", session_state=members)


def moves_on(rig: DrafterRig, tokens: tuple[int, ...], written: Any, **changes: Any) -> Script:
    def answer(_: Seen) -> Response:
        rig.verifier.commit(tokens)
        return stale(rig, written, **changes)

    return answer


@pytest.mark.parametrize("written", [base64url, padded, hexadecimal])
async def test_resynchronises_from_output(rig: DrafterRig, written: Any) -> None:
    """R-6.9-19, D-D2, D-H10: whatever form the octets have; output from its own n on, in parts."""
    rig.answers(rig.keeps(1, 4), moves_on(rig, (9, 8, 7), written))
    rig.verifier.script("GET", ".*/output", lambda _: rig.verifier.output(2, tokens=(9,)))
    first = (await rig.begin()).as_(Proposal)
    await rig.proposal()
    third = await rig.proposal()
    committed = (first.tokens[0], 4, 9, 8, 7)
    assert (third.round, third.base) == (3, 5)
    assert third.base_digest == rig.verifier.digest
    assert list(third.tokens) == rig.model.text((*PROMPT, *committed), len(third.tokens))
    reads = [seen for seen in rig.verifier.seen if seen.method == "GET"]
    assert [seen.request.query for seen in reads] == ["from=2", "from=3"]


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": 2},
        {"committed": 1},
        {"digest": base64url(bytes(32))},
        {"digest": "?"},
        {"committed": -1},
    ],
    ids=str,
)
async def test_does_not_follow_a_state_that_disagrees(
    rig: DrafterRig, changes: dict[str, Any]
) -> None:
    """R-6.9-20, D-D2: another epoch, fewer tokens than it knows, or another digest."""
    rig.answers(rig.keeps(1, 4), moves_on(rig, (9, 8), base64url, **changes))
    await rig.begin()
    await rig.proposal()
    assert await dropped(rig)


async def test_does_not_follow_output_that_disagrees(rig: DrafterRig) -> None:
    """R-6.9-20: the tokens read must lead to the digest of the state."""
    rig.answers(moves_on(rig, (9, 8), base64url))
    rig.verifier.script("GET", ".*/output", lambda _: rig.verifier.output(0, tokens=(9, 9)))
    await rig.begin()
    assert await dropped(rig)


@pytest.mark.parametrize("refusal", [problem(403), problem(404), problem(410)])
async def test_output_that_is_refused_ends_it(rig: DrafterRig, refusal: Response) -> None:
    """D-D2: there is nothing to go on from."""
    rig.answers(moves_on(rig, (9, 8), base64url))
    rig.verifier.script("GET", ".*/output", refusal)
    await rig.begin()
    assert await dropped(rig)


async def test_output_that_cannot_be_had_now_is_asked_for_again(rig: DrafterRig) -> None:
    """D-D1, D-D2: 503 and a lost answer are no reason to give up."""
    rig.answers(moves_on(rig, (9, 8), base64url))
    rig.verifier.script("GET", ".*/output", problem(503), DROP)
    await rig.begin()
    assert (await rig.proposal()).base == 2


async def test_the_same_base_with_another_round_is_only_a_round(rig: DrafterRig) -> None:
    """D-D2: nothing is missing, so nothing is read; the next round follows the state's."""
    rig.answers(lambda _: stale(rig, round=6))
    await rig.begin()
    assert (await rig.proposal()).round == 7
    assert rig.verifier.unread("GET", ".*") == 0


async def test_at_most_three_resynchronisations_in_a_row(rig: DrafterRig) -> None:
    """D-D2: and a verdict in between begins the count anew."""
    again = [lambda _: stale(rig)] * 3
    rig.answers(*again, rig.keeps(1, 4), *again, lambda _: stale(rig))
    await rig.begin()
    for _ in range(7):
        await rig.proposal()
    assert await dropped(rig)


async def test_a_state_less_stale_base_ends_it(rig: DrafterRig) -> None:
    """D-D2: without session_state there is nothing to arrive at."""
    rig.answers(StaleBase(""))
    await rig.begin()
    assert await dropped(rig)


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
    assert await dropped(rig) is False
    assert rig.drafter.counts["rounds"] == 1


def _uint(value: int) -> bytes:
    return bytes([value]) if value < 24 else bytes([0x18, value])


async def test_an_action_that_is_no_number_is_no_verdict(rig: DrafterRig) -> None:
    """R-5.2-3, D-E4: malformed, so it is not followed at all."""

    def answer(seen: Seen) -> Response:
        verdict = encode(rig.verifier.accepts(seen.as_(Proposal), 1, 4))
        return Response(200, (), verdict.replace(b"\x66action\x00", b"\x66action\x20"))

    rig.answers(answer)
    await rig.begin()
    assert await dropped(rig)
