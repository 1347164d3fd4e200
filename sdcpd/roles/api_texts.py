"""Texts for clients: from a parsed request to the whole or the streamed answer."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from sdcpd.engine.tokenizer import ChatTemplateError, TextModel
from sdcpd.protocol.uris import session_path_id
from sdcpd.roles.api_answers import Answer, ChatAnswer, CompletionAnswer, whole_octets
from sdcpd.roles.api_bodies import ChatBody, CompletionBody, TextBody
from sdcpd.roles.api_choices import Choices, usage_of
from sdcpd.roles.api_counts import ApiCounts, CountedChoices
from sdcpd.roles.api_echo import Echo
from sdcpd.roles.api_errors import (
    JSON_HEADERS,
    ApiError,
    broken_off,
    invalid,
    not_begun,
    retry_after,
)
from sdcpd.roles.api_messages import ChatMessages
from sdcpd.roles.api_plan import check_length, check_size, plan
from sdcpd.roles.api_stream import HEADERS, EventStream
from sdcpd.roles.api_text import Endings, PromptRun, Run, TextRun, Wanted
from sdcpd.roles.api_trace import RequestTrace
from sdcpd.roles.generation import GenerationError, Generator
from sdcpd.transport.http import Request, Response
from sdcpd.transport.http1 import StreamingResponse

log = logging.getLogger("sdcpd.api")
T = TypeVar("T")
_BESIDE = ThreadPoolExecutor(1, "tokens")  # each text takes many times its own memory
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
    trace: RequestTrace | None = None


async def run_beside(size: int, what: Callable[..., T], *arguments: object) -> T:
    """Call at once what is soon done, and in a thread, one at a time, what is not."""
    if size <= ENCODE_CHARACTERS_MAX:
        return what(*arguments)
    return await asyncio.get_running_loop().run_in_executor(_BESIDE, what, *arguments)


async def encode(text: TextModel, plain: str, *, special: bool = True) -> Sequence[int]:
    """The tokens of a text."""
    return await run_beside(len(plain), partial(text.encode, special=special), plain)


async def chat_tokens(
    text: TextModel, body: ChatMessages, *, special: bool = False, fitting: bool = False
) -> Sequence[int]:
    """The tokens of a chat, as the model's template puts it; raises ApiError 400.

    Templates put special tokens themselves. `fitting`: what can't fit the context is refused.
    """
    try:
        rendered = text.chat_prompt(body.for_template())
    except ChatTemplateError as e:
        raise invalid(str(e), "messages") from e
    if fitting:
        check_length(rendered, text=text, param="messages")
    return await encode(text, rendered, special=special)


class Texts:
    """Generates the texts of all clients."""

    def __init__(self, generator: Generator, text: TextModel, *, model: str) -> None:
        self._generator, self._text, self._model = generator, text, model
        self.configure(ping_s=5.0, max_queue=256, log_prompts=False)
        self._endings = Endings()
        self._opening: set[asyncio.Future[Any]] = set()
        self.counts = ApiCounts()
        self.counts.waiting = lambda: len(self._opening)

    def configure(self, *, ping_s: float, max_queue: int, log_prompts: bool) -> None:
        """Go by these settings from the next text on; at most `max_queue` may wait to open."""
        self._ping_s, self._max_queue, self._log_prompts = ping_s, max_queue, log_prompts

    async def aclose(self) -> None:
        """Let sessions end whose clients have gone."""
        await self._endings.drain(CLOSE_S)

    async def complete(
        self,
        body: CompletionBody,
        request: Request,
        *,
        owner: str,
        trace: RequestTrace | None = None,
    ) -> Response | StreamingResponse:
        """Continue one text or several; raises ApiError."""
        if not body.prompt:
            raise invalid("prompt is missing", "prompt", code="missing_required_parameter")
        wanted: list[Wanted] = []
        for given in body.prompt:
            wanted += await self._continuations(given, body, request)
        check_size(wanted)
        return await self._run(wanted, self._asked(request, owner, body, CompletionAnswer, trace))

    async def _continuations(
        self, given: str | list[int], body: CompletionBody, request: Request
    ) -> list[Wanted]:
        """What is wanted of one prompt."""
        plain, prompt, offsets = None, given, list[int]()
        if isinstance(given, str):
            check_length(plain := given, text=self._text, param="prompt")
            prompt, offsets = await run_beside(len(plain), self._text.encode_at, plain)
        assert not isinstance(prompt, str)
        texts = plan(
            body,
            prompt,
            text=self._text,
            param="prompt",
            max_new_default=COMPLETION_TOKENS_DEFAULT,
            request=request,
        )
        echo = None
        if body.echo:
            echo = Echo(
                self._generator,
                self._text,
                prompt,
                alternatives=body.alternatives,
                plain=plain,
                offsets=offsets,
            )
        rounds = body.rounds_in_stream
        return [Wanted(one, body.stop, echo, continues=True, rounds=rounds) for one in texts]

    async def chat(
        self,
        body: ChatBody,
        request: Request,
        *,
        owner: str,
        trace: RequestTrace | None = None,
    ) -> Response | StreamingResponse:
        """Answer a chat; raises ApiError."""
        prompt = await chat_tokens(self._text, body, fitting=True)
        texts = plan(
            body,
            prompt,
            text=self._text,
            param="messages",
            max_new_default=None,
            request=request,
        )
        wanted = [Wanted(one, body.stop, rounds=body.rounds_in_stream) for one in texts]
        return await self._run(wanted, self._asked(request, owner, body, ChatAnswer, trace))

    def _asked(
        self,
        request: Request,
        owner: str,
        body: TextBody,
        kind: Callable[[str, int, str, int | None], Answer],
        trace: RequestTrace | None,
    ) -> Asked:
        created = int(time.time())

        def answer(session: str) -> Answer:
            return kind(session, created, self._model, body.alternatives)

        return Asked(request, owner, body, answer, trace)

    async def _run(self, wanted: Sequence[Wanted], asked: Asked) -> Response | StreamingResponse:
        choices = self._begin(wanted, asked)
        if self._log_prompts:
            for one in wanted:
                log.info("prompt by %s: %a", asked.owner, self._text.decode_all(one.request.prompt))
        try:
            if asked.body.stream:
                return await self._streamed(choices, asked)
            return await self._whole(choices, asked)
        except BaseException:  # a client that goes away cancels us
            choices.close()
            raise

    def _begin(self, wanted: Sequence[Wanted], asked: Asked) -> Choices:
        waiting = len(self._opening)
        if waiting >= self._max_queue:
            raise ApiError(
                429,
                f"{waiting} texts wait to begin already; try again later",
                code="queue_full",
                headers=retry_after(1),
            )
        prompt_tokens = sum(len(one.request.prompt) for one in wanted[:: asked.body.choices])
        trace = asked.trace
        if trace is not None:
            under = trace.traceparent
            wanted = [
                replace(one, request=replace(one.request, traceparent=under)) for one in wanted
            ]
        begins = [partial(self._begin_one, one) for one in wanted]
        return CountedChoices(begins, self.counts, prompt_tokens=prompt_tokens, trace=trace)

    def _begin_one(self, wanted: Wanted) -> Run:
        if wanted.request.max_new == 0:
            label = session_path_id(secrets.token_bytes(16))
            return PromptRun(wanted, label=label)
        run = TextRun(self._generator, wanted, text=self._text, endings=self._endings)
        self._opening.add(run.opening)
        run.opening.add_done_callback(self._opening.discard)
        return run

    async def _whole(self, choices: Choices, asked: Asked) -> Response:
        try:
            session = await choices.first.opened()
        except GenerationError as e:
            raise not_begun(e) from e
        try:
            texts = await choices.whole()
        except GenerationError as e:
            raise broken_off(e) from e
        _log(session, choices, asked)
        usage = usage_of(choices, per_prompt=asked.body.choices)
        octets = await whole_octets(asked.answer(session), texts, usage)
        if asked.trace is not None:
            asked.trace.ended()
        return Response(200, (*JSON_HEADERS, ("x-request-id", session)), octets)

    async def _streamed(self, choices: Choices, asked: Asked) -> StreamingResponse:
        """A stream, which begins before its session if that takes long: proxies lose patience."""
        headers = HEADERS
        opening = asyncio.ensure_future(choices.first.opened())
        await asyncio.wait({opening}, timeout=self._ping_s or None)
        if opening.done():
            try:
                headers = (*HEADERS, ("x-request-id", opening.result()))
            except GenerationError as e:
                raise not_begun(e) from e
        opening.cancel()
        usage = partial(usage_of, choices, per_prompt=asked.body.choices)
        stream = EventStream(
            choices,
            asked.answer,
            usage=usage if asked.body.usage_in_stream else None,
            ping_s=self._ping_s,
            ended=lambda session: _log(session, choices, asked),
            closed=None if asked.trace is None else asked.trace.ended,
        )
        return StreamingResponse(200, headers, stream)


def _log(session: str, choices: Choices, asked: Asked) -> None:
    runs = [run for run in choices.runs if run is not None]
    log.info(
        "session %s: %s by %s: %d prompt tokens, %d completion tokens, finish %s",
        session,
        asked.request.path,
        asked.owner,
        sum(len(run.wanted.request.prompt) for run in runs[:: asked.body.choices]),
        sum(run.completion_tokens for run in runs),
        ", ".join(str(run.finish_reason) for run in runs),
    )
