"""The router's machine when things go wrong twice, at once, or for ever."""

from __future__ import annotations

import pytest

from sdcpd.protocol.commit_log import FenceRecord
from sdcpd.protocol.instances import NAMES_MAX, Board
from sdcpd.protocol.messages import Action, InstanceRole, Sampling, SessionState, State
from sdcpd.protocol.problems import ProblemDocument
from sdcpd.protocol.router import OPENING_TROUBLE_S, TROUBLE_S, Phase
from sdcpd.protocol.router_io import (
    Answered,
    AssignDrafter,
    ChangePolicy,
    Closed,
    DrafterLost,
    EventArrived,
    FenceConflict,
    Moved,
    NameAtVerifier,
    Named,
    Open,
    PostPolicy,
    Progress,
    ReadLog,
    Refused,
    Save,
    TokensWritten,
    VerifierAppeared,
    VerifierLost,
    Woken,
    WriteFence,
    WriteTokens,
)
from tests.kit.verifier_machine import SESSION, contract
from tests.protocol.test_router import D0, D1, DIGEST, V0, V1, Rig, record, status


def until_closed(rig: Rig, problem: ProblemDocument, *, seconds: float) -> Closed | None:
    """Every call to a verifier is refused, the log always answers; how it ends."""
    while rig.now < seconds:
        for action in rig.last:
            if isinstance(action, Closed):
                return action
        calls = [call for call in rig.last if not isinstance(call, Named)]
        asked = calls[0] if calls else None
        match asked:
            case None:
                rig.now = rig.machine.deadline() or seconds
                rig.feed(Woken())
            case ReadLog():
                epoch = rig.machine.epoch
                rig.log(*([FenceRecord(epoch=epoch)] if epoch > 1 else []))
            case WriteFence():
                rig.feed(Answered(asked.call))
            case _:
                rig.feed(Refused(rig.machine._call, problem))
    return None


@pytest.mark.parametrize("code", [429, 500, 502, 503])
def test_a_session_that_cannot_be_opened_is_refused_to_the_client(code: int) -> None:
    """D-R3: errors without end are told after a bound; whatever the code, no hot loop."""
    rig = Rig()
    closed = until_closed(rig, ProblemDocument(status=code), seconds=1000.0)
    assert closed is not None and closed.failed is not None and closed.failed.status == 503
    assert rig.now <= OPENING_TROUBLE_S + 1.0


def test_500_is_a_failure_of_the_verifier() -> None:
    """D-F1: three times 500, and the session goes elsewhere."""
    rig = Rig(verifiers=2)
    for _ in range(3):
        rig.feed(Refused(rig.machine._call, ProblemDocument(status=500)))
        rig.now += 1.0
        rig.feed(Woken())
    assert rig.machine.phase is Phase.READING


def test_a_verifier_that_always_finds_the_base_stale_is_not_hammered() -> None:
    """Each try is a fence in the log: they have a pace and an end."""
    rig = Rig()
    stale = ProblemDocument(status=409, suffix="sdcp-stale-base")
    assert until_closed(rig, stale, seconds=1000.0) is not None
    assert rig.machine.epoch < 60


def test_a_served_session_has_a_longer_bound() -> None:
    rig = Rig()
    rig.run()
    rig.board.report(V0, status(V0, InstanceRole.VERIFIER, ttl_ms=0), now=0.0)
    rig.feed(VerifierLost(V0, "withdrawn"))
    closed = until_closed(rig, ProblemDocument(status=503), seconds=10_000.0)
    assert closed is not None and TROUBLE_S <= rig.now < TROUBLE_S + 2


def test_a_reader_of_the_old_place_does_not_disturb_a_failover() -> None:
    """D-F2: the verifier that restarted is opened once, however long the prompt takes it."""
    rig = Rig()
    rig.run()
    rig.feed(VerifierLost(V0, "404", 1))
    reading = rig.machine._call
    assert rig.feed(VerifierLost(V0, "404", 1)) == [] and rig.machine._call == reading
    rig.log()
    assert rig.feed(VerifierLost(V0, "404", 1)) == []
    rig.feed(Answered(rig.machine._call))
    rig.log(FenceRecord(epoch=2))
    opened = rig.only(Open)
    assert isinstance(opened, Open) and opened.verifier == V0
    assert rig.feed(VerifierLost(V0, "404", 1)) == []
    rig.answer()
    rig.feed(VerifierLost(V0, "404", 2))
    rig.only(ReadLog)


def test_an_event_that_overtakes_the_answer_to_opening() -> None:
    """A short text may be over before the answer: its place must be known to read it."""
    rig = Rig(drafters=0)
    rig.feed(EventArrived(Action.FINISH, 4))
    assert [type(a) for a in rig.last] == [Save, Moved, Closed]
    rig = Rig()
    assert rig.feed(EventArrived(Action.SELF_DECODE, 4)) == []
    rig.answer(round_=4, committed=4)
    rig.only(Moved)
    rig.only(NameAtVerifier)


