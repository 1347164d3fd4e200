"""How long a pass waits for rounds that are about to come (section 8).

A pass costs little more with one more session in it, so one that starts just before another
session's round arrives makes that session wait for a whole pass.  Each session's pause between its
result and its next round is measured; a pass waits for those that are due, never longer than a
share of its own time, and never where nobody is expected: a session that is alone does not wait.
"""

from __future__ import annotations

from collections.abc import Hashable

WINDOW_SHARE = 0.15  # of a pass's time
LATE = 1.5  # how much longer than usual a pause may be before the session is not waited for
MEMORY = 0.2  # weight of a pause that was longer than usual


class BatchWindow:
    """What is known of the sessions' pauses; times are in seconds, of any one clock."""

    def __init__(self, share: float = WINDOW_SHARE) -> None:
        """`share` of a pass's time is the longest window; 0 for none."""
        self._share = share
        self._done_at: dict[Hashable, float] = {}
        self._pause_s: dict[Hashable, float] = {}

    def done(self, session: Hashable, now: float) -> None:
        """A session was given its result."""
        self._done_at[session] = now

    def arrived(self, session: Hashable, now: float) -> None:
        """A session's next round is here."""
        done_at = self._done_at.pop(session, None)
        if done_at is not None:
            pause_s = now - done_at
            old = self._pause_s.get(session, pause_s)
            # One long pause says little of the next, a short one that it can be done.
            weight = MEMORY if pause_s > old else 1 - MEMORY
            self._pause_s[session] = old + weight * (pause_s - old)

    def forget(self, session: Hashable) -> None:
        """A session has ended."""
        self._done_at.pop(session, None)
        self._pause_s.pop(session, None)

    def left_s(self, now: float, *, since: float, pass_s: float) -> float:
        """How long a pass that could have started at `since` should wait on; 0: it starts now."""
        end = since + self._share * pass_s
        due = [
            at + LATE * pause_s
            for session, at in self._done_at.items()
            if (pause_s := self._pause_s.get(session)) is not None
        ]
        # One that is due after the window is over is not waited for at all.
        awaited = [at for at in due if now < at <= end]
        return max(awaited) - now if awaited else 0.0
