"""A prompt as the beginning of its own continuations, with how probable the model found it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sdcpd.engine.tokenizer import TextModel, TextStream
from sdcpd.roles.api_answers import Piece
from sdcpd.roles.api_logprobs import entry
from sdcpd.roles.generation import Generator

AT_ONCE = 256  # tokens that are turned into text before others have their turn


class Echo:
    """Made once, however many continuations there are; whoever has one closes it."""

    def __init__(
        self,
        generator: Generator,
        text: TextModel,
        prompt: Sequence[int],
        *,
        alternatives: int | None,
        plain: str | None = None,
        offsets: Sequence[int] = (),
    ) -> None:
        """`plain` and `offsets`, where the prompt was a text: it, and where its tokens begin."""
        self._generator, self._text, self._prompt = generator, text, prompt
        self._alternatives, self._plain, self._offsets = alternatives, plain, offsets
        self._made: asyncio.Task[Piece] | None = None

    async def piece(self) -> Piece:
        """The prompt's text, and its entries if they are wanted; raises GenerationError."""
        if self._made is None:
            self._made = asyncio.ensure_future(self._make())
        made = await asyncio.shield(self._made)  # for whoever else waits for it
        return Piece(made.text, list(made.entries))

    def close(self) -> None:
        """Give it up."""
        if self._made is not None:
            self._made.cancel()

    async def _make(self) -> Piece:
        rows = None
        if self._alternatives is not None:
            rows = (None, *await self._generator.logprobs(self._prompt, self._alternatives))
        text, offsets = self._plain, self._offsets
        if text is None:
            text, offsets = await self._decoded()
        piece = Piece(text)
        for at, row in enumerate(rows or ()):
            piece.entries.append(
                entry(self._text.octets, self._prompt[at], row, offset=offsets[at])
            )
            if at % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
        return piece

    async def _decoded(self) -> tuple[str, list[int]]:
        """The text of tokens without a character that they do not finish, and their places."""
        stream, shown, count = TextStream(self._text), [], 0
        offsets = []
        for at, token in enumerate(self._prompt):
            offsets.append(count)
            shown.append(stream.add(token))
            count += len(shown[-1])
            if at % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
        return "".join(shown), offsets
