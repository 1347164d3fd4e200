"""The UDP side of a server: the connection of each datagram, after a Retry (RFC 9000, 8.1)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from aioquic.asyncio.server import QuicServer
from aioquic.quic.connection import QuicConnection

from sdcpd.transport.quic_link import QuicLink
from sdcpd.transport.quic_tls import configuration, demand_certificates
from sdcpd.transport.server_connection import ConnectionOwner, ServerConnection
from sdcpd.transport.tls import TlsIdentity
from sdcpd.transport.verification import check_client


class QuicListener(QuicServer):
    """aioquic's endpoint, whose connections are links with verified peers.

    With `retry` nothing is kept of a client before it has shown that it receives at its address.
    """

    def __init__(
        self,
        owner: ConnectionOwner,
        *,
        identity: TlsIdentity,
        accepted: Callable[[QuicLink], None],
        handshake_timeout_s: float,
    ) -> None:
        self._owner, self._identity, self._accepted = owner, identity, accepted
        self._handshake_timeout_s = handshake_timeout_s
        self._of_certificate = identity.certificate
        self._stopped = False
        super().__init__(
            configuration=configuration(identity), create_protocol=self._link, retry=True
        )

    def stop(self) -> None:
        """Take no more connections; those that are there go on."""
        self._stopped = True

    def close(self) -> None:
        """Close the socket; every connection has ended."""
        if self._transport is not None:
            self._transport.close()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """Pass a datagram to its connection, which may be a new one (asyncio)."""
        if self._identity.certificate is not self._of_certificate:
            self._of_certificate = self._identity.certificate
            self._configuration = configuration(self._identity)
        if self._stopped and not self._protocols:
            return
        super().datagram_received(data, addr)

    def pause_writing(self) -> None:
        """The socket's buffer is full (asyncio)."""
        for link in self._links():
            link.pause_writing()

    def resume_writing(self) -> None:
        """The socket's buffer has room again (asyncio)."""
        for link in self._links():
            link.resume_writing()

    def _links(self) -> set[QuicLink]:
        return set(self._protocols.values())

    def _link(self, quic: QuicConnection, stream_handler: object = None) -> QuicLink:
        connection = ServerConnection(self._owner)
        link = QuicLink(
            connection,
            demand_certificates(quic),
            check=partial(check_client, identity=self._identity),
            handshake_timeout_s=self._handshake_timeout_s,
        )
        connection.link = link
        if self._stopped:
            asyncio.get_running_loop().call_soon(link.abort)
        self._accepted(link)
        return link
