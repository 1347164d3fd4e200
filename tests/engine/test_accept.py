"""The tensor rules agree with the plain references of protocol.acceptance."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.engine import accept as tensors
from sdcpd.engine.api import Prefix, Score
from sdcpd.protocol import acceptance as plain
from sdcpd.protocol.messages import Sampling

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent.parent / "vectors.json").read_text())
V = 12


def sampling_of(profile: dict[str, Any]) -> Sampling:
    return Sampling(**{k: int(v) for k, v in profile.items()})


@pytest.mark.parametrize("case", VECTORS["target_distribution"]["cases"], ids=lambda c: c["name"])
def test_target_distribution_vectors(case: dict[str, Any]) -> None:
    """R-4.1-23, R-4.1-25, D-S1..S6"""
    keys = {k: v for k, v in case.items() if isinstance(v, list)}
    logits = [math.log(p) if p > 0 else -math.inf for p in keys["model"]]
    row = torch.tensor(logits, dtype=torch.float64)
    wanted = next(v for k, v in keys.items() if k != "model")
    profile = next(v for v in case.values() if isinstance(v, dict))
    got = tensors.distribution(row, sampling_of(profile))
    assert got.tolist() == pytest.approx(wanted, abs=VECTORS["target_distribution"]["tolerance"])


@given(st.integers(0, 2**64 - 1), st.integers(1, 2**32 - 1), st.integers(0, 2**20))
def test_noise_is_the_same_bit_for_bit(seed: int, k: int, token: int) -> None:
    """R-Z-1: u(k, t) agrees everywhere."""
    key = plain.noise_key(seed, k)
    got = tensors.uniforms(key, torch.tensor([token]))
    assert got.item() == plain.uniform(key, token)


rows = st.lists(
    st.lists(st.floats(-8, 8, width=32), min_size=V, max_size=V), min_size=4, max_size=4
)
profiles = st.builds(
    Sampling,
    temperature_milli=st.sampled_from([0, 300, 1000, 1700]),
    top_k=st.sampled_from([None, 0, 1, 4, 50]),
    top_p_milli=st.sampled_from([None, 0, 300, 900, 1000]),
    seed=st.integers(0, 2**64 - 1),
)


@given(rows, profiles)
def test_distribution_agrees(scores: list[list[float]], profile: Sampling) -> None:
    for row in scores:
        wanted = plain.target_distribution(row, profile)
        got = tensors.distribution(torch.tensor(row, dtype=torch.float32), profile)
        assert got.tolist() == pytest.approx(wanted, abs=1e-12)


@given(rows, profiles, st.lists(st.integers(0, V - 1), max_size=3), st.integers(0, 50))
def test_rules_agree(
    scores: list[list[float]], profile: Sampling, tokens: list[int], base: int
) -> None:
    """R-6.4-1, R-6.4-5, R-6.4-6, R-6.4-7, R-6.4-8, R-6.4-9, D-A1 to D-A5, R-Z-1: rules 1, 2, 200."""
    count = len(tokens)
    used = scores[: count + 1]
    p = [plain.target_distribution(row, profile) for row in used]
    values = {
        (i, purpose): (i * 7 + purpose * 3 + base) % 11 / 11
        for i in range(1, 6)
        for purpose in (0, 1)
    }

    def draw(i: int, purpose: int) -> float:
        return values[i, purpose]

    q_octets = struct.pack(f"<{V * count}f", *([1 / V] * V * count))
    q = plain.check_rows(q_octets, V, tokens) if count else []
    assert profile.seed is not None
    race = plain.rule200(p, tokens, profile.seed, base)
    greedy = plain.rule1([plain.greedy(row) for row in used], tokens)
    if profile.temperature_milli == 0:
        assert race == greedy
    wanted = {1: greedy, 2: plain.rule2(p, q, tokens, draw), 200: race}
    for rule, expected in wanted.items():
        work = Score(
            session=b"s" * 16,
            epoch=1,
            prefix=Prefix([], 0, 0),
            proposed=tuple(tokens),
            rule=rule,
            sampling=profile,
            base=base,
            draw=draw,
            q_rows=q_octets or None,
        )
        found = tensors.accept(torch.tensor(used, dtype=torch.float32), work)
        assert (found.accepted, found.additional) == (expected.accepted, expected.additional), rule


@pytest.mark.parametrize("entry", VECTORS["rule1"], ids=lambda e: e["name"])
def test_rule_1_vectors(entry: dict[str, Any]) -> None:
    """R-6.4-1, R-6.4-2, R-6.4-3: also where all are accepted."""
    rows = entry.get("p_rows") or [
        [float(t == best) for t in range(16)] for best in entry["argmax"]
    ]
    work = Score(
        session=b"s" * 16,
        epoch=1,
        prefix=Prefix([], 0, 0),
        proposed=tuple(entry["tokens"]),
        rule=1,
        sampling=Sampling(),
        base=entry["n"],
    )
    found = tensors.accept(torch.tensor(rows, dtype=torch.float32), work)
    assert (found.accepted, found.additional) == (entry["a"], entry["additional"])


@pytest.mark.parametrize("entry", VECTORS["rule2"]["seeded"])
def test_seeded_rule_2_vectors(entry: dict[str, Any]) -> None:
    """R-6.4-13, R-6.4-14: the values drawn, by i and purpose, and what they lead to."""
    drawn = []

    def draw(i: int, purpose: int) -> float:
        drawn.append((i, purpose))
        return plain.verifier_random(
            int(entry["seed"]), bytes.fromhex(entry["session"]), entry["round"], i, purpose
        )

    q_rows = b"".join(struct.pack(f"<{len(row)}f", *row) for row in entry["q"])
    work = Score(
        session=bytes.fromhex(entry["session"]),
        epoch=1,
        prefix=Prefix([], 0, 0),
        proposed=tuple(entry["tokens"]),
        rule=2,
        sampling=Sampling(),
        base=0,
        draw=draw,
        q_rows=q_rows,
    )
    logits = [[math.log(p) if p > 0 else -math.inf for p in row] for row in entry["p"]]
    found = tensors.accept(torch.tensor(logits, dtype=torch.float64), work)
    assert (found.accepted, found.additional) == (entry["a"], entry["additional"])
    assert drawn == [(value["i"], value["purpose"]) for value in entry["draws"]]


def test_ties_go_to_the_smallest_token() -> None:
    """R-6.4-2"""
    assert tensors.greedy(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])).tolist() == [1, 0]


@pytest.mark.parametrize("case", VECTORS["race"]["winners"])
def test_winner_vectors(case: dict[str, Any]) -> None:
    """R-Z-1"""
    p = torch.tensor(next(v for v in case.values() if isinstance(v, list)), dtype=torch.float64)
    numbers = {k: int(v) for k, v in case.items() if not isinstance(v, list)}
    assert tensors.winner(p, numbers["seed"], numbers["k"]) == numbers["winner"]
