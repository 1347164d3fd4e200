"""A small HTTP/1.1 server on h11, for clients and operators; instances never speak it.

Responses may stream; a handler learns of a client that has gone by being cancelled, a stream by
being closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol, TypeVar

import h11

from sdcpd.transport.http import Headers, Request, Response
from sdcpd.transport.shown import one_line

log = logging.getLogger("sdcpd.api")
T = TypeVar("T")
BODY_BYTES_MAX = 32 << 20
HEAD_BYTES_MAX = 64 << 10
PIPELINED_BYTES_MAX = 64 << 10  # kept of what follows a request; more waits in the socket
READ_BYTES = 64 << 10
HANDSHAKE_S = 10.0
IDLE_S = 75.0  # a keep-alive connection without a request
READ_S = 30.0  # a request that does not arrive, body octets earning it more time
BODY_BYTES_PER_S_MIN = 16 << 10
WRITE_S = 60.0  # a client that does not read is gone
LINGER_S = 2.0  # for a client that is still sending when it has been refused
CONNECTIONS_MAX = 4096


class Body(Protocol):
    """Pieces of a body, each sent at once; `aclose` is always called, even if nothing was asked."""

    async def __anext__(self) -> bytes: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StreamingResponse:
    """A response whose body comes piece by piece."""

    status: int
    headers: Headers
    body: Body


Http1Handler = Callable[[Request], Awaitable[Response | StreamingResponse]]
Refuse = Callable[[int, str], Response]


def _plain_refusal(status: int, text: str) -> Response:
    return Response(status, (("content-type", "text/plain; charset=utf-8"),), f"{text}\n".encode())


class _Gone(Exception):
    """The client has closed the connection, or does not read."""


class _Refused(Exception):
    """What came is no request that a handler could get; the connection ends with the answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


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
        refuse: Refuse = _plain_refusal,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`path` is a Unix socket's; `refuse` words answers to what never reaches the handler.

        With `tls` the address speaks HTTPS.
        """
        self._tls = tls
        self.handler, self.refuse = handler, refuse
        self.body_bytes_max = body_bytes_max
        self._host, self._port, self._path = host, port, path
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
        self._server = await asyncio.start_server(
            self._accept,
            self._host,
            self._port,
            ssl=self._tls,
            ssl_handshake_timeout=HANDSHAKE_S if self._tls else None,
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def aclose(self) -> None:
        """Stop listening and drop all connections; handlers are cancelled and waited for."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        full = len(self._connections) >= min(CONNECTIONS_MAX, _files_allowed() // 2)
        connection = _Connection(self, reader, writer)
        task = asyncio.get_running_loop().create_task(connection.run(full=full))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)


