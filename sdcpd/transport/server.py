"""Serves a handler over HTTP/2 with mutual TLS: one task a request, and a drain at the end."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from sdcpd.transport.http import Handler
from sdcpd.transport.limits import (
    ABORT_WAIT_S,
    LINGERING_MAX,
    LISTEN_BACKLOG,
    H2Limits,
    PaceLimits,
    ServerLimits,
)
from sdcpd.transport.link import Link
from sdcpd.transport.problem import problem
from sdcpd.transport.quic_server import QuicListener
from sdcpd.transport.refusal_log import RefusalLog
from sdcpd.transport.refusals import server_refusal
from sdcpd.transport.server_connection import ServerConnection
from sdcpd.transport.server_exchange import Incoming
from sdcpd.transport.shown import one_line
from sdcpd.transport.tcp import Scratch, TlsLink
from sdcpd.transport.tls import TlsIdentity

BodyLimit = Callable[[str, str], int] | int


class Server:
    """Accepts peers with certificates and calls `handler` for each of their requests."""

    def __init__(
        self,
        handler: Handler,
        *,
        identity: TlsIdentity,
        host: str,
        port: int,
        body_bytes_max: BodyLimit,
        on_refused: Callable[[str], None] | None = None,
        logger: logging.Logger | None = None,
        limits: H2Limits | None = None,
        bounds: ServerLimits | None = None,
        pace: PaceLimits | None = None,
        handshake_timeout_s: float = 5.0,
        http3: bool = False,
    ) -> None:
        """Keep what is needed; `body_bytes_max` is octets, or (method, path) -> octets.

        With `http3` the same is served over QUIC at the same port number.

        `on_refused` gets one word for each connection that was not let in and each request that
        was refused here.
        """
        self._handler = handler
        self._identity = identity
        self._host, self._port = host, port
        self.body_bytes_max = _body_limit(body_bytes_max)
        self.logger = logger or logging.getLogger(__name__)
        self._refusals = RefusalLog(self.logger, on_refused)
        self.limits = limits or H2Limits()
        self.bounds = bounds or ServerLimits()
        self.pace = pace or PaceLimits()
        self._handshake_timeout_s = handshake_timeout_s
        self._scratch = Scratch()
        self._http3 = http3
        self._quic: QuicListener | None = None
        self.alt_svc: str | None = None
        self._listener: asyncio.Server | None = None
        self._pending: dict[Link, int] = {}
        """Those in their handshake, and how many reloads there had been when it began."""
        self._lingering: dict[Link, None] = {}
        """Those that were not let in, until their sockets are closed."""
        self._reloads = 0
        self._connections: dict[Link, ServerConnection] = {}
        self._handlers: set[asyncio.Task[None]] = set()
        self._closing = False
        self._all_done = asyncio.Event()

    async def start(self) -> int:
        """Listen, and return the port; raises OSError when the address cannot be used."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            self._accept, self._host, self._port, backlog=LISTEN_BACKLOG
        )
        bound: socket.socket = self._listener.sockets[0]
        port = int(bound.getsockname()[1])
        if self._http3:
            await self._start_quic(bound.getsockname()[0], port)
        return port

    async def _start_quic(self, host: str, port: int) -> None:
        try:
            _, self._quic = await asyncio.get_running_loop().create_datagram_endpoint(
                lambda: QuicListener(
                    self,
                    identity=self._identity,
                    accepted=self.handshake_begins,
                    handshake_timeout_s=self._handshake_timeout_s,
                    listener=f"{host}:{port}",
                ),
                local_addr=(host, port),
            )
        except OSError:
            assert self._listener is not None, "TCP came first"
            self._listener.close()
            raise
        self.alt_svc = f'h3=":{port}"; ma=86400'

    async def aclose(self, grace_s: float = 5.0) -> None:
        """Stop listening, let requests in flight finish for `grace_s`, then drop the rest."""
        self._closing = True
        if self._listener is not None:
            self._listener.close()
        if self._quic is not None:
            self._quic.stop()
        for link in list(self._pending):
            link.abort()
        self.drain_connections()
        self._check_done()
        try:
            async with asyncio.timeout(grace_s):
                await self._all_done.wait()
        except TimeoutError:
            await self._drop_all()
        if self._quic is not None:
            self._quic.close()

    def drain_connections(self) -> None:
        """Ask every client to reconnect, as after a reload of the certificates."""
        self._reloads += 1
        for connection in list(self._connections.values()):
            connection.start_drain()

    def handshake_begins(self, link: Link) -> None:
        """Note a connection that is not yet let in."""
        if len(self._pending) >= self.bounds.handshakes:
            oldest = next(iter(self._pending))
            del self._pending[oldest]
            self.refused("handshake_flood", oldest.address, "too many handshakes at once")
            oldest.abort()
        self._pending[link] = self._reloads

    def let_in(self, link: Link, connection: ServerConnection) -> None:
        """Note a connection whose peer has been verified."""
        if self._pending.pop(link, None) != self._reloads:
            # It was checked against what was trusted before: it is one of the old connections.
            asyncio.get_running_loop().call_soon(connection.start_drain)
        same = [one for one in self._connections.values() if one.peer == connection.peer]
        self._connections[link] = connection
        if len(same) >= self.bounds.connections_per_peer:
            # The newest stays: the oldest may be one that its client has lost without a word.
            self.refused("too_many_connections", link.address, "too many connections of one peer")
            same[0].abort()

    def not_let_in(self, link: Link, error: Exception | None) -> None:
        """Say why a connection ended before its first request could come."""
        self._pending.pop(link, None)
        if len(self._lingering) >= LINGERING_MAX:
            oldest = next(iter(self._lingering))
            del self._lingering[oldest]
            oldest.abort()
        self._lingering[link] = None
        refusal = server_refusal(error, presented=link.presented_leaf, identity=self._identity)
        if refusal is None:
            self.logger.debug("%s went away during the TLS handshake: %s", link.address, error)
        else:
            self.refused(refusal.reason, link.address, refusal.text)

    def refused(self, reason: str, address: str, text: str) -> None:
        """Count and log one refusal."""
        self._refusals.note(reason, address, text)

    def count_refusal(self, reason: str) -> None:
        """Count one refused request."""
        self._refusals.count(reason)

    def forget(self, link: Link) -> None:
        """A connection's socket is closed."""
        self._pending.pop(link, None)
        self._lingering.pop(link, None)
        self._connections.pop(link, None)
        self._check_done()

    def spawn(self, connection: ServerConnection, incoming: Incoming) -> None:
        """Start a task for a request; it outlives its connection (D-H15)."""
        task = asyncio.get_running_loop().create_task(self._answer(connection, incoming))
        self._handlers.add(task)
        task.add_done_callback(self._handler_done)

    def _accept(self) -> TlsLink:
        connection = ServerConnection(self)
        link = TlsLink(
            connection,
            context=self._identity.server_context(),
            quiet_context=self._identity.quiet_context(),
            scratch=self._scratch,
            handshake_timeout_s=self._handshake_timeout_s,
        )
        connection.link = link
        self.handshake_begins(link)
        return link

    async def _answer(self, connection: ServerConnection, incoming: Incoming) -> None:
        request = incoming.request
        try:
            response = await self._handler(request)
        except Exception:
            self.logger.exception("%s failed", one_line(f"{request.method} {request.path}"))
            response = problem(500, "internal error; the log of this instance tells more")
        connection.respond(incoming, response)

    def _handler_done(self, task: asyncio.Task[None]) -> None:
        self._handlers.discard(task)
        self._check_done()

    def _check_done(self) -> None:
        busy = self._pending or self._connections or self._handlers
        if self._closing and not busy:
            self._all_done.set()

    async def _drop_all(self) -> None:
        """Cancel what outlived the grace, and wait until it is gone."""
        handlers = list(self._handlers)
        self.logger.warning(
            "dropping %d connections and %d unfinished requests",
            len(self._connections),
            len(handlers),
        )
        for task in handlers:
            task.cancel()
        for link in [*self._connections, *self._pending]:
            link.abort()
        try:
            async with asyncio.timeout(ABORT_WAIT_S):
                await self._all_done.wait()
        except TimeoutError:
            self.logger.error("%d requests do not end when cancelled", len(self._handlers))


def _body_limit(limit: BodyLimit) -> Callable[[str, str], int]:
    if callable(limit):
        return limit
    size = limit
    return lambda _method, _path: size
