"""What a run came to: faults by kind, tokens checked, gaps by fault, and whatever was wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from tests.chaos.client import Stream
from tests.chaos.plan import Fault

AFTER_S = 10.0  # a gap that begins later than this after a fault's end is not its doing


@dataclass(frozen=True, slots=True)
class Gap:
    """The longest silence of the streams that one kind of fault met, in seconds."""

    count: int
    p50_s: float
    p99_s: float


@dataclass
class Report:
    """Everything that is said of a run."""

    seed: int
    seconds: float
    faults: dict[str, int] = field(default_factory=dict)
    texts: int = 0
    whole: int = 0
    tokens_checked: int = 0
    reconnects: int = 0
    refused: int = 0
    failovers: int = 0
    gaps: dict[str, Gap] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @property
    def as_json(self) -> str:
        """One object."""
        return json.dumps(asdict(self), indent=1)

    @property
    def lines(self) -> Iterable[str]:
        """For people."""
        yield f"seed {self.seed}, {self.seconds:.0f} s, {sum(self.faults.values())} faults:"
        yield "  " + ", ".join(f"{count} x {kind}" for kind, count in sorted(self.faults.items()))
        yield f"{self.texts} texts, {self.whole} whole, {self.tokens_checked} tokens checked"
        yield f"{self.reconnects} times a client came back by session, {self.refused} refused"
        yield f"{self.failovers} sessions went on under a higher epoch"
        if self.gaps:
            yield f"{'longest gap of a stream by fault':<34}{'streams':>8}{'p50 s':>8}{'p99 s':>8}"
        for kind, gap in sorted(self.gaps.items()):
            yield f"  {kind:<32}{gap.count:>8}{gap.p50_s:>8.2f}{gap.p99_s:>8.2f}"
        yield "nothing lost, nothing twice" if not self.wrong else f"{len(self.wrong)} WRONG:"
        yield from (f"  {one}" for one in self.wrong)


Injected = tuple[float, float, Fault, dict[str, dict[str, Any]]]


def count_faults(injected: Sequence[Injected]) -> dict[str, int]:
    """How many of each kind there were."""
    return dict(Counter(fault.label for _, _, fault, _ in injected))


def gaps_by_fault(
    injected: Sequence[Injected], streams: Sequence[Stream], bases: dict[str, str]
) -> dict[str, Gap]:
    """The longest gap of each stream that was served by what a fault met, by kind of fault.

    `bases` are base URIs by name.
    """
    found: dict[str, list[float]] = {}
    by_session = {stream.session: stream for stream in streams}
    for begin, end, fault, sessions in injected:
        met = [one for one in sessions.values() if _meets(fault, one, bases)]
        for one in met:
            stream = by_session.get(one["session"])
            gap = None if stream is None else _gap(stream, begin, end)
            if gap is not None:
                found.setdefault(fault.label, []).append(gap)
    return {kind: _summary(gaps) for kind, gaps in found.items()}


def _meets(fault: Fault, session: dict[str, Any], bases: dict[str, str]) -> bool:
    """Whether a session was served by all the instances that a fault was about."""
    serving = {session["verifier"], session["drafter"]}
    return all(name.startswith("r") or bases[name] in serving for name in fault.targets)


def _gap(stream: Stream, begin: float, end: float) -> float | None:
    """The longest silence that began before a fault had been over for long, and ended after it."""
    silences = [b - a for a, b in pairwise(stream.times) if b > begin and a < end + AFTER_S]
    return max(silences, default=None)


def _summary(gaps: list[float]) -> Gap:
    gaps.sort()
    return Gap(len(gaps), _at(gaps, 0.5), _at(gaps, 0.99))


def _at(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]
