"""The messages of Section 5.2 as frozen values, with the member names of the CDDL.

`codec` turns them into octets and back. A value built by our own code is trusted to keep the
CDDL's ranges; a value that `codec.decode` returned has been checked. An absent optional member is
None. Members marked "hint" are unknown keys to other makes (D-Z5, D-Z6): they are read leniently
and never change what a peer without them would do.
"""

from dataclasses import dataclass
from enum import IntEnum


class Action(IntEnum):
    """What a verdict asks for, and the entries of the escalation ladder (Section 6.5.2).

    An unknown value on receipt becomes FAIL (Section 5.2, D-E4).
    """

    CONTINUE = 0
    REDUCE = 1
    SWITCH = 2
    SELF_DECODE = 3
    FINISH = 4
    FAIL = 5

    @classmethod
    def received(cls, value: int) -> "Action":
        """Read a value from a peer: what is not known is FAIL (Section 5.2)."""
        return cls(value) if value <= cls.FAIL else cls.FAIL


class State(IntEnum):
    """The values of session-state.state, which the draft leaves undefined (D-O11)."""

    WAITING = 0
    ASSIGNED = 1
    SELF_DECODING = 2
    FINISHED = 3
    FAILED = 4

    @classmethod
    def received(cls, value: int) -> int:
        """Read a value from a peer, which may use others: those stay plain integers."""
        return cls(value) if value <= cls.FAILED else value


class InstanceRole(IntEnum):
    """The values of status.role (Section 5.2)."""

    DRAFTER = 1
    VERIFIER = 2


class Rule(IntEnum):
    """Acceptance rules served by this project (Section 10.2.2; RACE is private use, D-Z7)."""

    GREEDY = 1
    SPECULATIVE_SAMPLING = 2
    RACE = 200


class Message:
    """Base of everything that has a row in the codec's tables."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(Message):
    """A sampling profile; absent members take the defaults of D-S1 (Section 4.1)."""

    temperature_milli: int | None = None
    top_k: int | None = None
    top_p_milli: int | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract(Message):
    """The Session Contract, fixed when the session is created (Section 4.1).

    self_load and low_ratio are percentages; max_new, self_max and m_max count tokens.
    """

    target: bytes
    tokenizer: bytes
    rule: int
    m_max: int
    max_new: int
    stop: tuple[int, ...]
    low_rounds: int
    fallback: tuple[int, ...]
    drafters: tuple[bytes, ...] | None = None
    sampling: Sampling | None = None
    low_ratio: int | None = None
    self_load: int | None = None
    self_max: int | None = None
    scope: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(Message):
    """Where a new verifier takes the session up again (Sections 5.2 and 6.9)."""

    round: int
    committed: int
    digest: bytes
    committed_tokens: str
    target_kv: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpen(Message):
    """Body of POST sessions (Section 6.1).

    Hints: self_decode_after_ms (D-Z6); logprobs, the number of alternatives wanted (D-Z5).
    """

    session: bytes
    epoch: int
    contract: Contract
    prompt: tuple[int, ...] | str
    commit_log: str
    prompt_kv: str | None = None
    resume: Resume | None = None
    self_decode_after_ms: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState(Message):
    """Answer of the verifier's session resources; round is the last completed one (D-O12)."""

    session: bytes
    epoch: int
    round: int
    committed: int
    digest: bytes
    state: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment(Message):
    """Names the drafter, to the verifier and to the drafter itself (Section 6.1).

    Hint: vocab, the verifier's number of scores in a row (D-E6).
    """

    session: bytes
    epoch: int
    contract: Contract
    verifier: str
    drafter: str
    prompt: tuple[int, ...] | str
    round: int
    committed: int
    digest: bytes
    m_init: int
    sampling: Sampling | None = None
    committed_tokens: str | None = None
    vocab: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status(Message):
    """What an instance reports of itself (Sections 5.2 and 6.1; meaning of the numbers D-R7).

    load is in percent, cache_mbps in megabit per second. Hints (D-Z5): engine (fingerprint),
    model (digest), ready, tokens_per_s, rules served, dropped (sessions given up), vocab,
    certificate_until (when its certificate expires, in seconds since 1970).
    """

    instance: str
    role: InstanceRole
    load: int
    queue: int
    ttl_ms: int
    accept_milli: int | None = None
    cache_mbps: int | None = None
    engine: str | None = None
    model: bytes | None = None
    ready: bool | None = None
    tokens_per_s: int | None = None
    rules: tuple[int, ...] | None = None
    dropped: tuple[bytes, ...] | None = None
    vocab: int | None = None
    certificate_until: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal(Message):
    """M proposed tokens that extend the committed prefix of length base (Section 6.2)."""

    session: bytes
    epoch: int
    round: int
    drafter: str
    base: int
    base_digest: bytes
    tokens: tuple[int, ...]
    status: Status
    q_rows: str | None = None
    draft_kv: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(Message):
    """Answer to a proposal: what was committed, and how to go on (Sections 6.3 and 6.5).

    accepted is the rule's a, before truncation (D-P14); low is the counter c (D-K3).
    """

    session: bytes
    epoch: int
    round: int
    accepted: int
    emitted: tuple[int, ...]
    committed: int
    digest: bytes
    action: Action
    m_cap: int
    low: int
    load: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Output(Message):
    """Committed tokens from the 0-based index from_ on (Section 6.7, D-G1).

    Hints: how many rounds, proposed and accepted tokens, and self-decoded rounds the session has
    had so far at this verifier; parts, of each round that these tokens are of (the length of the
    output after it, how many tokens were accepted, those that were not), the last two empty for a
    self-decoded token; logprobs, where the session was opened with them, a row for each token.
    """

    session: bytes
    epoch: int
    from_: int
    tokens: tuple[int, ...]
    final: bool
    finish: Action | None = None
    rounds: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    self_decoded: int | None = None
    parts: tuple[tuple[int, ...], ...] | None = None
    logprobs: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(Message):
    """Tells the router of a switch, of the end of self-decoding, or of the end (D-V1)."""

    session: bytes
    epoch: int
    kind: Action
    committed: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(Message):
    """Changes the sampling profile of rounds from_round and later (Section 6.6)."""

    session: bytes
    from_round: int
    sampling: Sampling
