"""Section 6.3 at the verifier's machine: order of checks, idempotence, commit."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.protocol.messages import Rule, SessionState, State
from sdcpd.protocol.problems import Problem, StaleBase, StaleEpoch, Unavailable
from sdcpd.protocol.verifier_io import Abandon, Append, AppendStalled, ScoreRound
from tests.kit.verifier_machine import D0, D1, Driver, contract, verdict

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent.parent / "vectors.json").read_text())
ORDER = [c for c in VECTORS["proposal_order"]["cases"] if "unknown session" not in c["conditions"]]


def rows_for(driver: Driver, tokens: list[int], *, zero: bool) -> bytes:
    """Uniform rows, or rows that forbid the proposed tokens."""
    vocab = driver.model.vocab
    out = b""
    for token in tokens:
        row = [1 / (vocab - zero)] * vocab
        if zero:
            row[token % vocab] = 0.0
        out += struct.pack(f"<{vocab}f", *row)
    return out


@pytest.mark.parametrize("case", ORDER, ids=lambda c: " + ".join(c["conditions"]) or "none")
def test_order_of_checks(case: dict[str, Any]) -> None:
    """R-6.3-1, D-P1: every condition listed holds at once."""
    conditions = set(case["conditions"])
    rule2 = any(c.startswith("rule 2") for c in conditions)
    closed = "session finished or failed" in conditions
    suspended = "suspended after switch or self_decode" in conditions
    recorded = "verdict recorded for the round" in conditions
    driver = Driver(
        contract(
            rule=Rule.SPECULATIVE_SAMPLING if rule2 else Rule.GREEDY,
            low_rounds=1,
            fallback=(5,) if closed else (2,),
        )
    )
    driver.name(D0)
    first = None
    if recorded or closed or suspended:
        wrong = driver.bad(1)
        if rule2:
            # Certain of a token that the target finds improbable: it is rejected.
            p = driver.model.scores(driver.machine.tokens)
            wrong = [p.index(min(p))]
            row = [0.0] * driver.model.vocab
            row[wrong[0]] = 1.0
            driver.rows["first"] = struct.pack(f"<{driver.model.vocab}f", *row)
        if not (closed or suspended):
            first = verdict(
                driver.propose(driver.good(2), q_rows="first")
                if not rule2
                else driver.propose(wrong, q_rows="first")
            )
        else:
            first = verdict(driver.propose(wrong, q_rows="first"))
    if rule2 and suspended is False and closed is False and recorded:
        driver.name(D0, m_init=3)
    changes: dict[str, Any] = {}
    tokens = driver.good(2) if not driver.machine.closed else [1, 2]
    if recorded:
        changes["round"] = 1
    if "wrong round" in conditions:
        changes["round"] = 9
    if "wrong epoch" in conditions:
        changes["epoch"] = 2
    if "wrong base" in conditions:
        changes["base"] = driver.machine.committed + 1
    if "wrong base_digest" in conditions:
        changes["base_digest"] = bytes(32)
    if "body names another drafter" in conditions:
        changes["drafter"] = D1
    if "M above m_cap" in conditions:
        tokens = tokens + [3] * 8
    if "token >= V" in conditions:
        tokens = [driver.model.vocab, *tokens[1:]]
    if rule2 and "rule 2: no q_rows" not in conditions:
        changes["q_rows"] = "rows"
        if "rule 2: rows not obtainable" not in conditions:
            zero = "rule 2: q of a proposed token is zero" in conditions
            driver.rows["rows"] = rows_for(driver, tokens, zero=zero)
    if "fenced" in conditions:
        driver.machine._lose("fenced", driver.now)
        driver.machine._actions.clear()
    client = D1 if "not the assigned drafter" in conditions else D0
    before = (driver.machine.round, len(driver.log), driver.machine._control)
    answer = driver.propose(tokens, client=client, **changes)
    if case.get("answer") == "new verdict":
        assert verdict(answer).round == 1
    elif case.get("answer") == "recorded verdict":
        assert answer is first
    else:
        assert isinstance(answer, Problem)
        assert (answer.status, answer.type) == (case["status"], case["type"])
    if case.get("answer") != "new verdict":
        assert (driver.machine.round, len(driver.log), driver.machine._control) == before  # D-P9


def test_fresh_session_reports_round_0() -> None:
    """R-2-2, R-2-3, R-6.1-4, R-6.1-15"""
    driver = Driver()
    state = driver.machine.state_message()
    assert (state.round, state.committed, state.state) == (0, 0, State.WAITING)
    assert isinstance(driver.propose([1]), Problem)
    driver.name()
    answer = driver.propose([1], round=0)
    assert isinstance(answer, StaleBase) and answer.session_state == driver.machine.state_message()


def test_verdict_chains() -> None:
    """R-4.2-2, R-5.2-10, R-5.2-11, R-6.3-32, R-6.5.1-1"""
    driver = Driver()
    driver.name()
    for _ in range(12):
        base = driver.machine.committed
        found = verdict(driver.propose(driver.good(2) + driver.bad(1)))
        assert 0 <= found.accepted <= 3
        assert found.committed == base + len(found.emitted)
        assert found.digest == driver.machine.chain.at(found.committed)
        assert 1 <= found.m_cap <= 8
    assert [r.round for r in driver.log] == list(range(1, 13))
    assert tuple(t for r in driver.log for t in r.emitted) == tuple(driver.machine.tokens[3:])


def test_verdicts_of_all_rounds_are_kept() -> None:
    """R-6.3-7, R-6.3-8, R-6.3-9"""
    driver = Driver()
    driver.name()
    verdicts = [driver.propose(driver.good(2)) for _ in range(5)]
    assert driver.propose([9, 9, 9, 9, 9, 9, 9, 9, 9, 9], round=2, base=77) is verdicts[1]
    assert len(driver.log) == 5


def test_same_round_waits_for_the_verdict() -> None:
    """R-6.3-10, R-6.3-11, D-P3: identical or not, one commit and one verdict."""
    driver = Driver(hold={ScoreRound})
    driver.name()
    tokens = driver.good(3)
    assert driver.propose(tokens) is None
    assert driver.propose(tokens) is None
    assert driver.propose(driver.bad(2)) is None
    driver.release()
    assert driver.answers[2] is driver.answers[3] is driver.answers[4]
    assert len(driver.log) == 1


def test_put_drafter_waits_for_the_round() -> None:
    """R-6.1-20, D-N3: the old drafter gets its verdict, the answer includes that round."""
    driver = Driver(hold={ScoreRound})
    driver.name(D0)
    driver.propose(driver.good(2))
    assert driver.name(D1) is None
    driver.release()
    assert verdict(driver.answers[2]).round == 1
    state = driver.answers[3]
    assert isinstance(state, SessionState) and state.round == 1
    assert isinstance(driver.propose([1], client=D0), Problem)
    driver.hold.clear()
    assert verdict(driver.propose(driver.good(1), client=D1))


def test_nothing_is_visible_before_the_append() -> None:
    """R-6.3-30, R-6.3-31, R-6.7-4, R-6.7-10"""
    driver = Driver(hold={Append})
    driver.name()
    assert driver.propose(driver.good(2)) is None
    assert driver.machine.output(0) is None
    driver.release()
    found = verdict(driver.answers[2])
    output = driver.machine.output(0)
    assert output is not None and output.tokens == found.emitted
    assert not output.final and output.finish is None


def test_fence_discards_the_round() -> None:
    """R-6.3-33, D-P18: nothing is released, and every later request is refused."""
    driver = Driver(hold={Append})
    driver.name()
    driver.propose(driver.good(2))
    driver.fenced = True
    driver.release()
    assert isinstance(driver.answers[2], StaleEpoch)
    assert driver.log == [] and driver.machine.committed == 0
    with pytest.raises(StaleEpoch):
        driver.machine.output(0)
    assert isinstance(driver.propose([1]), StaleEpoch)
    assert isinstance(driver.name(D1), StaleEpoch)
    assert isinstance(driver.policy(5), StaleEpoch)
    assert driver.events == []


def test_unknown_append_keeps_the_result() -> None:
    """R-6.3-34, D-P16: waiting clients are told to come again, and find the same round."""
    driver = Driver(hold={Append})
    driver.name()
    driver.propose(driver.good(2))
    (append,) = driver.held
    assert isinstance(append, Append)
    driver.feed(AppendStalled(append.work))
    assert isinstance(driver.answers[2], Unavailable)
    assert isinstance(driver.propose(driver.bad(1)), Unavailable)
    driver.release()
    found = verdict(driver.propose(driver.bad(1), round=1, base=0))
    assert found.emitted == append.record.emitted


def test_wait_is_bounded() -> None:
    """D-P3: after its bound a waiting request gets 503, and the round goes on."""
    driver = Driver(hold={ScoreRound})
    driver.name()
    driver.propose(driver.good(2))
    driver.feed(Abandon(2))
    assert isinstance(driver.answers[2], Unavailable)
    driver.release()
    assert verdict(driver.propose([1], round=1)).round == 1


@pytest.mark.parametrize("case", VECTORS["output"]["cases"])
def test_output_vectors(case: dict[str, Any]) -> None:
    """R-6.7-1, R-6.7-6, R-6.7-11, D-G1 to D-G6"""
    tokens = case["committed_tokens"]
    driver = Driver(contract(max_new=999))
    machine = driver.machine
    machine.tokens += tokens
    machine.chain.append(tokens)
    if case["session"] != "open":
        machine._state = State.FINISHED if case["session"] == "finished" else State.FAILED
    output = machine.output(case["from"])
    assert (output is None) == case["waits"]
    if output is not None:
        assert list(output.tokens) == case["tokens"]
        assert (output.from_, output.final) == (case["from"], case["final"])
        assert output.finish == case.get("finish")


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.sampled_from([D0, D1])), max_size=30)
)
def test_greedy_output_is_the_targets(rounds: list[tuple[int, bool, str]]) -> None:
    """R-6.4-4, R-9-5: whatever is proposed, by whom, and however it is repeated."""
    driver = Driver(contract(max_new=40, low_rounds=2, fallback=(1, 2, 5), self_load=100))
    driver.name(D0)
    for count, good, client in rounds:
        tokens = driver.good(count) if good else driver.bad(count)
        driver.propose(tokens[:8] or [0], client=client)
        driver.propose([5], client=client, round=driver.machine.round)
    text = driver.machine.tokens[3:]
    assert text == driver.model.text((1, 2, 3), len(text))
    assert [r.round for r in driver.log] == list(range(1, len(driver.log) + 1))
