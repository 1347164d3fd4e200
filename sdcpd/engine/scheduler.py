"""Which rows go into the next pass (no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

SHORT_ROWS_MAX = 68  # a round needs at most m_max + 1 = 65 rows; anything longer is a prefill
SEGMENT_ROWS_MIN = 4  # of a prefill, so that it moves on
PREFILL_ROWS_MIN = 8  # what the oldest prefill gets even when rounds could fill the pass
SLOWDOWN = 2.5  # times its time without, that a pass of rounds may take with a prefill in it
_MEMORY = 0.2  # weight of the newest measurement


class Plannable(Protocol):
    """Work that needs rows."""

    @property
    def rows_left(self) -> int: ...


J = TypeVar("J", bound=Plannable)


class PrefillPace:
    """How many rows of prefills go with rounds, so that others' tokens keep flowing.

    A row of a prefill costs the more the longer its text is: so what passes took is measured.
    """

    def __init__(self) -> None:
        self.rows = 4 * PREFILL_ROWS_MIN
        self._rounds_s = 0.0

    def passed(self, spent_s: float, *, rounds: int, prefill_rows: int) -> None:
        """Take in a pass of so many rounds and rows of prefills."""
        if not rounds:
            return
        if not prefill_rows:
            old = self._rounds_s or spent_s
            self._rounds_s = old + _MEMORY * (spent_s - old)
        elif self._rounds_s:
            ratio = SLOWDOWN * self._rounds_s / max(spent_s, 1e-9)
            rows = prefill_rows * min(max(ratio, 0.5), 1.25)
            self.rows = max(PREFILL_ROWS_MIN, int(rows))


def plan(
    jobs: Sequence[J], *, rows_max: int, prefill_max: int | None = None
) -> list[tuple[J, int]]:
    """Choose (job, rows) for one pass, in order of arrival.

    Rounds come first and whole, so that a long prompt does not hold up others' tokens; prefills
    share what is left, at most `prefill_max` rows where there are rounds: the oldest of them has
    half, and always moves on, the shortest have the rest.  The oldest round goes even if it is
    longer than `rows_max`, for its scores must come from one pass.
    """
    short = [job for job in jobs if job.rows_left <= SHORT_ROWS_MAX]
    long = [job for job in jobs if job.rows_left > SHORT_ROWS_MAX]
    left = rows_max - (PREFILL_ROWS_MIN if long else 0)
    chosen: list[tuple[J, int]] = []
    for job in short:
        need = job.rows_left
        if need <= left or not chosen:
            chosen.append((job, job.rows_left))
            left -= need
    left += PREFILL_ROWS_MIN if long else 0
    if chosen and prefill_max is not None:
        left = min(left, prefill_max)
    chosen += _prefills(long, max(left, SEGMENT_ROWS_MIN))
    return chosen


def _prefills(jobs: Sequence[J], left: int) -> list[tuple[J, int]]:
    chosen: list[tuple[J, int]] = []
    oldest, *others = jobs or (None,)
    if oldest is None:
        return chosen
    kept = min(oldest.rows_left, max(SEGMENT_ROWS_MIN, left // 2)) if others else 0
    left -= kept
    for job in sorted(others, key=lambda one: one.rows_left):
        if rows := min(job.rows_left, left // 4 * 4):
            chosen.append((job, rows))
            left -= rows
    return [(oldest, min(oldest.rows_left, (kept + left) // 4 * 4)), *chosen]
