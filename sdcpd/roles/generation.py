"""What a front end asks of the router beside it (outside the protocol, D-R8)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from sdcpd.protocol.logprobs import Row
from sdcpd.protocol.messages import Sampling


class GenerationError(Exception):
    """A text could not be begun or ended early; the text is one sentence for a client.

    `retry_after_s` is set where trying again later makes sense.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One text to generate; `sampling.temperature_milli` 0 is greedy."""

    prompt: tuple[int, ...]
    max_new: int
    stop: tuple[int, ...]
    sampling: Sampling
    speculate: bool = True
    rejection: bool = False
    """Whether a sampled text is verified under rule 2, where the operator leaves the choice."""
    logprobs: int | None = None
    """How many alternatives to each token are wanted with its log-probability."""
    traceparent: str = ""
    """The span that it is generated under, as verifiers and drafters are told of it."""


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What the text took; `passes` are those of the target, prefill not counted."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    self_decoded: int = 0
    committed: int = 0
    chain: bytes = b""
    """d[n] where known; covers the contract, so equal texts may have unequal chains."""

    @property
    def passes(self) -> int:
        """Target passes: one a round, one a self-decoded token."""
        return self.rounds + self.self_decoded


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens that became committed together."""

    tokens: tuple[int, ...]
    finished: bool
    """Whether these were the last, because of a stop token or max_new."""
    logprobs: tuple[Row, ...] = ()
    """Where they were asked for, of each token."""
    parts: tuple[tuple[int, ...], ...] = ()
    """What the rounds were like, as far as it is known, as `Output.parts` tells it."""


class Generation(Protocol):
    """A text being generated."""

    @property
    def session(self) -> bytes: ...

    @property
    def stats(self) -> GenerationStats: ...

    def __aiter__(self) -> AsyncIterator[Tokens]:
        """Committed tokens as they come; raises GenerationError if the session fails."""

    async def cancel(self) -> None:
        """End the session early (D-Z2); does nothing if it has ended."""


class SessionOutput(Protocol):
    """All that a session has committed, and what it goes on to commit."""

    @property
    def stop(self) -> tuple[int, ...] | None:
        """The tokens that end it; None where nothing but its log is left."""

    def __aiter__(self) -> AsyncIterator[Tokens]:
        """From its first token on; ends without a `finished` part where nobody knows how it ended.

        Raises GenerationError if the session has failed. Whoever stops reading ends nothing.
        """


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether texts can be generated now, and if not, why."""

    ready: bool
    reason: str


class Generator(Protocol):
    """Generates texts on the verifiers and drafters that the router knows."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Begin a text; raises GenerationError (no verifier, queue full, refused)."""

    async def output(self, session: bytes) -> SessionOutput | None:
        """What a session commits, None if there is no trace of it; raises GenerationError."""

    async def logprobs(self, tokens: Sequence[int], alternatives: int) -> tuple[Row, ...]:
        """How probable tokens[1:] are, each after those before it; raises GenerationError."""

    def readiness(self) -> Readiness: ...

    def overview(self) -> dict[str, Any]:
        """Instances, the number of open sessions, and counts; no base URI and no session."""


@asynccontextmanager
async def closing_parts(parts: AsyncIterator[Tokens]) -> AsyncIterator[AsyncIterator[Tokens]]:
    """Close an iterator that can be closed when it is left before its end."""
    try:
        yield parts
    finally:
        if isinstance(parts, AsyncGenerator):
            await parts.aclose()
