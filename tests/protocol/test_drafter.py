"""Section 6.2 and D-D1 at the drafter's machine."""

from __future__ import annotations

import pytest

from sdcpd.protocol.digest import extend
from sdcpd.protocol.drafter import DrafterSession
from sdcpd.protocol.drafter_io import (
    Drafted,
    DrafterEvent,
    DraftFailed,
    DraftTokens,
    FetchOutput,
    NoAnswer,
    OutputArrived,
    Pause,
    ProblemArrived,
    Published,
    PublishFailed,
    PublishRows,
    ReleaseRows,
    SendProposal,
    Stop,
    VerdictArrived,
    Woken,
)
from sdcpd.protocol.messages import Action, Output, SessionState
from sdcpd.protocol.problems import ProblemDocument
from tests.kit.drafter_machine import DIGEST, one, session, verdict_for
from tests.kit.verifier_machine import SESSION, contract


def proposed(
    tokens: tuple[int, ...] = (7, 8, 9), **changes: object
) -> tuple[DrafterSession, SendProposal]:
    """A machine with a proposal outstanding."""
    machine, draft = session(**changes)
    action = one(machine, Drafted(draft.work, tokens, 0.001))
    assert isinstance(action, SendProposal)
    return machine, action


def test_first_proposal_follows_the_assignment() -> None:
    """R-6.2-2, R-6.2-5, R-6.2-6, R-6.2-11"""
    machine, draft = session(round=7, committed=5, m_init=3)
    assert draft.m <= 3 and draft.base == 5
    action = one(machine, Drafted(draft.work, (7, 8), 0.001))
    assert action == SendProposal(8, 5, DIGEST, (7, 8), None)


def test_next_proposal_follows_the_verdict() -> None:
    """R-6.2-1, R-6.2-5, R-6.2-7: one at a time, base and limit as last learned."""
    machine, _ = proposed()
    found = verdict_for(machine, (7, 8, 4), m_cap=1)
    draft = one(machine, VerdictArrived(found, 0.02))
    assert isinstance(draft, DraftTokens) and (draft.m, draft.base) == (1, 3)
    action = one(machine, Drafted(draft.work, (6,), 0.001))
    assert action == SendProposal(2, 3, found.digest, (6,), None)


@pytest.mark.parametrize("action", [Action.SWITCH, Action.SELF_DECODE, Action.FINISH, Action.FAIL])
def test_stops_when_told(action: Action) -> None:
    """R-6.5.2-16, R-6.5.2-29, R-5.2-3"""
    machine, _ = proposed()
    stop = one(machine, VerdictArrived(verdict_for(machine, (7,), action=action), 0.02))
    assert isinstance(stop, Stop) and not stop.dropped
    assert machine.step(Woken(), now=9.0) == []


@pytest.mark.parametrize(
    "changes",
    [{"digest": bytes(32)}, {"round": 5}, {"epoch": 2}, {"session": bytes(16)}, {"committed": 9}],
)
def test_a_verdict_that_disagrees_ends_the_session(changes: dict[str, object]) -> None:
    """R-6.9-20, D-D5"""
    machine, _ = proposed()
    stop = one(machine, VerdictArrived(verdict_for(machine, (7, 8), **changes), 0.02))
    assert isinstance(stop, Stop) and stop.dropped


@pytest.mark.parametrize(
    ("status", "suffix", "dropped"),
    [
        (403, "sdcp-not-assigned", True),
        (409, "sdcp-stale-epoch", True),
        (410, "sdcp-session-closed", False),
        (422, "sdcp-bad-contract", True),
        (404, None, True),
        (409, None, True),
        (418, None, True),
        (400, None, True),
    ],
)
def test_problems_that_end_the_session(status: int, suffix: str | None, dropped: bool) -> None:
    """D-D1, R-5.1-12, R-7-10"""
    machine, _ = proposed()
    stop = one(machine, ProblemArrived(ProblemDocument(status=status, suffix=suffix)))
    assert isinstance(stop, Stop) and stop.dropped is dropped


@pytest.mark.parametrize(
    "event",
    [NoAnswer(), *(ProblemArrived(ProblemDocument(status=s)) for s in (429, 500, 503, 599))],
)
def test_repeats_the_identical_proposal(event: DrafterEvent) -> None:
    """R-6.9-17, R-5.1-12: same content, later each time, and not for ever."""
    machine, first = proposed()
    pauses = []
    for _ in range(4):
        pause = one(machine, event)
        assert isinstance(pause, Pause)
        pauses.append(pause.seconds)
        assert one(machine, Woken()) == first
    assert pauses == sorted(pauses) and len(set(pauses)) == 4
    stop = one(machine, event, now=1000.0)
    assert isinstance(stop, Stop) and stop.dropped


def test_limit_cuts_the_same_tokens() -> None:
    """D-D1 sdcp-limit: the round again with fewer tokens; at one token it is over."""
    machine, _ = proposed((7, 8, 9))
    limit = ProblemDocument(status=422, suffix="sdcp-limit", m_cap=2)
    assert one(machine, ProblemArrived(limit)) == SendProposal(1, 0, DIGEST, (7, 8), None)
    half = ProblemDocument(status=422, suffix="sdcp-limit")
    assert one(machine, ProblemArrived(half)) == SendProposal(1, 0, DIGEST, (7,), None)
    assert isinstance(one(machine, ProblemArrived(half)), Stop)


