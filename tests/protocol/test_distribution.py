"""Rules 2 and 200 commit with exactly the target's distribution (R-6.4-9, R-Z-3)."""

from __future__ import annotations

import random
import struct
from collections import Counter

import pytest

from sdcpd.engine.fake import FakeModel
from sdcpd.protocol.acceptance import draw_from, target_distribution, winner
from sdcpd.protocol.messages import Rule, Sampling
from tests.kit.verifier_machine import Driver, contract, verdict

V, SESSIONS = 4, 20_000
TARGET = FakeModel(vocab=V, seed=1)
DRAFT = FakeModel(vocab=V, seed=1, noise=0.6)
PROMPT = (1, 2)
# Quantiles of the chi-square distribution that a right machine exceeds once in 10,000 times.
CRITICAL = {3: 21.11, 15: 44.26}


def profile(seed: int) -> Sampling:
    return Sampling(temperature_milli=2500, seed=seed)


def first_two(rule: Rule, seed: int, m: int) -> tuple[int, int]:
    """The first two tokens of a session whose drafter samples from its own model."""
    sampling = profile(seed)
    driver = Driver(contract(rule=rule, sampling=sampling, max_new=2), model=TARGET, prompt=PROMPT)
    driver.name()
    chooser = random.Random(seed)
    while driver.machine.committed < 2:
        tokens, rows, text = [], b"", list(driver.machine.tokens)
        for index in range(m):
            q = target_distribution(DRAFT.scores(text), sampling)
            octets = struct.pack(f"<{V}f", *q)
            rounded = struct.unpack(f"<{V}f", octets)
            if rule is Rule.RACE:
                token = winner(q, seed, driver.machine.committed + index + 1)
            else:
                token = draw_from(rounded, chooser.random())
            tokens.append(token)
            rows += octets
            text.append(token)
        driver.rows["rows"] = rows
        verdict(driver.propose(tokens, q_rows="rows" if rule == 2 else None))
    first, second = driver.machine.tokens[len(PROMPT) :]
    return first, second


def chi_square(counts: Counter[object], expected: dict[object, float]) -> float:
    return sum((counts[key] - SESSIONS * p) ** 2 / (SESSIONS * p) for key, p in expected.items())


@pytest.mark.parametrize(
    "rule", [Rule.SPECULATIVE_SAMPLING, pytest.param(Rule.RACE, marks=pytest.mark.slow)]
)
@pytest.mark.timeout(120)
def test_first_second_and_pair_have_the_targets_distribution(rule: Rule) -> None:
    """R-6.4-9, R-Z-3: 20,000 seeded sessions, rounds of one and two tokens, against the exact distribution."""
    pairs: Counter[object] = Counter(
        first_two(rule, seed, 1 + seed % 2) for seed in range(SESSIONS)
    )
    p1 = target_distribution(TARGET.scores(PROMPT), profile(0))
    p2 = [target_distribution(TARGET.scores((*PROMPT, t)), profile(0)) for t in range(V)]
    joint: dict[object, float] = {(a, b): p1[a] * p2[a][b] for a in range(V) for b in range(V)}
    firsts: Counter[object] = Counter()
    seconds: Counter[object] = Counter()
    for (a, b), count in pairs.items():  # type: ignore[misc]
        firsts[a] += count
        seconds[b] += count
    second = {b: sum(p1[a] * p2[a][b] for a in range(V)) for b in range(V)}
    assert min(joint.values()) * SESSIONS > 20, "each cell is filled well enough for the test"
    assert chi_square(pairs, joint) < CRITICAL[15]
    assert chi_square(firsts, {t: p1[t] for t in range(V)}) < CRITICAL[3]
    assert chi_square(seconds, dict(second)) < CRITICAL[3]


def test_a_rule_2_session_repeats_its_text() -> None:
    """R-6.4-13: the same seed, session id and proposals give the same verdicts."""
    texts = {tuple(first_two(Rule.SPECULATIVE_SAMPLING, 77, 2)) for _ in range(3)}
    assert len(texts) == 1


def test_the_check_would_notice_a_wrong_distribution() -> None:
    """A twentieth moved from one token to another is far beyond the quantile."""
    p = target_distribution(TARGET.scores(PROMPT), profile(0))
    counts: Counter[object] = Counter({t: round(SESSIONS * q) for t, q in enumerate(p)})
    counts[0] += SESSIONS // 20
    counts[1] -= SESSIONS // 20
    assert chi_square(counts, {t: p[t] for t in range(V)}) > CRITICAL[3]
