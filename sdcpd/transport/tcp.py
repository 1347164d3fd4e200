"""One TCP connection with TLS driven by us over memory BIOs.

The event loop's own TLS swallows the alert that a refused peer should see and the reason that our
log should have, so octets go through `ssl.MemoryBIO` here and the socket stays plain.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable
from enum import Enum, Flag, auto
from typing import cast

from sdcpd.transport.h2_fast import FastH2Codec
from sdcpd.transport.h2_hardening import LeakyBucket
from sdcpd.transport.http import HttpConnection, Outgoing, Peer
from sdcpd.transport.limits import (
    LINGER_S,
    READ_TURN_S,
    REPLY_BACKLOG_BYTES,
    SILENT_TLS_BYTES_BURST,
    SILENT_TLS_BYTES_PER_OCTET,
    SILENT_TLS_BYTES_PER_S,
    SLOW_PIECE_BYTES,
    WRITE_HIGH_WATER_BYTES,
    H2Limits,
)
from sdcpd.transport.link import LinkUser
from sdcpd.transport.refusals import NoHttp2, NotTls, TooSlow
from sdcpd.transport.tls import ALPN, RecordingSSLObject, peer_of

TLS_HANDSHAKE_RECORD = 0x16
TLS_ALERT_RECORD = 0x15
TLS_RECORD_BYTES_MAX = 5 + (16 << 10) + 256  # RFC 8446 section 5.2


class Scratch:
    """Receive buffers that all connections of one event loop share.

    Safe because the loop fills and hands over the buffer within one callback.
    """

    def __init__(self, size: int = 256 << 10) -> None:
        self.wire = memoryview(bytearray(size))
        self.plain = memoryview(bytearray(size))


class _State(Enum):
    HANDSHAKE = auto()
    OPEN = auto()
    CLOSING = auto()
    GONE = auto()


class _Hold(Flag):
    """Why nothing is read at the moment."""

    TURN = auto()
    BACKLOG = auto()


class TlsLink(asyncio.BufferedProtocol):
    """TLS 1.3 on one socket, either side."""

    def __init__(
        self,
        user: LinkUser,
        *,
        context: ssl.SSLContext,
        quiet_context: ssl.SSLContext,
        scratch: Scratch,
        server_hostname: str | None = None,
        handshake_timeout_s: float = 5.0,
    ) -> None:
        self._user = user
        self._quiet_context = quiet_context
        self._scratch = scratch
        self._server_side = server_hostname is None
        self._handshake_timeout_s = handshake_timeout_s
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=self._server_side,
            server_hostname=server_hostname,
        )
        self._state = _State.HANDSHAKE
        self._first_octets = True
        self._aborted = False
        self._holds = _Hold(0)
        self._silent = LeakyBucket(SILENT_TLS_BYTES_BURST, SILENT_TLS_BYTES_PER_S)
        self._owed_bytes = 0
        """Octets of TLS that those of HTTP have not paid for yet."""
        self._slow = False
        self._rest = b""
        """What was read and is not decrypted yet, of a connection that takes long turns."""
        self._told_lost = False
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self.paused = False
        self.address = ""

    alternative = True

    def peer(self) -> Peer:
        """See Link."""
        return peer_of(self._tls, address=self.address)

    def codec(self, *, client: bool, now: float, limits: H2Limits | None) -> HttpConnection:
        """See Link."""
        return FastH2Codec(client=client, now=now, limits=limits)

    def send(self, outgoing: Outgoing) -> None:
        """See Link."""
        self.write(outgoing.data)

    def flushed(self) -> None:
        """TCP has its own timers."""

    @property
    def presented_leaf(self) -> bytes | None:
        """The leaf that the peer presented, verified or not; for messages only."""
        return self._tls.presented_leaf if isinstance(self._tls, RecordingSSLObject) else None

    @property
    def is_open(self) -> bool:
        """Whether octets can be sent."""
        return self._state is _State.OPEN

    @property
    def had_socket(self) -> bool:
        """Whether there ever was a connection, and so `link_gone` comes or came."""
        return self._transport is not None

    def write(self, data: bytes) -> None:
        """Encrypt and send; dropped when the connection is no longer open."""
        if self._state is not _State.OPEN:
            return
        self._tls.write(data)
        self._flush()
        transport = self._live_transport
        if self.paused and transport.get_write_buffer_size() > REPLY_BACKLOG_BYTES:
            self._hold(_Hold.BACKLOG)

    def close(self, error: Exception | None = None) -> None:
        """Say goodbye in TLS, send what is buffered, and close once the peer did too."""
        if self._state in (_State.CLOSING, _State.GONE):
            return
        if self._state is _State.OPEN:
            # It always wants to read the peer's own goodbye, which nobody waits for.
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()
        self._flush()
        self._linger()
        self._tell_lost(error)

    def abort(self) -> None:
        """Drop the connection at once, or as soon as there is one."""
        self._aborted = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the handshake (asyncio)."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        peername = transport.get_extra_info("peername")
        self.address = f"{peername[0]}:{peername[1]}" if peername else "?"
        if self._aborted:
            self._transport.abort()
            return
        self._set_timer(self._handshake_timeout_s, self._handshake_late)
        if not self._server_side:
            self._handshake()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the loop puts received octets (asyncio)."""
        return self._scratch.wire

    def buffer_updated(self, nbytes: int) -> None:
        """Take received octets (asyncio)."""
        if self._state in (_State.CLOSING, _State.GONE):
            return
        data = self._scratch.wire[:nbytes]
        if self._first_octets:
            self._first_octets = False
            if data[0] not in (TLS_HANDSHAKE_RECORD, TLS_ALERT_RECORD):
                self._refuse_plain(bytes(data[:16]))
                return
        if self._slow and nbytes > SLOW_PIECE_BYTES:
            self._rest = bytes(data[SLOW_PIECE_BYTES:])
            data = data[:SLOW_PIECE_BYTES]
        self._take(data)

    def eof_received(self) -> None:
        """The peer ended; the loop then closes the socket (asyncio)."""

    def pause_writing(self) -> None:
        """The write buffer is above its mark (asyncio)."""
        self.paused = True

    def resume_writing(self) -> None:
        """The write buffer is below its mark again (asyncio)."""
        self.paused = False
        if self._state is _State.OPEN:
            self._release(_Hold.BACKLOG)
            self._user.link_resumed()

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed (asyncio)."""
        self._state = _State.GONE
        self._set_timer(None)
        self._tell_lost(exc)
        self._user.link_gone(self)

    @property
    def _live_transport(self) -> asyncio.Transport:
        assert self._transport is not None  # No octets move before connection_made.
        return self._transport

    def _handshake(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return
        except ssl.SSLError as error:
            self.close(error)  # Flushing is what sends the alert.
            return
        self._flush()
        if self._tls.selected_alpn_protocol() != ALPN:
            self._state = _State.OPEN
            self.close(NoHttp2("no h2 in ALPN"))
            return
        # The handshake is over: stop the hook that records certificates.
        self._tls.context = self._quiet_context
        self._set_timer(None)
        self._state = _State.OPEN
        self._user.link_open(self)

    def _take(self, data: bytes | memoryview) -> None:
        """Decrypt octets and pass on what they hold; in turns with others where that takes long."""
        begin = time.monotonic()
        self._incoming.write(data)
        if self._state is _State.HANDSHAKE:
            self._handshake()
        if self._state is _State.OPEN:
            self._read(len(data))
        self._slow = time.monotonic() - begin > READ_TURN_S
        if self._state is not _State.OPEN or not (self._slow or self._rest):
            self._release(_Hold.TURN)
            return
        self._hold(_Hold.TURN)
        asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        """Go on with what is left of the octets that were read, or read on."""
        if self._rest and self._state is _State.OPEN:
            piece, self._rest = self._rest[:SLOW_PIECE_BYTES], self._rest[SLOW_PIECE_BYTES:]
            self._take(piece)
        else:
            self._rest = b""
            self._release(_Hold.TURN)

    def _hold(self, hold: _Hold) -> None:
        """Read no more until this, and whatever else holds, is released."""
        if not self._holds and not self._live_transport.is_closing():
            self._live_transport.pause_reading()
        self._holds |= hold

    def _release(self, hold: _Hold) -> None:
        held, self._holds = self._holds, self._holds & ~hold
        if held and not self._holds and not self._live_transport.is_closing():
            self._live_transport.resume_reading()

    def _read(self, wire_bytes: int) -> None:
        """Decrypt all that arrived and pass it on in large pieces."""
        plain = self._scratch.plain
        more, paid = True, 0
        while more and self._state is _State.OPEN:
            filled, error = 0, None
            try:
                # One record of 16 KiB a read, gathered so that HTTP sees few large pieces.
                while filled < len(plain):
                    size = self._tls.read(len(plain) - filled, plain[filled:])
                    if not size:
                        raise ssl.SSLZeroReturnError("the peer closed TLS")
                    filled += cast("int", size)
            except ssl.SSLWantReadError:
                more = False
            except ssl.SSLError as reason:
                more, error = False, reason
            if filled:
                paid += filled * SILENT_TLS_BYTES_PER_OCTET
                self._user.link_data(plain[:filled])
            if error is not None:
                self.close(None if isinstance(error, ssl.SSLZeroReturnError) else error)
        self._charge(wire_bytes - paid)
        if self._outgoing.pending:
            self._flush()

    def _charge(self, silent_bytes: int) -> None:
        """Count octets of TLS that those of HTTP have not paid for; a record may be half here."""
        if silent_bytes <= 0:
            self._owed_bytes = max(0, self._owed_bytes + silent_bytes)
            return
        self._owed_bytes += silent_bytes
        over = self._owed_bytes - TLS_RECORD_BYTES_MAX
        if over <= 0:
            return
        self._owed_bytes -= over
        if self._silent.add(over, now=asyncio.get_running_loop().time()):
            self._user.link_flooded("TLS records that carry nothing")

    def _flush(self) -> None:
        if self._outgoing.pending and self._transport is not None:
            self._transport.write(self._outgoing.read())

    def _refuse_plain(self, first: bytes) -> None:
        """Closed before any HTTP octet, whatever the peer speaks (D-H8); the log tells why."""
        self._linger()
        self._tell_lost(NotTls(first))

    def _handshake_late(self) -> None:
        self.close(TooSlow(f"no TLS handshake within {self._handshake_timeout_s:g} s"))

    def _linger(self) -> None:
        self._state = _State.CLOSING
        self._set_timer(LINGER_S, self.abort)
        transport = self._transport
        if transport is not None and not transport.is_closing():
            self._release(self._holds)  # To see the peer's end; what arrives is dropped.
            transport.write_eof()

    def _tell_lost(self, error: Exception | None) -> None:
        if not self._told_lost:
            self._told_lost = True
            self._user.link_lost(error)

    def _set_timer(self, delay_s: float | None, act: Callable[[], None] | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if delay_s is not None and act is not None:
            self._timer = asyncio.get_running_loop().call_later(delay_s, act)
