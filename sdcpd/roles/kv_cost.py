"""Whether it is faster to fetch KV than to compute it, by what was measured; no I/O, no clock."""

from __future__ import annotations

FIRST_LIMIT_S = 0.25  # before anything was measured
LIMIT_S_MIN = 0.01  # nobody notices, and what was measured of so little is mostly noise
LIMIT_S_MAX = 5.0
PROBE_EVERY = 16  # how often what was slow is tried again, in texts
_MEMORY = 0.3  # weight of the newest measurement
_TOKENS_MIN = 64  # a measurement over fewer is mostly that of something else


class KvCost:
    """Seconds a token, fetched and computed, smoothed."""

    def __init__(self) -> None:
        self._fetch_s = self._compute_s = 0.0  # 0: not measured
        self._skipped = 0

    def limit_s(self, tokens: int) -> float:
        """How long a text of so many tokens may be looked for; 0: it is computed.

        No longer than it takes to compute it: what can't be found costs no more than that.
        """
        if not self._compute_s:
            return FIRST_LIMIT_S
        compute_s = max(tokens * self._compute_s, LIMIT_S_MIN)
        if tokens * self._fetch_s > compute_s:
            self._skipped += 1
            if self._skipped % PROBE_EVERY:
                return 0.0
        return min(compute_s, LIMIT_S_MAX)

    def computed(self, tokens: int, seconds: float) -> None:
        """Count what an engine took for so many tokens, waiting for others included."""
        self._compute_s = _smoothed(self._compute_s, tokens, seconds)

    def fetched(self, tokens: int, seconds: float) -> None:
        """Count what the tiers took for so many tokens."""
        self._fetch_s = _smoothed(self._fetch_s, tokens, seconds)


def _smoothed(old: float, tokens: int, seconds: float) -> float:
    if tokens < _TOKENS_MIN:
        return old
    new = seconds / tokens
    return old + _MEMORY * (new - old) if old else new
