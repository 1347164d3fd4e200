"""Milliseconds of one pass by rows, sessions and context: `python -m tests.bench.passes TARGET`.

The engine's own Runner, without daemons, beside the forward pass of transformers over a dynamic
cache, in one process. The steps take turns, medians count. What checks drafted tokens is a pass of
several rows, which ought to cost little more than a pass of one.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from sdcpd.engine.load import _load
from sdcpd.engine.model_settings import ModelSettings
from sdcpd.engine.runner import PASS_ROWS_MAX, Feed, Runner
from tests.bench.engine_sides import cores

CONTEXTS = (128, 512, 2048)
ROWS = (1, 4, 16, 32, 64)
PEER_ROWS = (1, 16)
SESSIONS = 16
TARGET = 1.5  # a pass of 16 rows over a pass of one
ORDINARY = 300  # below it lie special tokens and single octets
Step = Callable[[], float]


def texts(vocab: int, count: int, length: int) -> list[list[int]]:
    """Different tokens, the same in every run."""
    chooser = random.Random(count)
    return [[chooser.randrange(ORDINARY, vocab) for _ in range(length)] for _ in range(count)]


def our_step(runner: Runner, given: Sequence[list[int]], context: int, rows: int) -> Step:
    """A pass over the next rows of all texts, after `context` of each, and all taken back."""
    kvs = [runner.new_kv() for _ in given]
    for kv, tokens in zip(kvs, given, strict=True):
        for at in range(0, context, PASS_ROWS_MAX):
            runner.run([Feed(kv, tokens[at : min(at + PASS_ROWS_MAX, context)])])

    def step() -> float:
        feeds = [
            Feed(kv, tokens[context : context + rows], rows)
            for kv, tokens in zip(kvs, given, strict=True)
        ]
        begin = time.perf_counter()
        runner.run(feeds)
        spent = time.perf_counter() - begin
        for kv, tokens in zip(kvs, given, strict=True):
            kv.match(tokens, context)
        return spent

    return step


def peer_step(model: Any, tokens: list[int], context: int, rows: int) -> Step:
    """The same for one text by transformers."""
    cache = DynamicCache()
    model(torch.tensor([tokens[:context]]), past_key_values=cache, logits_to_keep=1)
    fed = torch.tensor([tokens[context : context + rows]])

    def step() -> float:
        begin = time.perf_counter()
        model(fed, past_key_values=cache)
        spent = time.perf_counter() - begin
        cache.crop(-rows)
        return spent

    return step


def medians(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Milliseconds of each step; the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            spent = step()
            if number:
                times[name].append(1000 * spent)
    return {name: statistics.median(taken) for name, taken in times.items()}


def named(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows} rows"


def measure(runner: Runner, model: Any, context: int, rounds: int) -> dict[str, float]:
    """All steps at one context."""
    given = texts(runner.model.config.vocab, SESSIONS, context + max(ROWS))
    steps = {named(rows): our_step(runner, given[:1], context, rows) for rows in ROWS}
    steps[f"{SESSIONS} sessions"] = our_step(runner, given, context, 1)
    for rows in PEER_ROWS:
        steps[f"transformers, {named(rows)}"] = peer_step(model, given[0], context, rows)
    return medians(steps, rounds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=Path, help="a Hugging Face directory")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--context", type=int, action="append", dest="contexts")
    options = parser.parse_args()
    contexts = options.contexts or list(CONTEXTS)
    runner = _load(ModelSettings(options.target, device="cpu", threads=cores()), report=print)
    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=runner.model.dtype)
    with torch.inference_mode():
        found = {c: measure(runner, model, c, options.rounds) for c in contexts}
    print(f"{'ms a pass at a context of':<28}" + "".join(f"{c:>9}" for c in contexts))
    for name in found[contexts[0]]:
        print(f"{name:<28}" + "".join(f"{found[c][name]:9.1f}" for c in contexts))
    for name, above, below in (
        ("16 rows / 1 row", "16 rows", "1 row"),
        ("16 sessions / 1 row", f"{SESSIONS} sessions", "1 row"),
        ("transformers 1 row / ours", "transformers, 1 row", "1 row"),
        ("transformers 16 rows / ours", "transformers, 16 rows", "16 rows"),
    ):
        print(
            f"{name:<28}" + "".join(f"{found[c][above] / found[c][below]:9.2f}" for c in contexts)
        )
    worst = max(found[c]["16 rows"] / found[c]["1 row"] for c in contexts)
    word = "reached" if worst <= TARGET else "missed"
    print(f"{word}: 16 rows / 1 row is {worst:.2f} at the worst, to be at most {TARGET:.2f}")


if __name__ == "__main__":
    main()
