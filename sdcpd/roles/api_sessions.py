"""`GET /v1/sdcp/sessions/{id}/output?from=n`: for clients that come back to a text (D-G1, D-R8).

    data: {"object":"sdcp.output","session":ID,"from":n,"tokens":[5,7],"text":"..",
           "finish_reason":null}                                               (on one line)
    data: [DONE]

ID is the `x-request-id` of the first answer, or the id in its body, with `cmpl-` or `chatcmpl-` as
it stands there.  `from` is the number of tokens that the client has, 0 if it is not given.  Tokens
are all that the session has committed, a stop token at the end included, which has no text; `text`
is what they add to the text of those before.  from=0 gives all of it, and whoever has only text
skips its length.

Stop strings are the first request's and are not applied here.  Whoever stops reading ends nothing,
and a session that is read here goes on when its first client goes; one whose client never comes
back after a restart of the router runs to its end.  Whoever has a key may read any session whose
id they know.  `finish_reason` is "stop" or "length" in the last event, or null where a router was
restarted since the end and the verifier is gone: only the log is left then, which does not say
whether the text is complete.  A session that has failed or was ended early, by a stop string or
because its client had gone, gives what it had committed, then an event with an error that says so,
and no [DONE].
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from sdcpd.engine.tokenizer import TextModel, TextStream
from sdcpd.protocol.problems import Malformed
from sdcpd.protocol.uris import parse_from_query, parse_session_id, session_path_id
from sdcpd.roles.api_answers import event
from sdcpd.roles.api_errors import ApiError, broken_off, invalid, not_begun
from sdcpd.roles.api_stream import DONE, HEADERS, EventBody
from sdcpd.roles.generation import (
    GenerationError,
    Generator,
    SessionOutput,
    Tokens,
    closing_parts,
)
from sdcpd.transport.http import Request
from sdcpd.transport.http1 import StreamingResponse

log = logging.getLogger("sdcpd.api")
SESSIONS = "/v1/sdcp/sessions"
PREFIXES = ("chatcmpl-", "cmpl-")
TOKENS_AT_ONCE = 256  # turned into text before others have their turn


class Sessions:
    """Lets clients read sessions by their id, which nobody guesses: it has 128 random bits."""

    def __init__(
        self, generator: Generator, text: TextModel, *, ping_s: float, log_kept: str
    ) -> None:
        """`log_kept` tells people how long a session can be read after its end."""
        self._generator, self._text = generator, text
        self._ping_s, self._log_kept = ping_s, log_kept

    async def output(self, named: str, request: Request, *, owner: str) -> StreamingResponse:
        """The output of the session that a path names; raises ApiError."""
        session, from_ = _session(named), _from(request.query)
        label = session_path_id(session)
        try:
            found = await self._generator.output(session)
        except GenerationError as e:
            raise not_begun(e) from e
        if found is None:
            raise ApiError(
                404,
                f"no session {label} here; its log is kept for {self._log_kept} after its end",
                param="id",
                code="not_found",
            )
        if request.method != "HEAD":
            log.info("session %s: read from token %d by %s", label, from_, owner)
        events = _events(found, _Writer(label, from_, self._text, stop=found.stop))
        headers = (*HEADERS, ("x-request-id", label))
        return StreamingResponse(200, headers, EventBody(events, ping_s=self._ping_s))


class _Writer:
    """Makes events of committed tokens; what the client has already is taken without a word."""

    def __init__(
        self, session: str, from_: int, text: TextModel, *, stop: Sequence[int] | None
    ) -> None:
        """`stop` None, where only the log is left, stands for the model's own."""
        self._session, self._from = session, from_
        self._stop = frozenset(text.eos if stop is None else stop)
        self._stream = TextStream(text)
        self._count = 0
        self._stopped = False  # by a stop token, which is no text; nothing comes after one

    def add(self, part: Tokens) -> bytes | None:
        """The event of one part; None if the client has all of it, and more comes."""
        first, text = max(self._count, self._from), ""
        new = []
        for token in part.tokens:
            self._stopped = token in self._stop
            shown = "" if self._stopped else self._stream.add(token)
            if self._count >= self._from:
                new.append(token)
                text += shown
            self._count += 1
        if part.finished:
            reason = "stop" if self._stopped else "length"
            return self._event(first, new, text + self._stream.finish(), reason)
        return self._event(first, new, text, None) if new else None

    def end(self) -> bytes:
        """The last event where nobody knows how the session ended."""
        first, text = max(self._count, self._from), self._stream.finish()
        return self._event(first, [], text, "stop" if self._stopped else None)

    def _event(self, first: int, tokens: list[int], text: str, reason: str | None) -> bytes:
        value: dict[str, Any] = {"object": "sdcp.output", "session": self._session}
        value |= {"from": first, "tokens": tokens, "text": text, "finish_reason": reason}
        return event(value)


async def _events(output: SessionOutput, writer: _Writer) -> AsyncGenerator[bytes, None]:
    """Everything up to [DONE]; a session that fails has an error there and no [DONE]."""
    try:
        async with closing_parts(aiter(output)) as parts:
            async for part in parts:
                for piece in _pieces(part):
                    if (octets := writer.add(piece)) is not None:
                        yield octets + DONE if piece.finished else octets
                    await asyncio.sleep(0)  # a long text that is caught up on holds nobody up
                if part.finished:
                    return
        yield writer.end() + DONE
    except GenerationError as e:
        yield event(broken_off(str(e)).body())
    except Exception:
        log.exception("a session's output failed")
        yield event(broken_off("reading failed here; the log says why").body())


def _pieces(part: Tokens) -> Iterator[Tokens]:
    """A part in pieces of which each is soon done with; there is one at least."""
    rest = part
    while len(rest.tokens) > TOKENS_AT_ONCE:
        yield Tokens(rest.tokens[:TOKENS_AT_ONCE], finished=False)
        rest = replace(rest, tokens=rest.tokens[TOKENS_AT_ONCE:])
    yield rest


def _session(named: str) -> bytes:
    """The session that a path names, by its own id or by an answer's; raises ApiError 400."""
    ids = (named, *(named.removeprefix(p) for p in PREFIXES if named.startswith(p)))
    found = next((session for one in ids if (session := parse_session_id(one))), None)
    if found is None:
        raise invalid(
            f"{named!r} is not the id of a session; it has 22 characters, and stands in"
            " x-request-id and in the id of an answer",
            "id",
        )
    return found


def _from(query: str) -> int:
    """Tokens that the client has, 0 if it does not say; raises ApiError 400 (D-G3)."""
    if all(unquote(part.partition("=")[0]) != "from" for part in query.split("&")):
        return 0
    try:
        return parse_from_query(query)
    except Malformed as e:
        raise invalid(f"{e.detail}: it is the number of tokens that you have", "from") from e
