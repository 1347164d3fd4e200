"""Sampling policy updates: Section 6.6, D-Y1 to D-Y5, D-Z7."""

import json
from pathlib import Path
from typing import Any

import pytest

from sdcpd.protocol.limits import POLICIES_MAX
from sdcpd.protocol.messages import Contract, Policy, Sampling, SessionState
from sdcpd.protocol.policy import PolicyTable
from sdcpd.protocol.problems import Malformed, StaleBase, TooManyRequests

CASES = json.loads((Path(__file__).parents[1] / "vectors.json").read_text())["policy"]["cases"]


def table(sampling: dict[str, int] | None, rule: int = 2) -> PolicyTable:
    return PolicyTable(
        Contract(
            target=bytes(32),
            tokenizer=bytes(32),
            rule=rule,
            m_max=8,
            max_new=9,
            stop=(),
            low_rounds=3,
            fallback=(5,),
            sampling=None if sampling is None else Sampling(**sampling),
        )
    )


def policy(from_round: int, **sampling: int) -> Policy:
    return Policy(session=bytes(16), from_round=from_round, sampling=Sampling(**sampling))


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_policy_vectors(case: dict[str, Any]) -> None:
    """R-6.6-2, R-6.6-3, R-6.6-4, R-6.6-5: which are refused, and which profile each round has."""
    policies = table(case["contract_sampling"])
    for step in case["policies"]:
        message = policy(step["from_round"], **step["sampling"])
        if step["status"] == 200:
            policies.accept(message, step["after_round"])
        else:
            with pytest.raises(StaleBase):
                policies.accept(message, step["after_round"])
    profiles = [policies.profile(round_) for round_ in range(1, 7)]
    assert profiles == [Sampling(**s) for s in case["profile_of_rounds_1_to_6"]]


def test_dy2_the_problem_tells_the_current_round() -> None:
    state = SessionState(session=bytes(16), epoch=1, round=3, committed=4, digest=bytes(32))
    with pytest.raises(StaleBase) as raised:
        table({}).accept(policy(3), 3, state=state)
    assert raised.value.session_state == state


def test_dy5_a_repetition_is_told_apart() -> None:
    policies = table({})
    assert policies.accept(policy(2, seed=7), 1)
    assert not policies.accept(policy(2, seed=7), 9)
    assert policies.accept(policy(2, seed=8), 1)


def test_dy10_changed_only_from_the_policys_round_on() -> None:
    policies = table(None)
    policies.accept(policy(3, top_k=5), 0)
    assert [policies.changed(round_) for round_ in (1, 2, 3, 4)] == [False, False, True, True]
    assert policies.profile(1) == Sampling()


def test_dz7_rule_200_keeps_a_seed() -> None:
    policies = table({"seed": 1}, rule=200)
    with pytest.raises(Malformed):
        policies.accept(policy(3, top_k=5), 0)
    assert policies.accept(policy(3, top_k=5, seed=1), 0)


def test_pending_policies_are_bounded_and_passed_ones_make_room() -> None:
    policies = table({})
    for round_ in range(1, POLICIES_MAX + 1):
        policies.accept(policy(round_, seed=round_), 0)
    with pytest.raises(TooManyRequests):
        policies.accept(policy(POLICIES_MAX + 1), 0)
    assert policies.accept(policy(POLICIES_MAX + 1), 2)
    assert policies.profile(2) == Sampling(seed=2)
