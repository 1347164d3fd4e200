"""Tokens per second and per target pass of `sdcpd dev` on a model directory, by drafter.

    python -m tests.bench.real_model TARGET [--drafter DIR|ngram|none]... [--tokens 96] [--rounds 3]

The drafters take turns in each round, in one run, so that the machine's moods fall on all alike.
Every text of one prompt must have the same digest, whoever drafted it.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from tests.kit.dev import Dev, dev

PROMPTS = (
    "Write a short story about a tiny dragon in a teacup.",
    "Give me five facts about the desert fox.",
    "Explain how magnets work to a child.",
    "Write a Python function that reverses a list, and then the same function again with a comment.",
)


def measure(running: Dev, prompt: str, tokens: int) -> dict[str, Any]:
    return running.generate(prompt, tokens, chat=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=Path)
    parser.add_argument("--drafter", action="append", dest="drafters")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    drafters = options.drafters or ["none", "ngram"]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in drafters}
    with tempfile.TemporaryDirectory() as scratch:
        for round_ in range(options.rounds):
            for number, name in enumerate(drafters):
                # One cluster at a time: idle processes would still hold memory and caches.
                with ExitStack() as stack:
                    place = Path(scratch) / f"{round_}-{number}"
                    arguments = ("--target", str(options.target), "--drafter", name)
                    running = stack.enter_context(dev(place, *arguments))
                    measure(running, "warm up", 8)
                    found[name] += [measure(running, p, options.tokens) for p in PROMPTS]
    for index in range(len(PROMPTS)):
        digests = {
            runs[i]["digest"]
            for runs in found.values()
            for i in range(index, len(runs), len(PROMPTS))
        }
        assert len(digests) == 1, f"prompt {index}: {digests}"
    base = median(len(f["tokens"]) / f["seconds"] for f in found[drafters[0]])
    print(f"{'drafter':<40} {'tokens/s':>9} {'ratio':>6} {'tokens/pass':>12} {'accepted':>9}")
    for name, runs in found.items():
        rate = median(len(f["tokens"]) / f["seconds"] for f in runs)
        per_pass = sum(len(f["tokens"]) for f in runs) / sum(
            f["rounds"] + f["self_decoded"] for f in runs
        )
        drafted = sum(f["drafted"] for f in runs)
        share = sum(f["accepted"] for f in runs) / drafted if drafted else 0.0
        print(f"{Path(name).name:<40} {rate:9.1f} {rate / base:6.2f} {per_pass:12.2f} {share:9.2f}")
    print("all texts of a prompt have one digest")


if __name__ == "__main__":
    main()
