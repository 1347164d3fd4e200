"""Section 6.2 and D-D4 at the drafter's machine: a proposal prepared while the verdict is awaited."""

from __future__ import annotations

import random

import pytest

from sdcpd.protocol.drafter import DrafterSession
from sdcpd.protocol.drafter_io import (
    Assumed,
    AssumeToken,
    Drafted,
    DrafterAction,
    DrafterEvent,
    DraftTokens,
    DropPrepared,
    NoAnswer,
    Pause,
    Prepared,
    PrepareFailed,
    PrepareTokens,
    ProblemArrived,
    Published,
    PublishRows,
    ReleaseRows,
    SendProposal,
    Stop,
    TakePrepared,
    VerdictArrived,
    Woken,
)
from sdcpd.protocol.messages import Action
from sdcpd.protocol.preparation import CHANCE_MIN, DRAFT_MIN_S, TRIALS, TRY_EVERY, Payoff, Worth
from sdcpd.protocol.problems import ProblemDocument
from tests.kit.drafter_machine import one, session, verdict_for
from tests.kit.verifier_machine import contract

TOKENS, ASSUMED, NEXT = (7, 8, 9), 4, (5, 6)


def proposed(
    tokens: tuple[int, ...] = TOKENS, **changes: object
) -> tuple[DrafterSession, DraftTokens]:
    """A machine with a proposal outstanding, and the token that it asks to assume."""
    machine, draft = session(True, **changes)
    send, assume = machine.step(Drafted(draft.work, tokens, 0.001), now=0.0)
    assert isinstance(send, SendProposal) and isinstance(assume, AssumeToken)
    return machine, assume.draft


def assumed(**changes: object) -> tuple[DrafterSession, DraftTokens]:
    """One that knows what it assumes, and what it asks to prepare."""
    machine, look = proposed(**changes)
    action = one(machine, Assumed(look.work, ASSUMED))
    assert isinstance(action, PrepareTokens)
    return machine, action.draft


def prepared(*, rows: bool = False, **changes: object) -> DrafterSession:
    """One that has all but the verdict."""
    machine, look = assumed(**changes)
    assert machine.step(Prepared(Drafted(look.work, NEXT, 0.001, rows)), now=0.0) == []
    return machine


def answered(
    machine: DrafterSession, emitted: tuple[int, ...], **changes: object
) -> list[DrafterAction]:
    return machine.step(VerdictArrived(verdict_for(machine, emitted, **changes), 0.02), now=0.0)


def test_what_is_prepared_comes_after_all_that_is_proposed() -> None:
    """R-6.2-8, D-D4: first the token assumed to follow, then the tokens after it; noise counts on."""
    machine, look = proposed(committed=3)
    assert (look.length, look.base, look.after, look.m) == (5, 6, TOKENS, 1)
    action = one(machine, Assumed(look.work, ASSUMED))
    assert isinstance(action, PrepareTokens)
    look = action.draft
    assert (look.length, look.base, look.after) == (5, 7, (*TOKENS, ASSUMED))
    assert 1 <= look.m <= 4


def test_a_right_preparation_is_the_next_proposal_at_once() -> None:
    """R-6.2-8, R-6.2-5, D-D4: after the verdict, with its base and digest."""
    machine = prepared()
    found = verdict_for(machine, (*TOKENS, ASSUMED))
    take, send, look = machine.step(VerdictArrived(found, 0.02), now=0.0)
    assert isinstance(take, TakePrepared) and isinstance(look, AssumeToken)
    assert send == SendProposal(2, 4, found.digest, NEXT, None)


@pytest.mark.parametrize(
    ("emitted", "changes"),
    [
        ((*TOKENS, ASSUMED + 1), {}),
        ((*TOKENS[:2], ASSUMED), {}),
        ((*TOKENS[:2], ASSUMED), {"accepted": 3}),
        ((ASSUMED,), {}),
        ((*TOKENS, ASSUMED), {"accepted": 2}),
        ((*TOKENS, ASSUMED), {"m_cap": 1}),
        ((*TOKENS, ASSUMED), {"m_cap": 0}),
    ],
    ids=["another token", "one rejected", "cut", "none", "miscounted", "m_cap 1", "m_cap 0"],
)
def test_a_wrong_preparation_is_dropped(
    emitted: tuple[int, ...], changes: dict[str, object]
) -> None:
    """R-6.2-8, R-6.2-1, D-D4: and the next proposal drafted from the verdict, within its m_cap."""
    machine = prepared()
    drop, draft = answered(machine, emitted, **changes)
    assert isinstance(drop, DropPrepared) and isinstance(draft, DraftTokens)
    assert (draft.after, draft.base) == ((), len(emitted))
    assert draft.m <= max(1, int(str(changes.get("m_cap", 4))))
    send, _ = machine.step(Drafted(draft.work, (3,), 0.001), now=0.0)
    assert isinstance(send, SendProposal) and send.tokens == (3,)


