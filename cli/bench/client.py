"""Asking the API for texts: connections that are kept, and what each text came to."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import SplitResult

from cli.bench.answers import Answer, NotHttp

BEGIN_S = 10.0  # in which a connection must be made
UNREACHABLE, CUT, TIMEOUT = "nobody answers", "the connection was cut", "no end in time"
NO_API, NO_USAGE = "no answer of an OpenAI-compatible API", "a text without its usage"


@dataclass(slots=True)
class Text:
    """What one request came to; times are of `time.perf_counter`."""

    due_s: float
    """When it should have been sent, from which all its times count."""
    sent_s: float = 0.0
    end_s: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When text came, and how many characters."""
    usage: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None
    """The kind of failure; None: the text is whole."""
    said: str = ""
    """What the API said of the failure."""
    retry_after_s: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the text as the API counts them."""
        return int(self.usage.get("completion_tokens", 0))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is the same in all requests."""

    url: SplitResult
    """The API's base."""
    key: str | None
    model: str
    max_tokens: int
    temperature: float
    seed: int
    chat: bool
    ignore_eos: bool
    timeout_s: float
    tls: ssl.SSLContext | None = None
    """Where the API speaks HTTPS."""

    def request(self, prompt: str, number: int, *, speculate: bool, max_tokens: int) -> bytes:
        """The octets of a request; speculation is switched off for it alone."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.temperature:
            body["seed"] = (self.seed + number) % (1 << 31)
        if self.ignore_eos:
            body["ignore_eos"] = True
        if not speculate:
            body["speculation"] = False
        body |= {"messages": [{"role": "user", "content": prompt}]} if self.chat else {}
        body |= {} if self.chat else {"prompt": prompt}
        octets = json.dumps(body).encode()
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        path = f"{self.url.path.rstrip('/')}/{'chat/' if self.chat else ''}completions"
        head = f"POST {path} HTTP/1.1\r\nHost: {self.url.netloc}\r\n{key}"
        head += f"Content-Type: application/json\r\nContent-Length: {len(octets)}\r\n\r\n"
        return head.encode() + octets


class Connection(asyncio.Protocol):
    """Carries one request after the other."""

    def __init__(self) -> None:
        self.alive = False
        self.answer = Answer()
        self._transport: asyncio.Transport | None = None
        self._over: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport, self.alive = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol: the time is taken once, before anything is read of it."""
        now = time.perf_counter()
        try:
            self.answer.feed(data, now)
        except NotHttp as e:
            self._end(e)
        else:
            if self.answer.done:
                self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self.alive = False
        self.answer.eof()
        self._end(None if self.answer.done else ConnectionError(CUT))

    async def exchange(self, request: bytes, timeout_s: float) -> Answer:
        """Send a request and read all of its answer; raises NotHttp, OSError, TimeoutError."""
        assert self._transport is not None
        self.answer = Answer()
        self._over = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        async with asyncio.timeout(timeout_s):
            await self._over
        return self.answer

    def close(self) -> None:
        """Also in the middle of an answer, which ends its session."""
        if self._transport is not None:
            self._transport.abort()

    def _end(self, error: Exception | None) -> None:
        if self._over is None or self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)


class Client:
    """Asks for texts, with as many connections as there are texts at a time."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self._idle: list[Connection] = []
        self._asked = 0

    def close(self) -> None:
        """Close what is not in use."""
        while self._idle:
            self._idle.pop().close()

    async def ask(
        self, prompt: str, due_s: float, *, speculate: bool, max_tokens: int | None = None
    ) -> Text:
        """Ask for one text; what fails is told in it."""
        self._asked += 1
        most = max_tokens or self.wanted.max_tokens
        request = self.wanted.request(prompt, self._asked, speculate=speculate, max_tokens=most)
        text = Text(due_s, sent_s=time.perf_counter())
        try:
            _tell(text, await self._exchange(request))
        except NotHttp:
            text.failure = NO_API
        except TimeoutError:
            text.failure = TIMEOUT
        except ConnectionRefusedError:
            text.failure = UNREACHABLE
        except OSError as e:
            text.failure, text.said = CUT, "" if str(e) == CUT else str(e)
        text.end_s = text.arrivals[-1][0] if text.arrivals else time.perf_counter()
        return text

    async def _exchange(self, request: bytes) -> Answer:
        while True:
            connection, fresh = await self._connection()
            try:
                answer = await connection.exchange(request, self.wanted.timeout_s)
            except ConnectionError:
                # A server may close what is idle just when it is used again.
                if fresh or connection.answer.begun:
                    raise
                continue
            finally:
                if connection.alive and connection.answer.done and connection.answer.keep:
                    self._idle.append(connection)
                else:
                    connection.close()
            return answer

    async def _connection(self) -> tuple[Connection, bool]:
        """A connection, and whether it is new."""
        while self._idle:
            if (kept := self._idle.pop()).alive:
                return kept, False
        url, loop = self.wanted.url, asyncio.get_running_loop()
        host = url.hostname or ""  # which it has: it was looked at
        port = url.port or (443 if self.wanted.tls else 80)
        async with asyncio.timeout(BEGIN_S):
            _, made = await loop.create_connection(Connection, host, port, ssl=self.wanted.tls)
        return made, True


def _tell(text: Text, answer: Answer) -> None:
    """Put down what an answer came to."""
    events = answer.events
    text.arrivals, text.retry_after_s = events.arrivals, answer.retry_after_s
    text.usage = events.usage or {}
    if answer.status != 200:
        text.failure, text.said = f"status {answer.status}", answer.message
    elif events.error is not None:
        text.failure, text.said = "an error within the text", events.error
    elif not events.ended:
        text.failure = CUT
    elif events.usage is None or not text.tokens:
        text.failure = NO_USAGE
