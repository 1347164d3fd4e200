"""Certificates on both sides of QUIC: what aioquic has no public switch for, in one place.

aioquic can ask a client for its certificate, but checks nothing of it beside its signature, and
goes on without one. Here the decision is made before its state machine moves on, and whatever goes
wrong in making it ends the handshake with an alert: a check that fails after the state has moved
lets the client in. Every private name that this relies on is asked for when the module is loaded.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Sequence
from typing import Any

from aioquic import tls
from aioquic.buffer import Buffer, encode_uint_var
from aioquic.quic.configuration import SMALLEST_MAX_DATAGRAM_SIZE, QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import ConnectionTerminated, QuicEvent, StreamDataReceived, StreamReset
from aioquic.quic.packet import pull_quic_transport_parameters
from cryptography import x509

from sdcpd.transport.limits import H3Limits
from sdcpd.transport.quic_reset import TOKEN_BYTES, ResetTokens
from sdcpd.transport.refusals import CertificateRefused
from sdcpd.transport.tls import TlsIdentity

ALPN = "h3"
LIMITS = H3Limits()
DATAGRAM_BYTES_MAX = 16 << 10
MAX_UDP_PAYLOAD_SIZE = 0x03  # RFC 9000 section 18.2
LONG_HEADER_BIT = 0x80  # RFC 9000 section 17.2
FRAME_HANDLERS = "_QuicConnection__frame_handlers"

# What it says of a connection's end our own line says better.
logging.getLogger("quic").setLevel(logging.ERROR)

Check = Callable[[x509.Certificate | None, Sequence[x509.Certificate]], None]
"""Raises CertificateRefused for a peer that must not be spoken to."""

_ALERTS = {
    "no_certificate": tls.AlertDescription.certificate_required,
    "unknown_ca": tls.AlertDescription.unknown_ca,
    "expired": tls.AlertDescription.certificate_expired,
    "not_yet_valid": tls.AlertDescription.certificate_expired,
    "revoked": tls.AlertDescription.certificate_revoked,
    "wrong_purpose": tls.AlertDescription.unsupported_certificate,
}
_NEEDED = (
    (tls.Context, "_server_handle_hello"),
    (tls.Context, "_server_handle_certificate"),
    (tls.Context, "_server_handle_certificate_verify"),
    (tls.Context, "_client_handle_certificate_verify"),
    (QuicConnection, "_initialize"),
    (QuicConnection, "_replenish_connection_ids"),
    (QuicConnection, "_write_connection_limits"),
    (QuicConnection, "_write_stream_limits"),
    (QuicConnection, "_parse_transport_parameters"),
    (QuicConnection, "_serialize_transport_parameters"),
    (tls, "pull_certificate"),
)
for _owner, _name in _NEEDED:
    if not hasattr(_owner, _name):
        raise ImportError(f"this release of aioquic has no {_name}: HTTP/3 cannot check peers")
if FRAME_HANDLERS not in QuicConnection.__init__.__code__.co_names:
    raise ImportError(f"this release of aioquic has no {FRAME_HANDLERS}: floods go uncounted")


class _Refused(tls.Alert):
    """An alert of any description; the text goes to the peer, so it says nothing."""

    def __init__(self, description: tls.AlertDescription) -> None:
        super().__init__("certificate refused")
        self.description = description


class _MutualContext(tls.Context):
    """TLS in which nobody is let in before `check` has seen the peer's certificate."""

    peer_check: Check

    def _server_handle_hello(
        self, input_buf: Buffer, initial_buf: Buffer, handshake_buf: Buffer
    ) -> None:
        # No tickets: a resumed handshake carries no certificate, and so no 0-RTT either.
        self.get_session_ticket_cb = self.new_session_ticket_cb = None
        self._request_client_certificate = True
        super()._server_handle_hello(input_buf, initial_buf, handshake_buf)

    def _server_handle_certificate(self, input_buf: Buffer) -> None:
        position = input_buf.tell()
        if not tls.pull_certificate(input_buf).certificates:
            self._decide(None, ())
            raise _Refused(tls.AlertDescription.certificate_required)
        input_buf.seek(position)
        super()._server_handle_certificate(input_buf)

    def _server_handle_certificate_verify(self, input_buf: Buffer) -> None:
        self._decide(self._peer_certificate, self._peer_certificate_chain)
        super()._server_handle_certificate_verify(input_buf)

    def _client_handle_certificate_verify(self, input_buf: Buffer) -> None:
        self._decide(self._peer_certificate, self._peer_certificate_chain)
        super()._client_handle_certificate_verify(input_buf)

    def _decide(
        self, leaf: x509.Certificate | None, chain: Sequence[x509.Certificate] | None
    ) -> None:
        try:
            self.peer_check(leaf, chain or ())
        except CertificateRefused as refused:
            default = tls.AlertDescription.bad_certificate
            raise _Refused(_ALERTS.get(refused.word, default)) from refused
        except Exception as error:
            # Anything else, a malformed extension for one: not let in either.
            raise _Refused(tls.AlertDescription.bad_certificate) from error


