"""Errors that a peer is told: one class per row of Table 2 and per plain HTTP status in use.

A machine raises a `Problem`; the role's shell turns it into an answer with `to_json` in one place.
`parse_problem` is the other direction, for clients. No document says a prompt, token or key
(D-H10): details name members, never their values.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import ClassVar

from sdcpd.protocol.limits import PROBLEM_BYTES_MAX
from sdcpd.protocol.messages import SessionState
from sdcpd.protocol.state_json import json_uint, state_from_json, state_to_json

PROBLEM_MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "https://iana.org/assignments/sdcp#"  # without "www" (D-H11)
PLAIN_TYPE = "about:blank"


class Problem(Exception):
    """Base of all answers that are errors; `detail` is for people and names no user data.

    `session_state` goes with sdcp-stale-base (D-P20), `m_cap` with sdcp-limit (D-P7),
    `retry_after_s` (seconds) with temporary failures (D-H14). Field names in `headers` are in
    lower case.
    """

    status: ClassVar[int]
    suffix: ClassVar[str | None] = None
    title: ClassVar[str]

    def __init__(
        self,
        detail: str = "",
        *,
        session_state: SessionState | None = None,
        m_cap: int | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.session_state = session_state
        self.m_cap = m_cap
        self.retry_after_s = retry_after_s
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers.setdefault("retry-after", str(math.ceil(retry_after_s)))

    @property
    def type(self) -> str:
        """The type URI: the registry's prefix and the suffix, or about:blank (D-H11)."""
        return PLAIN_TYPE if self.suffix is None else TYPE_PREFIX + self.suffix

    def __str__(self) -> str:
        name = self.suffix or self.title
        return f"{self.status} {name}: {self.detail}" if self.detail else f"{self.status} {name}"


class StaleEpoch(Problem):
    """The epoch is not the session's, or the session was fenced here (Section 6.3, D-P18)."""

    status, suffix, title = 409, "sdcp-stale-epoch", "Epoch is not current"


class StaleBase(Problem):
    """Base, digest or round is not the current one; carries session_state (Section 7)."""

    status, suffix = 409, "sdcp-stale-base"
    title = "Proposal does not extend the committed prefix"


class QUnavailable(Problem):
    """Rule 2 without rows that can be had (Section 6.3 step 5, D-P12)."""

    status, suffix = 409, "sdcp-q-unavailable"
    title = "Draft probabilities required by the rule are unavailable"


class BadContract(Problem):
    """Something inside the contract is wrong or not served here (Section 4.1, D-E7)."""

    status, suffix, title = 422, "sdcp-bad-contract", "Contract invalid or not supported"


class LimitExceeded(Problem):
    """More tokens than m_cap or m_max; carries m_cap (D-P7)."""

    status, suffix, title = 422, "sdcp-limit", "Proposal violates m_cap or m_max"


class SessionClosed(Problem):
    """The session has finished or failed (D-H12)."""

    status, suffix, title = 410, "sdcp-session-closed", "Session has finished or failed"


class BadProposal(Problem):
    """A token beyond the vocabulary, or rows that are invalid (D-E6, D-P11)."""

    status, suffix = 422, "sdcp-bad-proposal"
    title = "Proposal inconsistent with its draft distributions"


class NotAssigned(Problem):
    """The client is not the drafter of the active assignment (Section 6.3 step 1, D-N4)."""

    status, suffix, title = 403, "sdcp-not-assigned", "Drafter is not assigned to the session"


class PlainProblem(Problem):
    """Base of the errors of type about:blank, whose title is the status phrase (RFC 9457)."""

    def __init_subclass__(cls) -> None:
        cls.title = HTTPStatus(cls.status).phrase


class Malformed(PlainProblem):
    """The body is not CBOR as D-E2 asks, or does not match its CDDL (D-E7)."""

    status = 400


class Forbidden(PlainProblem):
    """The client is somebody else than it would have to be (D-I3)."""

    status = 403