def test_a_verdict_before_anything_is_assumed_is_not_kept_waiting() -> None:
    """R-6.2-8: what has begun is no farther than a new draft; what comes of it is not looked at."""
    machine, look = proposed()
    drop, draft = answered(machine, (*TOKENS, ASSUMED))
    assert isinstance(drop, DropPrepared) and isinstance(draft, DraftTokens)
    assert machine.step(Assumed(look.work, ASSUMED), now=0.0) == []


def test_a_confirmed_preparation_is_waited_for() -> None:
    """R-6.2-8: it is the draft that would begin now, and farther."""
    machine, look = assumed()
    assert answered(machine, (*TOKENS, ASSUMED)) == []
    take, send, _ = machine.step(Prepared(Drafted(look.work, NEXT, 0.001)), now=0.0)
    assert isinstance(take, TakePrepared)
    assert isinstance(send, SendProposal) and (send.round, send.tokens) == (2, NEXT)


def test_a_wrong_one_is_dropped_before_it_is_done() -> None:
    """R-6.2-8"""
    machine, look = assumed()
    drop, draft = answered(machine, (*TOKENS, ASSUMED + 1))
    assert isinstance(drop, DropPrepared) and isinstance(draft, DraftTokens)
    assert machine.step(Prepared(Drafted(look.work, NEXT, 0.001)), now=0.0) == []


@pytest.mark.parametrize("confirmed", [False, True])
def test_an_engine_that_cannot_look_ahead_drafts_when_it_has_to(confirmed: bool) -> None:
    machine, look = assumed()
    if confirmed:
        assert answered(machine, (*TOKENS, ASSUMED)) == []
    drop, *rest = machine.step(PrepareFailed(look.work), now=0.0)
    assert isinstance(drop, DropPrepared)
    if not confirmed:
        assert rest == []
        rest = answered(machine, (*TOKENS, ASSUMED))
    (draft,) = rest
    assert isinstance(draft, DraftTokens) and draft.base == 4


def test_rows_of_what_was_prepared_are_published_after_the_verdict_alone() -> None:
    """R-6.2-3, R-6.2-4, R-6.2-8, D-D4: the leases of the round before go, and nothing else is held."""
    machine, draft = session(True)
    publish = one(machine, Drafted(draft.work, TOKENS, 0.001, rows=True))
    assert isinstance(publish, PublishRows)
    _, assume = machine.step(Published(publish.work, "ref-1", 0.0), now=0.0)
    assert isinstance(assume, AssumeToken)
    look = one(machine, Assumed(assume.draft.work, ASSUMED))
    assert isinstance(look, PrepareTokens)
    assert machine.step(Prepared(Drafted(look.draft.work, NEXT, 0.001, rows=True)), now=0.0) == []
    release, take, publish = answered(machine, (*TOKENS, ASSUMED))
    assert isinstance(release, ReleaseRows) and isinstance(take, TakePrepared)
    assert isinstance(publish, PublishRows) and (publish.round, publish.count) == (2, len(NEXT))
    send, _ = machine.step(Published(publish.work, "ref-2", 0.0), now=0.0)
    assert isinstance(send, SendProposal) and (send.tokens, send.q_rows) == (NEXT, "ref-2")


@pytest.mark.parametrize(
    "event",
    [
        NoAnswer(),
        *(
            ProblemArrived(ProblemDocument(status=status, suffix=suffix))
            for status, suffix in (
                (503, None),
                (429, None),
                (409, "sdcp-stale-base"),
                (422, "sdcp-bad-proposal"),
                (422, "sdcp-limit"),
                (410, "sdcp-session-closed"),
            )
        ),
    ],
)
def test_trouble_ends_a_preparation(event: DrafterEvent) -> None:
    """D-D1: whatever comes in place of the verdict, it is met as without one."""
    machine = prepared()
    drop, action, *_ = machine.step(event, now=0.0)
    assert isinstance(drop, DropPrepared)
    assert isinstance(action, Pause | SendProposal | DraftTokens | Stop)
    if isinstance(action, Pause):
        assert isinstance(one(machine, Woken()), SendProposal)  # and none is begun again
        assert isinstance(answered(machine, (*TOKENS, ASSUMED))[0], DraftTokens)


