"""The UDP side of a server: the connection of each datagram, after a Retry (RFC 9000, 8.1)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from aioquic.asyncio.server import QuicServer
from aioquic.quic.configuration import SMALLEST_MAX_DATAGRAM_SIZE
from aioquic.quic.connection import QuicConnection

from sdcpd.transport.h2_hardening import LeakyBucket
from sdcpd.transport.limits import STATELESS_RESETS_BURST, STATELESS_RESETS_PER_S
from sdcpd.transport.quic_link import QuicLink
from sdcpd.transport.quic_reset import ResetTokens
from sdcpd.transport.quic_tls import LONG_HEADER_BIT, configuration, demand_certificates
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
        listener: str,
    ) -> None:
        """`listener` is the host and port, for stateless resets."""
        self._owner, self._identity, self._accepted = owner, identity, accepted
        self._handshake_timeout_s = handshake_timeout_s
        self._of_certificate = identity.certificate
        self._reset_tokens = ResetTokens(identity.private_key, listener=listener)
        self._listener = listener
        self._resets = LeakyBucket(STATELESS_RESETS_BURST, STATELESS_RESETS_PER_S)
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
            self._reset_tokens = ResetTokens(self._identity.private_key, listener=self._listener)
        if not data or (self._stopped and not self._protocols):
            return
        if not data[0] & LONG_HEADER_BIT:
            connection_id = data[1 : 1 + self._configuration.connection_id_length]
            if connection_id not in self._protocols:
                self._reset(connection_id, len(data), addr)
                return
        elif len(data) < SMALLEST_MAX_DATAGRAM_SIZE and self._is_foreign(data):
            return  # it would be answered with more than it is (RFC 9000 section 5.2.2)
        super().datagram_received(data, addr)

    def _is_foreign(self, data: bytes) -> bool:
        """Whether a long header names a version that is none of ours."""
        version = int.from_bytes(data[1:5], "big")
        return version not in self._configuration.supported_versions

    def _reset(self, connection_id: bytes, received_bytes: int, addr: Any) -> None:
        """Tell a client of an earlier process that its connection is no more."""
        packet = self._reset_tokens.packet(connection_id, received_bytes=received_bytes)
        flood = self._resets.add(1, now=self._loop.time())
        if flood:
            self._resets.take_back(1)
        elif packet is not None and self._transport is not None:
            self._transport.sendto(packet, addr)

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
        checked = demand_certificates(quic)
        checked.set_reset_tokens(self._reset_tokens)
        checked.streams_max = self._owner.limits.streams_max
        link = QuicLink(
            connection,
            checked,
            check=partial(check_client, identity=self._identity),
            handshake_timeout_s=self._handshake_timeout_s,
        )
        connection.link = link
        if self._stopped:
            asyncio.get_running_loop().call_soon(link.abort)
        self._accepted(link)
        return link