class _Connection:
    """One client's requests, one after the other."""

    def __init__(
        self, server: Http1Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._server = server
        self._reader, self._writer = reader, writer
        self._machine = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._body: Body | None = None
        self._head_only = False  # what is asked is HEAD, whose answer has no body

    async def run(self, *, full: bool) -> None:
        """Serve until either side has had enough; raises nothing but cancellation."""
        try:
            await self._converse(full=full)
            self._writer.close()
            async with asyncio.timeout(WRITE_S):
                await self._writer.wait_closed()
        except (_Gone, OSError, TimeoutError) as e:
            log.debug("a client has gone: %r", e)
        except Exception:
            log.exception("a connection failed")
        finally:
            self._writer.transport.abort()  # nothing happens where all was sent and closed

    async def _converse(self, *, full: bool) -> None:
        try:
            if full:
                raise _Refused(503, "too many connections")
            while await self._serve_one():
                self._machine.start_next_cycle()
        except _Refused as e:
            answer = self._server.refuse(e.status, str(e))
            headers = (*answer.headers, ("connection", "close"))
            await self._send(Response(answer.status, headers, answer.body), head=self._head_only)
            await self._linger()

    async def _serve_one(self) -> bool:
        """One request and its response; False when the connection is over."""
        request = await self._read_request()
        if request is None:
            return False
        gone = asyncio.ensure_future(self._gone())
        try:
            response = await self._while_there(gone, self._handle(request))
            if isinstance(response, StreamingResponse):
                await self._stream(response, gone, head=self._head_only)
            else:
                await self._send(response, head=self._head_only)
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            if self._body is not None:
                body, self._body = self._body, None
                await body.aclose()
        return bool(self._machine.our_state is h11.DONE and self._machine.their_state is h11.DONE)

    # ---- reading

    async def _read_request(self) -> Request | None:
        """The next request; None when none comes; raises _Refused."""
        if not self._machine.trailing_data[0]:
            try:
                async with asyncio.timeout(IDLE_S):
                    await self._fill()
            except TimeoutError:
                return None
        try:
            async with asyncio.timeout(READ_S) as limit:
                return await self._whole_request(limit)
        except TimeoutError as e:
            raise _Refused(408, "the request did not arrive in time") from e
        except h11.RemoteProtocolError as e:
            # What was sent is not repeated: it may be anything.
            what = str(e).partition(":")[0]
            raise _Refused(
                e.error_status_hint, f"this is not HTTP/1.1 as it should be: {what}"
            ) from e

    async def _whole_request(self, limit: asyncio.Timeout) -> Request | None:
        self._head_only = False
        head = await self._next()
        if not isinstance(head, h11.Request):
            return None
        self._head_only = head.method == b"HEAD"
        if not head.http_version.startswith(b"1."):
            raise _Refused(505, "this listener speaks HTTP/1.1 only")
        too_large = _Refused(
            413, f"the body is larger than the {self._server.body_bytes_max} octets allowed"
        )
        names = {name for name, _ in head.headers}
        if {b"content-length", b"transfer-encoding"} <= names:
            # Two readers may see two bodies there (RFC 9112 6.1).
            raise _Refused(400, "both Content-Length and Transfer-Encoding are given")
        length = next((int(v) for k, v in head.headers if k == b"content-length"), 0)
        if length > self._server.body_bytes_max:
            raise too_large
        body = bytearray()
        while isinstance(event := await self._next(), h11.Data):
            body += event.data
            if len(body) > self._server.body_bytes_max:
                raise too_large
            earned_s = len(event.data) / BODY_BYTES_PER_S_MIN
            limit.reschedule((limit.when() or 0.0) + earned_s)
        return _request(head, bytes(body))

    async def _next(self) -> object:
        while (event := self._machine.next_event()) is h11.NEED_DATA:
            if self._machine.they_are_waiting_for_100_continue:
                await self._write(h11.InformationalResponse(status_code=100, headers=[]))
            await self._fill()
        return event

    async def _fill(self) -> bool:
        """Give the machine what has come; False at the end."""
        octets = await self._reader.read(READ_BYTES)
        self._machine.receive_data(octets)
        return bool(octets)

    async def _gone(self) -> None:
        """Return when the client has closed its side; what it sends is kept for its turn."""
        while len(self._machine.trailing_data[0]) <= PIPELINED_BYTES_MAX:
            if not await self._fill():
                return
        await asyncio.Event().wait()  # it has sent enough for now, and it is there

    async def _linger(self) -> None:
        """Read what still comes: a reset for it could destroy the answer at the client."""
        if self._writer.can_write_eof():
            self._writer.write_eof()
        async with asyncio.timeout(LINGER_S):
            while await self._reader.read(READ_BYTES):
                continue

    # ---- answering

    async def _handle(self, request: Request) -> Response | StreamingResponse:
        try:
            response = await self._server.handler(request)
        except Exception:
            log.exception("%s failed", one_line(f"{request.method} {request.path}"))
            return self._server.refuse(500, "the request failed here; the log says why")
        if isinstance(response, StreamingResponse):
            self._body = response.body
        return response

    async def _while_there(self, gone: asyncio.Future[None], work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when the client goes; raises _Gone then."""
        task = asyncio.ensure_future(work)
        both: tuple[asyncio.Future[Any], ...] = (task, gone)
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if task.cancelled():
            raise _Gone
        return task.result()

    async def _stream(
        self, response: StreamingResponse, gone: asyncio.Future[None], *, head: bool
    ) -> None:
        headers = (*response.headers, ("transfer-encoding", "chunked"))
        await self._write(_head(response.status, headers))
        if not head:
            await self._while_there(gone, self._pieces(response.body))
        await self._write(h11.EndOfMessage())

    async def _pieces(self, body: Body) -> None:
        """All of a body, in one task: one for each piece would cost as much as the piece."""
        try:
            while True:
                await self._write(h11.Data(data=await body.__anext__()))
        except StopAsyncIteration:
            return

    async def _send(self, response: Response, *, head: bool) -> None:
        headers = response.headers
        if response.status != 204 and response.header("content-length") is None:
            headers = (*headers, ("content-length", str(len(response.body))))
        await self._write(_head(response.status, headers))
        if not head and response.body:
            await self._write(h11.Data(data=response.body))
        await self._write(h11.EndOfMessage())

    async def _write(self, event: h11.Event) -> None:
        octets = self._machine.send(event)
        if not octets:
            return
        self._writer.write(octets)
        try:
            async with asyncio.timeout(WRITE_S):
                await self._writer.drain()
        except TimeoutError:
            raise _Gone from None


def _files_allowed() -> int:
    """How many files the process may have open; clients get half, for logs and peers need some."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if allowed == resource.RLIM_INFINITY else allowed


def _head(status: int, headers: Headers) -> h11.Response:
    dated = (*headers, ("date", formatdate(usegmt=True)))
    # As requests are read: a value may be a request's own.
    octets = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in dated]
    phrase = HTTPStatus(status).phrase.encode()
    return h11.Response(status_code=status, headers=octets, reason=phrase)


def _request(head: h11.Request, body: bytes) -> Request:
    headers = tuple((k.decode("latin-1"), v.decode("latin-1")) for k, v in head.headers)
    target = head.target.decode("latin-1")
    authority = next((value for key, value in headers if key == "host"), "")
    if not target.startswith("/") and "://" in target:  # as a proxy gets it (RFC 9112 3.2.2)
        authority, slash, rest = target.partition("://")[2].partition("/")
        target = slash + rest or "/"
    path, _, query = target.partition("?")
    return Request(head.method.decode(), path, query, headers, body, authority=authority)
