"""The parts of a verifier session's state, and the settings it goes by."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import Enum

from sdcpd.protocol.acceptance import Acceptance
from sdcpd.protocol.commit_log import CommitRecord
from sdcpd.protocol.verifier_io import Propose

PARTS_MAX = 1024  # rounds of which is known what they were like; whoever reads is not far behind


class Phase(Enum):
    """What the session is doing for the round at hand."""

    IDLE = "idle"
    FETCHING = "fetching"
    SCORING = "scoring"
    APPENDING = "appending"


@dataclass(frozen=True, slots=True)
class VerifierSettings:
    """What the operator sets; durations in seconds, None turns a thing off."""

    self_decode_after_s: float | None = 0.5
    drafter_silence_s: float | None = 3.0
    idle_s: float = 900.0


@dataclass(slots=True)
class Assigned:
    """The latest assignment (D-N2, D-N4)."""

    drafter: str
    m_init: int
    suspended: bool = False


@dataclass(slots=True)
class Work:
    """The round at hand; no proposal when self-decoding."""

    number: int
    round: int
    propose: Propose | None
    acceptance: Acceptance | None = None
    record: CommitRecord | None = None
    finished: bool = False
    stalled: bool = False


@dataclass(slots=True)
class Period:
    """A self-decoding period (D-K8); `silent` if the named drafter may end it (D-R9)."""

    left: int | None
    silent: bool
    ending: bool = False


class Parts:
    """What the last rounds were like, as `Output.parts` tells it.

    Sessions are kept for a while after their end, so each part is a few octets, not objects.
    """

    def __init__(self) -> None:
        self._values = array("I")
        self._ends = array("I")  # of each part in `_values`

    def add(self, committed: int, accepted: int, *rejected: int) -> None:
        """Note a round, after which so many tokens were committed."""
        self._values.extend((committed, accepted, *rejected))
        self._ends.append(len(self._values))
        if len(self._ends) >= 2 * PARTS_MAX:
            gone = self._ends[PARTS_MAX - 1]
            self._values = self._values[gone:]
            self._ends = array("I", (end - gone for end in self._ends[PARTS_MAX:]))

    def after(self, from_: int) -> tuple[tuple[int, ...], ...]:
        """The rounds of the tokens from that one on, as far as they are known."""
        found = []
        for at in range(len(self._ends) - 1, -1, -1):
            begin = self._ends[at - 1] if at else 0
            if self._values[begin] <= from_:
                break
            found.append(tuple(self._values[begin : self._ends[at]]))
        return tuple(reversed(found))
