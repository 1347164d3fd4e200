"""Passes in static shapes give what other passes give; no GPU is needed to see that."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from sdcpd.engine.compiled import RECOMPILES_MAX
from sdcpd.engine.load import load_target
from sdcpd.engine.model import LlamaModel
from sdcpd.engine.model_config import read_config
from sdcpd.engine.model_settings import ModelSettings
from sdcpd.engine.runner import STATIC_SHAPES, Feed, Runner
from sdcpd.engine.self_check import choose_shape
from sdcpd.engine.weights import Weights


def runner_of(directory: Path, backend: str | None) -> Runner:
    weights = Weights(directory, torch.float32)
    model = LlamaModel(read_config(directory), weights, device=torch.device("cpu"))
    return Runner(model, backend=backend)


def scores_of(runner: Runner) -> torch.Tensor:
    """Of three sessions that grow unevenly, one of them over a window's length."""
    chooser = random.Random(3)
    texts = [[chooser.randrange(160) for _ in range(140)] for _ in range(3)]
    sessions = [runner.new_kv() for _ in texts]
    found = []
    for counts in ((40, 5, 1), (3, 60, 60), (1, 1, 1), (17, 4, 30)):
        feeds = [
            Feed(kv, text[len(kv.tokens) : len(kv.tokens) + count], count)
            for kv, text, count in zip(sessions, texts, counts, strict=True)
        ]
        found += runner.run(feeds)
    return torch.cat(found)


@pytest.mark.slow
def test_every_family_is_traced_whole_and_scores_the_same(family: tuple[Any, Path]) -> None:
    """In one graph a layer, without a break; layers share what was compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    runner = runner_of(family[1], "eager")
    runner.shape = STATIC_SHAPES[0]
    wanted = scores_of(runner_of(family[1], None))
    found = scores_of(runner)
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))
    compiles = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    buckets, kinds, pieces = 4, 2, 2  # at most; three layers of their own would be more
    assert 0 < compiles <= buckets * kinds * pieces <= RECOMPILES_MAX


def test_rows_are_independent_in_static_shapes(tiny: tuple[Any, Path]) -> None:
    runner = runner_of(tiny[1], "eager")
    assert choose_shape(runner) and runner.shape in STATIC_SHAPES
    assert [runner.shape.padded(rows) for rows in (1, 16, 17, 65, 129)][-1] in (144, 256)


def test_rows_that_fill_a_pass_up_are_written_nowhere(tiny: tuple[Any, Path]) -> None:
    runner = runner_of(tiny[1], "eager")
    runner.shape = STATIC_SHAPES[1]
    kv, other = runner.new_kv(), runner.new_kv()
    runner.run([Feed(other, [1, 2, 3])])
    before = [rows.clone() for rows in other.rows(3)]
    runner.run([Feed(kv, [4, 5])])
    assert all(torch.equal(a, b) for a, b in zip(before, other.rows(3), strict=True))
    keys = runner.pool.keys.clone()
    used = [*kv.table, *other.table]
    for block in used:
        keys[:, :, block * 64 : block * 64 + 64] = 0
    assert keys[:, :, : runner.pool.tokens_max].count_nonzero() == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inductor_compiles_it_on_a_cpu(tiny: tuple[Any, Path], dtype: str) -> None:
    """`compile = true` where there is no GPU: slower, and right."""
    torch._dynamo.reset()
    settings = ModelSettings(tiny[1], threads=1, compile=True, kv_octets_max=64 << 20, dtype=dtype)
    target = load_target(settings, report=lambda _: None)
    assert ";compiled;" in target.info.fingerprint
    found, wanted = scores_of(target._runner), scores_of(runner_of(tiny[1], None))
    rounding = {"float32": 1e-4, "bfloat16": 0.1}[dtype]
    assert torch.allclose(found, wanted, atol=rounding * float(wanted.abs().max()))
