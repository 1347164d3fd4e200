"""What the roles ask of an engine; results are plain integers, floats and octets (no torch)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sdcpd.protocol.histogram import Histogram
from sdcpd.protocol.logprobs import Row
from sdcpd.protocol.messages import Sampling
from sdcpd.protocol.sparse import SparseRows

KV_BLOCK_TOKENS = 64
"""Tokens of a block of KV: a later prompt that begins alike is spared a multiple of it."""

Draw = Callable[[int, int], float]
"""Random value in [0, 1) for (position i, purpose), section 6.4."""


KeepEvicted = Callable[[Hashable, Sequence[int], Sequence[bytes]], None]
"""Takes (session, or session and epoch), the tokens covered, and their blocks of KV."""


class EngineError(Exception):
    """A pass failed; the work it belonged to has changed nothing and may be repeated."""


class EngineBusy(EngineError):
    """There is no memory for another session now; it may come again later."""


class ContextFull(EngineError):
    """The prefix and its proposal are longer than the model's context."""


class ModelError(Exception):
    """A model directory can't be used; the text says which, why, and what to do."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The committed prefix of a session at one moment.

    `tokens` is the session's own growing list; only its first `length` entries belong to the
    prefix, so that handing it to another thread needs no copy.
    """

    tokens: Sequence[int]
    length: int
    prompt: int
    """How many of them are the prompt; a model may put a beginning of its own before none."""
    scope: bytes = b""
    """Texts of one scope may begin with each other's keys and values (D-M3)."""


@dataclass(frozen=True, slots=True)
class Score:
    """Verify `proposed` (empty when self-decoding) after `prefix` (section 6.3, steps 6 and 7)."""

    session: bytes
    epoch: int
    prefix: Prefix
    proposed: tuple[int, ...]
    rule: int
    sampling: Sampling
    base: int
    """Committed output tokens before this round; rule 200 derives its noise from it."""
    draw: Draw | None = None
    """Rule 2 only."""
    q_rows: bytes | memoryview | None = None
    """Rule 2 only: M rows of V binary32, little-endian."""
    logprobs: int | None = None
    """How many alternatives to each token are wanted with its log-probability."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The rule's `a` and the additional token, and how long the pass took."""

    accepted: int
    additional: int
    pass_s: float = 0.0
    logprobs: tuple[Row, ...] = ()
    """Where they were wanted: of the accepted tokens and the additional one."""
    queue_s: float | None = None
    """How long it waited for memory and for the pass before; None where nobody measures that."""
    batch_wait_s: float | None = None
    """How long its pass waited for other rounds."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a model is, as contracts, statuses and people name it."""

    name: str
    model: bytes
    tokenizer: bytes
    vocab: int
    context_max: int
    fingerprint: str
    exact: bool
    """Whether the start-up self-check found rows independent of what stands beside them."""


@dataclass(frozen=True, slots=True)
class KvUsage:
    """How the memory for keys and values is used, in tokens."""

    tokens_max: int
    tokens_used: int
    """Of blocks in use, those of ended texts that others may begin with included."""
    waiting: int
    """Pieces of work that wait for room."""
    evicted: int
    """Sessions that had to make room, since the start."""
    adopted: int
    """Tokens that sessions began with and did not compute, since the start."""


