"""Two runs of one text as lines of a terminal: when tokens came, and where a verifier died."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

CELL_S = 0.1
WIDTH_MAX = 72
TOKENS, SILENCE, DEATH = "#", ".", "x"
LABELS = ("undisturbed", "killed")


def longest_gap_s(times_s: Sequence[float]) -> float:
    """The longest silence between two tokens, in seconds."""
    return max((b - a for a, b in pairwise(times_s)), default=0.0)


def strip(
    undisturbed_s: Sequence[float], killed_s: Sequence[float], *, death_s: float
) -> list[str]:
    """A line for each run and one for the scale; times count from each run's request.

    A character stands for 100 ms, or for more where a line would be wider than 72.
    """
    room = WIDTH_MAX - len(f"{LABELS[0]} ||")
    end_s = max(*undisturbed_s, *killed_s, death_s)
    cell_s = max(CELL_S, (end_s + CELL_S / 2) / room)
    lines = []
    for label, times_s, dead_s in zip(
        LABELS, (undisturbed_s, killed_s), (None, death_s), strict=True
    ):
        lines.append(f"{label:<{len(LABELS[0])}} |{_cells(times_s, cell_s, dead_s)}|")
    return [*lines, f"{'':<{len(LABELS[0])}}  {cell_s * 1000:.0f} ms a character"]


def _cells(times_s: Sequence[float], cell_s: float, death_s: float | None) -> str:
    marks = [*times_s, *([] if death_s is None else [death_s])]
    cells = [SILENCE] * (int(max(marks) / cell_s) + 1)
    for time_s in times_s:
        cells[int(time_s / cell_s)] = TOKENS
    if death_s is not None:
        cells[int(death_s / cell_s)] = DEATH
    return "".join(cells)
