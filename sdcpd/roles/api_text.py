"""One text from the request to its end: tokens to text, where it stops, what it took."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from sdcpd.engine.tokenizer import TextModel, TextStream
from sdcpd.protocol.uris import session_path_id
from sdcpd.roles.api_stop import StopCutter
from sdcpd.roles.generation import (
    Generation,
    GenerationError,
    GenerationRequest,
    Generator,
    Tokens,
    closing_parts,
)
from sdcpd.roles.tasks import Tasks


class Endings(Tasks):
    """Sessions that are being ended after their client has gone, or has had enough."""

    async def drain(self, timeout_s: float) -> None:
        """Wait until they have ended, but no longer."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        await self.aclose()


class TextRun:
    """Begins a text at once; whoever makes one closes it, whatever has happened."""

    def __init__(
        self,
        generator: Generator,
        request: GenerationRequest,
        *,
        text: TextModel,
        stop_strings: Sequence[str],
        endings: Endings,
    ) -> None:
        self.request = request
        self.finish_reason: str | None = None
        """Why the text ended, once all of it was given out."""
        self.completion_tokens = 0
        """Tokens up to where the text ends; a stop token is no part of it."""
        self._endings = endings
        self._stream, self._cutter = TextStream(text), StopCutter(stop_strings)
        self._stop = frozenset(request.stop)
        self._stopped = False  # by a stop token
        self._session_ended = False
        self._closed = False
        self.opening: asyncio.Future[Generation] = asyncio.ensure_future(
            generator.generate(request)
        )

    async def opened(self) -> str:
        """The session's label, once it is open; raises GenerationError."""
        # Shielded: a session that is just being opened has to be ended, not forgotten.
        return session_path_id((await asyncio.shield(self.opening)).session)

    async def pieces(self) -> AsyncGenerator[str, None]:
        """The text as it becomes certain; raises GenerationError."""
        generation = await asyncio.shield(self.opening)
        async with closing_parts(aiter(generation)) as parts:
            async for part in parts:
                self._session_ended = part.finished
                if text := self._take(part):
                    yield text
                if self.finish_reason is not None:
                    return
        raise GenerationError("the session ended before the text did")

    def close(self) -> None:
        """End the session unless its verifier has; returns at once."""
        if not self._closed and not self._session_ended:
            self._endings.spawn(self._end(), name="end of a session")
        self._closed = True

    def usage(self) -> dict[str, Any]:
        """The `usage` object; drafted tokens that the text doesn't show count as rejected."""
        stats = self.opening.result().stats
        prompt, completion = len(self.request.prompt), self.completion_tokens
        accepted = min(stats.accepted, completion)
        passes = stats.passes
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": stats.drafted - accepted,
            },
            "sdcp": {
                "rounds": stats.rounds,
                "tokens_per_pass": round(stats.committed / passes, 3) if passes else 0.0,
                "self_decoded": stats.self_decoded,
            },
        }

    async def _end(self) -> None:
        try:
            generation = await self.opening
        except GenerationError:
            return  # so there is nothing to end
        await generation.cancel()

    def _take(self, part: Tokens) -> str:
        """The text that these tokens add."""
        shown = []
        for token in part.tokens:
            if self._stopped or token in self._stop:
                self._stopped = True  # the stop token, and nothing comes after it
                continue
            self.completion_tokens += 1
            shown.append(self._cutter.add(self._stream.add(token)))
            if self._cutter.hit:
                self.finish_reason = "stop"
                return "".join(shown)
        if part.finished:
            shown.append(self._tail())
        return "".join(shown)

    def _tail(self) -> str:
        """What was held back, now that the text has ended by itself."""
        text = self._cutter.add(self._stream.finish()) + self._cutter.finish()
        stopped = self._stopped or self._cutter.hit
        self.finish_reason = "stop" if stopped else "length"
        return text
