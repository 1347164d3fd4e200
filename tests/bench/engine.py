"""The engine on a real model, whole clusters over mutual TLS, against others on the same machine.

    python -m tests.bench.engine TARGET [--drafter DIR] [--rounds 3] [--only plain,ngram] [-o json]

TARGET and DIR are Hugging Face directories; a draft model without a tokenizer gets the target's.
The sides take turns in each round, each alone on the machine; a ratio is of one round, and what
counts is the median. All is greedy, and no end of text shortens a text. Every text of one prompt
must be the same whatever the cluster's drafter, alone and among other sessions.

transformers runs in this interpreter, llama.cpp (llama-cpp-python) in that of --peer-python, from
a GGUF file with the same weights in bf16. Whoever is not installed is not measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from sdcpd.engine.tokenizer import TextModel
from tests.bench import engine_streams
from tests.bench.engine_prompts import SESSIONS, SETS, prompt, prompts
from tests.bench.engine_report import (
    ARRIVAL,
    CALM,
    FIRST,
    GROUPS,
    LINES,
    MANY,
    ONE,
    Figures,
    Line,
    as_json,
    report,
)
from tests.bench.engine_sides import (
    ALL,
    CLUSTERS,
    DRAFT,
    PLAIN,
    Cluster,
    Models,
    NotMeasured,
    Side,
    cores,
    open_side,
)

WARM_TOKENS = 8


@dataclass
class Bench:
    """One run: what is compared, and what was found."""

    models: Models
    text: TextModel
    tokens: int
    lines: list[Line]
    figures: Figures = field(default_factory=Figures)
    reasons: dict[str, str] = field(default_factory=dict)
    """Why sides were not measured."""
    digests: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    """Of each prompt's text: the digest, and who made it first."""
    firsts: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """The tokens of each text by the plain cluster."""
    shared: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """How many tokens of each text were the same as the plain cluster's, by other engines."""

    def works(self, side: str) -> list[str]:
        """What a side has to do for the lines."""
        return sorted({work for line in self.lines for name, work in line.needs() if name == side})

    def round(self, number: int) -> None:
        """All sides, in an order that turns."""
        turn = number % len(ALL)
        for side in (*ALL[turn:], *ALL[:turn]):
            works = self.works(side)
            if not works or side in self.reasons:
                continue
            print(f"round {number + 1}: {side}", file=sys.stderr, flush=True)
            try:
                self._side(side, works, number)
            except NotMeasured as e:
                self.reasons[side] = str(e)

    def _side(self, name: str, works: list[str], round_: int) -> None:
        place = self.models.scratch / f"{round_}-{ALL.index(name)}"
        with open_side(name, self.models, place) as side:
            side.text(prompt(self.text, "warm up"), WARM_TOKENS)
            for work in works:
                if work in SETS:
                    self._texts(name, side, work, round_)
                    continue
                assert isinstance(side, Cluster)
                measure = self._streams if work == "streams" else self._arrival
                measure(name, side.running.api, round_)

    def _texts(self, name: str, side: Side, work: str, round_: int) -> None:
        spent = made = 0.0
        for index, one in enumerate(prompts(self.text, SETS[work])):
            if round_ == 0:
                side.check(one)
            found = side.text(one, self.tokens)
            made, spent = made + len(found.tokens), spent + found.seconds
            self.figures.add(name, f"{work} {index}", round_, len(found.tokens) / found.seconds)
            if found.passes:
                per_pass = len(found.tokens) / found.passes
                self.figures.add(name, f"{work} {index}, tokens/pass", round_, per_pass)
            if name in CLUSTERS:
                self._same(f"{work} {index}", found.digest, name)
            self._compare(name, (work, index), found.tokens)
        self.figures.add(name, work, round_, made / spent)

    def _compare(self, name: str, key: tuple[str, int], tokens: list[int]) -> None:
        if name == PLAIN:
            self.firsts[key] = tokens
        elif name not in CLUSTERS and key in self.firsts:
            pairs = enumerate(zip(tokens, self.firsts[key], strict=False))
            same = next((at for at, (own, other) in pairs if own != other), len(tokens))
            self.shared[name].append(same)

    def _streams(self, name: str, api: str, round_: int) -> None:
        one, many, streams = engine_streams.rates(api, self.tokens)
        self.figures.add(name, ONE, round_, one)
        self.figures.add(name, MANY, round_, many)
        asked = (*SESSIONS[: engine_streams.ALONE], *SESSIONS)
        for message, stream in zip(asked, streams, strict=True):
            self._same(message, stream.digest, f"{name} in a stream")

    def _arrival(self, name: str, api: str, round_: int) -> None:
        found = engine_streams.gaps(api, self.text, round_)
        self.figures.add(name, CALM, round_, found.undisturbed)
        self.figures.add(name, ARRIVAL, round_, found.disturbed)
        self.figures.add(name, FIRST, round_, found.first_token)

    def _same(self, what: str, digest: str, who: str) -> None:
        self.digests[what].setdefault(digest, who)

    def differing(self) -> list[str]:
        """A sentence for each prompt whose texts differ."""
        return [
            f"DIFFERENT TEXTS of {what}: {', '.join(f'{who} {d[:12]}' for d, who in known.items())}"
            for what, known in self.digests.items()
            if len(known) > 1
        ]

    def notes(self) -> str:
        """What is no ratio."""
        said = [
            f"{side} writes the same as {PLAIN} for the first {median(counts):.0f} of "
            f"{self.tokens} tokens (median of {len(counts)} texts, at least {min(counts)})"
            for side, counts in self.shared.items()
        ]
        same = [f"all texts of a prompt have one digest ({len(self.digests)} prompts)"]
        return "\n".join([*said, *(self.differing() or same)])


def main() -> None:
    options = parsed()
    wanted = options.only.split(",")
    lines = [line for line in LINES if line.group in wanted]
    with tempfile.TemporaryDirectory() as scratch:
        models = Models(
            options.target,
            options.drafter,
            options.peer_python,
            cores(),
            Path(scratch),
            options.lookup_tokens,
        )
        bench = Bench(models, TextModel.load(options.target), options.tokens, lines)
        for number in range(options.rounds):
            bench.round(number)
    if options.output == "json":
        found = as_json(lines, bench.figures, bench.reasons) | {"notes": bench.notes()}
        print(json.dumps(found, indent=1))
    else:
        print(report(lines, bench.figures, bench.reasons))
        print(bench.notes())
    failed = [side for side in CLUSTERS if side in bench.reasons and side != DRAFT]
    sys.exit(1 if failed or bench.differing() else 0)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=Path)
    parser.add_argument("--drafter", type=Path, help="a draft model's directory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96, help="of each text")
    parser.add_argument("--only", default=",".join(GROUPS), help="of " + ",".join(GROUPS))
    parser.add_argument("--peer-python", default=sys.executable, help="has llama-cpp-python")
    parser.add_argument("--lookup-tokens", type=int, help="llama.cpp's prompt lookup drafts; 10")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    options = parser.parse_args()
    if unknown := set(options.only.split(",")) - set(GROUPS):
        parser.error(f"--only: no such group: {', '.join(sorted(unknown))}")
    return options


if __name__ == "__main__":
    main()
