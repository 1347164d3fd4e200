"""Acceptance rules and target distributions: Sections 4.1 and 6.4, D-A, D-S, D-P11, D-P15, D-Z7."""

import json
import math
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.engine import rows as in_arrays
from sdcpd.protocol import acceptance
from sdcpd.protocol.acceptance import Acceptance
from sdcpd.protocol.messages import Sampling
from sdcpd.protocol.problems import BadProposal

VECTORS = json.loads((Path(__file__).parents[1] / "vectors.json").read_text())
RULE2 = VECTORS["rule2"]
RACE = VECTORS["race"]
DISTRIBUTION = VECTORS["target_distribution"]


def named(entries: list[dict[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("entry", entries, ids=[entry["name"] for entry in entries])


def check_round(entry: dict[str, Any], result: Acceptance) -> None:
    assert (result.accepted, result.additional) == (entry["a"], entry["additional"])
    emitted, finished = acceptance.truncate(
        result.emitted(entry["tokens"]), entry["n"], entry["max_new"], entry["stop"]
    )
    assert list(emitted) == entry["emitted"]
    assert finished is entry["finished"]
    assert entry["n"] + len(emitted) == entry["committed"]


@named(VECTORS["rule1"])
def test_rule1_vectors(entry: dict[str, Any]) -> None:
    """R-6.4-2, D-P14, D-P15."""
    argmax = [acceptance.greedy(row) for row in entry.get("p_rows", [])] or entry["argmax"]
    assert argmax == entry["argmax"]
    check_round(entry, acceptance.rule1(argmax, entry["tokens"]))


def test_appendix_a_round() -> None:
    example = VECTORS["appendix_a"]["example_round"]
    result = acceptance.rule1(example["argmax"], example["tokens"])
    assert result == Acceptance(example["a"], example["additional"])
    assert list(result.emitted(example["tokens"])) == example["emitted"]


@named(RULE2["cases"])
def test_rule2_vectors(entry: dict[str, Any]) -> None:
    """R-6.4-4 and following: the draws used are exactly the ones the vector lists."""
    expected = [(i, 0) for i in range(1, len(entry["r"]) + 1)] + [(entry["u_i"], 1)]
    values = dict(zip(expected, [*entry["r"], entry["u"]], strict=True))
    drawn: list[tuple[int, int]] = []

    def draw(i: int, purpose: int) -> float:
        drawn.append((i, purpose))
        return float(values[i, purpose])

    rows = acceptance.check_rows(
        bytes.fromhex(entry["q_rows"]), len(entry["p"][0]), entry["tokens"]
    )
    for row, expected_row in zip(rows, entry["q"], strict=True):
        assert list(row) == pytest.approx(expected_row)
    check_round(entry, acceptance.rule2(entry["p"], rows, entry["tokens"], draw))
    assert drawn == expected


def seeded(entry: dict[str, Any]) -> Callable[[int, int], float]:
    session = bytes.fromhex(entry["session"])

    def draw(i: int, purpose: int) -> float:
        return acceptance.verifier_random(int(entry["seed"]), session, entry["round"], i, purpose)

    return draw


@pytest.mark.parametrize("entry", RULE2["seeded"])
def test_rule2_seeded_rounds(entry: dict[str, Any]) -> None:
    draw = seeded(entry)
    drawn = []

    def recorded(i: int, purpose: int) -> float:
        drawn.append({"i": i, "purpose": purpose, "value": draw(i, purpose)})
        return draw(i, purpose)

    result = acceptance.rule2(entry["p"], entry["q"], entry["tokens"], recorded)
    assert drawn == entry["draws"]
    assert result == Acceptance(entry["a"], entry["additional"])
    assert list(result.emitted(entry["tokens"])) == entry["emitted"]


@pytest.mark.parametrize("entry", RULE2["self_decoded"])
def test_da4_self_decoded_tokens(entry: dict[str, Any]) -> None:
    u = seeded(entry)(entry["i"], entry["purpose"])
    assert u == entry["value"]
    assert [acceptance.draw_from(entry["p"], u)] == entry["emitted"]


@pytest.mark.parametrize("entry", VECTORS["verifier_random"])
def test_da6_verifier_random(entry: dict[str, Any]) -> None:
    """R-6.4-8."""
    value = acceptance.verifier_random(
        seed=int(entry["seed"]),
        session=bytes.fromhex(entry["session"]),
        round=entry["round"],
        i=entry["i"],
        purpose=entry["purpose"],
    )
    assert value == entry["value"] == float.fromhex(entry["value_hex"])


@pytest.mark.parametrize("check", [acceptance.check_rows, in_arrays.check])
@named(RULE2["q_rows_refuse"])
def test_dp11_invalid_rows_are_refused(entry: dict[str, Any], check: Callable[..., Any]) -> None:
    with pytest.raises(BadProposal) as raised:
        check(bytes.fromhex(entry["q_rows"]), entry["V"], entry["tokens"])
    assert (raised.value.status, raised.value.type) == (entry["status"], entry["type"])


@named(RULE2["q_rows_accept"])
def test_dp11_valid_rows_are_taken_as_published(entry: dict[str, Any]) -> None:
    octets = bytes.fromhex(entry["q_rows"])
    found = acceptance.check_rows(octets, entry["V"], entry["tokens"])
    assert len(found) == len(entry["tokens"])
    assert all(row[token] > 0 for row, token in zip(found, entry["tokens"], strict=True))
    in_arrays.check(octets, entry["V"], entry["tokens"])


@given(
    st.lists(
        st.sampled_from([0.0, -0.0, 0.25, 0.5, 1.0, 1e-45, -1e-45, math.nan, math.inf, 3e38]),
        min_size=6,
        max_size=6,
    ),
    st.lists(st.integers(0, 3), min_size=2, max_size=2),
)
def test_dp11_arrays_decide_as_the_reference(values: list[float], tokens: list[int]) -> None:
    """Two rows of three values, good and bad."""
    octets = struct.pack("<6f", *values)

    def refusal(check: Callable[..., object]) -> str | None:
        try:
            check(octets, 3, tokens)
        except BadProposal as problem:
            return str(problem)
        return None

    told = refusal(acceptance.check_rows)
    # Where both rows are at fault, which is told first differs.
    assert (refusal(in_arrays.check) is None) == (told is None)


@named(DISTRIBUTION["cases"])
def test_target_distribution(entry: dict[str, Any]) -> None:
    """R-4.1-9, D-S1 to D-S6: log(model) as logits."""
    logits = [math.log(x) for x in entry["model"]]
    p = acceptance.target_distribution(logits, Sampling(**entry["sampling"]))
    assert p == pytest.approx(entry["p"], abs=DISTRIBUTION["tolerance"])
    assert [x > 0 for x in p] == [x > 0 for x in entry["p"]]


rows = st.lists(st.integers(0, 6), min_size=2, max_size=8).filter(any)


@given(
    st.lists(st.floats(-30, 30), min_size=1, max_size=12),
    st.integers(1, 3000),
    st.integers(0, 14),
    st.integers(0, 1000),
)
def test_target_distribution_is_one(
    logits: list[float], temperature: int, top_k: int, top_p: int
) -> None:
    sampling = Sampling(temperature_milli=temperature, top_k=top_k, top_p_milli=top_p)
    p = acceptance.target_distribution(logits, sampling)
    assert sum(p) == pytest.approx(1.0)
    assert p[acceptance.greedy(p)] == max(p)
    assert sum(x > 0 for x in p) <= (top_k or len(p))


def test_scores_of_minus_infinity_have_no_probability() -> None:
    assert acceptance.target_distribution([0.0, -math.inf], Sampling()) == [1.0, 0.0]


@given(rows, st.floats(0, 1, exclude_max=True))
def test_da3_drawn_tokens_have_weight(weights: list[int], u: float) -> None:
    assert weights[acceptance.draw_from(weights, u)] > 0


def test_da3_rounding_at_the_end_gives_the_last_token_with_weight() -> None:
    assert acceptance.draw_from([0.5, 0.5, 0.0], 1.0) == 1


def distribution(weights: Sequence[int]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


def test_rule2_output_has_the_targets_distribution() -> None:
    """Section 6.4: with exact q the first emitted token is distributed as p[1]."""
    p, q = [0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]
    rng = random.Random(7)
    counts = [0] * 4
    rounds = 20_000
    for _ in range(rounds):
        token = acceptance.draw_from(q, rng.random())
        result = acceptance.rule2([p, p], [q], [token], lambda i, purpose: rng.random())
        counts[result.emitted([token])[0]] += 1
    assert [count / rounds for count in counts] == pytest.approx(p, abs=0.015)


@pytest.mark.parametrize("entry", RACE["noise"])
def test_dz7_noise_agrees_bit_for_bit(entry: dict[str, Any]) -> None:
    key = acceptance.noise_key(int(entry["seed"]), entry["k"])
    assert f"{key:016x}" == entry["key"]
    assert acceptance.uniform(key, entry["token"]) == entry["u"] == float.fromhex(entry["u_hex"])


@pytest.mark.parametrize("entry", RACE["winners"])
def test_dz7_winners(entry: dict[str, Any]) -> None:
    assert acceptance.winner(entry["p"], int(entry["seed"]), entry["k"]) == entry["winner"]


@pytest.mark.parametrize("entry", RACE["rounds"])
def test_dz7_rounds(entry: dict[str, Any]) -> None:
    result = acceptance.rule200(entry["p"], entry["tokens"], int(entry["seed"]), entry["base"])
    assert result == Acceptance(entry["accepted"], entry["additional"])
    assert list(result.emitted(entry["tokens"])) == entry["emitted"]


@given(st.lists(rows, min_size=6, max_size=6), st.integers(0, 2**64 - 1), st.randoms())
def test_dz7_the_text_is_the_same_whatever_is_proposed(
    weights: list[list[int]], seed: int, choices: random.Random
) -> None:
    """No drafter, M or round boundary enters: only seed, k and p."""
    p = [distribution(row) for row in weights]
    alone = [acceptance.winner(row, seed, k) for k, row in enumerate(p, 1)]
    text: list[int] = []
    while len(text) < len(p):
        m = choices.randint(0, len(p) - len(text) - 1)
        guess = alone[len(text) : len(text) + m]
        if guess and choices.random() < 0.5:
            guess[choices.randrange(m)] = 0
        result = acceptance.rule200(p[len(text) :], guess, seed, len(text))
        text += result.emitted(guess)
    assert text == alone


def test_dz7_temperature_zero_is_rule_1() -> None:
    p = acceptance.target_distribution([1.0, 3.0, 3.0], Sampling(temperature_milli=0))
    assert {acceptance.winner(p, seed, 1) for seed in range(20)} == {1}


def unmixed(z: int) -> int:
    """The number that splitmix64 turns into z."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        for start in range(64 - shift, -1, -1):  # undo x ^= x >> shift from the top down
            z ^= (z >> shift) & (1 << start) if start < 64 - shift else 0
        z = z * pow(factor, -1, 2**64) % 2**64
    return z


def test_dz7_u_may_round_to_one_whose_time_is_zero() -> None:
    key = (unmixed(2**64 - 1) - 0x9E3779B97F4A7C15) % 2**64
    assert acceptance.uniform(key, 0) == 1.0
    assert acceptance.uniform((unmixed(0) - 0x9E3779B97F4A7C15) % 2**64, 0) == 0.5 / 2**53


@pytest.mark.parametrize(
    ("emitted", "base", "max_new", "stop", "expected"),
    [
        ((7, 9), 0, 10, (), ((7, 9), False)),
        ((7, 9), 0, 2, (), ((7, 9), True)),
        ((7, 9, 4), 5, 7, (), ((7, 9), True)),
        ((7, 2, 4), 0, 10, (2,), ((7, 2), True)),
        ((7, 4, 2), 0, 2, (2,), ((7, 4), True)),
        ((2, 2), 0, 10, (2, 2), ((2,), True)),
        ((7,), 0, 10, (2**40,), ((7,), False)),
    ],
)
def test_dp15_truncation(emitted: Any, base: int, max_new: int, stop: Any, expected: Any) -> None:
    assert acceptance.truncate(emitted, base, max_new, stop) == expected
