"""A text as server-sent events, with comments while nothing comes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from sdcpd.roles.api_answers import Answer, event
from sdcpd.roles.api_errors import broken_off
from sdcpd.roles.api_text import TextRun
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
    """A body of events, with comments while none comes."""

    def __init__(self, events: AsyncGenerator[bytes, None], *, ping_s: float) -> None:
        """`ping_s` 0 sends no comments."""
        self._events, self._ping_s = events, ping_s or None
        self._next: asyncio.Task[bytes | None] | None = None

    async def __anext__(self) -> bytes:
        if self._next is None:
            self._next = asyncio.ensure_future(self._pull())
        done, _ = await asyncio.wait({self._next}, timeout=self._ping_s)
        if not done:
            return PING
        octets, self._next = self._next.result(), None
        if octets is None:
            raise StopAsyncIteration
        return octets

    async def aclose(self) -> None:
        """End what makes the events, and wait for nothing but our own tasks."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
        await self._events.aclose()

    async def _pull(self) -> bytes | None:
        return await anext(self._events, None)


class EventStream(EventBody):
    """The body of a streamed answer; closing it ends the session."""

    def __init__(
        self,
        run: TextRun,
        answer: Callable[[str], Answer],
        *,
        with_usage: bool,
        ping_s: float,
        ended: Callable[[str, TextRun], None],
    ) -> None:
        """`ended` gets the session when all was sent."""
        super().__init__(self._all_events(), ping_s=ping_s)
        self._run, self._answer = run, answer
        self._with_usage, self._ended = with_usage, ended

    async def aclose(self) -> None:
        """End the session too if it still runs."""
        self._run.close()
        await super().aclose()

    async def _all_events(self) -> AsyncGenerator[bytes, None]:
        """Everything up to [DONE]; a text that fails has an error there and no [DONE]."""
        try:
            session = await self._run.opened()
            answer = self._answer(session)
            for chunk in answer.opening():
                yield event(chunk)
            async with aclosing(self._run.pieces()) as pieces:
                async for text in pieces:
                    yield event(answer.piece(text))
            self._run.close()  # after a stop string the session still runs
            assert self._run.finish_reason is not None, "a text without one raises"
            end = event(answer.end(self._run.finish_reason))
            if self._with_usage:
                end += event(answer.usage(self._run.usage()))
            self._ended(session, self._run)
            yield end + DONE
        except GenerationError as e:
            yield event(broken_off(str(e)).body())
        except Exception:
            log.exception("a stream failed")
            yield event(broken_off("the text failed here; the log says why").body())