def test_fewer_of_the_same_tokens_have_a_preparation_of_their_own() -> None:
    machine = prepared()
    limit = ProblemDocument(status=422, suffix="sdcp-limit", m_cap=2)
    _, send, look = machine.step(ProblemArrived(limit), now=0.0)
    assert isinstance(send, SendProposal) and send.tokens == TOKENS[:2]
    assert isinstance(look, AssumeToken) and look.draft.after == TOKENS[:2]


@pytest.mark.parametrize("action", [Action.SWITCH, Action.SELF_DECODE, Action.FINISH, Action.FAIL])
def test_a_stop_ends_a_preparation(action: Action) -> None:
    """R-6.5.2-16: also a right one."""
    machine = prepared()
    drop, stop = answered(machine, (*TOKENS, ASSUMED), action=action)
    assert isinstance(drop, DropPrepared) and isinstance(stop, Stop)


@pytest.mark.parametrize(
    "ends", [{"max_new": 4}, {"stop": (TOKENS[1],)}], ids=["max_new", "a stop token"]
)
def test_nothing_is_prepared_beyond_the_end(ends: dict[str, object]) -> None:
    """D-D4: all accepted would be the last round."""
    machine, draft = session(True, contract=contract(**ends))
    assert isinstance(one(machine, Drafted(draft.work, TOKENS, 0.001)), SendProposal)
    machine, look = proposed(contract=contract(stop=(ASSUMED,)))
    assert isinstance(one(machine, Assumed(look.work, ASSUMED)), DropPrepared)


def test_near_the_end_no_more_than_needed_is_prepared() -> None:
    """D-D6"""
    _, look = assumed(contract=contract(max_new=5))
    assert look.m == 1


def test_where_it_pays() -> None:
    """Not for unlikely rounds, cheap drafts or at the cost of other sessions."""
    sure, dear = 1.0, 10 * DRAFT_MIN_S
    assert Worth(None, Payoff()).wanted(sure, 4, dear, crowded=False, now=0.0)
    for alpha, draft_s, crowded in (
        (CHANCE_MIN ** (1 / 5) - 0.01, dear, False),
        (sure, DRAFT_MIN_S / 2, False),
        (sure, dear, True),
    ):
        assert not Worth(None, Payoff()).wanted(alpha, 4, draft_s, crowded=crowded, now=0.0)
        assert Worth(True, Payoff()).wanted(alpha, 4, draft_s, crowded=crowded, now=0.0)
    assert not Worth(False, Payoff()).wanted(sure, 4, dear, crowded=False, now=0.0)


@pytest.mark.parametrize(("with_s", "without_s"), [(0.02, 0.03), (0.03, 0.02)])
def test_what_is_faster_is_done_and_the_other_tried_now_and_then(
    with_s: float, without_s: float
) -> None:
    """Where a preparation slows the verdict by more than it saves, nearly none is made."""
    payoff, noise, now, chosen = Payoff(), random.Random(1), 0.0, []
    sessions = [Worth(None, payoff) for _ in range(2)]
    for number in range(600):
        worth = sessions[number % 2]
        took_with = worth.wanted(1.0, 4, 0.01, crowded=False, now=now)
        # One session's rounds are longer than the other's, which must not matter.
        now += (with_s if took_with else without_s) * (1 + number % 2) * noise.uniform(0.7, 1.3)
        worth.drafted(now)
        chosen.append(took_with)
    assert sum(chosen[: 2 * TRIALS]) == TRIALS
    share = sum(chosen[200:]) / 400
    wanted = 1 - 1 / TRY_EVERY if with_s < without_s else 1 / TRY_EVERY
    assert abs(share - wanted) < 0.1


def test_a_round_with_trouble_is_not_measured() -> None:
    payoff = Payoff()
    worth = Worth(None, payoff)
    for now in range(100):
        worth.wanted(1.0, 4, 0.01, crowded=False, now=float(now))
        worth.spoiled()
        worth.drafted(now + 0.5)
    assert payoff._rounds == {True: 0, False: 0}


def test_the_measure_is_shared_by_the_sessions_of_a_drafter() -> None:
    payoff = Payoff()
    machine, draft = session(None, payoff)
    machine.step(Drafted(draft.work, TOKENS[:2], 0.001), now=1.0)
    drop, again = answered(machine, (TOKENS[0], ASSUMED))
    assert isinstance(drop, DropPrepared) and isinstance(again, DraftTokens)
    machine.step(Drafted(again.work, TOKENS, 0.001), now=1.5)
    assert payoff._rounds == {True: 1, False: 0}
