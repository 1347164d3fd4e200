"""Sections 6.5 and 6.6 at the verifier's machine: escalation, self-decoding, policies."""

from __future__ import annotations

import pytest

from sdcpd.protocol.messages import Action, Rule, SessionState, State
from sdcpd.protocol.problems import (
    LimitExceeded,
    NotAssigned,
    Problem,
    SessionClosed,
    StaleBase,
)
from sdcpd.protocol.verifier_io import Cancel, ScoreFailed, ScoreRound
from sdcpd.protocol.verifier_state import VerifierSettings
from tests.kit.verifier_machine import D0, D1, Driver, contract, verdict


def state_of(answer: object) -> SessionState:
    assert isinstance(answer, SessionState), answer
    return answer


def test_ladder_reduce_then_switch_then_fail() -> None:
    """R-6.5.2-5, R-6.5.2-14, R-6.5.2-15, R-6.5.2-17, R-6.5.2-30, R-10-3"""
    driver = Driver(contract(low_rounds=1, fallback=(1, 2, 5)))
    driver.name(m_init=4)
    first = verdict(driver.propose(driver.bad(2)))
    assert (first.action, first.m_cap, first.low) == (Action.REDUCE, 2, 0)
    assert isinstance(driver.propose(driver.good(3)), LimitExceeded)
    second = verdict(driver.propose(driver.bad(2)))
    assert second.action is Action.SWITCH
    assert driver.events[-1].kind is Action.SWITCH
    assert (driver.events[-1].committed, driver.events[-1].digest) == (
        second.committed,
        second.digest,
    )
    assert driver.propose([0], round=second.round) is second
    assert isinstance(driver.propose(driver.good(1)), NotAssigned)
    driver.name(D1)
    third = verdict(driver.propose(driver.bad(1), client=D1))
    assert third.action is Action.FAIL and len(third.emitted) == 1
    assert isinstance(driver.propose([1], client=D1), SessionClosed)
    output = driver.machine.output(0)
    assert output is not None and output.final and output.finish is Action.FAIL
    assert len(output.tokens) == 3
    assert driver.events[-1].kind is Action.FAIL


def test_counters_persist_over_a_change_of_drafter() -> None:
    """R-6.5.2-10, D-K5: two low rounds, another drafter, one low round."""
    driver = Driver(contract(low_rounds=3, fallback=(1, 5)))
    driver.name(D0)
    lows = [verdict(driver.propose(driver.bad(1))).low for _ in range(2)]
    driver.name(D1)
    third = verdict(driver.propose(driver.bad(1), client=D1))
    assert (lows, third.low, third.action) == ([1, 2], 0, Action.REDUCE)


@pytest.mark.parametrize(
    ("load", "self_load", "action"),
    [(40, 40, Action.SELF_DECODE), (41, 40, Action.SWITCH), (0, None, Action.SWITCH)],
)
def test_self_decode_only_when_permitted(load: int, self_load: int | None, action: Action) -> None:
    """R-6.5.2-6, R-6.5.2-19"""
    driver = Driver(
        contract(low_rounds=1, fallback=(3, 2, 5), self_load=self_load, self_max=2), load=load
    )
    driver.name()
    assert verdict(driver.propose(driver.bad(1))).action is action


def test_self_decoding_period() -> None:
    """R-6.5.2-20, R-6.5.2-22, R-6.5.2-24, R-6.5.2-25, R-6.5.2-26, R-6.5.2-27: one token a round
    and record.
    """
    driver = Driver(contract(low_rounds=1, fallback=(3, 5), self_load=50, self_max=5))
    driver.name()
    control = driver.machine._control
    assert verdict(driver.propose(driver.bad(1))).round == 1
    assert [len(r.emitted) for r in driver.log[1:]] == [1] * 5
    assert [r.round for r in driver.log] == [1, 2, 3, 4, 5, 6]
    assert driver.machine.tokens[3:] == driver.model.text((1, 2, 3), 6)
    assert [e.kind for e in driver.events] == [Action.SELF_DECODE]
    state = driver.machine.state_message()
    assert (driver.events[0].committed, driver.events[0].digest) == (6, state.digest)
    after = driver.machine._control
    assert (after.c, after.g, after.j, after.m_cap) == (0, 0, 1, control.m_cap)
    assert isinstance(driver.propose(driver.good(1)), NotAssigned)
    assert state_of(driver.name()).round == 6
    assert isinstance(driver.propose([0], round=4), StaleBase)
    assert verdict(driver.propose(driver.good(2))).round == 7


