"""One text from the request to its end: tokens to text, where it stops, what it took."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from sdcpd.engine.tokenizer import TextModel, TextStream
from sdcpd.protocol.uris import session_path_id
from sdcpd.roles.api_answers import Piece
from sdcpd.roles.api_echo import Echo
from sdcpd.roles.api_stop import StopCutter
from sdcpd.roles.api_tokens import Entries, Rounds
from sdcpd.roles.generation import (
    Generation,
    GenerationError,
    GenerationRequest,
    GenerationStats,
    Generator,
    Tokens,
    closing_parts,
)
from sdcpd.roles.tasks import Tasks


@dataclass(frozen=True, slots=True)
class Wanted:
    """One choice of an answer: what is generated, and what is shown of it."""

    request: GenerationRequest
    stop_strings: Sequence[str] = ()
    echo: Echo | None = None
    """The prompt, if it is to stand before its continuation."""
    continues: bool = False
    """Whether the text goes on where the prompt ends, which may be within a character."""
    rounds: bool = False
    """Whether it is told of each piece which rounds it came from."""


class Endings(Tasks):
    """Sessions that are being ended after their client has gone, or has had enough."""

    async def drain(self, timeout_s: float) -> None:
        """Wait until they have ended, but no longer."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        await self.aclose()


class Run(Protocol):
    """One choice being made; whoever has one closes it, whatever has happened."""

    wanted: Wanted
    finish_reason: str | None
    """Why the text ended, once all of it was given out."""
    completion_tokens: int
    """Tokens until the text has ended: those of a stop string count, a stop token does not."""

    @property
    def stats(self) -> GenerationStats: ...

    async def opened(self) -> str:
        """The session's label, once it is open; raises GenerationError."""

    def pieces(self) -> AsyncGenerator[Piece, None]:
        """The text as it becomes certain; raises GenerationError."""

    def close(self) -> None:
        """End the session unless its verifier has; returns at once."""


class TextRun:
    """See Run. Begins its session at once."""

    def __init__(
        self, generator: Generator, wanted: Wanted, *, text: TextModel, endings: Endings
    ) -> None:
        self.wanted, self.completion_tokens = wanted, 0
        self.finish_reason: str | None = None
        request = wanted.request
        self._endings = endings
        self._stream, self._cutter = TextStream(text), StopCutter(wanted.stop_strings)
        if wanted.continues:
            self._stream.go_on_after(request.prompt)
        self._entries = Entries(text.octets) if request.logprobs is not None else None
        self._rounds = Rounds(text) if wanted.rounds else None
        self._stop = frozenset(request.stop)
        self._stopped = False  # by a stop token
        self._made = self._shown = 0  # characters, before the cutter and after it
        self._session_ended = False
        self._closed = False
        self.opening: asyncio.Future[Generation] = asyncio.ensure_future(
            generator.generate(request)
        )

    @property
    def stats(self) -> GenerationStats:
        """See Run."""
        return self.opening.result().stats

    async def opened(self) -> str:
        """See Run."""
        # Shielded: a session that is just being opened has to be ended, not forgotten.
        return session_path_id((await asyncio.shield(self.opening)).session)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """See Run."""
        generation = await asyncio.shield(self.opening)
        if self.wanted.echo is not None:
            piece = await self.wanted.echo.piece()
            self._made = self._shown = len(piece.text)
            yield piece
        async with closing_parts(aiter(generation)) as parts:
            async for part in parts:
                self._session_ended = part.finished
                if piece := self._take(part):
                    yield piece
                if self.finish_reason is not None:
                    return
        raise GenerationError("the session ended before the text did")

    def close(self) -> None:
        """See Run."""
        if not self._closed and not self._session_ended:
            self._endings.spawn(self._end(), name="end of a session")
        self._closed = True
        if self.wanted.echo is not None:
            self.wanted.echo.close()

    async def _end(self) -> None:
        try:
            generation = await self.opening
        except GenerationError:
            return  # so there is nothing to end
        await generation.cancel()

    def _take(self, part: Tokens) -> Piece:
        """What these tokens add to the text."""
        piece, texts = Piece(""), []
        for index, token in enumerate(part.tokens):
            if self._entries is not None:
                self._enter(token, part, index)
            texts.append(self._add(token, piece))
            if self._cutter.hit:
                self.finish_reason = "stop"
                break
        if part.finished and self.finish_reason is None:
            self._finish(piece)
        self._shown += len(piece.text)
        ended = self.finish_reason is not None
        if self._rounds is not None:
            texts += [""] * (len(part.tokens) - len(texts))  # what is behind a stop string
            self._rounds.add(texts, part.parts)
            piece.rounds = self._rounds.release(self._shown, ended=ended)
        if self._entries is not None:
            piece.entries = self._entries.release(self._shown)
            if ended and not self._cutter.hit:
                piece.entries += self._entries.finish()
        return piece

    def _add(self, token: int, piece: Piece) -> str:
        """Add one token to a piece; returns its own text."""
        if self._stopped or token in self._stop:
            self._stopped = True  # the stop token, and nothing comes after it
            return ""
        self.completion_tokens += 1
        text = self._stream.add(token)
        self._made += len(text)
        piece.text += self._cutter.add(text)
        return text

    def _enter(self, token: int, part: Tokens, index: int) -> None:
        """Note a token's log-probabilities; a stop token is shown to those who echo alone.

        Those score texts, and count an entry for each token that they asked for.
        """
        assert self._entries is not None
        ends = self._stopped or token in self._stop
        if not ends or (self.wanted.echo is not None and not self._stopped):
            self._entries.add(token, part.logprobs[index], offset=self._made)

    def _finish(self, piece: Piece) -> None:
        """Add what was held back, now that the text has ended by itself."""
        piece.text += self._cutter.add(self._stream.finish()) + self._cutter.finish()
        stopped = self._stopped or self._cutter.hit
        self.finish_reason = "stop" if stopped else "length"


class PromptRun:
    """See Run. A prompt that is shown, with nothing after it; no session is needed for that."""

    def __init__(self, wanted: Wanted, *, label: str) -> None:
        assert wanted.echo is not None, "there is nothing else to show"
        self.wanted, self.completion_tokens, self.stats = wanted, 0, GenerationStats()
        self.finish_reason: str | None = None
        self._echo, self._label = wanted.echo, label

    async def opened(self) -> str:
        """See Run: once it is known that there is a text."""
        await self._echo.piece()
        return self._label

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """See Run."""
        yield await self._echo.piece()
        self.finish_reason = "length"

    def close(self) -> None:
        """See Run."""
        self._echo.close()