class WrongRole(Forbidden):
    """No role of the client's certificate may do this (D-I3)."""


class NotFound(PlainProblem):
    """No such path, or a session never opened here or forgotten (D-H12)."""

    status = 404


class MethodNotAllowed(PlainProblem):
    """Another method on a known path; give `allow` in headers (D-H4)."""

    status = 405


class Conflict(PlainProblem):
    """Same session and epoch with other content (D-O2), or a log that is not extended (D-M7)."""

    status = 409


class PreconditionFailed(PlainProblem):
    """If-Match or If-None-Match does not hold (D-M7)."""

    status = 412


class TooLarge(PlainProblem):
    """A body above its limit (D-H7)."""

    status = 413


class UnsupportedMediaType(PlainProblem):
    """A body of another media type (D-H2)."""

    status = 415


class Unprocessable(PlainProblem):
    """A well-formed message that cannot be acted on, outside the contract (D-E6, D-O6)."""

    status = 422


class PreconditionRequired(PlainProblem):
    """A write to a log without a precondition (D-M7)."""

    status = 428


class TooManyRequests(PlainProblem):
    """Overload or a rate limit (D-X2)."""

    status = 429


class InternalError(PlainProblem):
    """A failure of ours; nothing was committed (D-H14)."""

    status = 500


class Unavailable(PlainProblem):
    """Something that is needed cannot be reached now (D-H14)."""

    status = 503


class InsufficientStorage(PlainProblem):
    """The store's quota is used up (RFC 4918 Section 11.5)."""

    status = 507


PROBLEMS_BY_SUFFIX: Mapping[str, type[Problem]] = {
    kind.suffix: kind
    for kind in (
        StaleEpoch,
        StaleBase,
        QUnavailable,
        BadContract,
        LimitExceeded,
        SessionClosed,
        BadProposal,
        NotAssigned,
    )
}


def to_json(problem: Problem) -> bytes:
    """Return the problem document of RFC 9457 as UTF-8 JSON (D-H10)."""
    document: dict[str, object] = {
        "type": problem.type,
        "title": problem.title,
        "status": problem.status,
    }
    if problem.detail:
        document["detail"] = problem.detail
    if problem.session_state is not None:
        document["session_state"] = state_to_json(problem.session_state)
    if problem.m_cap is not None:
        document["m_cap"] = problem.m_cap
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemDocument:
    """What a client learned from an error answer.

    `status` is that of the HTTP answer; `suffix` is None unless the type is one of Table 2, and
    then the answer is treated by the class of its status (D-H14).
    """

    status: int
    suffix: str | None = None
    title: str = ""
    detail: str = ""
    session_state: SessionState | None = None
    m_cap: int | None = None

    def __str__(self) -> str:
        text = self.detail or self.title
        name = self.suffix or "problem"
        return f"{self.status} {name}: {text}" if text else f"{self.status} {name}"


def parse_problem(status: int, body: bytes, content_type: str | None) -> ProblemDocument:
    """Read an error answer; whatever is not as D-H10 has it is left out, nothing is raised."""
    document = _json_object(body, content_type)
    kind = document.get("type")
    suffix = kind.removeprefix(TYPE_PREFIX) if isinstance(kind, str) else ""
    known = isinstance(kind, str) and kind.startswith(TYPE_PREFIX) and suffix in PROBLEMS_BY_SUFFIX
    m_cap = json_uint(document.get("m_cap"))
    return ProblemDocument(
        status=status,
        suffix=suffix if known else None,
        title=_text(document.get("title")),
        detail=_text(document.get("detail")),
        session_state=state_from_json(document.get("session_state")),
        m_cap=m_cap if m_cap else None,  # 0 is no limit that a proposal could keep
    )


def _json_object(body: bytes, content_type: str | None) -> dict[str, object]:
    media_type = (content_type or "").partition(";")[0].strip().lower()
    if media_type not in (PROBLEM_MEDIA_TYPE, "application/json") or len(body) > PROBLEM_BYTES_MAX:
        return {}
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
