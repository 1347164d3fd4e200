"""Section 6.2 and the drafter's share of 6.3 to 6.5: a real drafter, a scripted verifier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from sdcpd.protocol.codec import encode_tokens
from sdcpd.protocol.digest import extend
from sdcpd.protocol.drafter import DrafterSettings
from sdcpd.protocol.messages import Action, Proposal
from sdcpd.protocol.problems import Unavailable
from sdcpd.transport.http import Response
from tests.kit.drafter_rig import PROMPT, DrafterRig, drafter_rig
from tests.kit.scripted import Answer, Seen, quiet
from tests.kit.vectors import VECTORS
from tests.kit.verifier_machine import SESSION, contract


@pytest.fixture
async def rig() -> AsyncIterator[DrafterRig]:
    async with drafter_rig() as made:
        yield made


def drafted(rig: DrafterRig, committed: tuple[int, ...], count: int) -> list[int]:
    """What a fresh drafter proposes after these committed tokens."""
    return rig.model.text((*PROMPT, *committed), count)


async def stopped(rig: DrafterRig) -> None:
    """Wait until the drafter has given the session up, and see that it proposed nothing more."""
    async with asyncio.timeout(10):
        while rig.drafter.sessions:
            await asyncio.sleep(0)
    assert rig.verifier.unread("POST", "proposals") == 0


async def test_m_is_held_to_the_last_verdicts_m_cap(rig: DrafterRig) -> None:
    """R-6.2-1: m_cap 1 gives one token, and a larger one later gives more again."""
    rig.answers(rig.keeps(4, 1, m_cap=1), rig.keeps(1, 1, m_cap=3), rig.keeps(3, 1, m_cap=64))
    lengths = [len((await rig.begin()).as_(Proposal).tokens)]
    lengths += [len((await rig.proposal()).tokens) for _ in range(3)]
    assert lengths == [4, 1, 3, 8]  # m_max is 8


@pytest.mark.parametrize("m_init", [1, 2, 3, 4, 64])
async def test_before_the_first_verdict_m_init_is_the_limit(rig: DrafterRig, m_init: int) -> None:
    """R-6.2-1, R-6.2-2: of each assignment, also of a later one; and never more than m_max."""
    rig.answers(rig.keeps(0, 9, m_cap=8))
    first = (await rig.begin(m_init=m_init)).as_(Proposal)
    await rig.proposal()
    rig.verifier.commit((4, 4))
    assert await rig.assign(m_init=2) is None
    third = await rig.proposal()
    assert len(first.tokens) == min(m_init, 8)
    assert (len(third.tokens), third.round) == (2, 3)


async def test_base_and_digest_are_those_of_the_last_verdict(rig: DrafterRig) -> None:
    """R-6.2-5, R-6.2-6, R-6.2-11, R-3-2: from the assignment's prefix on, one round at a time."""
    rig.holds((9, 8, 7, 6, 5), round_=7)
    rig.answers(rig.keeps(1, 30), rig.keeps(0, 31))
    start = rig.verifier.digest
    assert await rig.assign() is None
    first, second, third = [await rig.proposal() for _ in range(3)]
    assert (first.round, first.base, first.base_digest) == (8, 5, start)
    emitted = (first.tokens[0], 30)
    assert (second.round, second.base) == (9, 7)
    assert second.base_digest == extend(start, emitted)
    assert (third.round, third.base) == (10, 8)
    assert third.base_digest == extend(start, (*emitted, 31)) == rig.verifier.digest


async def test_drafting_goes_on_from_what_was_accepted_alone(rig: DrafterRig) -> None:
    """R-6.2-8, R-6.3-37: after a partial verdict, what a fresh drafter would propose."""
    rig.answers(rig.keeps(2, 30), rig.keeps(0, 3), rig.keeps(4, 17))
    committed: tuple[int, ...] = ()
    proposals = [(await rig.begin()).as_(Proposal)]
    for kept, extra in ((2, 30), (0, 3), (4, 17)):
        committed += (*proposals[-1].tokens[:kept], extra)
        proposals.append(await rig.proposal())
        assert proposals[-1].base == len(committed)
        assert list(proposals[-1].tokens) == drafted(rig, committed, len(proposals[-1].tokens))


async def test_one_proposal_is_outstanding(rig: DrafterRig) -> None:
    """R-6.2-7: while the answer is held, neither the next round nor a repetition is sent."""
    held = asyncio.Event()

    async def slow(seen: Seen) -> Answer:
        await held.wait()
        return rig.verifier.accepts(seen.as_(Proposal), 1, 2)

    rig.answers(slow)
    await rig.begin()
    assert await rig.assign() is None  # neither does the assignment repeated begin a second one
    for _ in range(500):
        await asyncio.sleep(0)
    assert rig.verifier.unread("POST", "proposals") == 0
    held.set()
    assert (await rig.proposal()).round == 2


