"""What goes into a router's session machine, and what it asks its shell to do.

Every call that the shell makes for the machine carries a number; the result comes back with it, and
a result with another number is of a call that no longer matters.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdcpd.protocol.commit_log import LogSummary
from sdcpd.protocol.messages import Action, Assignment, Policy, Sampling, SessionOpen, SessionState
from sdcpd.protocol.problems import ProblemDocument
from sdcpd.protocol.router_record import SessionRecord

# ---- events


@dataclass(frozen=True, slots=True)
class Answered:
    """The call succeeded; verifiers answer with their session-state."""

    call: int
    state: SessionState | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The call was answered with an error."""

    call: int
    problem: ProblemDocument


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The call got no answer; it may or may not have been processed."""

    call: int
    reason: str


@dataclass(frozen=True, slots=True)
class LogRead:
    """The commit log as it stands; no tag if it does not exist yet."""

    call: int
    log: LogSummary
    etag: str | None


@dataclass(frozen=True, slots=True)
class FenceConflict:
    """Somebody appended since the log was read."""

    call: int


@dataclass(frozen=True, slots=True)
class TokensWritten:
    """The committed tokens are an object in the MLC; None: drafters fetch them as output."""

    call: int
    reference: str | None
    target_kv: str | None = None
    """The KV of the prompt, where the MLC has it; for another verifier."""


@dataclass(frozen=True, slots=True)
class Woken:
    """`deadline()` has come, or the instances have changed."""


@dataclass(frozen=True, slots=True)
class EventArrived:
    """POST events, after its checks (D-V4)."""

    kind: Action
    committed: int


@dataclass(frozen=True, slots=True)
class DrafterLost:
    """The drafter's status expired, it restarted, or it gave the session up."""

    drafter: str


@dataclass(frozen=True, slots=True)
class VerifierLost:
    """The verifier's status expired, it restarted, or it forgot the session.

    `epoch` is the one at which a reader of output found it lost; None whatever the epoch.
    """

    verifier: str
    reason: str
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class VerifierAppeared:
    """A verifier reports for the first time in this router's life; it may have been restarted."""

    verifier: str


@dataclass(frozen=True, slots=True)
class Progress:
    """The front end has read output up to `committed`; `closed` if it was the last.

    `finish` is how the verifier said that the session has ended, where it was heard.
    """

    committed: int
    closed: bool
    finish: Action | None = None


@dataclass(frozen=True, slots=True)
class ChangePolicy:
    """A new sampling profile from the next round on (section 6.6)."""

    sampling: Sampling


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """The record could not be stored."""

    reason: str


RouterEvent = (
    Answered
    | Refused
    | Unreachable
    | LogRead
    | FenceConflict
    | TokensWritten
    | Woken
    | EventArrived
    | DrafterLost
    | VerifierLost
    | VerifierAppeared
    | Progress
    | ChangePolicy
    | SaveFailed
)

# ---- actions


@dataclass(frozen=True, slots=True)
class Save:
    """Store the record durably before any action that follows (D-F5); None: forget the session."""

    record: SessionRecord | None


@dataclass(frozen=True, slots=True)
class Open:
    """POST sessions at a verifier."""

    call: int
    verifier: str
    message: SessionOpen


@dataclass(frozen=True, slots=True)
class PostPolicy:
    """POST sessions/{id}/policy."""

    call: int
    verifier: str
    message: Policy


@dataclass(frozen=True, slots=True)
class NameAtVerifier:
    """PUT sessions/{id}/drafter."""

    call: int
    verifier: str
    message: Assignment


@dataclass(frozen=True, slots=True)
class AssignDrafter:
    """POST assignments."""

    call: int
    message: Assignment


@dataclass(frozen=True, slots=True)
class ReadLog:
    """Read the commit log; then LogRead or Unreachable."""

    call: int


@dataclass(frozen=True, slots=True)
class WriteFence:
    """Append a fence record if the log is still as `etag` says; then Answered or FenceConflict."""

    call: int
    epoch: int
    etag: str | None


@dataclass(frozen=True, slots=True)
class WriteTokens:
    """Write the first `committed` tokens of the log as an MLC object; then TokensWritten."""

    call: int
    committed: int


@dataclass(frozen=True, slots=True)
class Moved:
    """The session is served by this verifier from now on; the front end follows."""

    verifier: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Named:
    """The session has (or no longer has) this drafter; for accounts and statuses."""

    drafter: str | None
    previous: str | None


@dataclass(frozen=True, slots=True)
class Closed:
    """The session is over for the router; `failed` says why if it could not be served."""

    failed: ProblemDocument | None


RouterAction = (
    Save
    | Open
    | PostPolicy
    | NameAtVerifier
    | AssignDrafter
    | ReadLog
    | WriteFence
    | WriteTokens
    | Moved
    | Named
    | Closed
)
