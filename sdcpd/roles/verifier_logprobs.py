"""`POST logprobs`: how probable a text's tokens are under the target (private use, D-Z5).

No session is needed for it and nothing is kept, so that a router may ask any verifier of the model.
"""

from __future__ import annotations

import asyncio

from sdcpd.engine.api import EngineBusy, EngineError, TargetEngine
from sdcpd.protocol.codec import decode
from sdcpd.protocol.logprobs import LogprobsAnswer, LogprobsRequest
from sdcpd.protocol.problems import Malformed, TooManyRequests, Unavailable, Unprocessable
from sdcpd.roles.base import Call, message_response
from sdcpd.transport.http import Response

AT_ONCE = 4  # beside rounds, which go before them in every pass
WAITING_MAX = 64


class LogprobsResource:
    """Answers for one engine, which works for so many at a time and lets others wait."""

    def __init__(self, engine: TargetEngine) -> None:
        self._engine = engine
        self._room = asyncio.Semaphore(AT_ONCE)
        self.active = 0
        """Requests that are being worked on or wait."""

    async def answer(self, call: Call) -> Response:
        """Answer with a row for each token asked about.

        Raises Malformed, Unprocessable for tokens that can't be scored here, and TooManyRequests
        or Unavailable for what may come again later.
        """
        asked = decode(LogprobsRequest, call.request.body)
        _check(asked, self._engine)
        if self.active >= WAITING_MAX:
            raise TooManyRequests("too many texts wait to be scored", retry_after_s=1)
        self.active += 1
        try:
            async with self._room:
                return await _answer(asked, self._engine)
        finally:
            self.active -= 1


def _check(asked: LogprobsRequest, engine: TargetEngine) -> None:
    info = engine.info
    if not 1 <= asked.from_ < len(asked.tokens):
        raise Malformed("from must name a token that comes after another")
    if asked.target != info.model:
        raise Unprocessable("the target is not the model served here")
    if max(asked.tokens) >= info.vocab:
        raise Unprocessable("a token is beyond the vocabulary")
    if len(asked.tokens) > info.context_max:
        raise Unprocessable(
            f"there are {len(asked.tokens)} tokens; the model's context is {info.context_max}"
        )


async def _answer(asked: LogprobsRequest, engine: TargetEngine) -> Response:
    scope = asked.scope or b""
    try:
        rows = await engine.logprobs(asked.tokens, asked.from_, asked.alternatives, scope=scope)
    except EngineBusy as e:
        raise TooManyRequests(str(e), retry_after_s=1) from e
    except EngineError as e:
        raise Unavailable(f"the tokens could not be scored: {e}", retry_after_s=1) from e
    return message_response(LogprobsAnswer(rows=rows))
