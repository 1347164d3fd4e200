"""One accepted connection of a server: its requests in flight and its goodbye."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from sdcpd.transport.http import HttpProtocolError, Peer, Response, StreamEvent, StreamGone
from sdcpd.transport.limits import H2Limits, PaceLimits, ServerLimits
from sdcpd.transport.link import Link
from sdcpd.transport.problem import problem
from sdcpd.transport.pump import HttpPump
from sdcpd.transport.server_exchange import Incoming, ServerExchange
from sdcpd.transport.shown import one_line


class ConnectionOwner(Protocol):
    """What a connection needs of its server."""

    body_bytes_max: Callable[[str, str], int]
    limits: H2Limits
    bounds: ServerLimits
    pace: PaceLimits
    logger: logging.Logger
    alt_svc: str | None
    """Where else the same server answers (RFC 7838), None if nowhere."""

    def let_in(self, link: Link, connection: ServerConnection) -> None:
        """The peer of a connection has been verified."""
        ...

    def not_let_in(self, link: Link, error: Exception | None) -> None:
        """A connection ended before its first request could come."""
        ...

    def refused(self, reason: str, address: str, text: str) -> None:
        """Count and log one refusal."""
        ...

    def count_refusal(self, reason: str) -> None:
        """Count one refused request."""
        ...

    def forget(self, link: Link) -> None:
        """A connection's socket is closed."""
        ...

    def spawn(self, connection: ServerConnection, incoming: Incoming) -> None:
        """Start a task for a request."""
        ...


class ServerConnection(HttpPump):
    """One accepted connection."""

    def __init__(self, server: ConnectionOwner) -> None:
        super().__init__()
        self._server = server
        self._exchange: ServerExchange | None = None
        self._peer: Peer | None = None
        self.link: Link | None = None

    @property
    def peer(self) -> str:
        """The peer's certificate, "" before it is known."""
        return self._peer.fingerprint if self._peer else ""

    def link_open(self, link: Link) -> None:
        """The peer is verified: start HTTP."""
        server = self._server
        self._peer = link.peer()
        codec = link.codec(client=False, now=self._loop.time(), limits=server.limits)
        self._exchange = ServerExchange(
            codec,
            body_bytes_max=server.body_bytes_max,
            peer=self._peer,
            requests_max=server.limits.streams_max,
            buffered_bytes_max=server.bounds.buffered_bytes,
            pace=server.pace,
        )
        server.let_in(link, self)
        self.attach(link, codec)

    def link_lost(self, error: Exception | None) -> None:
        """The peer left or was refused."""
        self._stop_tick()
        assert self.link is not None  # Set before the link got its first octet.
        if self._exchange is None:
            self._server.not_let_in(self.link, error)
        elif isinstance(error, HttpProtocolError):
            self._server.refused("http_error", self._name(), str(error))
        else:
            self._server.logger.debug("%s disconnected: %s", self._name(), error or "closed")

    def link_gone(self, link: Link) -> None:
        """The socket is closed."""
        self._server.forget(link)

    def start_drain(self) -> None:
        """Begin the goodbye of RFC 9113 section 6.8."""
        if self._exchange is not None and self.is_open:
            self._exchange.start_drain(self._loop.time())
            self.flush()

    def respond(self, incoming: Incoming, response: Response) -> None:
        """Send a response, unless its client went away."""
        if self._exchange is None or not self.is_open:
            return
        now = self._loop.time()
        if self.link is not None and self.link.alternative and self._server.alt_svc:
            alternative = ("alt-svc", self._server.alt_svc)
            response = replace(response, headers=(*response.headers, alternative))
        try:
            try:
                self._exchange.respond(incoming.stream_id, response, now=now)
            except ValueError:
                self._server.logger.exception("response to %s", one_line(incoming.request.path))
                substitute = problem(500, "internal error; the log of this instance tells more")
                self._exchange.fail(incoming.stream_id, substitute, now=now)
        except StreamGone:
            self._server.logger.debug("%s no longer waits for %s", self._name(), incoming)
        self.flush_soon()

    def on_events(self, events: list[StreamEvent], *, now: float) -> None:
        """Start a task for each request that became whole."""
        assert self._exchange is not None  # Octets come after link_open.
        for incoming in self._exchange.handle(events, now=now):
            self._server.spawn(self, incoming)
        self._count_refusals(self._exchange)

    def on_tick(self, now: float) -> None:
        """Drop bodies that are too slow."""
        assert self._exchange is not None  # Ticks come after link_open.
        self._exchange.on_tick(now)
        self._count_refusals(self._exchange)

    def _count_refusals(self, exchange: ServerExchange) -> None:
        for reason in exchange.refusals:
            self._server.count_refusal(reason)
        exchange.refusals.clear()

    def pump_bodies(self) -> bool:
        """Send one turn's worth of responses."""
        return self._exchange is not None and self._exchange.pump()

    def is_drained(self) -> bool:
        """Whether the goodbye is complete."""
        return self._exchange is not None and self._exchange.drained

    def _name(self) -> str:
        assert self.link is not None  # Set before the link got its first octet.
        common_name = self._peer.common_name if self._peer else ""
        return f"{self.link.address} ({common_name})" if common_name else self.link.address