class TargetEngine(Protocol):
    """The target model of a verifier."""

    @property
    def info(self) -> EngineInfo: ...

    async def prepare(
        self,
        session: bytes,
        epoch: int,
        prefix: Prefix,
        *,
        kv: bytes | None = None,
        blocks: Sequence[bytes | memoryview] = (),
    ) -> int:
        """Have the KV of a prefix ahead of its first round.

        Raises EngineError; EngineBusy if the memory for KV stays full for a while.

        `kv` is a KV object for a beginning of the prefix (D-M4): what it covers is not computed,
        and whatever is wrong with it, it is ignored (D-O10). `blocks` are the first of those that
        `blocks` made of the same tokens. Returns how many tokens were not computed.
        """
        ...

    async def blocks(
        self, session: bytes, epoch: int, tokens: Sequence[int], first: int
    ) -> list[bytes]:
        """The KV of a session's `tokens` in whole blocks of KV_BLOCK_TOKENS, from `first` on.

        Fewer where not all are there, or where what is there is of other tokens (those that were
        rejected last); octets that mean something to an engine of the same model and fingerprint
        alone. Raises EngineError.
        """
        ...

    def resident(self, session: bytes, epoch: int) -> bool:
        """Whether a session's KV is in memory; it may have had to make room for others'."""

    def on_eviction(self, keep: KeepEvicted) -> None:
        """Have `keep` told, in this event loop, of the KV of sessions that make room."""

    async def export(self, session: bytes, epoch: int, tokens: int) -> bytes | None:
        """The KV object for the session's first `tokens`; None if they are not all there."""

    def kv_octets(self, tokens: int) -> int:
        """Octets of the KV of that many tokens, without an object's header."""

    async def check_rows(self, octets: bytes | memoryview, tokens: Sequence[int]) -> None:
        """Raise BadProposal unless a q_rows object can be what the tokens came from (D-P11)."""
        ...

    async def score(self, work: Score) -> Scored:
        """Score one proposal; raises EngineError (nothing has changed then)."""

    async def logprobs(
        self, tokens: Sequence[int], from_: int, alternatives: int, *, scope: bytes = b""
    ) -> tuple[Row, ...]:
        """How probable tokens[from_:] are, each after those before it, with alternatives to each.

        Of the distribution at temperature 1; 1 <= from_ < len(tokens). Raises EngineError.
        """
        ...

    def forget(self, session: bytes, epoch: int) -> None:
        """Free what is kept for a session; unknown sessions are ignored."""

    def kv_usage(self) -> KvUsage | None:
        """How its memory for KV is used; None if it has none of its own."""

    def batches(self) -> Histogram | None:
        """How many rounds each pass with any has scored; None where nobody counts them."""

    def pass_s(self) -> float:
        """Smoothed duration of a target pass in seconds (0 before the first)."""

    def silence_s(self) -> float:
        """For how many seconds its thread has shown no sign of life; 0 if it has none.

        An idle thread shows one about once a second, one that works after each pass.
        """

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DraftWork:
    """Propose up to `m` tokens after `prefix` and `after` (section 6.2)."""

    session: bytes
    prefix: Prefix
    m: int
    rule: int
    sampling: Sampling
    base: int
    """Output tokens before the first that is drafted; rule 200 derives its noise from it."""
    vocab: int
    """The target's V; no token at or above it is proposed and rows have this length (D-E6)."""
    after: tuple[int, ...] = ()
    """Tokens between the prefix and the draft that may never be committed (D-D4)."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens, under rule 2 with the rows they were sampled from."""

    tokens: tuple[int, ...]
    q_rows: bytes | SparseRows | None = None
    seconds: float = 0.0
    reused: int = 0
    """Tokens whose KV was loaded from the blocks given."""


class DraftEngine(Protocol):
    """A source of proposals: a draft model, or n-gram look-up."""

    @property
    def model(self) -> bytes:
        """The draft model's digest (D-C9); an n-gram drafter has a fixed one."""

    @property
    def tokenizer(self) -> bytes | None:
        """Digest of the tokenizer the drafter's tokens belong to; None if it fits any."""

    @property
    def vocab(self) -> int | None:
        """Own row length, None if it fits any."""

    @property
    def kv_fingerprint(self) -> bytes | None:
        """What its blocks of KV are of: model and what computes it; None if it has none."""

    async def draft(self, work: DraftWork, *, blocks: Sequence[bytes | memoryview] = ()) -> Draft:
        """Propose between 1 and `m` tokens; raises EngineError.

        `blocks` are the first of those that `blocks` made of the same tokens; what they cover is
        not computed.
        """

    async def blocks(self, session: bytes, tokens: Sequence[int], first: int) -> list[bytes]:
        """As TargetEngine.blocks."""

    def resident(self, session: bytes) -> bool:
        """As TargetEngine.resident; True where there is no KV at all."""

    def on_eviction(self, keep: KeepEvicted) -> None:
        """As TargetEngine.on_eviction."""

    def kv_usage(self) -> KvUsage | None:
        """As TargetEngine.kv_usage."""

    def silence_s(self) -> float:
        """As TargetEngine.silence_s."""

    def forget(self, session: bytes) -> None: ...

    async def aclose(self) -> None: ...
