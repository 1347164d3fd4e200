"""What goes into a drafter's session machine, and what it asks its shell to do."""

from __future__ import annotations

from dataclasses import dataclass

from sdcpd.protocol.messages import Output, Sampling, Verdict
from sdcpd.protocol.problems import ProblemDocument

# ---- events


@dataclass(frozen=True, slots=True)
class Drafted:
    """Tokens for the next proposal, and how long a token took in seconds."""

    work: int
    tokens: tuple[int, ...]
    token_s: float
    rows: bool = False
    """Whether there are draft rows to publish (rule 2)."""
    crowded: bool = False
    """Whether the engine has so many sessions that more work for one delays the others."""


@dataclass(frozen=True, slots=True)
class DraftFailed:
    """The draft engine could not go on."""

    work: int
    reason: str


@dataclass(frozen=True, slots=True)
class Assumed:
    """The token that the draft model expects after all that is proposed."""

    work: int
    token: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """Tokens for the proposal after the outstanding one."""

    drafted: Drafted


@dataclass(frozen=True, slots=True)
class PrepareFailed:
    """The draft engine could not look ahead; it is asked again when it has to."""

    work: int


@dataclass(frozen=True, slots=True)
class Published:
    """The draft rows are in the MLC under this reference, and how long that took in seconds."""

    work: int
    reference: str
    publish_s: float


@dataclass(frozen=True, slots=True)
class PublishFailed:
    """The MLC would not take the rows."""

    work: int
    reason: str


@dataclass(frozen=True, slots=True)
class VerdictArrived:
    """The answer to the proposal, and how long it took in seconds."""

    verdict: Verdict
    round_s: float


@dataclass(frozen=True, slots=True)
class ProblemArrived:
    """The proposal, or the request for output, was answered with an error."""

    problem: ProblemDocument


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """The request may or may not have been processed."""


@dataclass(frozen=True, slots=True)
class OutputArrived:
    """Committed tokens, asked for to resynchronise."""

    output: Output


@dataclass(frozen=True, slots=True)
class Woken:
    """The pause asked for is over."""


DrafterEvent = (
    Drafted
    | DraftFailed
    | Assumed
    | Prepared
    | PrepareFailed
    | Published
    | PublishFailed
    | VerdictArrived
    | ProblemArrived
    | NoAnswer
    | OutputArrived
    | Woken
)

# ---- actions


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Draft between 1 and `m` tokens after the first `length` of `tokens`; then Drafted."""

    work: int
    length: int
    base: int
    """Output tokens before the first that is drafted."""
    m: int
    sampling: Sampling
    after: tuple[int, ...] = ()
    """Tokens between those and the first that is drafted, which are not committed."""


@dataclass(frozen=True, slots=True)
class AssumeToken:
    """Draft the token that follows if all is accepted, beside the request; then Assumed."""

    draft: DraftTokens


@dataclass(frozen=True, slots=True)
class PrepareTokens:
    """Draft what is proposed next if that is so, beside the request; then Prepared."""

    draft: DraftTokens


@dataclass(frozen=True, slots=True)
class TakePrepared:
    """What was prepared is the proposal now, and its rows are the session's."""


@dataclass(frozen=True, slots=True)
class DropPrepared:
    """What is or was being prepared is not needed: end the work on it, forget its rows."""


@dataclass(frozen=True, slots=True)
class PublishRows:
    """Write the rows of the first `count` tokens under a new name, leased; then Published."""

    work: int
    round: int
    count: int


@dataclass(frozen=True, slots=True)
class ReleaseRows:
    """The verdict is there: the leases of this session's rows may go."""


@dataclass(frozen=True, slots=True)
class SendProposal:
    """POST the proposal; a repetition has the same content."""

    round: int
    base: int
    base_digest: bytes
    tokens: tuple[int, ...]
    q_rows: str | None


@dataclass(frozen=True, slots=True)
class FetchOutput:
    """GET output from the verifier; then OutputArrived."""

    from_: int


@dataclass(frozen=True, slots=True)
class Pause:
    """Send Woken after that many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Stop:
    """The session is over for this drafter.

    `dropped` tells the router that it was given up, and not ended by a verdict (D-Z5).
    """

    reason: str
    dropped: bool


DrafterAction = (
    DraftTokens
    | AssumeToken
    | PrepareTokens
    | TakePrepared
    | DropPrepared
    | PublishRows
    | ReleaseRows
    | SendProposal
    | FetchOutput
    | Pause
    | Stop
)
