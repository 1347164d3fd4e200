"""A small HTTP/1.1 server on h11, for clients and operators; instances never speak it.

Responses may stream; a handler learns of a client that has gone by being cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import h11

from sdcpd.transport.http import Headers, Request, Response

log = logging.getLogger("sdcpd.api")
BODY_BYTES_MAX = 32 << 20
IDLE_S = 75.0  # a keep-alive connection without a request
READ_S = 30.0  # a request that does not go on arriving
WRITE_S = 60.0  # a client that does not read is gone
CONNECTIONS_MAX = 4096


@dataclass(frozen=True, slots=True)
class StreamingResponse:
    """A response whose body comes piece by piece, each sent at once."""

    status: int
    headers: Headers
    body: AsyncIterator[bytes]


Http1Handler = Callable[[Request], Awaitable[Response | StreamingResponse]]


class _Gone(Exception):
    """The client has closed the connection, or does not read."""


class Http1Server:
    """Listens on a TCP address or a Unix socket and calls `handler` for each request."""

    def __init__(
        self,
        handler: Http1Handler,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        path: Path | None = None,
        body_bytes_max: int = BODY_BYTES_MAX,
        too_large: Response | None = None,
        bad_request: Callable[[str], Response] | None = None,
    ) -> None:
        """`path` is a Unix socket's; `bad_request` words the answer to what is no HTTP."""
        self._handler = handler
        self._host, self._port, self._path = host, port, path
        self.body_bytes_max = body_bytes_max
        self.too_large = too_large or Response(413, (("content-length", "0"),))
        self.bad_request = bad_request or (lambda text: Response(400, (), text.encode()))
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Listen, and return the port (0 for a Unix socket); raises OSError."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.unlink(missing_ok=True)
            mask = os.umask(0o117)  # the socket's mode is its access control
            try:
                self._server = await asyncio.start_unix_server(self._accept, str(self._path))
            finally:
                os.umask(mask)
            return 0
        self._server = await asyncio.start_server(self._accept, self._host, self._port)
        return int(self._server.sockets[0].getsockname()[1])

    async def aclose(self) -> None:
        """Stop listening and drop all connections."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= CONNECTIONS_MAX:
            writer.close()
            return
        connection = _Connection(self, self._handler, reader, writer)
        task = asyncio.get_running_loop().create_task(connection.run())
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)


class _Connection:
    def __init__(
        self,
        server: Http1Server,
        handler: Http1Handler,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._server, self._handler = server, handler
        self._reader, self._writer = reader, writer
        self._machine = h11.Connection(h11.SERVER, max_incomplete_event_size=64 << 10)

    async def run(self) -> None:
        try:
            while await self._one():
                self._machine.start_next_cycle()
        except (_Gone, OSError, TimeoutError):
            log.debug("a client has gone")
        except h11.RemoteProtocolError as e:
            await self._answer_bad(str(e))
        finally:
            self._writer.close()

    async def _one(self) -> bool:
        """One request and its response; False when the connection is over."""
        head = await self._next(IDLE_S)
        if not isinstance(head, h11.Request):
            return False
        body = bytearray()
        while not isinstance(event := await self._next(READ_S), h11.EndOfMessage):
            if not isinstance(event, h11.Data):
                return False
            body += event.data
            if len(body) > self._server.body_bytes_max:
                await self._send(self._server.too_large, head=False)
                return False
        request = _request(head, bytes(body), self._writer)
        response = await self._call(request)
        if isinstance(response, StreamingResponse):
            await self._stream(response)
        else:
            await self._send(response, head=request.method == "HEAD")
        return bool(self._machine.our_state is h11.DONE and self._machine.their_state is h11.DONE)

    async def _call(self, request: Request) -> Response | StreamingResponse:
        """Run the handler; a client that goes away cancels it."""
        call = asyncio.ensure_future(self._handler(request))
        gone = asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            raise _Gone
        finally:
            gone.cancel()
            call.cancel()
            await asyncio.gather(call, gone, return_exceptions=True)

    async def _gone(self) -> None:
        """Return when the client has closed its side; pipelined octets are kept for later."""
        while self._machine.their_state is h11.DONE:
            octets = await self._reader.read(65536)
            self._machine.receive_data(octets)
            if not octets or self._machine.trailing_data[0]:
                if octets:
                    await asyncio.Event().wait()  # a pipelined request: the client is there
                return

    async def _stream(self, response: StreamingResponse) -> None:
        headers = (*response.headers, ("transfer-encoding", "chunked"))
        await self._write(_head(response.status, headers))
        gone = asyncio.ensure_future(self._gone())
        try:
            async with aclosing(response.body) as body:  # type: ignore[type-var]
                while True:
                    piece = asyncio.ensure_future(anext(body, None))
                    await asyncio.wait({piece, gone}, return_when=asyncio.FIRST_COMPLETED)
                    if not piece.done():
                        piece.cancel()
                        await asyncio.gather(piece, return_exceptions=True)
                        raise _Gone
                    if (octets := piece.result()) is None:
                        break
                    await self._write(h11.Data(data=octets))
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
        await self._write(h11.EndOfMessage())

    async def _send(self, response: Response, *, head: bool) -> None:
        headers = response.headers
        if response.status != 204 and response.header("content-length") is None:
            headers = (*headers, ("content-length", str(len(response.body))))
        await self._write(_head(response.status, headers))
        if not head and response.body:
            await self._write(h11.Data(data=response.body))
        await self._write(h11.EndOfMessage())

    async def _answer_bad(self, text: str) -> None:
        if self._machine.our_state is not h11.IDLE:
            return
        try:
            await self._send(self._server.bad_request(text), head=False)
        except (_Gone, OSError, h11.LocalProtocolError):
            log.debug("a client that spoke no HTTP has gone")

    async def _write(self, event: h11.Event) -> None:
        octets = self._machine.send(event)
        if octets:
            self._writer.write(octets)
            try:
                await asyncio.wait_for(self._writer.drain(), WRITE_S)
            except TimeoutError:
                raise _Gone from None

    async def _next(self, timeout_s: float) -> object:
        while True:
            event = self._machine.next_event()
            if event is h11.NEED_DATA:
                if self._machine.they_are_waiting_for_100_continue:
                    await self._write(h11.InformationalResponse(status_code=100, headers=[]))
                octets = await asyncio.wait_for(self._reader.read(65536), timeout_s)
                self._machine.receive_data(octets)
                continue
            return event


def _head(status: int, headers: Headers) -> h11.Response:
    return h11.Response(
        status_code=status, headers=list(headers), reason=HTTPStatus(status).phrase.encode()
    )


def _request(head: h11.Request, body: bytes, writer: asyncio.StreamWriter) -> Request:
    headers = tuple((k.decode("latin-1"), v.decode("latin-1")) for k, v in head.headers)
    path, _, query = head.target.decode("latin-1").partition("?")
    host = next((value for key, value in headers if key == "host"), "")
    return Request(head.method.decode(), path, query, headers, body, authority=host)
