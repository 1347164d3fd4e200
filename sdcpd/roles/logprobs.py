"""How probable tokens of texts are: asked of whichever verifier can tell (D-Z5)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sdcpd.protocol.instances import Board
from sdcpd.protocol.logprobs import LogprobsAnswer, LogprobsRequest, Row
from sdcpd.protocol.messages import InstanceRole
from sdcpd.protocol.uris import join
from sdcpd.roles.calls import BadAnswer, Declined, call, read_answer
from sdcpd.roles.generation import GenerationError
from sdcpd.transport.http import Client, TransportError

log = logging.getLogger("sdcpd.router")
TIMEOUT_S = 120.0  # the text before a piece is computed meanwhile
PIECE = 256  # tokens asked about at once
TRIES_MAX = 3
PAUSE_S = 0.5
NOT_SERVED = (404, 405, 501)
UNKNOWN = "verifier {} is of a make that tells no log-probabilities; ask without logprobs"


@dataclass(frozen=True, slots=True)
class LogprobSource:
    """Asks fresh verifiers in turn; nothing is kept at them, so any will do."""

    client: Client
    board: Board
    target_of: Callable[[str], bytes]
    """The digest of a verifier's model; raises GenerationError."""

    async def rows(
        self, tokens: Sequence[int], from_: int, alternatives: int, *, first: str | None = None
    ) -> tuple[Row, ...]:
        """A row for each of tokens[from_:], from_ at least 1; raises GenerationError.

        `first` is the verifier to ask before others. Asked in pieces, at one verifier if it can
        be: nobody computes much for a client that has gone, and what was computed is kept there
        for the next piece.
        """
        found: list[Row] = []
        for at in range(from_, len(tokens), PIECE):
            first, rows = await self._piece(tokens[: at + PIECE], at, alternatives, first)
            found += rows
        return tuple(found)

    async def _piece(
        self, tokens: Sequence[int], from_: int, alternatives: int, first: str | None
    ) -> tuple[str, tuple[Row, ...]]:
        """The rows, and which verifier told them."""
        tried: list[str] = []
        for _ in range(TRIES_MAX):
            verifier = first if first not in (None, *tried) else self._next(tried)
            assert verifier is not None
            if verifier in tried:
                await asyncio.sleep(PAUSE_S)  # it is the only one; it may be back
            tried.append(verifier)
            try:
                return verifier, await self._ask(verifier, tokens, from_, alternatives)
            except (Declined, TransportError, BadAnswer) as e:
                if isinstance(e, Declined) and e.problem.status in NOT_SERVED:
                    raise GenerationError(UNKNOWN.format(verifier)) from e
                log.warning("log-probabilities from %s: %s", verifier, e)
                reason = str(e)
        raise GenerationError(f"log-probabilities can't be had now: {reason}", retry_after_s=1)

    def _next(self, tried: Sequence[str]) -> str:
        verifier = self.board.choose_verifier(now=time.monotonic(), exclude=tried)
        if verifier is None:
            raise GenerationError("no verifier is ready", retry_after_s=1)
        return verifier

    async def _ask(
        self, verifier: str, tokens: Sequence[int], from_: int, alternatives: int
    ) -> tuple[Row, ...]:
        message = LogprobsRequest(
            target=self.target_of(verifier),
            tokens=tuple(tokens),
            from_=from_,
            alternatives=alternatives,
        )
        uri = join(verifier, "logprobs")
        self.board.given(verifier, InstanceRole.VERIFIER)
        response = await call(self.client, "POST", uri, message=message, timeout_s=TIMEOUT_S)
        rows = read_answer(LogprobsAnswer, response).rows
        if len(rows) != len(tokens) - from_:
            raise BadAnswer(f"there are {len(rows)} rows for {len(tokens) - from_} tokens")
        return rows
