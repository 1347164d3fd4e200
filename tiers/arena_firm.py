"""Which parts of an arena no eviction frees, and how long a piece lies between them.

Kept up to date with every lease, so that to refuse an object costs next to nothing however many
objects are leased. Invariants, told by `check`: parts that are held are those with a deadline.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection
from heapq import heapify, heappop, heappush

from tiers.arena_slots import Slots

_HEAP_SLACK = 64  # stale deadlines kept before the heap is rebuilt; renewals leave one each


class _Gaps(Slots):
    """Parts at places that others choose, and what is free between them."""

    def __init__(self, size_bytes: int, *, chunk_bytes: int) -> None:
        self._starts: list[int] = []
        super().__init__(size_bytes, chunk_bytes=chunk_bytes)

    def take_at(self, start: int, size_bytes: int) -> None:
        """Take a part that is free, in whole granules."""
        begin = self._starts[bisect_right(self._starts, start) - 1]
        end = begin + self._remove_free(begin)
        if begin < start:
            self._add_free(begin, start - begin)
        if start + size_bytes < end:
            self._add_free(start + size_bytes, end - start - size_bytes)
        self._taken[start] = size_bytes
        self.taken_bytes += size_bytes

    def _add_free(self, start: int, size_bytes: int) -> None:
        super()._add_free(start, size_bytes)
        insort(self._starts, start)

    def _remove_free(self, start: int) -> int:
        del self._starts[bisect_right(self._starts, start) - 1]
        return super()._remove_free(start)


class Firm:
    """The parts that are leased, each with its deadline; times are the caller's."""

    def __init__(self, size_bytes: int, *, chunk_bytes: int) -> None:
        """As the arena's slots."""
        self._gaps = _Gaps(size_bytes, chunk_bytes=chunk_bytes)
        self._until: dict[int, float] = {}
        self._deadlines: list[tuple[float, int]] = []

    def hold(self, start: int, size_bytes: int, until: float) -> None:
        """A part stays until then, whatever was said before."""
        if start not in self._until:
            self._gaps.take_at(start, size_bytes)
        self._until[start] = until
        heappush(self._deadlines, (until, start))
        if len(self._deadlines) > 2 * len(self._until) + _HEAP_SLACK:
            self._deadlines = [(until, start) for start, until in self._until.items()]
            heapify(self._deadlines)

    def let_go(self, start: int) -> None:
        """A part may go; nothing happens for one that might already."""
        if self._until.pop(start, None) is not None:
            self._gaps.give_back(start)

    def held(self, now: float) -> Collection[int]:
        """Where the parts lie that stay."""
        while self._deadlines and self._deadlines[0][0] <= now:
            until, start = heappop(self._deadlines)
            if self._until.get(start) == until:
                self.let_go(start)
        return self._until.keys()

    def leaves(
        self, size_bytes: int, now: float, *, besides: dict[int, int], replaced: int | None
    ) -> bool:
        """Whether so much, in whole granules, fits between what stays.

        `besides` are parts that stay as well, by their places; the one `replaced` needs not.
        """
        held = self.held(now)
        old = replaced if replaced in held and replaced not in besides else None
        old_bytes = 0 if old is None else self._gaps.size_of(old)
        if old is not None:
            self._gaps.give_back(old)
        fits, added = self._gaps.largest_bytes >= size_bytes, list[int]()
        if fits:
            added = [start for start in besides if start not in held]
            for start in added:
                self._gaps.take_at(start, besides[start])
            fits = self._gaps.largest_bytes >= size_bytes
            for start in added:
                self._gaps.give_back(start)
        if old is not None:
            self._gaps.take_at(old, old_bytes)
        return fits

    def check(self) -> None:
        """Assert the invariants of this module."""
        self._gaps.check()
        assert len(self._gaps) == len(self._until)
        assert {(until, start) for start, until in self._until.items()} <= set(self._deadlines)
