"""When a server that fails is left alone: after a few failures in a row, for longer each time."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger("sdcpd.mlc")
FAILURES_MAX = 3
PAUSE_S_MIN = 1.0
PAUSE_S_MAX = 30.0


class Pause:
    """Tells whether to ask; after a pause one call tries, and the others wait for what it finds."""

    def __init__(self, where: str, clock: Callable[[], float]) -> None:
        """`where` names the server in the log: once when it begins to fail, once when that ends."""
        self._where, self._clock = where, clock
        self._in_row = 0
        self._length_s = 0.0
        self._until = 0.0
        self._trying = False

    @property
    def resting(self) -> bool:
        """Whether no call may be made now."""
        return self._down and (self._trying or self._clock() < self._until)

    def enter(self) -> bool:
        """Whether a call may be made; then `leave` has to be told how it went."""
        if self.resting:
            return False
        self._trying = self._down
        return True

    def leave(self, *, failed: bool | None) -> None:
        """Count how a call went; None where it was given up and nothing is known."""
        trial, self._trying = self._trying, False
        if failed is None:
            return
        was_down = self._down
        if not failed:
            if was_down:
                log.info("%s answers again: it is used as before", self._where)
            self._in_row, self._length_s = 0, 0.0
            return
        self._in_row += 1
        if self._down and not was_down:
            log.info(
                "%s failed %d times in a row: the cache does without it, and asks it again after"
                " pauses of %.0f to %.0f s",
                self._where,
                FAILURES_MAX,
                PAUSE_S_MIN,
                PAUSE_S_MAX,
            )
        # Calls that were under way when the pause began make it no longer.
        if self._down and (trial or not was_down):
            self._length_s = min(max(2 * self._length_s, PAUSE_S_MIN), PAUSE_S_MAX)
            self._until = self._clock() + self._length_s

    @property
    def _down(self) -> bool:
        return self._in_row >= FAILURES_MAX
