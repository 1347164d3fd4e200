"""Section 6.3, steps 1 to 4: who may propose, epochs, repeated rounds, bases and limits."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from sdcpd.protocol.codec import encode
from sdcpd.protocol.messages import Action
from sdcpd.transport.http import Response
from sdcpd.transport.loopback import LoopbackClient
from tests.kit.answers import output_of, refused, state_of, until, verdict_of
from tests.kit.cluster import peer
from tests.kit.scripted_target import GatedTarget
from tests.kit.vectors import VECTORS
from tests.kit.verifier_wire import DRAFTER, OTHER, Wire

MakeWire = Callable[..., Wire]


async def gated(make_wire: MakeWire) -> tuple[Wire, GatedTarget]:
    wire = make_wire(engine_kind=GatedTarget)
    await wire.ready()
    assert isinstance(wire.engine, GatedTarget)
    return wire, wire.engine


async def post(wire: Wire, tokens: list[int], **changes: object) -> Response:
    return await wire.send("drafter", "POST", "proposals", encode(wire.proposal(tokens, **changes)))


# ---- step 1


@pytest.mark.parametrize("who", ["router", "front_end", "other"])
async def test_another_certificate_may_not_propose(wire: Wire, who: str) -> None:
    """R-6.3-2: even with a body that is right in every respect."""
    await wire.ready()
    before = wire.snapshot()
    refused(await wire.propose(wire.good(2), who=who, drafter=DRAFTER), 403, "sdcp-not-assigned")
    assert wire.snapshot() == before
    verdict_of(await wire.propose(wire.good(2)))


async def test_the_body_names_the_assigned_drafter(wire: Wire) -> None:
    """R-6.3-3: another URI is refused, before all other checks; another way to write the same one
    is not (D-H5).
    """
    await wire.ready()
    for other in (OTHER, "https://d0.test/x/", "https://d0.test:444/", "d0"):
        refused(await wire.propose(wire.good(1), drafter=other), 403, "sdcp-not-assigned")
    found = verdict_of(await wire.propose(wire.good(1), drafter="https://D0.TEST:443"))
    for late in ({"round": 1}, {"epoch": 2}, {"base": 7}):  # even a recorded verdict is not told
        refused(await wire.propose([1], drafter=OTHER, **late), 403, "sdcp-not-assigned")
    assert verdict_of(await wire.propose([1], round=1)) == found


@pytest.mark.parametrize("entry", VECTORS["uris"]["base_uri_equal"], ids=lambda e: e["b"])
async def test_ways_to_write_a_base_uri(make_wire: MakeWire, entry: dict[str, Any]) -> None:
    """R-6.3-2, R-6.3-3, D-H5, D-I1: in the certificate, PUT drafter and the proposal, each either
    way; all three must name one instance.
    """
    spellings = (entry["a"], entry["b"])
    for certified, named, said in itertools.product(spellings, repeat=3):
        if certified == named == said:
            continue
        wire = make_wire()
        wire.clients["drafter"] = LoopbackClient(wire.network, peer("drafter", "d", certified))
        await wire.ready(drafter=named)
        answer = await wire.propose(wire.good(2), drafter=said)
        if entry["equal"]:
            verdict_of(answer)
        else:
            refused(answer, 403, "sdcp-not-assigned")
            assert wire.records() == []


async def test_assignment_comes_before_everything_else(wire: Wire) -> None:
    """R-6.3-4: an unassigned drafter learns nothing more, its own old round included."""
    await wire.ready()
    verdict_of(await wire.propose(wire.good(2)))
    answer = await wire.propose(wire.good(1), who="other", epoch=9, base=77, round=44)
    refused(answer, 403, "sdcp-not-assigned")
    state_of(await wire.name(drafter=OTHER))
    refused(await wire.propose([1], round=1), 403, "sdcp-not-assigned")
    verdict_of(await wire.propose(wire.good(1), who="other"))


# ---- step 2


@pytest.mark.parametrize("epoch", [0, 1, 3, 2**64 - 1])
async def test_any_other_epoch_is_stale(wire: Wire, epoch: int) -> None:
    """R-6.3-5: lower and higher ones alike."""
    state_of(await wire.open(epoch=2))
    state_of(await wire.name(epoch=2))
    before = wire.snapshot()
    refused(await wire.propose(wire.good(1), epoch=epoch), 409, "sdcp-stale-epoch")
    assert wire.snapshot() == before


async def test_epoch_comes_before_a_recorded_verdict(wire: Wire) -> None:
    """R-6.3-6: the repetition of a round that was answered, at another epoch."""
    await wire.ready()
    verdict_of(await wire.propose(wire.good(2)))
    refused(await wire.propose(wire.good(2), round=1, epoch=2), 409, "sdcp-stale-epoch")


# ---- step 3


async def test_a_round_sent_twice_has_one_answer(wire: Wire) -> None:
    """R-6.3-7: octet for octet the same, and one record."""
    await wire.ready()
    body = encode(wire.proposal(wire.good(3)))
    answers = [await wire.send("drafter", "POST", "proposals", body) for _ in range(3)]
    assert {answer.status for answer in answers} == {200}
    assert len({answer.body for answer in answers}) == 1
    assert len(wire.records()) == 1 and len(wire.engine.scored) == 1


async def test_every_earlier_round_is_remembered(wire: Wire) -> None:
    """R-6.3-8, R-6.3-9, R-6.3-13: with the old committed and m_cap, whatever is sent again."""
    await wire.ready()
    verdicts = [verdict_of(await wire.propose(wire.good(2))) for _ in range(6)]
    assert len({(v.committed, v.m_cap) for v in verdicts}) >= 5
    for old in verdicts:
        assert await wire.propose([9, 9], round=old.round, base=99) == old
        assert await wire.propose(wire.good(1), round=old.round) == old
        assert await wire.propose([99] * 20, round=old.round, base_digest=bytes(32)) == old
    assert len(wire.records()) == 6


@pytest.mark.parametrize("same", [True, False])
async def test_a_round_in_verification_is_waited_for(make_wire: MakeWire, same: bool) -> None:
    """R-6.3-10, R-6.3-11: identical or not, one pass, one record, one verdict for all."""
    wire, engine = await gated(make_wire)
    tokens = wire.good(3)
    first = asyncio.ensure_future(post(wire, tokens))
    await until(lambda: engine.scored)
    others = [asyncio.ensure_future(post(wire, tokens if same else [1, i])) for i in range(3)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert not any(other.done() for other in others)
    engine.gate.set()
    answers = [await task for task in (first, *others)]
    assert {answer.status for answer in answers} == {200}
    assert len({answer.body for answer in answers}) == 1
    assert len(wire.records()) == len(engine.scored) == 1
    assert wire.commits()[0].emitted[:3] == tuple(tokens)


@pytest.mark.parametrize("action", [Action.FINISH, Action.FAIL])
async def test_the_last_round_can_be_asked_for_again(make_wire: MakeWire, action: Action) -> None:
    """R-6.3-12: its verdict is kept after the end; any other round is refused."""
    members = {"max_new": 2} if action is Action.FINISH else {"low_rounds": 2, "fallback": (5,)}
    wire = make_wire(members=members)
    await wire.ready()
    first = verdict_of(await wire.propose(wire.bad(1)))
    last = verdict_of(await wire.propose(wire.bad(1)))
    assert last.action is action
    assert await wire.propose([3], round=2, base=0) == last
    assert await wire.propose([3], round=1, base=0) == first
    for changes in ({}, {"base": 0, "round": 8}, {"base_digest": bytes(32)}):
        refused(await wire.propose([1], **changes), 410, "sdcp-session-closed")


# ---- step 4


@pytest.mark.parametrize(
    "changes",
    [
        {"base": 2},
        {"base": 4},
        {"base": 0},
        {"base": 2**64 - 1},
        {"base_digest": bytes(32)},
        {"round": 3},
        {"round": 0},
        {"round": 2**64 - 1},
    ],
    ids=str,
)
async def test_a_stale_base_tells_the_present_one(wire: Wire, changes: dict[str, object]) -> None:
    """R-6.3-14, R-6.3-15, R-6.3-16: with the session-state of the moment, and nothing changed."""
    await wire.ready()
    last = verdict_of(await wire.propose(wire.good(2)))
    before = wire.snapshot()
    state = refused(
        await wire.propose(wire.good(1), **changes), 409, "sdcp-stale-base"
    ).session_state
    assert state is not None
    assert (state.epoch, state.round, state.committed, state.digest) == (
        1,
        1,
        last.committed,
        last.digest,
    )
    assert wire.snapshot() == before
    assert verdict_of(await wire.propose(wire.good(1))).round == 2


async def test_the_limit_is_told_and_consumes_nothing(wire: Wire) -> None:
    """R-6.3-17: m_cap + 1 tokens are refused, m_cap are not; a stale base comes first."""
    await wire.ready(m_init=3)
    problem = refused(await wire.propose(wire.good(4)), 422, "sdcp-limit")
    assert problem.m_cap == 3
    refused(await wire.propose(wire.good(4), base=1), 409, "sdcp-stale-base")
    found = verdict_of(await wire.propose(wire.good(3)))
    assert (found.round, found.accepted) == (1, 3)


async def test_the_limit_is_that_of_the_last_verdict(wire: Wire) -> None:
    """R-6.3-18: load that rises afterwards does not lower it; the next verdict may."""
    await wire.ready(m_init=8)
    wire.pin_load(0)
    assert verdict_of(await wire.propose(wire.good(8))).m_cap == 8
    wire.pin_load(100)
    found = verdict_of(await wire.propose(wire.good(8)))
    assert found.accepted == 8 and found.m_cap == 7
    refused(await wire.propose(wire.good(8)), 422, "sdcp-limit")
    assert verdict_of(await wire.propose(wire.good(7))).accepted == 7


async def test_the_limit_outlives_a_lower_m_init(wire: Wire) -> None:
    """R-6.3-18, D-N2: the drafter named once more may still go by the m_cap it was last told."""
    await wire.ready(m_init=7)
    assert verdict_of(await wire.propose(wire.good(1))).m_cap == 8
    state_of(await wire.name(m_init=3))
    assert verdict_of(await wire.propose(wire.good(8))).m_cap == 4
    refused(await wire.propose(wire.good(5)), 422, "sdcp-limit")


async def test_no_token_is_no_proposal(wire: Wire) -> None:
    """R-6.3-19"""
    await wire.ready()
    refused(await wire.propose([]), 400)
    assert wire.records() == [] and wire.engine.scored == []


# ---- steps 6 and 7


async def test_output_is_plain_greedy_decoding(wire: Wire) -> None:
    """R-6.3-24: p[1..M+1] are those of the committed prefix and the tokens before."""
    await wire.ready()
    for good, m in ((0, 1), (1, 3), (3, 3), (2, 4), (0, 4), (4, 4), (1, 1), (2, 3)):
        found = verdict_of(await wire.propose(wire.bad(m, good=good)))
        assert found.accepted == good and len(found.emitted) == good + 1
    tokens = output_of(await wire.output()).tokens
    assert list(tokens) == wire.model.text((1, 2, 3), len(tokens))


async def test_many_sessions_do_not_touch_each_other(make_wire: MakeWire) -> None:
    """R-6.3-25: 32 sessions with rounds side by side write what each writes alone."""
    wire = make_wire()
    names = [bytes([i]) * 16 for i in range(32)]
    prompts = {name: (i % 7, i % 5, i) for i, name in enumerate(names)}

    async def write(name: bytes) -> None:
        changes = {"session": name, "prompt": prompts[name]}
        log = f"https://r0.test/logs/{name.hex()}"
        state_of(await wire.open(commit_log=log, **changes))
        state_of(await wire.name(**changes))
        for i in range(5):
            tokens = wire.model.text(wire.served(name).machine.tokens, i % 3 + 1)
            verdict_of(await wire.propose(tokens, session=name))

    await asyncio.gather(*(write(name) for name in names))
    for name in names:
        tokens = wire.mlc.tokens(name.hex())
        assert len(tokens) == 2 + 3 + 4 + 2 + 3
        assert list(tokens) == wire.model.text(prompts[name], len(tokens))


async def test_a_failed_pass_changes_nothing(make_wire: MakeWire) -> None:
    """R-6.3-40: 500, and the same round afterwards as if it had never been sent (D-K12)."""
    wire, engine = await gated(make_wire)
    before = wire.snapshot()[:-1]
    engine.gate = None  # type: ignore[assignment]
    assert (await post(wire, wire.good(2))).status == 500
    assert wire.snapshot()[:-1] == before
    engine.gate = asyncio.Event()
    engine.gate.set()
    assert verdict_of(await wire.propose(wire.good(2))).round == 1
