"""A real draft model under rule 2: what it proposes is sampled from what it publishes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from sdcpd.engine.api import DraftWork, Prefix
from sdcpd.engine.drafters import ModelDrafter
from sdcpd.protocol.acceptance import check_rows, draw_from, verifier_random
from sdcpd.protocol.messages import Sampling
from tests.engine.conftest import dense, drafter_of

VOCAB, SEED = 160, 11
Drawn = list[tuple[Sequence[float], int, bytes, int]]


@pytest.fixture
async def drafter(tiny: tuple[Any, Path]) -> AsyncIterator[ModelDrafter]:
    made = drafter_of(tiny[1])
    yield made
    await made.aclose()


async def test_what_names_a_drafters_kv_tells_model_and_machine_apart(
    drafter: ModelDrafter, tiny: tuple[Any, Path]
) -> None:
    others = [
        drafter_of(tiny[1], fingerprint="elsewhere"),
        drafter_of(tiny[1], model=b"another"),
        drafter_of(tiny[1]),
    ]
    names = [one.kv_fingerprint for one in (drafter, *others)]
    for one in others:
        await one.aclose()
    assert len(set(names)) == 3 and names[0] == names[3]


async def drawn(drafter: ModelDrafter, rounds: int, **profile: int) -> Drawn:
    """(row, token, session, position) of proposals of many sessions after one prefix."""
    sessions = [index.to_bytes(16, "big") for index in range(rounds)]
    prefix, sampling = Prefix([9, 8, 7], 3, 3), Sampling(**profile)
    drafts = await asyncio.gather(
        *(drafter.draft(DraftWork(s, prefix, 4, 2, sampling, 0, VOCAB)) for s in sessions)
    )
    found: Drawn = []
    for session, draft in zip(sessions, drafts, strict=True):
        rows = check_rows(dense(draft), VOCAB, draft.tokens)
        for i, (row, token) in enumerate(zip(rows, draft.tokens, strict=True), 1):
            found.append((row, token, session, i))
    return found


async def test_tokens_are_distributed_as_their_rows(drafter: ModelDrafter) -> None:
    """R-5.2-16: the randomised cumulative probabilities of the drawn tokens are uniform."""
    bins = [0] * 10
    sample = await drawn(drafter, 300, temperature_milli=3000)
    for index, (row, token, _, _) in enumerate(sample):
        sums = [0.0, *accumulate(row)]
        # Where in the token's own interval does not matter; golden-ratio steps fill it evenly.
        at = sums[token] + (index * 0.6180339887 % 1) * row[token]
        bins[min(9, int(10 * at / sums[-1]))] += 1
    expected = len(sample) / 10
    chi_square = sum((count - expected) ** 2 / expected for count in bins)
    assert chi_square < 40  # 9 degrees of freedom: one run in 100,000


async def test_a_seed_does_not_tell_what_will_be_drawn(drafter: ModelDrafter) -> None:
    """R-6.4-16, D-A7: neither the verifier's values nor the same ones each time."""
    sample = await drawn(drafter, 60, temperature_milli=3000, seed=SEED)
    for purpose in (0, 1):
        for round_ in (0, 1):
            hits = sum(
                draw_from(row, verifier_random(SEED, session, round_, i, purpose)) == token
                for row, token, session, i in sample
            )
            assert hits < len(sample) / 2
    assert len({token for _, token, _, i in sample if i == 1}) > 3
