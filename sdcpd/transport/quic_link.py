"""One QUIC connection on a datagram socket, as a `Link`: handshake, timers and the end."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from enum import Enum, auto
from ipaddress import ip_address
from typing import Any, cast

from aioquic.quic.events import (
    ConnectionIdIssued,
    ConnectionIdRetired,
    ConnectionTerminated,
    HandshakeCompleted,
    QuicEvent,
)
from aioquic.tls import AlertDescription
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from sdcpd.transport.h3_codec import H3Codec
from sdcpd.transport.http import ConnectFailed, HttpConnection, Outgoing, Peer
from sdcpd.transport.identity_files import common_name, uri_names
from sdcpd.transport.limits import H2Limits, H3Limits
from sdcpd.transport.link import LinkUser
from sdcpd.transport.quic_sending import pace_by_ticks
from sdcpd.transport.quic_tls import DATAGRAM_BYTES_MAX, Check, MutualQuic
from sdcpd.transport.refusals import CertificateRefused, NoHttp2, PeerAlert, TlsFailed, TooSlow

H3_NO_ERROR = 0x100
CLOCK_S = 0.0005  # a timer that fires so much too early is on time
CRYPTO_ERROR, CRYPTO_ERROR_LAST = 0x100, 0x1FF


_CERTIFICATE_ALERTS = (
    AlertDescription.bad_certificate,
    AlertDescription.unsupported_certificate,
    AlertDescription.certificate_unknown,
)


class _State(Enum):
    HANDSHAKE = auto()
    OPEN = auto()
    CLOSING = auto()
    GONE = auto()


def _nothing(*_: object) -> None:
    return


class QuicLink(asyncio.DatagramProtocol):
    """One connection; a server's share its socket, a client's has one of its own.

    The three handlers are set by the endpoint that finds connections by their ids.
    """

    alternative = False

    def __init__(
        self, user: LinkUser, quic: MutualQuic, *, check: Check, handshake_timeout_s: float
    ) -> None:
        self._user, self._quic, self._check = user, quic, check
        quic.peer_check = self._checked
        self._client = bool(quic.configuration.is_client)
        self._state = _State.HANDSHAKE
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.DatagramTransport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._refused: CertificateRefused | None = None
        self._terminated: ConnectionTerminated | None = None
        self._told_lost = False
        self._heard = self._loop.time()
        self._presented: x509.Certificate | None = None
        self.paused = False
        self.address = ""
        self._connection_id_issued_handler: Callable[[bytes], None] = _nothing
        self._connection_id_retired_handler: Callable[[bytes], None] = _nothing
        self._connection_terminated_handler: Callable[[], None] = _nothing
        self._handshake_timer = self._loop.call_later(handshake_timeout_s, self._late)
        self._handshake_timeout_s = handshake_timeout_s

    # ---- Link

    @property
    def is_open(self) -> bool:
        """See Link."""
        return self._state is _State.OPEN

    @property
    def had_socket(self) -> bool:
        """See Link."""
        return self._transport is not None

    @property
    def presented_leaf(self) -> bytes | None:
        """See Link."""
        return None if self._presented is None else self._presented.public_bytes(Encoding.DER)

    def peer(self) -> Peer:
        """See Link."""
        leaf = self._quic.peer_certificate
        names = _names(leaf)
        return Peer(
            address=self.address,
            uris=uri_names(leaf),
            dns=tuple(names.get_values_for_type(x509.DNSName)) if names else (),
            common_name=common_name(leaf.subject),
            fingerprint=hashlib.sha256(leaf.public_bytes(Encoding.DER)).hexdigest(),
        )

    def codec(self, *, client: bool, now: float, limits: H2Limits | None) -> HttpConnection:
        """See Link; the bounds of HTTP/2 frames are not HTTP/3's."""
        return H3Codec(self._quic, client=client, now=now, next_event=self._next_event)

    def send(self, outgoing: Outgoing) -> None:
        """See Link."""
        if self._transport is not None and self._state is not _State.GONE:
            # A client's socket is connected, and then takes no address.
            self._transport.sendto(outgoing.data, None if self._client else outgoing.address)

    def flushed(self) -> None:
        """See Link."""
        self._settle()

    def close(self, error: Exception | None = None) -> None:
        """See Link."""
        if self._state in (_State.CLOSING, _State.GONE):
            return
        self._state = _State.CLOSING
        self._handshake_timer.cancel()
        self._quic.close(error_code=H3_NO_ERROR)
        self._transmit()
        self._tell_lost(error)
        self._settle()

    def abort(self) -> None:
        """See Link."""
        if self._state is not _State.GONE:
            self._quic.close(error_code=H3_NO_ERROR)
            self._transmit()
            self._finish(None)

    # ---- asyncio and the endpoint

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is there; a client begins."""
        self._transport = cast("asyncio.DatagramTransport", transport)
        if self._client:
            peername = transport.get_extra_info("peername")
            self.address = f"{peername[0]}:{peername[1]}"
            self._quic.connect(peername, now=self._loop.time())
            self._transmit()
            self._settle()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """A datagram of this connection arrived."""
        if self._state is _State.GONE:
            return
        self._heard = self._loop.time()
        if self._client and self._state is _State.OPEN and self._quic.is_stateless_reset(data):
            self._finish(ConnectionError("it was restarted"))
            return
        if not self.address:
            # The one that Retry has proved; later datagrams may come from anywhere.
            self.address = f"{addr[0]}:{addr[1]}"
        if self._state is _State.OPEN:
            self._user.link_data(memoryview(data), addr)  # which ends in `flushed`
            if self._state is _State.OPEN:
                return
        else:
            self._quic.receive_datagram(data, addr, now=self._loop.time())
            self._look()
        self._settle()

    def error_received(self, exc: Exception) -> None:
        """The network says that a datagram of ours went nowhere."""
        if self._client and self._state is _State.OPEN:
            if self._loop.time() > self._heard + H3Limits().refused_after_s:
                self._finish(exc)
        elif self._client and self._state is _State.HANDSHAKE:
            if isinstance(exc, ConnectionRefusedError):
                exc = ConnectFailed(
                    f"nothing listens at {self.address} (UDP); check that the instance runs and "
                    "its base URI"
                )
            self._finish(exc)

    def pause_writing(self) -> None:
        """The socket's buffer is full."""
        self.paused = True

    def resume_writing(self) -> None:
        """The socket's buffer has room again."""
        self.paused = False
        if self._state is _State.OPEN:
            self._user.link_resumed()

    # ---- inside

    def _checked(self, leaf: x509.Certificate | None, chain: Sequence[x509.Certificate]) -> None:
        self._presented = leaf
        try:
            self._check(leaf, chain)
        except CertificateRefused as refused:
            self._refused = refused
            raise

    def _look(self) -> None:
        """See what a handshake, or a goodbye, has come to."""
        while (event := self._quic.next_event()) is not None:
            if isinstance(event, HandshakeCompleted) and self._state is _State.HANDSHAKE:
                self._state = _State.OPEN
                self._handshake_timer.cancel()
                pace_by_ticks(self._quic)
                if ip_address(self.address.rsplit(":", 1)[0].strip("[]")).is_loopback:
                    # It carries more, and most of a packet's cost is per packet.
                    self._quic.enlarge_datagrams(DATAGRAM_BYTES_MAX)
                self._user.link_open(self)
                if self.is_open:
                    self._user.link_data(memoryview(b""))  # what came with it
                return
            self._own(event)
        ending = self._quic.ending
        if ending is not None and self._state is _State.HANDSHAKE:
            # Told before the peer knows: its end comes only after QUIC's closing period.
            self._state = _State.CLOSING
            self._handshake_timer.cancel()
            self._tell_lost(self._why(ending))
        self._transmit()

    def _next_event(self) -> QuicEvent | None:
        """The next event that is not the link's own."""
        while (event := self._quic.next_event()) is not None:
            if not self._own(event):
                self._quic.note(event)
                return event
        return None

    def _own(self, event: QuicEvent) -> bool:
        match event:
            case ConnectionIdIssued():
                self._connection_id_issued_handler(event.connection_id)
            case ConnectionIdRetired():
                self._connection_id_retired_handler(event.connection_id)
            case ConnectionTerminated():
                self._terminated = event
            case _:
                return False
        return True

    def _transmit(self) -> None:
        for data, address in self._quic.datagrams_to_send(now=self._loop.time()):
            self.send(Outgoing(data, address))

    def _settle(self) -> None:
        """After anything: has it ended, and when is QUIC's next timer due?"""
        if self._state is _State.GONE:
            return
        if self._terminated is not None:
            self._finish(self._why(self._terminated))
            return
        due = self._quic.get_timer()
        if due is None:
            return
        if self._timer is not None:
            if self._timer_at <= due:
                return  # it looks again when it fires: most are put off before they are due
            self._timer.cancel()
        self._timer, self._timer_at = self._loop.call_at(due, self._on_timer), due

    def _on_timer(self) -> None:
        self._timer = None
        due, now = self._quic.get_timer(), self._loop.time()
        if due is None or now < due - CLOCK_S:
            self._settle()
            return
        self._quic.handle_timer(now=max(due, now))
        if self._state is _State.OPEN:
            self._user.link_data(memoryview(b""))
        else:
            self._look()
        self._settle()

    def _late(self) -> None:
        self.close(TooSlow(f"no QUIC handshake within {self._handshake_timeout_s:g} s"))

    def _why(self, event: ConnectionTerminated) -> Exception | None:
        """The reason of an end, for those above."""
        if self._refused is not None:
            return self._refused
        transport_error = event.frame_type is not None
        if transport_error and CRYPTO_ERROR <= event.error_code <= CRYPTO_ERROR_LAST:
            alert = event.error_code - CRYPTO_ERROR
            return self._our_alert(alert) if self._quic.closed_by_us else PeerAlert(alert)
        if event.error_code in (0, H3_NO_ERROR):
            return None
        return ConnectionError(event.reason_phrase or f"QUIC error {event.error_code:#x}")

    def _our_alert(self, alert: int) -> Exception:
        """What the peer had done when the library refused it by itself."""
        if alert == AlertDescription.no_application_protocol:
            return NoHttp2("no h3 in ALPN")
        if alert == AlertDescription.decrypt_error:
            text = "the peer does not have the key that belongs to it"
            return CertificateRefused("bad_certificate", text, self._presented)
        if alert in _CERTIFICATE_ALERTS:
            text = "the peer's certificate cannot be understood"
            return CertificateRefused("bad_certificate", text, self._presented)
        return TlsFailed(f"our alert {alert}")

    def _finish(self, error: Exception | None) -> None:
        self._state = _State.GONE
        self._handshake_timer.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._connection_terminated_handler()
        if self._client and self._transport is not None:
            self._transport.close()
        self._tell_lost(error)
        self._user.link_gone(self)

    def _tell_lost(self, error: Exception | None) -> None:
        if not self._told_lost:
            self._told_lost = True
            self._user.link_lost(error)


def _names(leaf: x509.Certificate) -> x509.SubjectAlternativeName | None:
    try:
        return leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
