"""Texts for clients: from a parsed request to the whole or the streamed answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sdcpd.engine.tokenizer import ChatTemplateError, TextModel
from sdcpd.roles.api_answers import Answer, ChatAnswer, CompletionAnswer, octets_of
from sdcpd.roles.api_bodies import ChatBody, CompletionBody, TextBody
from sdcpd.roles.api_errors import (
    JSON_HEADERS,
    ApiError,
    broken_off,
    invalid,
    not_begun,
    retry_after,
)
from sdcpd.roles.api_plan import plan
from sdcpd.roles.api_stream import HEADERS, EventStream
from sdcpd.roles.api_text import Endings, TextRun
from sdcpd.roles.generation import GenerationError, GenerationRequest, Generator
from sdcpd.transport.http import Request, Response
from sdcpd.transport.http1 import StreamingResponse

log = logging.getLogger("sdcpd.api")
COMPLETION_TOKENS_DEFAULT = 16  # OpenAI's
ENCODE_CHARACTERS_MAX = 8192  # longer texts are encoded in a thread
CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Asked:
    """Who asked for a text, and what its answer looks like once its session is known."""

    request: Request
    owner: str
    body: TextBody
    answer: Callable[[str], Answer]


class Texts:
    """Generates the texts of all clients; `max_queue` may wait for their session to open."""

    def __init__(
        self, generator: Generator, text: TextModel, *, model: str, ping_s: float, max_queue: int
    ) -> None:
        self._generator, self._text = generator, text
        self._model, self._ping_s, self._max_queue = model, ping_s, max_queue
        self._endings = Endings()
        self._opening: set[asyncio.Future[Any]] = set()

    async def aclose(self) -> None:
        """Let sessions end whose clients have gone."""
        await self._endings.drain(CLOSE_S)

    async def complete(
        self, body: CompletionBody, request: Request, *, owner: str
    ) -> Response | StreamingResponse:
        """Continue a text; raises ApiError."""
        if body.prompt is None:
            raise invalid("prompt is missing", "prompt", code="missing_required_parameter")
        given = body.prompt
        prompt = await self._encode(given) if isinstance(given, str) else given
        wanted = plan(
            body,
            prompt,
            text=self._text,
            param="prompt",
            max_new_default=COMPLETION_TOKENS_DEFAULT,
            request=request,
        )
        return await self._run(wanted, self._asked(request, owner, body, CompletionAnswer))

    async def chat(
        self, body: ChatBody, request: Request, *, owner: str
    ) -> Response | StreamingResponse:
        """Answer a chat; raises ApiError."""
        try:
            rendered = self._text.chat_prompt(body.for_template())
        except ChatTemplateError as e:
            raise invalid(str(e), "messages") from e
        prompt = await self._encode(rendered, special=False)  # the template has put its own
        wanted = plan(
            body,
            prompt,
            text=self._text,
            param="messages",
            max_new_default=None,
            request=request,
        )
        return await self._run(wanted, self._asked(request, owner, body, ChatAnswer))

    def _asked(
        self, request: Request, owner: str, body: TextBody, kind: Callable[[str, int, str], Answer]
    ) -> Asked:
        created = int(time.time())
        return Asked(request, owner, body, lambda session: kind(session, created, self._model))

    async def _encode(self, text: str, *, special: bool = True) -> Sequence[int]:
        if len(text) <= ENCODE_CHARACTERS_MAX:
            return self._text.encode(text, special=special)
        return await asyncio.to_thread(self._text.encode, text, special=special)

    async def _run(self, wanted: GenerationRequest, asked: Asked) -> Response | StreamingResponse:
        run = self._begin(wanted, asked.body.stop)
        try:
            if asked.body.stream:
                return await self._streamed(run, asked)
            return await self._whole(run, asked)
        except BaseException:  # a client that goes away cancels us
            run.close()
            raise

    def _begin(self, wanted: GenerationRequest, stop_strings: Sequence[str]) -> TextRun:
        waiting = len(self._opening)
        if waiting >= self._max_queue:
            raise ApiError(
                429,
                f"{waiting} texts wait to begin already; try again later",
                code="queue_full",
                headers=retry_after(1),
            )
        run = TextRun(
            self._generator,
            wanted,
            text=self._text,
            stop_strings=stop_strings,
            endings=self._endings,
        )
        self._opening.add(run.opening)
        run.opening.add_done_callback(self._opening.discard)
        return run

    async def _whole(self, run: TextRun, asked: Asked) -> Response:
        try:
            session = await run.opened()
        except GenerationError as e:
            raise not_begun(e) from e
        try:
            text = "".join([piece async for piece in run.pieces()])
        except GenerationError as e:
            raise broken_off(str(e)) from e
        run.close()  # after a stop string the session still runs
        _log(session, run, asked)
        assert run.finish_reason is not None, "a text without one raises"
        value = asked.answer(session).whole(text, run.finish_reason, run.usage())
        return Response(200, (*JSON_HEADERS, ("x-request-id", session)), octets_of(value))

    async def _streamed(self, run: TextRun, asked: Asked) -> StreamingResponse:
        """A stream, which begins before its session if that takes long: proxies lose patience."""
        headers = HEADERS
        await asyncio.wait({run.opening}, timeout=self._ping_s or None)
        if run.opening.done():
            try:
                headers = (*HEADERS, ("x-request-id", await run.opened()))
            except GenerationError as e:
                raise not_begun(e) from e
        stream = EventStream(
            run,
            asked.answer,
            with_usage=asked.body.usage_in_stream,
            ping_s=self._ping_s,
            ended=lambda session, run: _log(session, run, asked),
        )
        return StreamingResponse(200, headers, stream)


def _log(session: str, run: TextRun, asked: Asked) -> None:
    log.info(
        "session %s: %s by %s: %d prompt tokens, %d completion tokens, finish %s",
        session,
        asked.request.path,
        asked.owner,
        len(run.request.prompt),
        run.completion_tokens,
        run.finish_reason,
    )