def test_load_ends_the_period() -> None:
    """R-6.5.2-23"""
    driver = Driver(contract(low_rounds=1, fallback=(3, 5), self_load=50), hold={ScoreRound})
    driver.name()
    driver.propose(driver.bad(1))
    driver.release()
    driver.release()
    driver.load = 51
    driver.release()
    assert driver.events[-1].kind is Action.SELF_DECODE
    assert driver.machine.state_message().state is State.WAITING


def test_put_ends_the_period() -> None:
    """R-6.5.2-31: a proposal is refused, a new assignment ends it without an event."""
    driver = Driver(contract(low_rounds=1, fallback=(3, 5), self_load=50), hold={ScoreRound})
    driver.name()
    driver.propose(driver.bad(1))
    driver.release()
    assert isinstance(driver.propose(driver.good(1)), NotAssigned)
    assert driver.name(D1) is None
    driver.release()
    state = state_of(driver.answers[driver.requests])
    assert state.state is State.ASSIGNED and driver.events == []
    driver.hold.clear()
    assert verdict(driver.propose(driver.good(1), client=D1)).round == state.round + 1


def test_finish_takes_precedence() -> None:
    """R-6.5.2-12, R-6.5.2-28, R-6.3-27, R-6.3-28, R-6.3-29"""
    driver = Driver(contract(low_rounds=1, max_new=1, fallback=(2, 5)))
    driver.name()
    found = verdict(driver.propose(driver.bad(1)))
    assert (found.action, found.low, len(found.emitted)) == (Action.FINISH, 1, 1)
    text = Driver().model.text((1, 2, 3), 3)
    stopped = Driver(contract(stop=(text[1],)))
    stopped.name()
    found = verdict(stopped.propose(text))
    assert (found.accepted, found.emitted, found.action) == (3, tuple(text[:2]), Action.FINISH)
    full = Driver(contract(max_new=2))
    full.name()
    found = verdict(full.propose(text))
    assert (found.accepted, found.emitted, found.action) == (3, tuple(text[:2]), Action.FINISH)


def test_max_new_0_finishes_at_once() -> None:
    """R-4.1-6, D-C3"""
    driver = Driver(contract(max_new=0))
    output = driver.machine.output(0)
    assert output is not None and output.final and output.finish is Action.FINISH
    assert isinstance(driver.name(), SessionClosed)
    assert isinstance(driver.propose([1]), NotAssigned)


def test_without_a_drafter_the_verifier_decodes_alone() -> None:
    """R-8-4, D-R5: after its time, to the end, and again after each period with self_max."""
    driver = Driver(contract(self_load=100, max_new=12))
    assert driver.machine.deadline() == 100.5
    driver.tick(0.4)
    assert driver.log == []
    driver.tick(0.1)
    assert driver.machine.tokens[3:] == driver.model.text((1, 2, 3), 12)
    assert driver.machine.closed and [e.kind for e in driver.events] == [Action.FINISH]
    some = Driver(contract(self_load=100, self_max=5, max_new=12))
    for _ in range(3):
        some.tick(0.5)
    assert some.machine.closed
    assert [e.kind for e in some.events] == [3, 3, Action.FINISH]
    never = Driver(contract(self_load=100), settings=VerifierSettings(None, None))
    never.tick(600)
    assert never.log == []


def test_silent_drafter_is_not_waited_for() -> None:
    """D-R9: the verifier goes on; the drafter's stale proposal ends the period, its next counts."""
    driver = Driver(contract(self_load=100), hold={ScoreRound})
    driver.name()
    assert driver.machine.deadline() == 103.0
    driver.tick(3.0)
    driver.release()
    driver.release()
    late = driver.propose([0, 0], round=1, base=0)
    assert late is None
    driver.release()
    answer = driver.answers[driver.requests]
    assert isinstance(answer, StaleBase) and answer.session_state is not None
    assert driver.events == []
    driver.hold.clear()
    assert verdict(driver.propose(driver.good(2))).round == answer.session_state.round + 1


