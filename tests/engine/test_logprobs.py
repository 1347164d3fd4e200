"""Log-probabilities of the target at temperature 1, whoever proposes (ux 1.3, D-Z5)."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sdcpd.engine.api import ContextFull, EngineError, Prefix, Score
from sdcpd.engine.load import load_target
from sdcpd.engine.logprobs import logprob_rows
from sdcpd.engine.model_settings import ModelSettings
from sdcpd.engine.target import LlamaTarget
from sdcpd.protocol.logprobs import MICRONATS_MAX, Row, logprob_row
from sdcpd.protocol.messages import Sampling

PROMPT = [3 + i * 7 % 150 for i in range(30)]


@pytest.fixture
async def target(tiny: tuple[Any, Path]) -> AsyncIterator[LlamaTarget]:
    engine = load_target(ModelSettings(tiny[1], threads=1), report=lambda _: None)
    yield engine
    await engine.aclose()


async def written(
    target: LlamaTarget, proposals: list[tuple[int, ...]], *, rule: int = 1, **sampling: int
) -> tuple[list[int], list[Row]]:
    """Tokens and rows of as many rounds as there are proposals."""
    tokens, rows = list(PROMPT), []
    profile = Sampling(**(sampling or {"temperature_milli": 0}))
    session = random.Random(str(proposals)).randbytes(16)
    for proposed in proposals:
        done = len(tokens) - len(PROMPT)
        prefix = Prefix(tokens, len(tokens), len(PROMPT))
        work = Score(session, 1, prefix, proposed, rule, profile, done, logprobs=4)
        found = await target.score(work)
        tokens += [*proposed[: found.accepted], found.additional]
        rows += found.logprobs
    return tokens, rows


async def test_they_are_of_the_model_at_temperature_1(
    target: LlamaTarget, tiny: tuple[Any, Path]
) -> None:
    """Compared with what the reference implementation makes of the same tokens."""
    tokens, rows = await written(target, [()] * 12)
    with torch.no_grad():
        scores = tiny[0](torch.tensor([tokens[:-1]])).logits[0, len(PROMPT) - 1 :]
    expected = torch.log_softmax(scores.double(), dim=-1)
    for token, row, reference in zip(tokens[len(PROMPT) :], rows, expected, strict=True):
        assert -row[0] / 1e6 == pytest.approx(float(reference[token]), abs=1e-3)
        best = reference.topk(4)
        assert [-value / 1e6 for value in row[2::2]] == pytest.approx(
            best.values.tolist(), abs=1e-3
        )
        assert row[1] == token, "greedy: the token is the most probable one"


@pytest.mark.parametrize("sampling", [{}, {"temperature_milli": 700, "top_k": 5, "seed": 9}])
async def test_speculation_changes_none(target: LlamaTarget, sampling: dict[str, int]) -> None:
    """ux 1.2 row 11: right, half right and wrong proposals; the profile does not enter."""
    rule = 200 if sampling else 1
    alone, plain = await written(target, [()] * 24, rule=rule, **sampling)
    known = alone[len(PROMPT) :]
    proposals = [tuple(known[0:5]), (known[6], 3, 3), (3,), tuple(known[9:12])]
    text, rows = await written(target, proposals, rule=rule, **sampling)
    made = len(text) - len(PROMPT)
    assert text == alone[: len(text)]
    assert made > 9
    assert rows == plain[:made]


@pytest.mark.parametrize("from_", [1, 5, 29, 30, 33])
async def test_any_text_can_be_asked_about(target: LlamaTarget, from_: int) -> None:
    """What a verifier has not written itself, or has forgotten, has the same rows."""
    tokens, rows = await written(target, [()] * 12)
    found = await target.logprobs(tokens, from_, 4)
    assert len(found) == len(tokens) - from_
    again = await target.logprobs(tokens, from_, 4)
    assert again == found, "though it could begin with what was computed before"
    shared = min(len(found), len(rows))
    assert list(found[-shared:]) == rows[-shared:]


async def test_long_texts_take_several_passes(target: LlamaTarget) -> None:
    tokens = [3 + i * 11 % 150 for i in range(target.info.context_max)]
    whole = await target.logprobs(tokens, 1, 2)
    assert len(whole) == len(tokens) - 1
    for at in (1, 100, 128, 129, 200):
        assert (await target.logprobs(tokens[: at + 1], at, 2))[0] == whole[at - 1]


async def test_nothing_is_left_of_it(target: LlamaTarget) -> None:
    session = bytes(16)
    await target.prepare(session, 1, Prefix(PROMPT, len(PROMPT), len(PROMPT)))
    await target.logprobs(PROMPT, 1, 0)
    with pytest.raises(ContextFull):
        await target.logprobs([5] * (target.info.context_max + 2), 1, 0)
    held = await target.worker.read((session, 1), lambda kv: len(kv.tokens))
    assert held == len(PROMPT) - 1
    assert list(target.worker._memory._held) == [(session, 1)]


async def test_an_engine_that_stops_says_so(target: LlamaTarget) -> None:
    await target.aclose()
    with pytest.raises(EngineError, match="stopping"):
        await target.logprobs(PROMPT, 1, 0)


def test_rows_of_extremes() -> None:
    """Ties, certainty, what can't happen, and more alternatives than there are tokens."""
    scores = torch.tensor([[0.0, 0.0], [1e30, -1e30]])
    assert logprob_rows(scores, [1, 0], 20) == (
        (693147, 0, 693147, 1, 693147),
        (0, 0, 0, 1, MICRONATS_MAX),
    )
    assert logprob_rows(scores[1:], [1], 0) == ((MICRONATS_MAX,),)
    assert logprob_rows(scores, [], 3) == ()


def test_the_fake_engine_tells_the_same() -> None:
    chooser = random.Random(5)
    scores = [value / 128 for value in chooser.sample(range(-512, 512), 32)]
    assert (logprob_row(scores, 7, 5),) == logprob_rows(torch.tensor([scores]), [7], 5)
