"""One connection of the local server: a memory, and one request at a time.

What the other process wrote is copied once, before anything looks at it: it may go on writing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import Protocol

from sdcpd.transport.http import Request, Response
from sdcpd.transport.local_link import LocalLink
from sdcpd.transport.local_memory import BadMemory, SharedMemory, attach
from sdcpd.transport.local_messages import (
    VERSION,
    Answer,
    Ask,
    Hello,
    Message,
    Ready,
    Refused,
    digest_of,
)
from sdcpd.transport.local_tokens import LocalTokens
from sdcpd.transport.loopback import answer

MEMORY_BYTES_MAX = 64 << 20
HELLO_S = 2.0
IDLE_S = 120.0
FINISH_S = 2.0  # the longest that a close waits for a handler

logger = logging.getLogger(__name__)


class Serving(Protocol):
    """What a connection needs of its server."""

    tokens: LocalTokens
    objects_path: str
    body_bytes_max: Callable[[str, str], int]

    def take(self, size_bytes: int) -> bool: ...

    def release(self, size_bytes: int) -> None: ...

    async def answer(self, request: Request) -> Response: ...


class LocalServing:
    """Serves one connected socket until something is wrong with it."""

    def __init__(
        self, server: Serving, came: socket.socket, *, closed: Callable[[LocalServing], None]
    ) -> None:
        """Take the socket over; `closed` is called once."""
        self._server = server
        self._closed = closed
        self._memory: SharedMemory | None = None
        self._running: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(HELLO_S, self._close, "it said nothing")
        self._link = LocalLink(came, received=self._received, lost=self._close)

    async def aclose(self) -> None:
        """Let a handler that runs finish, for a moment, and close."""
        if self._running is not None:
            running = self._running
            await asyncio.wait([running], timeout=FINISH_S)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        self._close("the server ends")

    def _received(self, message: Message, descriptor: int | None) -> None:
        self._timer.cancel()
        try:
            if isinstance(message, Hello):
                self._hello(message, descriptor)
            elif isinstance(message, Ask) and descriptor is None and self._running is None:
                self._ask(message)
            else:
                self._close("it sent what was not its turn")
        finally:
            if descriptor is not None:
                os.close(descriptor)
        if self._link.is_open and self._running is None:
            self._timer = self._loop.call_later(IDLE_S, self._close, "it was idle")

    def _hello(self, hello: Hello, descriptor: int | None) -> None:
        if descriptor is None or self._memory is not None:
            self._close("it sent no memory, or a second one")
            return
        if hello.version != VERSION or self._server.tokens.peer(hello.token) is None:
            self._refuse("version or token")
            self._close("its version or token is not known")
            return
        try:
            self._memory = attach(descriptor, bytes_max=MEMORY_BYTES_MAX)
        except BadMemory as error:
            self._close(f"its memory is not taken: {error}")
            return
        self._link.send(Ready())

    def _ask(self, ask: Ask) -> None:
        memory, peer = self._memory, self._server.tokens.peer(ask.token)
        path, _, query = ask.target.partition("?")
        if memory is None or ask.size_bytes > memory.size_bytes:
            self._close("it asked without a memory that holds the body")
        elif peer is None:
            self._refuse("token")
        elif not path.startswith(self._server.objects_path):
            self._refuse("only objects are served here")
        elif ask.size_bytes > self._server.body_bytes_max(ask.method, ask.target):
            self._refuse("the body is too large")
        elif not self._server.take(ask.size_bytes):
            self._refuse("too many bodies at once")
        else:
            body = memory.read(0, ask.size_bytes)
            request = Request(
                ask.method,
                path,
                query,
                ask.headers,
                body,
                peer,
                authority=ask.authority,
                takes_view=True,
            )
            self._running = self._loop.create_task(self._answer(request, memory))

    async def _answer(self, request: Request, memory: SharedMemory) -> None:
        try:
            response = await answer(self._server.answer, request)
        finally:
            self._running = None
            self._server.release(len(request.body))
            if not self._link.is_open:
                self._unmap()
        if not self._link.is_open:
            return
        self._timer = self._loop.call_later(IDLE_S, self._close, "it was idle")
        body = response.body if response.view is None else response.view
        if len(body) > memory.size_bytes:
            self._link.send(Refused("the answer does not fit", len(body)))
            return
        memory.write(0, body)
        headers = tuple((name.lower(), value) for name, value in response.headers)
        self._link.send(Answer(response.status, headers, len(body), digest_of(body)))

    def _refuse(self, reason: str) -> None:
        self._link.send(Refused(reason))

    def _close(self, reason: str) -> None:
        """End the connection; what runs goes on to its end, as a server's does."""
        logger.debug("a local connection ends: %s", reason)
        self._timer.cancel()
        self._link.close()
        if self._running is None:
            self._unmap()
        self._closed(self)

    def _unmap(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