def test_bad_proposal_is_drafted_anew_once() -> None:
    """D-D1 sdcp-bad-proposal"""
    machine, _ = proposed()
    bad = ProblemArrived(ProblemDocument(status=422, suffix="sdcp-bad-proposal"))
    draft = one(machine, bad)
    assert isinstance(draft, DraftTokens)
    one(machine, Drafted(draft.work, (3,), 0.001))
    assert isinstance(one(machine, bad), Stop)


def test_rows_are_published_before_the_proposal_and_again_when_lost() -> None:
    """R-6.2-3, R-6.2-4, D-D1 sdcp-q-unavailable: new name, same tokens, for 10 s."""
    machine, draft = session()
    publish = one(machine, Drafted(draft.work, (7, 8), 0.001, rows=True))
    assert isinstance(publish, PublishRows) and publish.count == 2
    first = one(machine, Published(publish.work, "ref-1", 0.0))
    assert isinstance(first, SendProposal) and first.q_rows == "ref-1"
    gone = ProblemArrived(ProblemDocument(status=409, suffix="sdcp-q-unavailable"))
    assert isinstance(one(machine, gone), Pause)
    publish = one(machine, Woken())
    assert isinstance(publish, PublishRows)
    again = one(machine, Published(publish.work, "ref-2", 0.0))
    assert isinstance(again, SendProposal) and (again.tokens, again.q_rows) == ((7, 8), "ref-2")
    found = verdict_for(machine, (7, 8, 1))
    release, draft2 = machine.step(VerdictArrived(found, 0.02), now=0.0)
    assert isinstance(release, ReleaseRows) and isinstance(draft2, DraftTokens)


def test_the_time_to_publish_a_row_is_time_to_draft_a_token() -> None:
    """R-6.2-10: with a cache that takes 50 ms a row, fewer tokens pay; without rows nothing."""
    lengths = []
    for row_s in (0.0, 0.05, 1.0):
        machine, draft = session(m_init=4)
        publish = one(machine, Drafted(draft.work, (7, 8, 9, 6), 0.001, rows=True))
        assert isinstance(publish, PublishRows)
        one(machine, Published(publish.work, "ref", 4 * row_s))
        found = verdict_for(machine, (7, 8, 9, 6, 1), m_cap=8)
        next_draft = machine.step(VerdictArrived(found, 0.05), now=0.0)[-1]
        assert isinstance(next_draft, DraftTokens)
        lengths.append(next_draft.m)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 8 and lengths[1] < 4 and lengths[2] == 1


def test_rows_that_cannot_be_written_end_the_session() -> None:
    machine, draft = session()
    publish = one(machine, Drafted(draft.work, (7,), 0.001, rows=True))
    assert isinstance(publish, PublishRows)
    assert isinstance(one(machine, PublishFailed(publish.work, "full")), Pause)
    publish = one(machine, Woken())
    assert isinstance(publish, PublishRows)
    actions = machine.step(PublishFailed(publish.work, "full"), now=11.0)
    assert isinstance(actions[-1], Stop)


def state(committed: int, digest: bytes, **changes: int) -> SessionState:
    return SessionState(
        session=SESSION,
        epoch=changes.get("epoch", 1),
        round=changes.get("round", 3),
        committed=committed,
        digest=digest,
    )


def test_resynchronises_from_output() -> None:
    """R-6.9-19, D-D2: reads what it missed, checks the digest, goes on at the next round."""
    machine, _ = proposed()
    tokens = (9, 8, 7, 6)
    stale = ProblemDocument(
        status=409, suffix="sdcp-stale-base", session_state=state(4, extend(DIGEST, tokens))
    )
    assert one(machine, ProblemArrived(stale)) == FetchOutput(0)

    def output(from_: int, part: tuple[int, ...]) -> OutputArrived:
        return OutputArrived(
            Output(session=SESSION, epoch=1, from_=from_, tokens=part, final=False)
        )

    assert one(machine, output(0, tokens[:2])) == FetchOutput(2)
    draft = one(machine, output(2, (7, 6, 5)))
    assert isinstance(draft, DraftTokens) and draft.base == 4
    action = one(machine, Drafted(draft.work, (1,), 0.001))
    assert action == SendProposal(4, 4, extend(DIGEST, tokens), (1,), None)


@pytest.mark.parametrize(
    "wrong", [None, state(4, DIGEST, epoch=2), state(0, bytes(32))], ids=["none", "epoch", "digest"]
)
def test_does_not_resynchronise_with_what_disagrees(wrong: SessionState | None) -> None:
    """D-D2, R-6.9-20"""
    machine, _ = proposed()
    stale = ProblemDocument(status=409, suffix="sdcp-stale-base", session_state=wrong)
    assert isinstance(one(machine, ProblemArrived(stale)), Stop)


def test_at_most_three_resynchronisations_in_a_row() -> None:
    machine, _ = proposed()
    stale = ProblemDocument(status=409, suffix="sdcp-stale-base", session_state=state(0, DIGEST))
    for _ in range(3):
        draft = one(machine, ProblemArrived(stale))
        assert isinstance(draft, DraftTokens)
        one(machine, Drafted(draft.work, (1,), 0.001))
    assert isinstance(one(machine, ProblemArrived(stale)), Stop)


def test_a_draft_engine_that_fails_gives_the_session_up() -> None:
    machine, draft = session()
    stop = one(machine, DraftFailed(draft.work, "out of memory"))
    assert isinstance(stop, Stop) and stop.dropped and "out of memory" in stop.reason


def test_near_the_end_no_more_than_needed_is_drafted() -> None:
    """D-D6"""
    _, draft = session(contract=contract(max_new=2), m_init=4)
    assert draft.m <= 2
