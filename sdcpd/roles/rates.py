"""Rate limits of rounds, a session and a drafter (section 9, D-X2)."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

DRAFTER_FACTOR = 20  # a drafter serves many sessions
BUCKETS_MAX = 65_536  # a forgotten bucket is a full one


class RateLimit:
    """Token buckets of one second's burst."""

    def __init__(self, rate: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`rate` is rounds a second and session."""
        self._rate = rate
        self._clock = clock
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def allow(self, session: bytes | None, drafter: str) -> bool:
        """Whether one more round may be processed now; takes it if so.

        No session: the drafter is not the one named, and takes only from its own share.
        """
        now = self._clock()
        wanted: list[tuple[Hashable, float]] = [(("d", drafter), self._rate * DRAFTER_FACTOR)]
        if session is not None:
            wanted.append((("s", session), self._rate))
        levels = [self._level(key, rate, now) for key, rate in wanted]
        if min(levels) < 1:
            return False
        for (key, _), level in zip(wanted, levels, strict=True):
            self._buckets[key] = (level - 1, now)
            self._buckets.move_to_end(key)
        while len(self._buckets) > BUCKETS_MAX:
            self._buckets.popitem(last=False)
        return True

    def _level(self, key: Hashable, rate: float, now: float) -> float:
        level, at = self._buckets.get(key, (rate, now))
        return min(rate, level + (now - at) * rate)