async def test_a_slow_drafter_proposes_fewer_tokens(rig: DrafterRig) -> None:
    """R-6.2-9, R-6.2-10: with a second a token the shortest proposal commits most a second."""
    rig.engine.token_s = 1.0
    rig.answers(rig.keeps(4, 1, m_cap=8), rig.keeps(1, 1, m_cap=8))
    assert len((await rig.begin()).as_(Proposal).tokens) == 4  # nothing was measured yet
    assert [len((await rig.proposal()).tokens) for _ in range(2)] == [1, 1]


async def test_a_fixed_m_is_held_to_the_limits_too() -> None:
    """R-6.2-1, R-6.2-2: the operator's choice lifts neither m_init nor m_cap."""
    async with drafter_rig(machine=DrafterSettings(m=3)) as rig:
        rig.answers(rig.keeps(2, 1, m_cap=1), rig.keeps(1, 1, m_cap=8))
        lengths = [len((await rig.begin(m_init=2)).as_(Proposal).tokens)]
        lengths += [len((await rig.proposal()).tokens) for _ in range(2)]
        assert lengths == [2, 1, 3]


async def test_no_more_is_drafted_than_can_be_committed(rig: DrafterRig) -> None:
    """R-6.2-1, D-D6: near max_new the proposal is as long as what is left."""
    rig.contract = contract(max_new=5)
    rig.answers(rig.keeps(2, 1))
    assert len((await rig.begin()).as_(Proposal).tokens) == 4
    assert len((await rig.proposal()).tokens) == 2


@pytest.mark.parametrize("action", [Action.CONTINUE, Action.REDUCE])
async def test_continue_and_reduce_go_on(rig: DrafterRig, action: Action) -> None:
    """R-6.5.2-13: the next round, within m_cap."""
    rig.answers(rig.keeps(0, 5, action=action, m_cap=2))
    await rig.begin()
    second = await rig.proposal()
    assert second.round == 2 and len(second.tokens) == 2


@pytest.mark.parametrize("action", [Action.SWITCH, Action.SELF_DECODE, Action.FINISH, Action.FAIL])
async def test_the_other_actions_end_the_session(rig: DrafterRig, action: Action) -> None:
    """R-6.5.2-16, R-6.5.2-29: no further proposal, and nothing that the router need hear of."""
    rig.answers(rig.keeps(1, 5, action=action))
    await rig.begin()
    await stopped(rig)
    await quiet()
    assert rig.drafter.status().dropped is None and rig.engine.forgotten == [SESSION]
    assert len(rig.verifier.seen) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"digest": bytes(32)},
        {"round": 2},
        {"epoch": 2},
        {"session": bytes(16)},
        {"committed": 9},
        {"emitted": (1, 1)},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
async def test_a_verdict_that_disagrees_is_not_followed(
    rig: DrafterRig, wrong: dict[str, object]
) -> None:
    """R-6.9-20, D-D5: the session is dropped, and the router is told."""
    rig.answers(rig.keeps(1, 5, **wrong))
    await rig.begin()
    await stopped(rig)
    assert rig.drafter.status().dropped == (rig.verifier.session,)


async def test_assignments_are_checked(rig: DrafterRig) -> None:
    """R-6.2-12, R-9-3, R-4.1-27, R-4.1-4, D-N8: each with its own answer, none with a proposal."""
    rig.holds()
    bad = [
        ({"who": "verifier"}, 403, None),
        ({"who": "front_end"}, 403, None),
        ({"digest": bytes(32)}, 422, None),
        ({"drafter": rig.verifier.base}, 422, None),
        ({"m_init": 0}, 422, None),
        ({"committed": 1, "round": 1}, 422, None),
        ({"contract": contract(drafters=(bytes(32),))}, 422, "sdcp-bad-contract"),
        ({"contract": contract(rule=7)}, 422, "sdcp-bad-contract"),
        ({"contract": contract(rule=200)}, 422, "sdcp-bad-contract"),
        ({"contract": contract(m_max=0)}, 422, "sdcp-bad-contract"),
    ]
    for changes, status, suffix in bad:
        problem = await rig.assign(**changes)  # type: ignore[arg-type]
        assert problem is not None, changes
        assert (problem.status, problem.suffix) == (status, suffix), changes
    assert (await rig.post(b"\xa1\x61x\x01")).status == 400
    assert rig.verifier.unread("POST", "proposals") == 0 and not rig.drafter.sessions


async def test_another_tokenizer_is_refused(rig: DrafterRig) -> None:
    """R-6.2-12, D-C5: by a drafter that knows its own."""
    rig.engine.tokenizer = b"\x01" * 32
    rig.holds()
    problem = await rig.assign()
    assert problem is not None and problem.suffix == "sdcp-bad-contract"
    rig.contract = contract(tokenizer=b"\x01" * 32)
    assert (await rig.begin()).as_(Proposal).round == 1


