"""What the benchmark of the engine compares: ratios of figures of one round, and their targets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from tests.bench.engine_prompts import VARIED
from tests.bench.engine_sides import (
    DRAFT,
    LLAMA,
    LLAMA_LOOKUP,
    LOOKUP,
    NGRAM,
    PLAIN,
    TRANSFORMERS,
)

TEXTS = ("varied", "repeating")
ONE, MANY = "one session", "16 sessions"
CALM, ARRIVAL, FIRST = "p99 gap, s", "p99 gap at arrival, s", "first token of arrival, s"
WORKS: Mapping[str, tuple[str, ...]] = {
    "varied": ("varied",),
    "repeating": ("repeating",),
    "streams": (ONE, MANY),
    "arrival": (CALM, ARRIVAL, FIRST),
}
"""What a side can be made to do, and the figures that come of it."""


class Figures:
    """One value for each side, name and round."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)

    def add(self, side: str, name: str, round_: int, value: float) -> None:
        self._values[side, name][round_] = value

    def of(self, side: str, name: str) -> dict[int, float]:
        """By round."""
        return self._values.get((side, name), {})

    def all(self) -> Iterable[tuple[str, str, list[float]]]:
        """Side, name and values."""
        for (side, name), values in self._values.items():
            yield side, name, list(values.values())


@dataclass(frozen=True, slots=True)
class Line:
    """A figure of one side over the largest of others', round by round."""

    group: str
    name: str
    above: tuple[str, str]
    below: tuple[tuple[str, str], ...]
    target: float | None = None
    at_most: bool = False
    texts: int = 0
    """If not 0, the ratio of the worst of so many texts."""

    def needs(self) -> set[tuple[str, str]]:
        """Sides and what they have to do."""
        figures = (self.above, *self.below)
        return {(side, w) for side, name in figures for w, names in WORKS.items() if name in names}

    def ratios(self, figures: Figures) -> list[float]:
        """Of each round; empty if a side was not measured."""
        if not self.texts:
            return self._ratios(figures, "")
        each = [self._ratios(figures, f" {index}") for index in range(self.texts)]
        return min((one for one in each if one), key=median, default=[])

    def _ratios(self, figures: Figures, suffix: str) -> list[float]:
        above = figures.of(self.above[0], self.above[1] + suffix)
        below = [figures.of(side, name + suffix) for side, name in self.below]
        rounds = [r for r in above if all(r in one for one in below)]
        return [above[r] / max(one[r] for one in below) for r in rounds]

    def verdict(self, ratios: list[float]) -> str:
        """One sentence; empty without a target."""
        if self.target is None or not ratios:
            return ""
        found = median(ratios)
        reached = found <= self.target if self.at_most else found >= self.target
        bound = "at most" if self.at_most else "at least"
        word = "reached" if reached else "missed"
        return f"{word}: {self.name} is {found:.2f}, to be {bound} {self.target:.2f}"


def _line(group: str, above: str, below: str, work: str, target: float | None = None) -> Line:
    return Line(group, f"{above} / {below}, {work}", (above, work), ((below, work),), target)


_WORST = f"{NGRAM} / {PLAIN}, varied, worst text"
_FASTER = f"{NGRAM} / the faster llama.cpp, repeating"
_FASTER_BELOW = ((LLAMA, "repeating"), (LLAMA_LOOKUP, "repeating"))
LINES = (
    _line("plain", PLAIN, TRANSFORMERS, "varied", 1.4),
    _line("plain", PLAIN, TRANSFORMERS, "repeating"),
    *(_line("plain", PLAIN, LOOKUP, work) for work in TEXTS),
    _line("ngram", NGRAM, PLAIN, "repeating", 1.5),
    _line("ngram", NGRAM, PLAIN, "varied"),
    Line("ngram", _WORST, (NGRAM, "varied"), ((PLAIN, "varied"),), 0.97, texts=len(VARIED)),
    _line("draft", DRAFT, PLAIN, "varied", 1.2),
    Line("llama", _FASTER, (NGRAM, "repeating"), _FASTER_BELOW, 1.0),
    *(_line("llama", NGRAM, side, "repeating") for side in (LLAMA, LLAMA_LOOKUP)),
    *(
        Line("concurrent", f"{side}, {MANY} / {ONE}", (side, MANY), ((side, ONE),), 4.0)
        for side in (PLAIN, NGRAM)
    ),
    Line("gaps", f"{PLAIN}, {ARRIVAL} / {CALM}", (PLAIN, ARRIVAL), ((PLAIN, CALM),), 3.0, True),
)
GROUPS = tuple(dict.fromkeys(line.group for line in LINES))


def report(lines: Iterable[Line], figures: Figures, reasons: Mapping[str, str]) -> str:
    """The tables, and a sentence for each target."""
    said = [f"{'ratio':<58} {'min':>6} {'median':>7} {'max':>6}"]
    ratios = {line: line.ratios(figures) for line in lines}
    for line, found in ratios.items():
        if found:
            spread = f"{min(found):6.2f} {median(found):7.2f} {max(found):6.2f}"
            said.append(f"{line.name:<58} {spread}")
    said += ["", f"{'tokens/s, if not said otherwise':<58} {'min':>6} {'median':>7} {'max':>6}"]
    for side, name, values in figures.all():
        if any(name in names for names in WORKS.values()):
            spread = f"{min(values):6.2f} {median(values):7.2f} {max(values):6.2f}"
            said.append(f"{side + ': ' + name:<58} {spread}")
    said += ["", *filter(None, (line.verdict(found) for line, found in ratios.items()))]
    said += [f"not measured: {side}: {reason}" for side, reason in reasons.items()]
    return "\n".join(said)


def as_json(lines: Iterable[Line], figures: Figures, reasons: Mapping[str, str]) -> dict[str, Any]:
    """The same, for programs."""
    return {
        "ratios": [
            {
                "group": line.group,
                "name": line.name,
                "ratios": found,
                "median": median(found) if found else None,
                "target": line.target,
                "at_most": line.at_most,
                "verdict": line.verdict(found).partition(":")[0] or None,
            }
            for line in lines
            for found in [line.ratios(figures)]
        ],
        "figures": [
            {"side": side, "name": name, "rounds": values} for side, name, values in figures.all()
        ],
        "not_measured": dict(reasons),
    }
