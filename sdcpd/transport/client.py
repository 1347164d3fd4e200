"""A pooled HTTP/2 client with mutual TLS: one connection a server, many requests on it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from sdcpd.transport.exchange import ClientExchange, NotProcessed, Outcome
from sdcpd.transport.h2_codec import H2Codec, H2Limits
from sdcpd.transport.http import (
    ConnectFailed,
    ConnectionLost,
    Headers,
    Peer,
    PeerRefused,
    RequestTimeout,
    Response,
    StreamEvent,
    TransportError,
    find_header,
)
from sdcpd.transport.pump import HttpPump
from sdcpd.transport.refusals import client_refusal
from sdcpd.transport.send_queue import PaceLimits
from sdcpd.transport.tcp import Scratch, TlsLink
from sdcpd.transport.tls import TlsIdentity, peer_of

CheckPeer = Callable[[Peer, str], None]
# A server that is draining gives requests back; a fresh connection then takes them.
ATTEMPTS_MAX = 3


@dataclass(frozen=True, slots=True)
class _Origin:
    host: str
    port: int

    @property
    def text(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class HttpClient:
    """Sends requests to servers by URI, reusing and renewing connections."""

    def __init__(
        self,
        identity: TlsIdentity,
        *,
        check_peer: CheckPeer | None = None,
        connect_timeout_s: float = 3.0,
        response_bytes_max: int = 1 << 30,
        limits: H2Limits | None = None,
        pace: PaceLimits | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        """Keep what is needed.

        `check_peer` gets the server's Peer and "host:port" once a connection, before anything is
        sent, and raises PeerRefused for a server that must not be trusted (D-I2).
        """
        self._identity = identity
        self._check_peer = check_peer
        self._connect_timeout_s = connect_timeout_s
        self._response_bytes_max = response_bytes_max
        self._limits = limits
        self._pace = pace
        self._logger = logger or logging.getLogger(__name__)
        self._scratch = Scratch()
        self._connecting: dict[_Origin, asyncio.Task[_ClientConnection]] = {}
        self._connections: set[_ClientConnection] = set()
        self._closed = False

    async def request(
        self,
        method: str,
        uri: str,
        *,
        headers: Headers = (),
        body: bytes = b"",
        timeout_s: float = 30.0,
    ) -> Response:
        """Send one request, as `Client.request` tells; `timeout_s` covers connecting too."""
        origin, authority, target = _split_uri(uri)
        fields = _request_fields(method, authority, target, headers, body)
        sent = False
        try:
            async with asyncio.timeout(timeout_s):
                for attempt in range(1, ATTEMPTS_MAX + 1):
                    connection = await self._connection(origin)
                    sent = True
                    try:
                        return await connection.call(fields, body)
                    except NotProcessed:
                        if connection.is_usable or attempt == ATTEMPTS_MAX:
                            raise
                        sent = False
        except TimeoutError as error:
            what = f"{method} {target} at {origin.text}"
            if not sent:
                raise ConnectFailed(f"no connection for {what} within {timeout_s:g} s") from error
            raise RequestTimeout(
                f"no answer to {what} within {timeout_s:g} s; it may have been processed"
            ) from error
        raise AssertionError("the last attempt returns or raises")

    async def aclose(self) -> None:
        """Close every connection; requests in flight fail with ConnectionLost."""
        self._closed = True
        connecting = list(self._connecting.values())
        for task in connecting:
            task.cancel()
        await asyncio.gather(*connecting, return_exceptions=True)
        gone = [connection.gone for connection in self._connections]
        for connection in list(self._connections):
            connection.close()
        if gone:
            await asyncio.wait(gone)

    async def _connection(self, origin: _Origin) -> _ClientConnection:
        if self._closed:
            raise ConnectFailed("this client is closed")
        task = self._connecting.get(origin)
        if task is not None and task.done() and not _is_usable(task):
            task = None
        if task is None:
            task = asyncio.get_running_loop().create_task(self._connect(origin))
            task.add_done_callback(_retrieve)
            self._connecting[origin] = task
        # Shielded: others wait for the same connection.
        return await asyncio.shield(task)

    async def _connect(self, origin: _Origin) -> _ClientConnection:
        connection = _ClientConnection(
            origin,
            identity=self._identity,
            check_peer=self._check_peer,
            response_bytes_max=self._response_bytes_max,
            limits=self._limits,
            pace=self._pace,
        )
        self._connections.add(connection)
        connection.gone.add_done_callback(lambda _: self._connections.discard(connection))
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._open_socket(origin, connection)
                await connection.ready
        except TimeoutError as error:
            connection.abandon()
            raise ConnectFailed(
                f"{origin.text} did not answer within {self._connect_timeout_s:g} s; "
                "check that it runs and that no firewall is between"
            ) from error
        except BaseException:
            connection.abandon()
            raise
        return connection

    async def _open_socket(self, origin: _Origin, connection: _ClientConnection) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(
                lambda: connection.make_link(self._scratch, self._connect_timeout_s),
                origin.host,
                origin.port,
            )
        except ConnectionRefusedError as error:
            raise ConnectFailed(
                f"nothing listens at {origin.text}; check that the instance runs and its base URI"
            ) from error
        except socket.gaierror as error:
            raise ConnectFailed(
                f'host name "{origin.host}" cannot be resolved; check the base URI and DNS'
            ) from error
        except OSError as error:
            raise ConnectFailed(f"no connection to {origin.text}: {error}") from error


class _ClientConnection(HttpPump):
    """One connection to a server."""

    def __init__(
        self,
        origin: _Origin,
        *,
        identity: TlsIdentity,
        check_peer: CheckPeer | None,
        response_bytes_max: int,
        limits: H2Limits | None,
        pace: PaceLimits | None,
    ) -> None:
        super().__init__()
        self._origin = origin
        self._identity = identity
        self._check_peer = check_peer
        self._response_bytes_max = response_bytes_max
        self._limits = limits
        self._pace = pace
        self._exchange: ClientExchange | None = None
        self._calls: dict[int, asyncio.Future[Response]] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._refusal: Exception | None = None
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.ready.add_done_callback(_retrieve)
        self.gone: asyncio.Future[None] = self._loop.create_future()

    @property
    def is_usable(self) -> bool:
        """Whether new requests may be sent here."""
        return self.is_open and self._exchange is not None and not self._exchange.going

    async def call(self, fields: Headers, body: bytes) -> Response:
        """Send one request and wait for its response; cancelling it resets the stream."""
        exchange = self._exchange
        assert exchange is not None  # The pool hands out connections that are ready.
        while (stream_id := self._start(exchange, fields, body)) is None:
            await self._wait_for_stream()
        answer: asyncio.Future[Response] = self._loop.create_future()
        self._calls[stream_id] = answer
        self.flush_soon()
        try:
            return await answer
        finally:
            if self._calls.pop(stream_id, None) is not None and self.is_open:
                exchange.cancel(stream_id)
                self._wake_waiting()
                self.flush_soon()

    def make_link(self, scratch: Scratch, handshake_timeout_s: float) -> TlsLink:
        """The protocol of a socket that was just connected."""
        self._link = TlsLink(
            self,
            context=self._identity.client_context(),
            quiet_context=self._identity.quiet_context(),
            scratch=scratch,
            server_hostname=self._origin.host,
            handshake_timeout_s=handshake_timeout_s,
        )
        return self._link

    def abandon(self) -> None:
        """Drop a connection that was not finished; nobody waits for its reason any more."""
        # uvloop makes the protocol before it connects, so there may be a link without a socket.
        unconnected = self._link is None or not self._link.had_socket
        if unconnected and not self.gone.done():
            self.gone.set_result(None)
        self.abort()

    def link_open(self, link: TlsLink) -> None:
        """TLS verified the server: check who it is, then start HTTP."""
        peer = peer_of(link.ssl_object, address=link.address)
        if self._check_peer is not None:
            try:
                self._check_peer(peer, self._origin.text)
            except Exception as error:
                self._refusal = error
                link.close(error)
                return
        codec = H2Codec(client=True, now=self._loop.time(), limits=self._limits)
        self._exchange = ClientExchange(
            codec,
            server=self._origin.text,
            response_bytes_max=self._response_bytes_max,
            pace=self._pace,
        )
        self.attach(link, codec)

    def link_lost(self, error: Exception | None) -> None:
        """The server left or refused us: everyone who waits is told."""
        self._stop_tick()
        if not self.ready.done():
            self.ready.set_exception(self._refusal or self._why_not_ready(error))
        detail = f" ({error})" if error else ""
        server = self._origin.text
        lost = ConnectionLost(
            f"{server} closed the connection{detail}; the request may have been processed"
        )
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(lost)
        self._calls.clear()
        self._wake_waiting(everyone=True)

    def link_gone(self, link: TlsLink) -> None:
        """The socket is closed."""
        if not self.gone.done():
            self.gone.set_result(None)

    def on_events(self, events: list[StreamEvent], *, now: float) -> None:
        """Pass responses to those who wait for them."""
        assert self._exchange is not None  # Octets come after link_open.
        self._settle(self._exchange.handle(events))
        if self._exchange.ready and not self.ready.done():
            self.ready.set_result(None)

    def on_tick(self, now: float) -> None:
        """Give up on bodies that are taken too slowly."""
        assert self._exchange is not None  # Ticks come after link_open.
        self._settle(self._exchange.on_tick(now))

    def pump_bodies(self) -> bool:
        """Send one turn's worth of request bodies."""
        return self._exchange is not None and self._exchange.pump()

    def is_drained(self) -> bool:
        """Whether the server said goodbye and nothing is in flight."""
        return self._exchange is not None and self._exchange.drained

    async def _wait_for_stream(self) -> None:
        turn: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._wake_waiting()  # Our turn had come: pass it on.
            raise

    def _start(self, exchange: ClientExchange, fields: Headers, body: bytes) -> int | None:
        if not self.is_usable:
            raise NotProcessed(f"{self._origin.text} closed the connection before the request")
        return exchange.start(fields, body, now=self._loop.time())

    def _settle(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            answer = self._calls.pop(outcome.stream_id, None)
            if answer is None or answer.done():
                continue
            if isinstance(outcome.result, TransportError):
                answer.set_exception(outcome.result)
            else:
                answer.set_result(outcome.result)
        going = self._exchange is not None and self._exchange.going
        if outcomes or going:
            self._wake_waiting(everyone=going)

    def _wake_waiting(self, *, everyone: bool = False) -> None:
        """Let those try again who wait for a stream."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                if not everyone:
                    return

    def _why_not_ready(self, error: Exception | None) -> PeerRefused:
        return client_refusal(
            error,
            server=self._origin.text,
            host=self._origin.host,
            presented=None if self._link is None else self._link.presented_leaf,
            identity=self._identity,
        )


def _is_usable(task: asyncio.Task[_ClientConnection]) -> bool:
    return not task.cancelled() and task.exception() is None and task.result().is_usable


def _retrieve(future: asyncio.Future[_ClientConnection] | asyncio.Future[None]) -> None:
    """Mark an exception as seen: whoever still waited has got it, and nobody else will ask."""
    if future.done() and not future.cancelled():
        future.exception()


def _split_uri(uri: str) -> tuple[_Origin, str, str]:
    """Origin, authority and request target of an absolute https URI; raises ValueError."""
    parts = urlsplit(uri)
    if parts.scheme.lower() != "https" or not parts.hostname or "@" in parts.netloc:
        raise ValueError(f'"{uri}" is not an https URI with a host')
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return _Origin(parts.hostname, parts.port or 443), parts.netloc, target


def _request_fields(
    method: str, authority: str, target: str, headers: Headers, body: bytes
) -> Headers:
    fields: list[tuple[str, str]] = [
        (":method", method),
        (":scheme", "https"),
        (":authority", authority),
        (":path", target),
        *headers,
    ]
    if body and find_header(headers, "content-length") is None:
        fields.append(("content-length", str(len(body))))
    return tuple(fields)
