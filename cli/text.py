"""Plain columns, durations and colours for a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import click


def echo(text: str) -> None:
    """Print to standard output: colour only on a terminal, and not with NO_COLOR."""
    click.echo(text, color=False if os.environ.get("NO_COLOR") else None)


def table(rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Lines with aligned columns; those numbered in `right` are aligned right.

    Never cut to the width of a terminal: output in a pipe must be whole.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(_width(row[i]) for row in cells) for i in range(len(cells[0]))] if cells else []
    lines = []
    for row in cells:
        padded = []
        for i, cell in enumerate(row):
            space = " " * (widths[i] - _width(cell))
            padded.append(space + cell if i in right else cell + space)
        lines.append("  ".join(padded).rstrip())
    return lines


def duration(seconds: float) -> str:
    """A duration in its two largest units, as in "3d 4h"."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}min"
    return f"{minutes}min {whole % 60}s" if minutes else f"{whole}s"


def _width(cell: str) -> int:
    return len(click.unstyle(cell))
