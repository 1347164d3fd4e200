"""A drafter whose head is over a part of the vocabulary (`d2t` names the token of each row)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdcpd.engine.api import DraftWork, Prefix
from sdcpd.engine.runner import Feed
from sdcpd.protocol.messages import Sampling
from tests.engine.conftest import dense, drafter_of, runner_of

TOKENS = torch.tensor([3, 5, 8, 13, 21, 34, 55, 89, 144], dtype=torch.int32)
TEXT = [3, 90, 5, 7]


@pytest.fixture
def reduced(tiny: tuple[Any, Path], tmp_path: Path) -> Path:
    """The small model, with the rows of its head for TOKENS alone."""
    tensors = load_file(tiny[1] / "model.safetensors")
    head = tensors["model.embed_tokens.weight"][TOKENS.long()].clone()
    save_file({**tensors, "lm_head.weight": head, "d2t": TOKENS}, tmp_path / "model.safetensors")
    config = json.loads((tiny[1] / "config.json").read_text())
    config |= {"tie_word_embeddings": False, "draft_vocab_size": len(TOKENS)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def scores_of(directory: Path) -> torch.Tensor:
    runner = runner_of(directory)
    return runner.run([Feed(runner.new_kv(), TEXT, 1)])[0][0]


def work(rule: int, sampling: Sampling, vocab: int = 160) -> DraftWork:
    return DraftWork(b"d", Prefix(TEXT, len(TEXT), len(TEXT)), 3, rule, sampling, 0, vocab)


def test_tokens_without_a_row_are_impossible(reduced: Path, tiny: tuple[Any, Path]) -> None:
    found, whole = scores_of(reduced), scores_of(tiny[1])
    assert torch.allclose(found[TOKENS.long()], whole[TOKENS.long()], rtol=1e-4, atol=1e-4)
    assert int(torch.isinf(found).sum()) == 160 - len(TOKENS)


async def test_it_drafts_the_best_of_what_it_has_rows_for(reduced: Path) -> None:
    """Greedily by the head alone, and as the whole row would have it."""
    drafter = drafter_of(reduced)
    draft = await drafter.draft(work(1, Sampling(temperature_milli=0)))
    assert draft.tokens[0] == int(scores_of(reduced).argmax())
    assert set(draft.tokens) <= set(TOKENS.tolist())
    near_greedy = Sampling(temperature_milli=1, seed=3)
    assert (await drafter.draft(work(200, near_greedy))).tokens == draft.tokens
    await drafter.aclose()


async def test_its_rows_are_of_the_targets_vocabulary(reduced: Path) -> None:
    """D-E6: rule 2 has V values a row; nothing beyond a smaller V is proposed."""
    drafter = drafter_of(reduced)
    sampled = await drafter.draft(work(2, Sampling(temperature_milli=1000)))
    assert len(dense(sampled)) == 4 * 160 * 3
    for vocab in (100, 60):
        draft = await drafter.draft(work(1, Sampling(temperature_milli=0), vocab))
        assert max(draft.tokens) < vocab and set(draft.tokens) <= set(TOKENS.tolist())
    await drafter.aclose()