def test_never_assigned_to_a_drafter_that_expired_meanwhile() -> None:
    """R-6.1-22"""
    rig = Rig(drafters=2)
    rig.answer()
    name = rig.only(NameAtVerifier)
    assert isinstance(name, NameAtVerifier) and name.message.drafter == D0
    rig.board.report(D0, status(D0, InstanceRole.DRAFTER, ttl_ms=0), now=0.0)
    rig.feed(DrafterLost(D0))
    rig.answer()
    assert not [a for a in rig.last if isinstance(a, AssignDrafter)]
    name = rig.only(NameAtVerifier)
    assert isinstance(name, NameAtVerifier) and name.message.drafter == D1


def test_committed_tokens_that_cannot_be_written_are_written_later() -> None:
    """R-6.9-6: a session with commits is never opened without resume."""
    rig = Rig(verifiers=2)
    rig.run()
    rig.feed(VerifierLost(V0, "gone"))
    rig.log(record(1))
    rig.feed(Answered(rig.machine._call))
    rig.log(record(1), FenceRecord(epoch=2))
    rig.feed(TokensWritten(rig.machine._call, None))
    assert rig.last == []
    rig.now += 1.0
    rig.feed(Woken())
    rig.only(WriteTokens)
    rig.feed(TokensWritten(rig.machine._call, "https://r/objects/t"))
    opened = rig.only(Open)
    assert isinstance(opened, Open) and opened.message.resume is not None


def test_of_two_routers_that_fence_at_once_one_lets_go() -> None:
    """D-M9, D-F1: the epoch that stands in the log is not the one that we wrote."""
    rig = Rig(verifiers=2)
    rig.run()
    rig.feed(VerifierLost(V0, "gone"))
    rig.log()
    rig.feed(FenceConflict(rig.machine._call))
    rig.log(FenceRecord(epoch=2))
    assert isinstance(rig.last[-1], Closed)


def test_a_full_verifier_is_passed_over() -> None:
    """429 at opening: another verifier of the same model is asked, with the same epoch."""
    rig = Rig(verifiers=2)
    rig.feed(Refused(rig.machine._call, ProblemDocument(status=429)))
    rig.now = 1.0
    rig.feed(Woken())
    opened = rig.only(Open)
    assert isinstance(opened, Open) and opened.verifier == V1 and opened.message.epoch == 1


def test_failover_goes_to_a_verifier_of_the_same_model() -> None:
    board = Board({})
    board.report(V0, status(V0, InstanceRole.VERIFIER, model=bytes(32)), now=0.0)
    board.report(V1, status(V1, InstanceRole.VERIFIER, model=b"\x01" * 32, load=0), now=0.0)
    assert board.choose_verifier(now=0.0, exclude={V0}, target=bytes(32)) == V0
    assert board.choose_verifier(now=0.0, exclude={V0}) == V1


def test_drafters_that_drop_the_session_at_once_are_named_less_and_less() -> None:
    """D-R9: between the tries the verifier's own decoding has its turn."""
    rig = Rig(drafters=2, switch_grace_s=2.0)
    waits = []
    rig.answer()
    for _ in range(12):
        name = rig.only(NameAtVerifier)
        assert isinstance(name, NameAtVerifier)
        rig.answer()
        rig.feed(Answered(rig.machine._call))
        rig.feed(DrafterLost(name.message.drafter))
        if rig.machine.phase is Phase.WAITING:
            due = rig.machine.deadline()
            assert due is not None
            waits.append(due - rig.now)
            rig.now = due
            rig.feed(Woken())
    assert waits == sorted(waits) and waits[0] >= 2.0 and waits[-1] == 16.0
    rig.feed(Progress(10, False))
    rig.answer(round_=3, committed=10)
    rig.feed(TokensWritten(rig.machine._call, None))
    rig.feed(Answered(rig.machine._call))
    rig.feed(Progress(12, False))
    rig.feed(DrafterLost(rig.machine.drafter or ""))
    rig.only(NameAtVerifier)


def test_a_policy_that_comes_while_a_drafter_is_named_is_posted() -> None:
    """R-6.6-1"""
    rig = Rig()
    rig.answer()
    rig.feed(ChangePolicy(Sampling(temperature_milli=500)))
    rig.answer()
    rig.feed(Answered(rig.machine._call))
    rig.only(PostPolicy)


def test_no_timer_of_the_grace_outside_of_waiting() -> None:
    rig = Rig()
    rig.run()
    rig.feed(EventArrived(Action.SWITCH, 4))
    rig.feed(ChangePolicy(Sampling(temperature_milli=500)))
    assert rig.machine.phase is Phase.POLICY and rig.machine.deadline() is None


