"""Plain columns, durations and colours for a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import IO, Any

import click

TIMEOUT, QUIET = "cli.timeout_s", "cli.quiet"
"""Where a context's `meta` has the options of `sdcpctl` itself."""


def echo(text: str, *, nl: bool = True) -> None:
    """Print to standard output: colour only on a terminal, and not with NO_COLOR."""
    click.echo(text, nl=nl, color=colour())


def remark(text: str, *, nl: bool = True) -> None:
    """Print to standard error what nobody needs to know, unless --quiet is given."""
    if not is_quiet():
        click.echo(text, nl=nl, err=True, color=colour())


def colour() -> bool | None:
    """What click takes: None, on a terminal alone and not with --no-color; False with NO_COLOR."""
    return False if os.environ.get("NO_COLOR") else None


def is_quiet() -> bool:
    """Whether progress and remarks are not wanted."""
    return bool(_given(QUIET))


def timeout_given_s() -> float | None:
    """How long an instance may take to answer, where --timeout says it."""
    found: float | None = _given(TIMEOUT)
    return found


def shows_progress() -> bool:
    """Whether a line that changes is of use on standard error."""
    return is_terminal(sys.stderr) and not is_quiet()


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether somebody sits there; a stream that is closed is None."""
    return stream is not None and stream.isatty()


def _given(name: str) -> Any:
    this = click.get_current_context(silent=True)
    return None if this is None else this.meta.get(name)


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
