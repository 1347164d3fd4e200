"""The choices of one answer: several sessions at a time, their pieces as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from sdcpd.roles.api_answers import Piece
from sdcpd.roles.api_text import Run

AT_ONCE = 8  # sessions of one request that are open together
PIECES_MAX = 32  # that wait for a client which reads slowly

_Item = tuple[int, Piece | BaseException | None]


class Choices:
    """Begins the first choice at once; whoever makes one closes it, whatever has happened."""

    def __init__(self, begins: Sequence[Callable[[], Run]]) -> None:
        """Each of `begins` makes the run of one choice."""
        self._begins = begins
        self.runs: list[Run | None] = [begins[0](), *(None for _ in begins[1:])]
        self._closed = False

    @property
    def first(self) -> Run:
        """The choice whose session gives the answer its name."""
        run = self.runs[0]
        assert run is not None, "it begins at once"
        return run

    def finish_reason(self, index: int) -> str:
        """Why a choice ended of which all was given out."""
        run = self.runs[index]
        assert run is not None and run.finish_reason is not None, "a text without one raises"
        return run.finish_reason

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece | None], None]:
        """Pieces with the index of their choice, None at its end; raises GenerationError."""
        if len(self._begins) > 1:
            async with aclosing(self._several()) as several:
                async for one in several:
                    yield one
            return
        async with aclosing(self.first.pieces()) as pieces:
            async for piece in pieces:
                yield 0, piece
        self.first.close()  # after a stop string the session still runs
        yield 0, None

    async def whole(self) -> list[tuple[Piece, str]]:
        """All texts and why each ended; raises GenerationError."""
        texts = [Piece("") for _ in self._begins]
        async with aclosing(self.pieces()) as pieces:
            async for index, piece in pieces:
                if piece is not None:
                    texts[index].add(piece)
        return [(text, self.finish_reason(index)) for index, text in enumerate(texts)]

    def close(self) -> None:
        """End the sessions that still run; returns at once."""
        self._closed = True
        for run in self.runs:
            if run is not None:
                run.close()

    async def _several(self) -> AsyncGenerator[tuple[int, Piece | None], None]:
        queue: asyncio.Queue[_Item] = asyncio.Queue(PIECES_MAX)
        room = asyncio.Semaphore(AT_ONCE)
        tasks = [
            asyncio.ensure_future(self._drive(index, queue, room))
            for index in range(len(self._begins))
        ]
        try:
            left = len(tasks)
            while left:
                index, item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                left -= item is None
                yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _drive(
        self, index: int, queue: asyncio.Queue[_Item], room: asyncio.Semaphore
    ) -> None:
        async with room:
            if self._closed:
                return
            try:
                run = self.runs[index] = self.runs[index] or self._begins[index]()
                async with aclosing(run.pieces()) as pieces:
                    async for piece in pieces:
                        await queue.put((index, piece))
                run.close()
                await queue.put((index, None))
            except Exception as e:
                await queue.put((index, e))


def usage_of(choices: Choices, *, per_prompt: int) -> dict[str, Any]:
    """The `usage` object of all choices, of which `per_prompt` in turn share a prompt.

    Drafted tokens that a text doesn't show count as rejected.
    """
    runs = [run for run in choices.runs if run is not None]
    prompt = sum(len(run.wanted.request.prompt) for run in runs[::per_prompt])
    completion = sum(run.completion_tokens for run in runs)
    accepted = sum(min(run.stats.accepted, run.completion_tokens) for run in runs)
    passes = sum(run.stats.passes for run in runs)
    committed = sum(run.stats.committed for run in runs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(run.stats.drafted for run in runs) - accepted,
        },
        "sdcp": {
            "rounds": sum(run.stats.rounds for run in runs),
            "tokens_per_pass": round(committed / passes, 3) if passes else 0.0,
            "self_decoded": sum(run.stats.self_decoded for run in runs),
        },
    }