class MutualQuic(QuicConnection):
    """A QUIC connection, either side, whose peer `peer_check` has seen before HTTP begins."""

    peer_check: Check
    streams_max: int = LIMITS.streams_max
    peer_payload_bytes_max: int = SMALLEST_MAX_DATAGRAM_SIZE
    closed_by_us = False
    """Whether the end of the connection was our decision, an alert of ours included."""
    reset_tokens: ResetTokens | None = None
    """A server's, for its connection ids."""
    frames_seen = 0
    """Frames of all packets that a client has sent, counted by its server."""
    delivered_bytes = 0
    """Octets of all streams that have arrived in order."""

    @property
    def ending(self) -> ConnectionTerminated | None:
        """Why the connection is being closed, by whom ever; told as an event only at its end."""
        return self._close_event

    def enlarge_datagrams(self, size: int) -> None:
        """Send larger datagrams from now on; only where the path is known to carry them."""
        size = min(size, self.peer_payload_bytes_max)
        for part in (self, self._loss._cc, self._loss._pacer):
            part._max_datagram_size = size

    def _parse_transport_parameters(self, data: bytes, *args: Any, **kwargs: Any) -> None:
        """As the library's, which forgets how large a datagram the peer takes."""
        super()._parse_transport_parameters(data, *args, **kwargs)
        found = pull_quic_transport_parameters(Buffer(data=data)).max_udp_payload_size
        # Who says nothing may take any by RFC 9000, and others' clients do not.
        self.peer_payload_bytes_max = found or SMALLEST_MAX_DATAGRAM_SIZE

    def _serialize_transport_parameters(self) -> bytes:
        """As the library's, and how large a datagram we take, which it does not say."""
        value = encode_uint_var(DATAGRAM_BYTES_MAX)
        own = encode_uint_var(MAX_UDP_PAYLOAD_SIZE) + encode_uint_var(len(value)) + value
        return bytes(super()._serialize_transport_parameters()) + own

    def close(self, *args: Any, **kwargs: Any) -> None:
        """As the library's; it calls this for the peer's faults as well."""
        self.closed_by_us = True
        super().close(*args, **kwargs)

    def note(self, event: QuicEvent) -> None:
        """Count what an event delivers, or will never deliver, against the connection's window."""
        if isinstance(event, StreamDataReceived):
            self.delivered_bytes += len(event.data)
        elif isinstance(event, StreamReset):
            stream = self._streams.get(event.stream_id)
            if stream is not None:
                receiver = stream.receiver
                self.delivered_bytes += receiver.highest_offset - receiver.starting_offset()

    def is_stateless_reset(self, datagram: bytes) -> bool:
        """Whether the server says that it knows nothing of this connection."""
        issued = (self._peer_cid, *self._peer_cid_available)
        tokens = {one.stateless_reset_token for one in issued if one.stateless_reset_token}
        short = bool(datagram) and not datagram[0] & LONG_HEADER_BIT
        return short and datagram[-TOKEN_BYTES:] in tokens

    def set_reset_tokens(self, tokens: ResetTokens) -> None:
        """Announce tokens that the next process of this server can make again."""
        self.reset_tokens = tokens
        self._name_tokens()

    def _name_tokens(self) -> None:
        if self.reset_tokens is not None:
            for one in self._host_cids:
                one.stateless_reset_token = self.reset_tokens.of(one.cid)

    def _replenish_connection_ids(self) -> None:
        super()._replenish_connection_ids()
        self._name_tokens()

    def _count_frames(self) -> None:
        """Have each frame counted; the library's table of handlers has no other way in."""
        handlers = getattr(self, FRAME_HANDLERS)

        def counted(handle: Callable[..., None]) -> Callable[..., None]:
            def count(*args: object) -> None:
                self.frames_seen += 1
                handle(*args)

            return count

        for kind, (handle, epochs) in handlers.items():
            handlers[kind] = counted(handle), epochs

    def _write_connection_limits(self, builder: Any, space: Any) -> None:
        """Open the connection's window as data arrives in order, and never by doubling it."""
        limit, window = self._local_max_data, LIMITS.connection_window_bytes
        if self.delivered_bytes + window // 2 >= limit.value:
            limit.value = self.delivered_bytes + window
        used, limit.used = limit.used, 0  # the library doubles when half is used
        try:
            super()._write_connection_limits(builder, space)
        finally:
            limit.used = used

    def _write_stream_limits(self, builder: Any, space: Any, stream: Any) -> None:
        """The same for one stream."""
        receiver, window = stream.receiver, LIMITS.stream_window_bytes
        if not stream.max_stream_data_local:
            return  # one that only we send on
        arrived = receiver.starting_offset()
        if arrived + window // 2 >= stream.max_stream_data_local:
            stream.max_stream_data_local = arrived + window
        elif stream.max_stream_data_local == stream.max_stream_data_local_sent:
            return
        highest, receiver.highest_offset = receiver.highest_offset, 0
        try:
            super()._write_stream_limits(builder, space, stream)
        finally:  # it raises when the packet is full
            receiver.highest_offset = highest

    def _initialize(self, peer_cid: bytes) -> None:
        limit = self._local_max_streams_bidi
        limit.value = limit.sent = self.streams_max
        super()._initialize(peer_cid)
        # The context is made in there, and aioquic has no way to say of which class.
        self.tls.__class__ = _MutualContext
        self.tls.peer_check = self.peer_check
        if not self._is_client:
            self._count_frames()

    @property
    def peer_certificate(self) -> x509.Certificate:
        """The peer's leaf, once the handshake is over."""
        leaf = self.tls._peer_certificate
        assert isinstance(leaf, x509.Certificate), "no handshake ends without a certificate"
        return leaf


def demand_certificates(quic: QuicConnection) -> MutualQuic:
    """Make a connection that has not begun one that checks its peer, by its `peer_check`."""
    quic.__class__ = MutualQuic
    assert isinstance(quic, MutualQuic)
    return quic


def configuration(identity: TlsIdentity, *, server_name: str | None = None) -> QuicConfiguration:
    """What connections go by from now on; `server_name` for a client, None for a server."""
    made = QuicConfiguration(
        is_client=server_name is not None,
        alpn_protocols=[ALPN],
        idle_timeout=LIMITS.idle_timeout_s,
        max_data=LIMITS.connection_window_bytes,
        max_stream_data=LIMITS.stream_window_bytes,
        server_name=server_name,
    )
    made.certificate = identity.certificate
    made.certificate_chain = list(identity.intermediates)
    made.private_key = identity.private_key
    # Our own check decides (verification.py): the library's stumbles over URI names.
    made.verify_mode = ssl.CERT_NONE
    return made
