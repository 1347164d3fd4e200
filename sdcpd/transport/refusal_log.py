"""Who was not let in: every refusal counted, and so many lines of log as a person can read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sdcpd.transport.h2_hardening import LeakyBucket
from sdcpd.transport.limits import REFUSAL_LINES_BURST, REFUSAL_LINES_PER_S
from sdcpd.transport.shown import one_line


class RefusalLog:
    """Counts and logs; a flood of refusals is told by its number."""

    def __init__(self, logger: logging.Logger, count: Callable[[str], None] | None = None) -> None:
        """`count` gets the reason of each refusal, one word."""
        self._logger, self._count = logger, count
        self._lines = LeakyBucket(REFUSAL_LINES_BURST, REFUSAL_LINES_PER_S)
        self._untold = 0

    def count(self, reason: str) -> None:
        """One refusal that nobody needs to read about."""
        if self._count is not None:
            self._count(reason)

    def note(self, reason: str, who: str, text: str) -> None:
        """One refusal: a word for the counter, the peer, and a sentence for the log."""
        self.count(reason)
        if self._lines.add(1, now=time.monotonic()):
            self._lines.take_back(1)
            self._untold += 1
            return
        untold, self._untold = self._untold, 0
        more = f" (and {untold} refusals before it that were not logged)" if untold else ""
        self._logger.warning("refused %s: %s%s", one_line(who), one_line(text), more)
