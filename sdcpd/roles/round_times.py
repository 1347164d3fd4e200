"""What the round at hand of one session takes, stage by stage."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sdcpd.engine.api import Scored
from sdcpd.protocol.histogram import Histogram


class Taken(NamedTuple):
    """A round that is over: when it began and ended, and how long each stage took until when."""

    begin: float
    end: float
    stages: Sequence[tuple[str, float, float]]


class RoundTimes:
    """Counts the stages of a round with a proposal once it has its verdict.

    A session works on one round at a time, and what comes late of one that was given up does not
    count.
    """

    def __init__(self, stages: Mapping[str, Histogram]) -> None:
        self._stages = stages
        self._work: int | None = None  # None where it decodes alone
        self._begin = 0.0
        self._took: list[tuple[str, float, float]] = []  # stage, how long, until when

    def begun(self, work: int, *, proposal: bool) -> None:
        """Work begins, or goes on with its next stage."""
        if not proposal:
            self._work = None
        elif work != self._work:
            self._work, self._begin = work, time.monotonic()
            self._took.clear()

    def took(self, work: int, stage: str, seconds: float) -> None:
        """A stage is over."""
        if work == self._work:
            self._took.append((stage, seconds, time.monotonic()))

    def scored(self, work: int, scored: Scored, seconds: float) -> None:
        """The engine has answered after so long, which includes waiting where it tells of that."""
        waited_s = 0.0
        for stage, wait_s in (("queue", scored.queue_s), ("batch_wait", scored.batch_wait_s)):
            if wait_s is not None:
                waited_s += wait_s
                self.took(work, stage, wait_s)
        self.took(work, "score", max(0.0, seconds - waited_s))

    def over(self) -> Taken | None:
        """The round at hand was committed; None for one without a proposal.

        What is returned holds until the next round begins.
        """
        if self._work is None:
            return None
        self._work = None
        for stage, seconds, _ in self._took:
            self._stages[stage].add(seconds)
        end = time.monotonic()
        self._stages["total"].add(end - self._begin)
        return Taken(self._begin, end, self._took)
