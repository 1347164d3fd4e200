"""Rejected tokens leave nothing behind, however often: a drafter equal to the target stays so."""

from __future__ import annotations

import random

import pytest

from sdcpd.engine.api import DraftWork, Prefix, Score
from sdcpd.engine.load import load_twins
from sdcpd.engine.model_settings import ModelSettings
from sdcpd.protocol.messages import Sampling
from tests.kit.dev import PAIR

ROUNDS = 1000
GREEDY = Sampling(temperature_milli=0)
SEEDED = Sampling(temperature_milli=800, seed=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "rule", "sampling"), [("float32", 1, GREEDY), ("bfloat16", 200, SEEDED)]
)
async def test_a_drafter_equal_to_the_target_has_all_accepted(
    rule: int, sampling: Sampling, dtype: str
) -> None:
    """Half of the rounds are cut short by force, at both sides alike, and go on with another token."""
    settings = ModelSettings(PAIR / "target", dtype=dtype, threads=1)
    target, drafter = load_twins(settings, report=lambda _: None)
    chooser = random.Random(7)
    vocab = target.info.vocab
    tokens = [chooser.randrange(vocab) for _ in range(20)]
    judged = 0
    for _ in range(ROUNDS):
        if len(tokens) > 1500:  # the context has an end: another session
            drafter.forget(b"d")
            target.forget(b"t", 1)
            del tokens[20:]
        prefix, base = Prefix(tokens, len(tokens), 20), len(tokens) - 20
        m = chooser.randint(1, 6)
        draft = await drafter.draft(DraftWork(b"d", prefix, m, rule, sampling, base, vocab))
        work = Score(b"t", 1, prefix, draft.tokens, rule, sampling, base)
        scored = await target.score(work)
        assert scored.accepted == m
        judged += 1
        kept = chooser.randrange(m + 1) if chooser.random() < 0.5 else m
        forced = chooser.randrange(vocab) if kept < m else scored.additional
        tokens += [*draft.tokens[:kept], forced]
    assert judged == ROUNDS
    await drafter.aclose()
    await target.aclose()
