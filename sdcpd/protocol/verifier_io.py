"""What goes into a verifier's session machine, and what it asks its shell to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sdcpd.protocol.commit_log import CommitRecord
from sdcpd.protocol.messages import (
    Assignment,
    Event,
    Policy,
    Proposal,
    Sampling,
    SessionState,
    Verdict,
)
from sdcpd.protocol.problems import Problem

# ---- events: decoded requests, results of the shell's work, and the passing of time


@dataclass(frozen=True, slots=True)
class Propose:
    """POST proposals; `is_instance(base)` tells whether the client is the instance of that base."""

    request: int
    proposal: Proposal
    is_instance: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class NameDrafter:
    """PUT sessions/{id}/drafter."""

    request: int
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class SetPolicy:
    """POST sessions/{id}/policy."""

    request: int
    policy: Policy


@dataclass(frozen=True, slots=True)
class Cancel:
    """DELETE sessions/{id} (D-Z2)."""

    request: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """A request has waited as long as it may (D-P3)."""

    request: int


@dataclass(frozen=True, slots=True)
class RowsReady:
    """The q_rows of the round were fetched and checked, or why not."""

    work: int
    rows: bytes | memoryview | None
    problem: Problem | None = None


@dataclass(frozen=True, slots=True)
class RoundScored:
    """The rule's a and the additional token."""

    work: int
    accepted: int
    additional: int


@dataclass(frozen=True, slots=True)
class ScoreFailed:
    """The pass failed and nothing has changed; `fatal` if none can ever succeed (D-K12)."""

    work: int
    reason: str
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class Appended:
    """The record is durable; `load` in percent and `lower` are readings for control (D-P22)."""

    work: int
    load: int
    lower: bool = False


@dataclass(frozen=True, slots=True)
class AppendStalled:
    """The outcome of the append is not known yet; the shell goes on finding out (D-P16)."""

    work: int


@dataclass(frozen=True, slots=True)
class AppendFenced:
    """The log refused the record for ever: authority is lost (D-P17, D-P18)."""

    work: int


@dataclass(frozen=True, slots=True)
class Superseded:
    """A session-open with a higher epoch has taken this one's place (D-O3)."""


@dataclass(frozen=True, slots=True)
class Tick:
    """`deadline()` has come."""

    load: int


VerifierEvent = (
    Propose
    | NameDrafter
    | SetPolicy
    | Cancel
    | Abandon
    | RowsReady
    | RoundScored
    | ScoreFailed
    | Appended
    | AppendStalled
    | AppendFenced
    | Superseded
    | Tick
)

# ---- actions, to be performed in the order given


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a request; None is an answer without content."""

    request: int
    message: Verdict | SessionState | None


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer a request with a problem."""

    request: int
    problem: Problem


@dataclass(frozen=True, slots=True)
class FetchRows:
    """Get and check the draft rows of a proposal (D-P11, D-P12); then RowsReady."""

    work: int
    reference: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScoreRound:
    """Score a proposal, or the next token when `tokens` is empty; then RoundScored."""

    work: int
    tokens: tuple[int, ...]
    length: int
    """Tokens of the prefix, prompt included."""
    base: int
    rule: int
    sampling: Sampling
    draw: Callable[[int, int], float]
    q_rows: bytes | memoryview | None


@dataclass(frozen=True, slots=True)
class Append:
    """Append a record to the commit log, durably; then Appended, AppendStalled or AppendFenced."""

    work: int
    record: CommitRecord


@dataclass(frozen=True, slots=True)
class OutputChanged:
    """Wake whoever waits for output."""


@dataclass(frozen=True, slots=True)
class SendEvent:
    """Deliver an event to the router, at least once (D-V2)."""

    event: Event


@dataclass(frozen=True, slots=True)
class WithdrawEvents:
    """Stop retrying events of kind 2 and 3: a new assignment has met their need (D-V2)."""


@dataclass(frozen=True, slots=True)
class RoundDone:
    """A round was committed; for metrics. No verdict: a self-decoded one."""

    verdict: Verdict | None
    proposed: int
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class PeriodDone:
    """A self-decoding period is over; for metrics. `end` is one of PERIOD_ENDS."""

    end: str


PERIOD_ENDS = ("drafter", "self_max", "load", "error", "finish", "fail", "fenced")
"""A drafter was named or proposed; so many tokens were written; the load was too high; a pass
failed; the session has finished or failed; its authority was lost."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The session has finished, failed or been fenced: its model state may be freed."""

    reason: str


VerifierAction = (
    Reply
    | Refuse
    | FetchRows
    | ScoreRound
    | Append
    | OutputChanged
    | SendEvent
    | WithdrawEvents
    | RoundDone
    | PeriodDone
    | Ended
)
