"""What a metric is called, what it means and who has it: the one place that pages and texts go by.

A family is made once, beside the code that reads its values, and is from then on in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sdcpd.protocol.histogram import Histogram

ROLES = ("router", "verifier", "drafter")
DRAFTING = ("verifier", "drafter")


@dataclass(frozen=True, slots=True)
class Family:
    """A metric; every sample has the label `role` beside `labels`."""

    name: str
    """As it is scraped: a counter's ends in _total."""
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    roles: tuple[str, ...]
    """Which roles have it."""
    labels: tuple[str, ...] = ()
    of_instances: bool = False
    """Whether `role` is that of the instance a sample is of, not of the one that tells it."""

    def __call__(self, value: float | Histogram, *labels: str) -> Sample:
        """A value of it, with those of its labels."""
        return Sample(self, labels, value)


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a family."""

    family: Family
    labels: tuple[str, ...]
    value: float | Histogram


Samples = Iterator[Sample]
FAMILIES: dict[str, Family] = {}
"""All of them by name, in the order of pages and texts."""


def _made(family: Family) -> Family:
    assert family.name not in FAMILIES, f"{family.name} is there twice"
    FAMILIES[family.name] = family
    return family


def counter(name: str, text: str, *labels: str, roles: tuple[str, ...] = ROLES) -> Family:
    """A family of numbers that only grow; `name` is without _total."""
    return _made(Family(f"{name}_total", "counter", text, roles, labels))


def gauge(
    name: str,
    text: str,
    *labels: str,
    roles: tuple[str, ...] = ROLES,
    of_instances: bool = False,
) -> Family:
    """A family of numbers that are as they are now."""
    return _made(Family(name, "gauge", text, roles, labels, of_instances))


def histogram(name: str, text: str, *labels: str, roles: tuple[str, ...] = ROLES) -> Family:
    """A family of distributions."""
    return _made(Family(name, "histogram", text, roles, labels))
