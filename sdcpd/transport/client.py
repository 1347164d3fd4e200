"""A pooled HTTP/2 client with mutual TLS: one connection a server, many requests on it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable
from functools import partial
from typing import Literal

from sdcpd.transport.backoff import Backoff
from sdcpd.transport.client_connection import CheckPeer, ClientConnection, Origin, mark_retrieved
from sdcpd.transport.client_exchange import NotProcessed
from sdcpd.transport.http import (
    ConnectFailed,
    Headers,
    OtherProtocol,
    PeerRefused,
    RequestTimeout,
    Response,
)
from sdcpd.transport.limits import H2Limits, PaceLimits
from sdcpd.transport.request_head import request_fields, split_uri
from sdcpd.transport.tcp import Scratch
from sdcpd.transport.tls import TlsIdentity

# A server that is draining gives requests back; a fresh connection then takes them.
ATTEMPTS_MAX = 3
# For the version that is tried because the other failed: a firewall may drop its packets, and
# whoever waits has waited for the other already.
SECOND_CONNECT_TIMEOUT_S = 1.0


Transport = Literal["auto", "h2", "h3"]
Version = Literal["h2", "h3"]


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
        transport: Transport = "auto",
        connections_max: int = 1,
    ) -> None:
        """Keep what is needed.

        `connections_max` are made to a server that allows no more streams on those there are.

        `transport`: HTTP/2, HTTP/3, or HTTP/2 and the other where that can't be connected to.

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
        self._connecting: dict[Origin, asyncio.Task[ClientConnection]] = {}
        self._widening: dict[Origin, asyncio.Task[ClientConnection]] = {}
        self._connections_max = connections_max
        self._connections: set[ClientConnection] = set()
        self._closed = False
        self._backoff: Backoff[Origin] = Backoff()
        self._transport = transport
        self._worked: dict[Origin, Version] = {}
        """Origins where HTTP/2 failed and HTTP/3 did not."""

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
        origin, authority, target = split_uri(uri)
        fields = request_fields(method, authority, target, headers, body)
        sent = False
        try:
            async with asyncio.timeout(timeout_s):
                attempts = 0
                while True:
                    connection = await self._connection(origin)
                    sent = True
                    try:
                        return await connection.call(fields, body)
                    except NotProcessed:
                        # One that was retired before it began is no failure of the server's.
                        attempts += not connection.retired
                        if connection.is_usable or attempts == ATTEMPTS_MAX:
                            raise
                        sent = False
        except TimeoutError as error:
            what = f"{method} {target} at {origin.text}"
            if not sent:
                raise ConnectFailed(f"no connection for {what} within {timeout_s:g} s") from error
            raise RequestTimeout(
                f"no answer to {what} within {timeout_s:g} s; it may have been processed"
            ) from error

    async def aclose(self) -> None:
        """Close every connection; requests in flight fail with ConnectionLost."""
        self._closed = True
        connecting = [*self._connecting.values(), *self._widening.values()]
        for task in connecting:
            task.cancel()
        await asyncio.gather(*connecting, return_exceptions=True)
        gone = [connection.gone for connection in self._connections]
        for connection in list(self._connections):
            connection.close()
        if gone:
            await asyncio.wait(gone)

    def renew_connections(self) -> None:
        """Let open connections finish what they carry and open new ones for the rest.

        For use after a reload of the certificates.
        """
        self._backoff.forget()
        for connection in list(self._connections):
            connection.retire()

    async def _connection(self, origin: Origin) -> ClientConnection:
        if self._closed:
            raise ConnectFailed("this client is closed")
        task = self._connecting.get(origin)
        if task is not None and task.done() and not _is_usable(task):
            task = None
        if task is None:
            loop = asyncio.get_running_loop()
            self._backoff.check(origin, now=loop.time())
            task = loop.create_task(self._connect(origin))
            task.add_done_callback(mark_retrieved)
            self._connecting[origin] = task
        made = await self._shared(task)
        if self._connections_max == 1 or made.has_room:
            return made
        return await self._with_room(origin) or made

    async def _with_room(self, origin: Origin) -> ClientConnection | None:
        """A connection with a free stream or, where there can be none, the fewest that wait."""
        while there := [c for c in self._connections if c.origin == origin and c.is_usable]:
            if (best := min(there, key=lambda c: (not c.has_room, c.waiting))).has_room:
                return best
            task = self._widening.get(origin)
            if task is None or task.done():
                if len(there) >= self._connections_max:
                    return best
                task = self._widening[origin] = asyncio.ensure_future(self._connect_somehow(origin))
                task.add_done_callback(mark_retrieved)
            try:
                await self._shared(task)
            except ConnectFailed:
                return best  # those there are go on serving
        return None

    async def _shared(self, task: asyncio.Task[ClientConnection]) -> ClientConnection:
        try:
            # Shielded: others wait for the same connection.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._closed and task.cancelled() and not (caller and caller.cancelling()):
                raise ConnectFailed("this client is closed") from None
            raise

    async def _connect(self, origin: Origin) -> ClientConnection:
        try:
            made = await self._connect_somehow(origin)
        except ConnectFailed as failed:
            self._backoff.failed(origin, failed, now=asyncio.get_running_loop().time())
            raise
        self._backoff.succeeded(origin)
        return made

    async def _connect_somehow(self, origin: Origin) -> ClientConnection:
        """By the version that worked last, else HTTP/2 and then the other (D-H8)."""
        if self._transport != "auto":
            return await self._connect_by(self._transport, origin, self._connect_timeout_s)
        first = self._worked.get(origin, "h2")
        try:
            return await self._connect_by(first, origin, self._connect_timeout_s)
        except ConnectFailed as failed:
            self._worked.pop(origin, None)
            if isinstance(failed, PeerRefused) and not isinstance(failed, OtherProtocol):
                raise  # it was reached, and the same certificate would be refused again
            second: Version = "h3" if first == "h2" else "h2"
            try:
                made = await self._connect_by(second, origin, SECOND_CONNECT_TIMEOUT_S)
            except PeerRefused:
                raise
            except ConnectFailed:
                raise failed from None
            self._worked[origin] = second
            return made

    async def _connect_by(
        self, version: Version, origin: Origin, timeout_s: float
    ) -> ClientConnection:
        connection = ClientConnection(
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
            async with asyncio.timeout(timeout_s):
                if version == "h2":
                    await self._open_socket(origin, connection)
                else:
                    await self._open_datagram_socket(origin, connection)
                await connection.ready
        except TimeoutError as error:
            connection.abandon()
            raise ConnectFailed(
                f"{origin.text} did not answer within {timeout_s:g} s; "
                "check that it runs and that no firewall is between"
            ) from error
        except BaseException:
            connection.abandon()
            raise
        return connection

    async def _open_socket(self, origin: Origin, connection: ClientConnection) -> None:
        make = partial(connection.make_link, self._scratch, self._connect_timeout_s)
        loop = asyncio.get_running_loop()
        await _opened(loop.create_connection(make, origin.host, origin.port), origin)

    async def _open_datagram_socket(self, origin: Origin, connection: ClientConnection) -> None:
        make = partial(connection.make_quic_link, self._connect_timeout_s)
        loop = asyncio.get_running_loop()
        address = (origin.host, origin.port)
        await _opened(loop.create_datagram_endpoint(make, remote_addr=address), origin)


async def _opened(opening: Awaitable[object], origin: Origin) -> None:
    """Wait for a socket; raises ConnectFailed with what a person can act on."""
    try:
        await opening
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


def _is_usable(task: asyncio.Task[ClientConnection]) -> bool:
    return not task.cancelled() and task.exception() is None and task.result().is_usable
