"""One connection of a client to a server: its requests in flight, and why it ended."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sdcpd.transport.client_exchange import ClientExchange, NotProcessed, Outcome
from sdcpd.transport.http import (
    ConnectFailed,
    ConnectionLost,
    Headers,
    Peer,
    Response,
    StreamEvent,
    TransportError,
)
from sdcpd.transport.limits import H2Limits, PaceLimits
from sdcpd.transport.link import Link
from sdcpd.transport.pump import HttpPump
from sdcpd.transport.quic_link import QuicLink
from sdcpd.transport.quic_tls import MutualQuic, configuration
from sdcpd.transport.refusals import client_refusal
from sdcpd.transport.tcp import Scratch, TlsLink
from sdcpd.transport.tls import TlsIdentity
from sdcpd.transport.verification import check_server

CheckPeer = Callable[[Peer, str], None]


@dataclass(frozen=True, slots=True)
class Origin:
    """Host and port of a server."""

    host: str
    port: int

    @property
    def text(self) -> str:
        """As in a URI: host:port, with brackets around an IPv6 address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class ClientConnection(HttpPump):
    """One connection to a server."""

    def __init__(
        self,
        origin: Origin,
        *,
        identity: TlsIdentity,
        check_peer: CheckPeer | None,
        response_bytes_max: int,
        limits: H2Limits | None,
        pace: PaceLimits | None,
    ) -> None:
        super().__init__()
        self.origin = origin
        self._identity = identity
        self._check_peer = check_peer
        self._response_bytes_max = response_bytes_max
        self._limits = limits
        self._pace = pace
        self._exchange: ClientExchange | None = None
        self._calls: dict[int, asyncio.Future[Response]] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._refusal: Exception | None = None
        self.retired = False
        """Whether it was begun with what has been renewed since."""
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.ready.add_done_callback(mark_retrieved)
        self.gone: asyncio.Future[None] = self._loop.create_future()

    @property
    def is_usable(self) -> bool:
        """Whether new requests may be sent here."""
        return self.is_open and self._exchange is not None and not self._exchange.going

    @property
    def has_room(self) -> bool:
        """Whether a request would go out at once."""
        return self._exchange is not None and not self._waiting and self._exchange.can_start

    @property
    def waiting(self) -> int:
        """How many requests wait for a stream."""
        return len(self._waiting)

    async def call(self, fields: Headers, body: bytes) -> Response:
        """Send one request and wait for its response; cancelling it resets the stream."""
        exchange = self._exchange
        assert exchange is not None  # The pool hands out connections that are ready.
        try:
            while (stream_id := self._start(exchange, fields, body)) is None:
                await self._wait_for_stream()
        finally:
            # Many streams may have become free at once, and this call may have taken none.
            if self._waiting and exchange.can_start:
                self._wake_waiting()
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
        link = TlsLink(
            self,
            context=self._identity.client_context(),
            quiet_context=self._identity.quiet_context(),
            scratch=scratch,
            server_hostname=self.origin.host,
            handshake_timeout_s=handshake_timeout_s,
        )
        self._link = link
        return link

    def make_quic_link(self, handshake_timeout_s: float) -> QuicLink:
        """The same for a datagram socket."""
        host = self.origin.host
        made = configuration(self._identity, server_name=host)
        link = QuicLink(
            self,
            MutualQuic(configuration=made),
            check=partial(check_server, identity=self._identity, host=host),
            handshake_timeout_s=handshake_timeout_s,
        )
        self._link = link
        return link

    def retire(self) -> None:
        """Take no more requests, and close once those in flight are answered.

        One that is being made closes as soon as it is ready: it was begun with what is old now.
        """
        self.retired = True
        if self._exchange is not None and self.is_open and self.ready.done():
            self._exchange.going = True
            self._wake_waiting(everyone=True)
            self.flush_soon()

    def abandon(self) -> None:
        """Drop a connection that was not finished; nobody waits for its reason any more."""
        # uvloop makes the protocol before it connects, so there may be a link without a socket.
        unconnected = self._link is None or not self._link.had_socket
        if unconnected and not self.gone.done():
            self.gone.set_result(None)
        self.abort()

    def link_open(self, link: Link) -> None:
        """TLS verified the server: check who it is, then start HTTP."""
        peer = link.peer()
        if self._check_peer is not None:
            try:
                self._check_peer(peer, self.origin.text)
            except Exception as error:
                self._refusal = error
                link.close(error)
                return
        codec = link.codec(client=True, now=self._loop.time(), limits=self._limits)
        self._exchange = ClientExchange(
            codec,
            server=self.origin.text,
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
        server = self.origin.text
        lost = ConnectionLost(
            f"{server} closed the connection{detail}; the request may have been processed"
        )
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(lost)
        self._calls.clear()
        self._wake_waiting(everyone=True)

    def link_gone(self, link: Link) -> None:
        """The socket is closed."""
        if not self.gone.done():
            self.gone.set_result(None)

    def on_events(self, events: list[StreamEvent], *, now: float) -> None:
        """Pass responses to those who wait for them."""
        assert self._exchange is not None  # Octets come after link_open.
        outcomes = self._exchange.handle(events)
        self._settle(outcomes)
        if self._waiting and not outcomes and self._exchange.can_start:
            self._wake_waiting(everyone=True)  # the server allows more than it did
        if self._exchange.ready and not self.ready.done():
            self.ready.set_result(None)
            if self.retired:
                self.retire()

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
        await turn

    def _start(self, exchange: ClientExchange, fields: Headers, body: bytes) -> int | None:
        if not self.is_usable:
            raise NotProcessed(f"{self.origin.text} closed the connection before the request")
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

    def _why_not_ready(self, error: Exception | None) -> ConnectFailed:
        return client_refusal(
            error,
            server=self.origin.text,
            host=self.origin.host,
            presented=None if self._link is None else self._link.presented_leaf,
            identity=self._identity,
        )


def mark_retrieved(future: asyncio.Future[ClientConnection] | asyncio.Future[None]) -> None:
    """Mark an exception as seen: whoever still waited has got it, and nobody else will ask."""
    if future.done() and not future.cancelled():
        future.exception()
