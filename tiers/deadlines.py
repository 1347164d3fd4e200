"""When leases end: a heap in which a renewal leaves what it replaced, until there is too much."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from tiers.api import Key

_SLACK = 64  # stale entries kept before the heap is rebuilt


class Deadlines:
    """Those that were set, the earliest first; `current` tells which of a key's counts, if any."""

    def __init__(self, current: Callable[[Key], float | None]) -> None:
        self._current = current
        self._heap: list[tuple[float, int, Key]] = []
        self._entries = 0

    def __len__(self) -> int:
        return len(self._heap)

    def keys(self) -> set[Key]:
        """Of all that were set and not taken, stale ones too."""
        return {key for _, _, key in self._heap}

    def set(self, key: Key, deadline: float, *, objects: int) -> None:
        """Enter a deadline that is the key's current one now; `objects` bounds what is current."""
        self._entries += 1  # orders equal deadlines, so that keys are never compared
        heappush(self._heap, (deadline, self._entries, key))
        if len(self._heap) > 2 * objects + _SLACK:
            self._heap = [entry for entry in self._heap if self._current(entry[2]) == entry[0]]
            heapify(self._heap)

    def take(self, now: float) -> Iterator[Key]:
        """Take the keys whose current deadline has come."""
        while self._heap and self._heap[0][0] <= now:
            deadline, _, key = heappop(self._heap)
            if self._current(key) == deadline:
                yield key