def test_m_init_and_repeated_assignments() -> None:
    """R-6.1-17, R-6.1-18, D-N2"""
    driver = Driver()
    driver.name(m_init=2)
    assert isinstance(driver.propose(driver.good(3)), LimitExceeded)
    assert verdict(driver.propose(driver.good(2))).m_cap == 3
    driver.name(m_init=2)
    assert verdict(driver.propose(driver.good(3))).accepted == 3
    driver.name(D1, m_init=1)
    assert isinstance(driver.propose(driver.good(2), client=D1), LimitExceeded)
    answer = driver.name(D1, m_init=0)
    assert isinstance(answer, Problem) and answer.status == 422


def test_policies_apply_from_their_round() -> None:
    """R-6.6-2, R-6.6-3, R-6.6-5, R-4.1-22"""
    from sdcpd.protocol.messages import Sampling

    driver = Driver(
        contract(rule=Rule.RACE, sampling=Sampling(temperature_milli=1000, seed=3), self_load=100)
    )
    driver.name()
    driver.propose(driver.good(1))
    assert isinstance(driver.policy(1, seed=5), StaleBase)
    assert isinstance(driver.policy(3), Problem)  # rule 200 needs a seed
    assert state_of(driver.policy(3, temperature_milli=0, seed=9)).round == 1
    driver.propose(driver.good(1))
    base = len(driver.machine.tokens)
    found = verdict(driver.propose(driver.good(4)))
    assert found.accepted == 4
    assert driver.machine.tokens[base:] == driver.model.text(driver.machine.tokens[:base], 5)
    assert state_of(driver.policy(3, temperature_milli=0, seed=9)).round == 3


def test_cancel_fails_at_the_round_boundary() -> None:
    """D-Z2"""
    driver = Driver(hold={ScoreRound})
    driver.name()
    driver.propose(driver.good(1))
    driver.ask(Cancel)
    assert not driver.machine.closed
    driver.release()
    assert driver.machine.closed and driver.machine.end_reason == "cancelled"
    output = driver.machine.output(0)
    assert output is not None and output.final and output.finish is Action.FAIL


def test_idle_session_is_failed() -> None:
    """D-K12"""
    driver = Driver()
    driver.tick(900)
    assert driver.machine.end_reason == "idle"
    assert driver.events[-1].kind is Action.FAIL


def test_a_context_that_is_full_fails_the_session() -> None:
    """D-K12: what was committed stays delivered, and the router is told."""
    from sdcpd.protocol.verifier_io import ScoreFailed

    driver = Driver(hold={ScoreRound})
    driver.name()
    driver.propose(driver.good(1))
    (action,) = driver.held
    assert isinstance(action, ScoreRound)
    driver.feed(ScoreFailed(action.work, "context full", fatal=True))
    answer = driver.answers[driver.requests]
    assert isinstance(answer, Problem) and answer.status == 500
    output = driver.machine.output(0)
    assert output is not None and output.final and output.finish is Action.FAIL
    assert driver.events[-1].kind is Action.FAIL


def test_the_same_assignment_again_does_not_end_a_period() -> None:
    """D-N2: a repeated PUT changes nothing; D-R9's period ends by a new assignment only."""
    driver = Driver(contract(self_load=100), hold={ScoreRound})
    driver.name()
    driver.tick(3.0)
    for _ in range(3):
        committed = driver.machine.committed
        driver.name()
        driver.release()
        assert isinstance(driver.answers[driver.requests], SessionState)
        assert driver.machine.committed == committed + 1 and driver.machine.busy
    driver.name(D1)
    driver.release()
    assert not driver.machine.busy and driver.machine.drafter == D1


def test_self_decoding_at_once_that_is_not_permitted_is_not_asked_for_all_the_time() -> None:
    """D-R5, D-Z6: with self_decode_after 0 a busy or broken engine must not be hammered."""
    driver = Driver(contract(self_load=50), settings=VerifierSettings(0.0, None), load=90)
    driver.tick(0.0)
    due = driver.machine.deadline()
    assert driver.log == [] and due is not None and due > driver.now
    driver.load = 0
    driver.hold = {ScoreRound}
    driver.tick(due - driver.now)
    (score,) = driver.held
    assert isinstance(score, ScoreRound)
    driver.feed(ScoreFailed(score.work, "the device is gone"))
    due = driver.machine.deadline()
    assert due is not None and due > driver.now
    assert driver.machine.state_message().state == State.WAITING
