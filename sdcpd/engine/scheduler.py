"""Which rows go into the next pass (no torch)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

SHORT_ROWS_MAX = 68  # a round needs at most m_max + 1 = 65 rows; anything longer is a prefill
SEGMENT_ROWS_MIN = 4  # a session's rows are padded to a multiple of this
PREFILL_ROWS_MIN = 32  # what the oldest prefill gets even when rounds could fill the pass


class Plannable(Protocol):
    """Work that needs rows."""

    @property
    def rows_left(self) -> int: ...


J = TypeVar("J", bound=Plannable)


def plan(jobs: Sequence[J], *, rows_max: int) -> list[tuple[J, int]]:
    """Choose (job, rows) for one pass, in order of arrival.

    Rounds come first and whole, so that a long prompt does not hold up others' tokens; prefills
    share what is left, and the oldest of them always moves on.  The oldest round goes even if it is
    longer than `rows_max`, for its scores must come from one pass.
    """
    short = [job for job in jobs if job.rows_left <= SHORT_ROWS_MAX]
    long = [job for job in jobs if job.rows_left > SHORT_ROWS_MAX]
    left = rows_max - (PREFILL_ROWS_MIN if long else 0)
    chosen: list[tuple[J, int]] = []
    for job in short:
        need = _padded(job.rows_left)
        if need <= left or not chosen:
            chosen.append((job, job.rows_left))
            left -= need
    left += PREFILL_ROWS_MIN if long else 0
    chosen += _prefills(long, max(left, SEGMENT_ROWS_MIN))
    return chosen


def _prefills(jobs: Iterable[J], left: int) -> list[tuple[J, int]]:
    chosen = []
    for job in jobs:
        rows = min(job.rows_left, left // 4 * 4)
        if rows <= 0:
            break
        chosen.append((job, rows))
        left -= _padded(rows)
    return chosen


def _padded(rows: int) -> int:
    return (rows + 3) // 4 * 4
