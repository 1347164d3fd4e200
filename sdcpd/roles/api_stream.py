"""A text as server-sent events, with comments while nothing comes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from sdcpd.roles.api_answers import Answer, event
from sdcpd.roles.api_choices import Choices
from sdcpd.roles.api_errors import SESSION_FAILED, broken_off
from sdcpd.roles.api_trace import FAILED, GONE
from sdcpd.roles.generation import GenerationError
from sdcpd.transport.http import Headers

log = logging.getLogger("sdcpd.api")
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS: Headers = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),  # proxies would keep the text until it is long enough
)


class EventBody:
    """A body of events, with comments while none comes.

    One task makes them, one ahead of whoever reads, and a timer puts the comments between.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], *, ping_s: float) -> None:
        """`ping_s` 0 sends no comments."""
        self._events, self._ping_s = events, ping_s
        self._ready: asyncio.Queue[bytes | None] = asyncio.Queue(1)
        self._making: asyncio.Task[None] | None = None
        self._failed: Exception | None = None

    async def __anext__(self) -> bytes:
        if self._making is None:
            self._making = asyncio.ensure_future(self._make())
        timer = None
        if self._ping_s and self._ready.empty():
            timer = asyncio.get_running_loop().call_later(self._ping_s, self._ping)
        try:
            octets = await self._ready.get()
        finally:
            if timer is not None:
                timer.cancel()
        if octets is None:
            raise self._failed or StopAsyncIteration
        return octets

    async def aclose(self) -> None:
        """End what makes the events, and wait for nothing but our own tasks."""
        if self._making is not None:
            self._making.cancel()
            await asyncio.gather(self._making, return_exceptions=True)
        await self._events.aclose()

    def _ping(self) -> None:
        if self._ready.empty():
            self._ready.put_nowait(PING)

    async def _make(self) -> None:
        try:
            async for octets in self._events:
                await self._ready.put(octets)
        except Exception as e:
            self._failed = e
        await self._ready.put(None)


class EventStream(EventBody):
    """The body of a streamed answer; closing it ends its sessions."""

    def __init__(
        self,
        choices: Choices,
        answer: Callable[[str], Answer],
        *,
        usage: Callable[[], dict[str, Any]] | None,
        ping_s: float,
        ended: Callable[[str], None],
        closed: Callable[[str], None] | None = None,
    ) -> None:
        """`usage`: what is told at the end; `ended` gets the first session when all was sent.

        `closed` gets a word for what went wrong, or none, when nothing will be sent any more.
        """
        super().__init__(self._all_events(), ping_s=ping_s)
        self._choices, self._answer = choices, answer
        self._usage, self._ended, self._closed = usage, ended, closed
        self._wrong = GONE  # until all was given out

    async def aclose(self) -> None:
        """End the sessions too that still run."""
        self._choices.close()
        await super().aclose()
        if self._closed is not None:
            self._closed(self._wrong)

    async def _all_events(self) -> AsyncGenerator[bytes, None]:
        """Everything up to [DONE]; a text that fails has an error there and no [DONE]."""
        try:
            session = await self._choices.first.opened()
            answer = self._answer(session)
            for index in range(len(self._choices.runs)):
                for chunk in answer.opening(index):
                    yield event(chunk)
            async with aclosing(self._choices.pieces()) as pieces:
                async for index, piece in pieces:
                    if piece is not None:
                        yield event(answer.piece(index, piece))
                    else:
                        yield event(answer.end(index, self._choices.finish_reason(index)))
            last = event(answer.usage(self._usage())) if self._usage is not None else b""
            self._ended(session)
            self._wrong = ""
            yield last + DONE
        except GenerationError as e:
            self._wrong = SESSION_FAILED
            yield event(broken_off(str(e)).body())
        except Exception:
            log.exception("a stream failed")
            self._wrong = FAILED
            yield event(broken_off("the text failed here; the log says why").body())
