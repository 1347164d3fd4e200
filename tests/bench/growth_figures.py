"""How figures grow with the work: least squares, and in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

SAME = 1.25
"""What is at most so many times its first figure at the end counts as constant."""
LINEAR = 1.15
"""The exponent between the last two figures up to which growth counts as linear."""


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """What a unit of x adds to y, by least squares; 0 where all x are the same."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    both = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return both / spread if spread else 0.0


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The power of x that y grows with between its last two figures; 0 where that has no sense."""
    if len(xs) < 2 or min(*xs[-2:], *ys[-2:]) <= 0 or xs[-1] == xs[-2]:
        return 0.0
    return math.log(ys[-1] / ys[-2]) / math.log(xs[-1] / xs[-2])


def grows_worse(xs: Sequence[float], ys: Sequence[float]) -> bool:
    """Whether y grows worse than linearly, and by more than chance would have it."""
    return len(xs) > 1 and ys[-1] > SAME * ys[0] and exponent(xs, ys) > LINEAR


def described(xs: Sequence[float], ys: Sequence[float], unit: str, each: str) -> str:
    """A verb and what follows it: how y, in `unit`, goes with x, counted in `each`."""
    first, last = number(ys[0]), number(ys[-1])
    if len(xs) < 2 or ys[0] / SAME <= ys[-1] <= SAME * ys[0]:
        return f"is constant: {first} {unit} at {xs[0]:,} {each}s, {last} {unit} at {xs[-1]:,}"
    if ys[-1] < ys[0]:
        return f"falls from {first} {unit} at {xs[0]:,} {each}s to {last} {unit} at {xs[-1]:,}"
    tells = f"from {first} {unit} at {xs[0]:,} {each}s to {last} {unit} at {xs[-1]:,}"
    if grows_worse(xs, ys):
        power = exponent(xs, ys)
        return f"**grows worse than linearly**, {tells} (power {power:.2f} at the end)"
    thousand = number(1000 * slope(xs, ys))
    return f"grows at most linearly, {tells}: {thousand} {unit} a thousand {each}s"


def number(value: float) -> str:
    """Three digits that count."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
