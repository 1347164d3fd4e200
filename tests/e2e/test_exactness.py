"""Greedy output is that of the target alone: an independent decoder, and every drafter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.e2e.test_dev import DRAFTERS, OVER_HTTP_3
from tests.kit.dev import PAIR, dev

PROMPTS = [
    "Once upon a time",
    "Write a short story about a tiny dragon in a teacup.",
    "Give me five facts about the desert fox.",
    "The old lighthouse",
    "Why does a snowstorm in the mountains matter?",
    "Describe the speed of light in three sentences.",
    "In the heart of the city",
    "Write a poem about stars and galaxies.",
    "What should I know about wind energy?",
    "The water cycle is",
    "Write a short email about a mysterious letter.",
    "Imagine a world where",
    "Climate change is",
    "Ask and answer three questions about a secret tunnel under the school.",
    "As the sun dipped below the horizon,",
    "Here are five facts about how bread is made:",
    "Write an introduction for a blog post about the four seasons.",
    "A",
    "Explain how magnets work to a child, please, and use short words for it.",
    "Dear friend, thank you for the letter about the first day at a new job;",
]
CLOSE = 1e-4  # scores nearer than this two correct implementations may order differently


def alone(prompt: str, count: int) -> tuple[list[int], list[float]]:
    """What transformers decodes greedily in binary32, and the gap of the two top scores."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()
    ids = Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json")).encode(prompt).ids
    text = torch.tensor([ids])
    tokens: list[int] = []
    gaps: list[float] = []
    with torch.no_grad():
        out = model(text, use_cache=True)
        for _ in range(count):
            top = out.logits[0, -1].topk(2)
            tokens.append(int(top.indices[0]))
            gaps.append(float(top.values[0] - top.values[1]))
            if tokens[-1] == model.config.eos_token_id:
                break
            out = model(
                torch.tensor([[tokens[-1]]]), past_key_values=out.past_key_values, use_cache=True
            )
    return tokens, gaps


def check(
    tmp_path: Path, prompts: list[str], count: int, clusters: dict[str, tuple[str, ...]]
) -> None:
    texts: dict[str, list[list[int]]] = {}
    for name, drafter in clusters.items():
        with dev(tmp_path / name, *drafter) as running:
            texts[name] = [running.generate(prompt, count)["tokens"] for prompt in prompts]
    first, *others = texts.values()
    assert all(other == first for other in others), "bit-identical among our own runs"
    parted = []
    for prompt, ours in zip(prompts, first, strict=True):
        wanted, gaps = alone(prompt, count)
        if ours != wanted:
            at = next(i for i, (a, b) in enumerate(zip(ours, wanted, strict=False)) if a != b)
            parted.append((prompt, at, gaps[at]))
    print(f"{len(prompts)} prompts x {count} tokens; parted from transformers: {parted}")
    assert all(gap < CLOSE for _, _, gap in parted), parted
    assert len(parted) <= 1, parted


@pytest.mark.slow
def test_greedy_is_the_targets_own_text_20_by_128(tmp_path: Path) -> None:
    check(tmp_path, PROMPTS, 128, DRAFTERS | OVER_HTTP_3)
