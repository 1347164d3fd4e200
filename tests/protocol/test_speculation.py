"""Speculation control: Sections 6.2 and 6.5, D-K1 to D-K11, D-D6."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.protocol.messages import Action, Contract
from sdcpd.protocol.speculation import AlphaEstimate, Control, choose_m, is_low

VECTORS = json.loads((Path(__file__).parents[1] / "vectors.json").read_text())
TRACES = VECTORS["control"]["traces"]
LENGTHS = VECTORS["speculation_length"]["cases"]


def contract(**members: Any) -> Contract:
    known: dict[str, Any] = {
        "target": bytes(32),
        "tokenizer": bytes(32),
        "rule": 1,
        "m_max": 8,
        "max_new": 256,
        "stop": (),
        "low_rounds": 3,
        "fallback": (1, 2, 3, 5),
    }
    members = {k: tuple(v) if isinstance(v, list) else v for k, v in members.items()}
    return Contract(**{**known, **members})


@pytest.mark.parametrize("trace", TRACES, ids=[trace["name"] for trace in TRACES])
def test_control_traces(trace: dict[str, Any]) -> None:
    """R-6.5.2-1, R-6.5.2-2, R-6.5.2-3, R-6.5.2-4, R-6.5.2-5, R-6.5.2-6, R-6.5.2-7, R-6.5.2-8,
    R-6.5.2-10, R-6.5.2-11, R-6.5.2-12, R-6.5.2-14: every step of every trace.
    """
    terms = contract(**trace["contract"])
    control = Control().assigned(terms, trace["m_init"])
    for step in trace["steps"]:
        if "assign" in step:
            control = control.assigned(terms, step["assign"])
        elif "round" in step:
            assert is_low(step["a"], step["M"], terms.low_ratio) is step["low"]
            control, decision = control.after_round(
                terms,
                accepted=step["a"],
                proposed=step["M"],
                finished=step.get("finished", False),
                load=step["load"],
            )
            assert decision.action == step["action"]
            assert decision.round_low is step["low"]
            assert decision.low == step["verdict_low"]
        # A self-decoded period touches nothing (D-K4), so there is nothing to do for it.
        assert (control.c, control.g, control.j) == (step["c"], step["g"], step["j"])
        if step.get("m_cap") is not None:
            assert control.m_cap == step["m_cap"]


def after(control: Control, terms: Contract, **changes: Any) -> tuple[Control, Any]:
    known: dict[str, Any] = {"accepted": 0, "proposed": 1, "finished": False, "load": 0}
    return control.after_round(terms, **{**known, **changes})


def test_dk10_skipped_and_exhausted_entries_are_told() -> None:
    terms = contract(low_rounds=1, fallback=[3, 3, 1], self_load=10)
    control, decision = after(Control(m_cap=5), terms, load=11)
    assert (decision.applied, decision.skipped, decision.exhausted) == (Action.REDUCE, 2, False)
    assert (control.m_cap, control.j) == (2, 3)
    control, decision = after(control, terms, load=11)
    assert (decision.action, decision.exhausted, control.j) == (Action.FAIL, True, 3)


def test_dk2_load_lowers_m_cap_by_one_and_never_below_one() -> None:
    terms = contract()
    for accepted in (0, 1):
        control, _ = after(Control(m_cap=2), terms, accepted=accepted, lower=True)
        assert control.m_cap == 1
        control, _ = after(control, terms, accepted=accepted, lower=True)
        assert control.m_cap == 1
    control, _ = after(control, terms, accepted=1)
    assert control.m_cap == 2


def test_dk2_the_halving_is_exact_under_load() -> None:
    control, decision = after(Control(c=2, m_cap=8), contract(), lower=True)
    assert (decision.action, control.m_cap) == (Action.REDUCE, 4)


@given(
    st.integers(1, 64),
    st.integers(1, 4),
    st.integers(0, 100),
    st.lists(st.sampled_from([1, 2, 3, 5]), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 64), st.integers(0, 100), st.booleans()), max_size=30),
)
def test_control_invariants(
    m_max: int,
    low_rounds: int,
    low_ratio: int,
    fallback: list[int],
    rounds: list[tuple[int, int, bool]],
) -> None:
    """R-6.5.1-1: 1 <= m_cap <= m_max in every verdict; and the counters' own invariants."""
    terms = contract(
        m_max=m_max, low_rounds=low_rounds, low_ratio=low_ratio, fallback=fallback, self_load=50
    )
    control = Control().assigned(terms, 4)
    for accepted, load, lower in rounds:
        before, m = control, control.m_cap
        control, decision = after(
            control, terms, accepted=min(accepted, m), proposed=m, load=load, lower=lower
        )
        assert 1 <= control.m_cap <= m_max
        assert control.c < low_rounds and (control.c == 0 or control.g == 0)
        assert 0 <= control.j <= len(fallback)
        assert decision.low == control.c
        assert (decision.applied is None) is (decision.action is Action.CONTINUE)
        if decision.action is Action.SELF_DECODE:
            assert load <= 50
        if not decision.round_low:
            assert control.m_cap <= before.m_cap + 1


@pytest.mark.parametrize("case", LENGTHS, ids=str)
def test_dd6_speculation_length(case: dict[str, Any]) -> None:
    """R-6.2-9: the rule that Section 6.2 recommends."""
    assert choose_m(case["alpha"], case["t_d"], case["t_v"], case["limit"]) == case["M"]


def test_dd6_ties_go_to_the_smaller_m() -> None:
    assert choose_m(0.0, 0.0, 1.0, 8) == 1
    assert choose_m(1.0, 1.0, 1.0, 8) == 1


def test_alpha_starts_at_07_and_follows_the_acceptance() -> None:
    estimate = AlphaEstimate()
    assert estimate.value == pytest.approx(0.7)
    for _ in range(100):
        estimate.update(accepted=4, proposed=4)
    assert 0.99 < estimate.value <= 1.0
    for _ in range(200):
        estimate.update(accepted=0, proposed=4)
    assert 0.0 <= estimate.value < 0.05


def test_alpha_weighs_tested_tokens_and_not_rounds() -> None:
    """Of 4 tokens with the third rejected, 3 were tested: alpha goes to 2/3, not to 2/4."""
    estimate = AlphaEstimate()
    for _ in range(500):
        estimate.update(accepted=2, proposed=4)
    assert estimate.value == pytest.approx(2 / 3, abs=0.01)
