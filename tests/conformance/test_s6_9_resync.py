"""How a real drafter gets back in step, and when it does not try (D-D2, 6.9)."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sdcpd.protocol.messages import Proposal
from sdcpd.protocol.problems import StaleBase
from sdcpd.transport.http import Response
from tests.kit.drafter_rig import PROMPT, DrafterRig, drafter_rig
from tests.kit.scripted import DROP, Script, Seen, problem


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DrafterRig]:
    monkeypatch.setattr("sdcpd.protocol.drafter.REPEAT_FIRST_S", 0.001)
    async with drafter_rig() as made:
        yield made


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
    assert await rig.dropped()
    # What can be seen to disagree at once is not asked after.
    comparable = changes.get("digest") == base64url(bytes(32))
    assert rig.verifier.unread("GET", ".*") == int(comparable)


@pytest.mark.parametrize(
    "changes",
    [{"tokens": (9, 9)}, {"from_": 1}, {"epoch": 2}, {"tokens": ()}],
    ids=lambda changes: next(iter(changes)),
)
async def test_does_not_follow_output_that_disagrees(
    rig: DrafterRig, changes: dict[str, Any]
) -> None:
    """R-6.9-20: it must go on where it was asked to, and lead to the digest of the state."""
    rig.answers(moves_on(rig, (9, 8), base64url))
    members = {"from_": 0, "tokens": (9, 8), **changes}
    rig.verifier.script("GET", ".*/output", lambda _: rig.verifier.output(**members))
    await rig.begin()
    assert await rig.dropped()


async def test_more_output_than_the_state_tells_is_left(rig: DrafterRig) -> None:
    """D-D2: the verifier has moved on since; the state is what the drafter arrives at."""
    rig.answers(moves_on(rig, (9, 8), base64url))
    rig.verifier.script("GET", ".*/output", lambda _: rig.verifier.output(0, tokens=(9, 8, 7)))
    await rig.begin()
    following = await rig.proposal()
    assert (following.round, following.base) == (2, 2)
    assert following.base_digest == rig.verifier.digest


@pytest.mark.parametrize("refusal", [problem(403), problem(404), problem(410)])
async def test_output_that_is_refused_ends_it(rig: DrafterRig, refusal: Response) -> None:
    """D-D2: there is nothing to go on from."""
    rig.answers(moves_on(rig, (9, 8), base64url))
    rig.verifier.script("GET", ".*/output", refusal)
    await rig.begin()
    assert await rig.dropped()


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
    """R-6.9-19, D-D2: and a verdict in between begins the count anew."""
    again = [lambda _: stale(rig)] * 3
    rig.answers(*again, rig.keeps(1, 4), *again, lambda _: stale(rig))
    await rig.begin()
    for _ in range(7):
        await rig.proposal()
    assert await rig.dropped()


async def test_a_state_less_stale_base_ends_it(rig: DrafterRig) -> None:
    """D-D2: without session_state there is nothing to arrive at."""
    rig.answers(StaleBase(""))
    await rig.begin()
    assert await rig.dropped()
