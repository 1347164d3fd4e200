"""A run: at each load blocks with speculation and without take turns, since machines drift."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from cli.bench.client import Client, Text
from cli.bench.figures import PAIRS_MIN, Verdict, tokens_per_s, usage_of, verdict, whole
from cli.bench.load import Block, arrivals, closed_loop, open_loop
from cli.bench.prompts import Prompts
from cli.bench.rounds import Key, Rounds, Sources, rounds_of

WARM_UP_TOKENS = 16
ARRIVALS_SEED = 20_000  # one schedule for each repeat, whatever the prompts are
Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    loads: Sequence[float]
    """Clients at a time, or requests a second where the loop is open."""
    open_loop: bool
    duration_s: float | None
    requests: int | None
    """Of a block; one of the two is given, and the duration for an open loop."""
    repeats: int
    baseline: bool

    def name(self, load: float) -> str:
        """A load as people read it."""
        if self.open_loop:
            return f"{load:g} requests/s"
        return "1 session" if load == 1 else f"{load:g} sessions"


@dataclass
class Point:
    """What one load came to."""

    load: float
    on: list[Block] = field(default_factory=list)
    off: list[Block] = field(default_factory=list)
    grown: Counter[Key] = field(default_factory=Counter)
    """Metrics, over the blocks with speculation."""

    @property
    def rounds(self) -> Rounds:
        """Of the blocks with speculation."""
        return rounds_of(usage_of(texts_of(self.on)), self.grown)


@dataclass
class Run:
    """All that was measured, whole or not."""

    plan: Plan
    points: list[Point] = field(default_factory=list)
    unfinished: list[Text] = field(default_factory=list)
    """Texts of warm-ups: they count for nothing but failures."""
    stopped: str | None = None
    """Why it ended early."""
    all_grown: Counter[Key] = field(default_factory=Counter)
    """Metrics, over the whole run."""

    def failures(self) -> Counter[str]:
        """How often which kind of failure was."""
        texts = [one for point in self.points for one in texts_of([*point.on, *point.off])]
        return Counter(one.failure for one in [*texts, *self.unfinished] if one.failure)

    def said(self, kind: str) -> str:
        """What the API said of a kind of failure when it was first met."""
        texts = [one for point in self.points for one in texts_of([*point.on, *point.off])]
        every = [*texts, *self.unfinished]
        return next((one.said for one in every if one.failure == kind and one.said), "")


def texts_of(blocks: Sequence[Block]) -> list[Text]:
    """All texts of some blocks."""
    return [text for block in blocks for text in block.texts]


def ratios(point: Point, *, open_loop: bool) -> list[float]:
    """How much better each pair of blocks is with speculation: above 1 it helps.

    By tokens a second; where load is offered at a rate, by how soon a text has ended.
    """
    found = []
    for on, off in zip(point.on, point.off, strict=False):
        values = [_end_s(off), _end_s(on)] if open_loop else [tokens_per_s(on), tokens_per_s(off)]
        if all(values):
            found.append(values[0] / values[1])
    return found


def judged(point: Point, *, open_loop: bool) -> tuple[Verdict, str]:
    """The verdict of a point; where there is none, why."""
    found = ratios(point, open_loop=open_loop)
    with_it, without = usage_of(texts_of(point.on)), usage_of(texts_of(point.off))
    if not found:
        return Verdict.UNKNOWN, "nothing was measured to compare it with"
    if not with_it.texts or not without.texts:
        return Verdict.UNKNOWN, "the API tells nothing of rounds, so both may be the same"
    if without.rounds:
        return Verdict.UNKNOWN, f"{without.rounds} rounds had a drafter although told to have none"
    if not with_it.rounds:
        return Verdict.UNKNOWN, "no drafter took part"
    said = verdict(found)
    few = (
        f"it takes {PAIRS_MIN} pairs of blocks to show a spread" if said is Verdict.UNKNOWN else ""
    )
    return said, few


def _end_s(block: Block) -> float:
    """The median time from when a text was due to its end."""
    ends = [one.end_s - one.due_s for one in whole(block.texts)]
    return median(ends) if ends else 0.0


class Runner:
    """Carries out a plan."""

    def __init__(
        self, plan: Plan, client: Client, prompts: Prompts, sources: Sources, told: Told
    ) -> None:
        """`told` gets a line whenever something else begins."""
        self.run = Run(plan)
        self._plan, self._client, self._prompts = plan, client, prompts
        self._sources, self._told = sources, told
        self._speculate = True

    async def measure(self) -> None:
        """Measure all; what was measured is in `run` even if this is cancelled."""
        first = self._sources.look()
        try:
            for load in self._plan.loads:
                if not await self._point(load):
                    break
        finally:
            self._client.close()
            self.run.all_grown = grown(first, self._sources.look())

    async def _point(self, load: float) -> bool:
        """One load; whether to go on."""
        await self._warm_up(load)
        point = Point(load)
        self.run.points.append(point)
        for repeat in range(self._plan.repeats):
            ways = [True, False] if self._plan.baseline else [True]
            # The one that begins changes, so that drift favours neither.
            for speculate in ways if repeat % 2 == 0 else reversed(ways):
                way = "speculation" if speculate else "self-decode"
                name = self._plan.name(load)
                self._told(f"{name}: {way}, repeat {repeat + 1} of {self._plan.repeats}")
                if not await self._block(point, speculate, repeat):
                    return False
        return True

    async def _block(self, point: Point, speculate: bool, repeat: int) -> bool:
        before = self._sources.look() if speculate else None
        self._speculate = speculate
        block = await self._loaded(point.load, repeat)
        if self._prompts.out:
            self.run.unfinished += block.texts
            self.run.stopped = "the prompts of the file ran out"
            return False
        (point.on if speculate else point.off).append(block)
        if before is not None:
            point.grown.update(grown(before, self._sources.look()))
        if block.texts and not whole(block.texts):
            self.run.stopped = "no text of a whole block came to its end"
            return False
        return True

    async def _loaded(self, load: float, repeat: int) -> Block:
        plan = self._plan
        if plan.open_loop:
            assert plan.duration_s is not None
            due = arrivals(load, plan.duration_s, ARRIVALS_SEED + repeat)
            return await open_loop(
                self._ask, self._prompts.take, due=due, duration_s=plan.duration_s
            )
        return await closed_loop(
            self._ask,
            self._prompts.take,
            clients=int(load),
            duration_s=plan.duration_s,
            requests=plan.requests,
        )

    async def _warm_up(self, load: float) -> None:
        """As many texts at once as there will be, both ways; they count for nothing."""
        self._told(f"{self._plan.name(load)}: warming up")
        clients = 1 if self._plan.open_loop else int(load)
        for speculate in (True, False) if self._plan.baseline else (True,):
            self._speculate = speculate
            prompts = [self._prompts.take() for _ in range(clients)]
            texts = await asyncio.gather(
                *(self._ask(one, 0.0, WARM_UP_TOKENS) for one in prompts if one is not None)
            )
            self.run.unfinished += [one for one in texts if one.failure is not None]

    async def _ask(self, prompt: str, due_s: float, max_tokens: int | None = None) -> Text:
        if max_tokens is not None:
            max_tokens = min(max_tokens, self._client.wanted.max_tokens)
        return await self._client.ask(
            prompt, due_s, speculate=self._speculate, max_tokens=max_tokens
        )


def grown(before: Counter[Key], after: Counter[Key]) -> Counter[Key]:
    """By how much counters grew, those too that did not; nothing where one has begun anew."""
    made: Counter[Key] = Counter()
    for key, value in after.items():
        made[key] = value - before[key]
    # An instance was started again meanwhile, or tells no more: what is left would be of others.
    return Counter() if any(value < 0 for value in made.values()) else made
