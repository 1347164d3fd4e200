"""The model code against transformers, and the independence of rows that exactness rests on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sdcpd.engine.api import ContextFull
from sdcpd.engine.runner import SHAPES, Feed
from sdcpd.engine.self_check import choose_shape, holds
from tests.engine.conftest import COMMON, runner_of


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


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_a_model_with_one_key_head_are_independent(
    tmp_path: Path, dtype: torch.dtype, heads: int
) -> None:
    """As those of Gemma 3 1B; torch takes another way for one head and several threads."""
    shape = COMMON | {"num_key_value_heads": 1, "num_attention_heads": heads, "head_dim": 64}
    torch.manual_seed(4)
    model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    torch.set_num_threads(2)
    try:
        runner = runner_of(tmp_path, dtype)
        for shape_ in SHAPES:
            runner.shape = shape_
            assert holds(runner)
        text = [random.Random(1).randrange(160) for _ in range(65)]
        kv, other = runner.new_kv(), runner.new_kv()
        whole = runner.run([Feed(kv, text, 65)])[0]
        one_by_one = torch.cat([runner.run([Feed(other, [token], 1)])[0] for token in text])
        assert torch.equal(whole, one_by_one)
    finally:
        torch.set_num_threads(1)