def test_an_ended_session_keeps_nothing_large() -> None:
    rig = Rig()
    rig.run()
    rig.feed(EventArrived(Action.FINISH, 4))
    assert rig.machine.closed and rig.machine.prompt == ()


def test_a_drafter_counts_from_its_choice_on() -> None:
    """D-R6: a burst between two reports spreads, although naming takes two round trips."""
    rig = Rig(drafters=2)
    rig.answer()
    for action in rig.last:
        if isinstance(action, Named) and action.drafter:
            rig.board.assigned(action.drafter, InstanceRole.DRAFTER, 1)
    assert rig.board.choose_drafter(contract(), now=0.0) == D1


def test_process_names_are_bounded_and_live_by_their_own_ttl() -> None:
    """D-R2"""
    board = Board({})
    for i in range(100):
        board.report(D0, status(f"d0.{i}", InstanceRole.DRAFTER), now=float(i))
    assert len(board.all()[0].names) == NAMES_MAX
    board.report(D0, status("d0.98", InstanceRole.DRAFTER), now=100.0)
    # One of the two alive goes; a third that was never seen withdraws.
    for name in ("d0.98", "d0.unknown"):
        assert not board.report(D0, status(name, InstanceRole.DRAFTER, ttl_ms=0), now=101.0)
        assert board.fresh(D0, InstanceRole.DRAFTER, now=101.0)
    board.report(D0, status("d0.99", InstanceRole.DRAFTER, ttl_ms=0), now=102.0)
    assert not board.fresh(D0, InstanceRole.DRAFTER, now=102.0)


def test_a_verifier_that_never_likes_the_values_of_put_is_not_hammered() -> None:
    """D-N1: repeated with its own values, but not in a hot loop."""
    rig = Rig()
    rig.answer()
    stale = ProblemDocument(status=409, suffix="sdcp-stale-base", session_state=rig.machine._state)
    for _ in range(3):
        rig.feed(Refused(rig.machine._call, stale))
        rig.only(NameAtVerifier)
    assert rig.feed(Refused(rig.machine._call, stale)) == []
    rig.now = 1.0
    rig.feed(Woken())
    rig.only(NameAtVerifier)


def test_a_drafter_that_is_not_ready_is_not_chosen() -> None:
    """D-Z5"""
    board = Board({})
    board.report(D0, status(D0, InstanceRole.DRAFTER, ready=False), now=0.0)
    assert board.choose_drafter(contract(), now=0.0) is None


@pytest.mark.parametrize(
    ("vocab", "state", "committed", "ended"),
    [
        (99, State.FINISHED, 7, Action.FINISH),
        (99, State.FAILED, 7, Action.FAIL),
        (99, State.ASSIGNED, 7, None),
        (99, State.ASSIGNED, 64, Action.FINISH),
        (None, State.FINISHED, 7, None),  # another make of verifier may mean anything by it
        (None, None, 64, Action.FINISH),
    ],
)
def test_a_session_that_was_opened_again_at_its_end_is_over(
    vocab: int | None, state: State | None, committed: int, ended: Action | None
) -> None:
    """R-6.9-14: nobody would tell, and the router would hold it for ever (D-O11, D-O14)."""
    rig = Rig(drafters=0)
    rig.board.report(V0, status(V0, InstanceRole.VERIFIER, vocab=vocab), now=0.0)
    found = SessionState(
        session=SESSION, epoch=1, round=5, committed=committed, digest=DIGEST, state=state
    )
    rig.feed(Answered(rig.machine._call, found))
    assert rig.machine.closed is (ended is not None)
    assert rig.machine.ended is ended
    rig.only(Moved)


def test_a_verifier_that_appears_is_asked_for_the_sessions_of_the_router_before() -> None:
    """R-6.9-16, D-F5: it may have been restarted between the two; an identical opening tells."""
    rig = Rig()
    rig.run()
    drafter = rig.machine.drafter
    assert rig.feed(VerifierAppeared(V1)) == []
    rig.feed(VerifierAppeared(V0))
    opened = rig.only(Open)
    assert isinstance(opened, Open) and opened.message.epoch == 1
    rig.answer(round_=3, committed=5)
    named = rig.only(NameAtVerifier)
    assert isinstance(named, NameAtVerifier) and named.message.drafter == drafter
    rig = Rig()
    rig.run()
    rig.feed(VerifierAppeared(V0))
    found = SessionState(session=SESSION, epoch=1, round=3, committed=5, digest=DIGEST)
    problem = ProblemDocument(status=409, suffix="sdcp-stale-base", session_state=found)
    rig.feed(Refused(rig.machine._call, problem))
    rig.only(ReadLog)
