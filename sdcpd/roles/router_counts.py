"""What a router counts of sessions, drafters and failovers, for monitoring."""

from __future__ import annotations

from collections import Counter

from sdcpd.protocol.messages import Action, Assignment
from sdcpd.protocol.router import RouterSession
from sdcpd.roles.counts import OUTCOMES

ASSIGNMENTS = ("new", "switch", "failover", "resume")


class RouterCounts:
    """Counters since the start; every name is there from the beginning, with value 0."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        """Sessions by how they ended."""
        self.assignments: Counter[str] = Counter(dict.fromkeys(ASSIGNMENTS, 0))
        """Assignments that a drafter has taken, by why it was named."""
        self.failovers = 0
        """Times that a session was opened at another verifier after a fence."""
        self.stale_outputs = 0
        """Answers with output that no longer counted: of an epoch that is over, or out of turn."""

    def end(self, machine: RouterSession, *, cancelled: bool) -> None:
        """Count a session's end."""
        if machine.ended is Action.FINISH:
            self.ended["finish"] += 1
        else:
            self.ended["cancelled" if cancelled else "fail"] += 1


class Assignments:
    """Why each drafter of one session was named, from what was named before."""

    def __init__(self, counts: RouterCounts, *, restored: bool) -> None:
        """`restored`: the session is one that a router before this one had open."""
        self._counts, self._restored = counts, restored
        self._last: tuple[str, int] | None = None

    def taken(self, assignment: Assignment) -> None:
        """A drafter has taken it."""
        self._counts.assignments[self._reason(assignment)] += 1
        self._last = (assignment.drafter, assignment.epoch)

    def _reason(self, assignment: Assignment) -> str:
        if self._last is None:
            if self._restored:
                return "resume"
            return "new" if assignment.epoch == 1 else "failover"
        drafter, epoch = self._last
        if assignment.epoch != epoch:
            return "failover"
        return "resume" if assignment.drafter == drafter else "switch"