async def test_epochs_of_assignments(rig: DrafterRig) -> None:
    """R-6.2-12, D-N9: a lower epoch is refused; a higher one replaces what was being done."""
    rig.verifier.epoch = 2
    late = asyncio.Event()

    async def answers_late(seen: Seen) -> Answer:
        await late.wait()
        return rig.verifier.accepts(seen.as_(Proposal), 1, 2)

    rig.answers(answers_late)
    await rig.begin()
    problem = await rig.assign(epoch=1)
    assert problem is not None and (problem.status, problem.suffix) == (409, "sdcp-stale-epoch")
    assert await rig.assign(epoch=3) is None
    proposal = await rig.proposal()
    assert (proposal.epoch, proposal.round) == (3, 1)
    late.set()
    await quiet()
    assert rig.verifier.unread("POST", "proposals") == 0  # the old epoch's session is no more


@pytest.mark.parametrize("entry", VECTORS["uris"]["base_uri_equal"], ids=lambda e: e["b"])
async def test_an_assignment_may_write_the_drafter_in_another_way(
    rig: DrafterRig, entry: dict[str, Any]
) -> None:
    """R-6.2-12, D-N8, D-H5: 422 unless it names the instance that this drafter is."""
    for own, named in ((entry["a"], entry["b"]), (entry["b"], entry["a"])):
        rig.drafter.config = replace(rig.drafter.config, base_uri=own)
        rig.holds()
        problem = await rig.assign(drafter=named)
        assert (problem is None) is entry["equal"] is bool(rig.drafter.sessions)
        assert problem is None or problem.status == 422


async def test_a_delayed_duplicate_does_not_rewind(rig: DrafterRig) -> None:
    """R-6.2-13, D-N9: neither an earlier round's nor this round's."""
    rig.answers(*[rig.keeps(1, 5)] * 3)
    await rig.begin()
    for _ in range(2):
        await rig.proposal()
    fourth = await rig.proposal()
    assert await rig.assign(m_init=1) is None  # of the round that the last verdict was for
    rig.holds()  # the digest of nothing committed
    assert await rig.assign(round=0, committed=0) is None
    assert fourth.round == 4
    for _ in range(100):
        await asyncio.sleep(0)
    assert rig.verifier.unread("POST", "proposals") == 0
    assert rig.drafter.sessions[0].machine.round == 3


@pytest.mark.parametrize("action", [Action.SWITCH, Action.SELF_DECODE])
async def test_after_a_stop_an_equal_round_is_a_new_assignment(
    rig: DrafterRig, action: Action
) -> None:
    """R-6.2-13, D-R4: the same drafter named again at the round of its switch proposes again."""
    rig.answers(rig.keeps(1, 5, action=action))
    await rig.begin()
    await stopped(rig)
    assert await rig.assign() is None
    again = await rig.proposal()
    assert (again.round, again.base) == (2, 2)


async def test_committed_tokens_come_from_the_object(rig: DrafterRig) -> None:
    """R-6.2-11, D-N7: and then no output is asked for."""
    rig.holds((9, 8, 7), round_=2)
    rig.router.mlc.objects["s/tokens"] = encode_tokens((9, 8, 7))
    assert await rig.assign(committed_tokens=rig.router.base + "objects/s/tokens") is None
    proposal = await rig.proposal()
    assert list(proposal.tokens) == drafted(rig, (9, 8, 7), 4)
    assert rig.verifier.unread("GET", ".*") == 0


@pytest.mark.parametrize("reference", [None, "gone", "short", "untrusted"])
async def test_committed_tokens_come_from_output_otherwise(
    rig: DrafterRig, reference: str | None
) -> None:
    """R-6.2-14, D-N7: without the object, or with one that is not the tokens; in parts if need be."""
    rig.holds((9, 8, 7), round_=2)
    rig.router.mlc.objects["s/short"] = encode_tokens((9, 8))
    base = "https://elsewhere.test/" if reference == "untrusted" else rig.router.base
    rig.verifier.script(
        "GET", "sessions/.*/output", lambda _: rig.verifier.output(0, tokens=(9, 8))
    )
    changes = {"committed_tokens": f"{base}objects/s/{reference}"} if reference else {}
    assert await rig.assign(**changes) is None
    reads = [await rig.verifier.next("GET", "sessions/.*/output") for _ in range(2)]
    assert [seen.request.query for seen in reads] == ["from=0", "from=2"]
    peer = reads[0].request.peer
    assert peer is not None and rig.base in peer.uris
    assert list((await rig.proposal()).tokens) == drafted(rig, (9, 8, 7), 4)


async def test_output_that_cannot_be_had_now_is_503(rig: DrafterRig) -> None:
    """R-6.2-12, D-N8: the router may try again; nothing is begun."""
    rig.holds((9, 8, 7), round_=2)
    output = "sessions/.*/output"
    rig.verifier.script("GET", output, Unavailable("not now"), Response(200, (), b"\xff"))
    rig.verifier.script("GET", output, lambda _: rig.verifier.output(0, tokens=()))
    statuses = []
    for _ in range(3):
        problem = await rig.assign()
        statuses.append(problem.status if problem else 204)
    assert statuses == [503, 503, 422] and not rig.drafter.sessions
    assert await rig.assign() is None
    assert (await rig.proposal()).base == 3
