"""The model code against transformers, and the independence of rows that exactness rests on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from sdcpd.engine.api import ContextFull
from sdcpd.engine.runner import Feed
from sdcpd.engine.self_check import choose_shape
from tests.engine.conftest import runner_of


def test_scores_agree_with_transformers(family: tuple[Any, Path]) -> None:
    """Every family: the same scores within binary32's rounding, over chunks of any size."""
    model, directory = family
    runner = runner_of(directory)
    ids = torch.randint(0, 160, (1, 120), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(ids).logits[0]
    kv, rows, at = runner.new_kv(), [], 0
    for piece in (50, 1, 3, 64, 2):
        rows += runner.run([Feed(kv, ids[0, at : at + piece].tolist(), piece)])
        at += piece
    got = torch.cat(rows)
    assert torch.allclose(got, wanted, rtol=2e-4, atol=2e-4 * float(wanted.abs().max()))
    assert torch.equal(got.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_their_batch(tiny: tuple[Any, Path], dtype: torch.dtype) -> None:
    """R-6.3-25, D-P23: bit-equal alone, in pieces, and among strangers."""
    assert choose_shape(runner_of(tiny[1], dtype))


def test_rejected_tokens_leave_no_trace(tiny: tuple[Any, Path]) -> None:
    """R-6.3-37: after a rollback, scores are bit-equal to those of a fresh session."""
    runner = runner_of(tiny[1])
    chooser = random.Random(2)
    text = [chooser.randrange(160) for _ in range(40)]
    kv = runner.new_kv()
    runner.run([Feed(kv, [*text[:20], 7, 7, 7, 7, 7])])
    assert kv.match(text, 40) == 20
    again = runner.run([Feed(kv, text[20:], 1)])[0]
    fresh = runner.run([Feed(runner.new_kv(), text, 1)])[0]
    assert torch.equal(again, fresh)


def test_context_full_is_refused_before_anything_is_written(tiny: tuple[Any, Path]) -> None:
    runner = runner_of(tiny[1])
    kv = runner.new_kv()
    with pytest.raises(ContextFull, match="513 tokens do not fit the model's context of 512"):
        runner.run([Feed(kv, [1] * 513)])
    assert kv.tokens == []
    runner.run(
        [
            Feed(kv, [1] * 128),
        ]
    )
    runner.run([Feed(kv, [1] * 384, 1)])
    assert len(kv.tokens) == 512
