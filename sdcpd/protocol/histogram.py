"""Counts of values by fixed upper bounds: to add one costs next to nothing, reading is rare."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence


class Histogram:
    """How many values were at most each bound; the last count is of those above all of them."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    @classmethod
    def of(cls, bounds: Sequence[float], times: Mapping[int, int]) -> Histogram:
        """What values come to that each occurred so many times."""
        made = cls(bounds)
        for value, count in times.items():
            made.counts[bisect_left(made.bounds, value)] += count
            made.total += value * count
        return made
