"""HTTP/3 by aioquic, behind `HttpConnection`, with the bounds that aioquic leaves to us (RFC 9114).

Begins when the handshake is over and the peer known (quic_link.py); from then on all datagrams
of the connection pass through here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aioquic.buffer import encode_uint_var
from aioquic.h3.connection import FrameType, H3Connection, H3Stream, encode_frame
from aioquic.h3.events import DataReceived, H3Event, HeadersReceived
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import (
    PingAcknowledged,
    QuicEvent,
    StopSendingReceived,
    StreamDataReceived,
    StreamReset,
)

from sdcpd.transport.h2_fields import encoded_field, fields_of, request_of, response_of
from sdcpd.transport.h2_hardening import LeakyBucket
from sdcpd.transport.http import (
    Address,
    Data,
    End,
    GoAway,
    Headers,
    HttpProtocolError,
    Outgoing,
    PeerReady,
    PingAcked,
    Reset,
    ResetCode,
    StreamEvent,
    StreamGone,
)
from sdcpd.transport.limits import SMALL_BYTES_MAX, H3Limits
from sdcpd.transport.quic_sending import send_first
from sdcpd.transport.quic_tls import MutualQuic

KEEPALIVE_PING = 1
LAST_STREAM_ID_MAX = 2**62 - 4
FRAME_HEADER_BYTES_MAX = 9  # of DATA: its type, and its length in at most 8 octets
# HTTP/3's numbers for ours (RFC 9114 section 8.1).
_CODES = {
    ResetCode.NO_ERROR: 0x100,
    ResetCode.PROTOCOL_ERROR: 0x101,
    ResetCode.INTERNAL_ERROR: 0x102,
    ResetCode.REFUSED_STREAM: 0x10B,
    ResetCode.CANCEL: 0x10C,
    ResetCode.ENHANCE_YOUR_CALM: 0x107,
}
_OURS = {number: code for code, number in _CODES.items()}


@dataclass(slots=True)
class _Stream:
    sent_end: bool = False
    received_end: bool = False
    sent_bytes: int = 0


class _Http3(H3Connection):
    """Notices a GOAWAY, whose payload the library throws away, and keeps no QPACK table.

    A header section that waits for a table entry makes the library buffer all that follows on its
    stream, with no bound; with a table of no size there is nothing to wait for.
    """

    peer_going = False
    _max_table_capacity = property(lambda _: 0, lambda _, value: None)
    _blocked_streams = property(lambda _: 0, lambda _, value: None)

    def __init__(self, quic: QuicConnection) -> None:
        super().__init__(quic)
        self.head_streams: set[int] = set()
        """Requests whose answers name a length and have no body."""
        self.frames_seen = 0

    def _check_content_length(self, stream: H3Stream) -> None:
        if stream.stream_id not in self.head_streams:
            super()._check_content_length(stream)

    def _check_request_or_push_frame_type(self, frame_type: int, stream: H3Stream) -> None:
        self.frames_seen += 1
        super()._check_request_or_push_frame_type(frame_type, stream)

    def _check_control_frame_type(self, frame_type: int) -> None:
        self.frames_seen += 1
        super()._check_control_frame_type(frame_type)
        self.peer_going = self.peer_going or frame_type == FrameType.GOAWAY

    def announced_headers(self, stream_id: int) -> int:
        """Octets of a header section that is still arriving."""
        stream = self._stream.get(stream_id)
        if stream is None or stream.frame_type != FrameType.HEADERS:
            return 0
        return stream.frame_size or 0

    def send_goaway(self, stream_id: int) -> None:
        """Tell the peer that streams from `stream_id` on will not be served."""
        frame = encode_frame(FrameType.GOAWAY, encode_uint_var(stream_id))
        self._quic.send_stream_data(self._local_control_stream_id, frame)


class H3Codec:
    """One HTTP/3 connection, client or server, as a sans-IO `HttpConnection`."""

    piecewise = True  # datagrams: one ACK for many, and many streams in one packet

    def __init__(
        self,
        quic: MutualQuic,
        *,
        client: bool,
        now: float,
        next_event: Callable[[], QuicEvent | None],
        limits: H3Limits | None = None,
    ) -> None:
        """`next_event` gives the QUIC events that are not the link's own."""
        self._limits = limits or H3Limits()
        self._quic, self._client, self._next_event = quic, client, next_event
        self._http = _Http3(quic)
        self._streams: dict[int, _Stream] = {}
        self._resets = LeakyBucket(self._limits.resets_burst, self._limits.resets_per_s)
        self._idle_frames = LeakyBucket(
            self._limits.idle_frames_burst, self._limits.idle_frames_per_s
        )
        self._frames_seen = quic.frames_seen
        self._highest = -4
        self._peer_ready = self._peer_going = False
        self._last_heard = now
        self._pinged: float | None = None
        self._shortest_rtt_s, self._rtt_until = math.inf, now
        self._urgent: set[int] = set()
        """Streams of small messages, which go before what waits of large ones."""
        self._room: int | None = None
        """What may still be given to aioquic; counted anew when ACKs may have come."""

    def receive(
        self, data: bytes | memoryview, *, address: Address | None = None, now: float
    ) -> list[StreamEvent]:
        """Take a datagram, or none when only time has passed; raises HttpProtocolError."""
        found: list[StreamEvent] = []
        self._room = None
        try:
            if data:
                self._last_heard, self._pinged = now, None
                self._quic.receive_datagram(bytes(data), address, now=now)
                self._charge_frames(len(data), now)
                self._note_rtt(now)
            while (event := self._next_event()) is not None:
                self._take(event, found, now)
        except HttpProtocolError:
            raise
        except Exception as error:
            # Whatever comes out of the library was caused by this datagram: it ends this
            # connection and nothing else.
            self._quic.close(error_code=_CODES[ResetCode.INTERNAL_ERROR])
            raise HttpProtocolError(f"a datagram that aioquic cannot take: {error!r}") from error
        if self._client and not self._peer_ready and self._quic._handshake_confirmed:
            self._peer_ready = True  # HANDSHAKE_DONE: the server has seen our certificate
            found.append(PeerReady())
        if self._http.peer_going and not self._peer_going:
            self._peer_going = True
            found.append(GoAway(LAST_STREAM_ID_MAX, 0, ""))
        return found

    def open_stream(self) -> int | None:
        """The next stream id, or None at the peer's limit or after its GOAWAY."""
        if self._peer_going or not self._peer_ready:
            return None
        stream_id: int = self._quic.get_next_available_stream_id()
        return stream_id if stream_id // 4 < self._quic._remote_max_streams_bidi else None

    def send_headers(self, stream_id: int, headers: Headers, *, end: bool) -> None:
        """Queue a header section; raises StreamGone or ValueError (a field not allowed)."""
        encoded = [encoded_field(name, value) for name, value in headers]
        if self._client:
            self._streams.setdefault(stream_id, _Stream())
            if (b":method", b"HEAD") in encoded:
                self._http.head_streams.add(stream_id)
        stream = self._live(stream_id)
        with _stream_gone():
            self._http.send_headers(stream_id, encoded, end_stream=end)
        self._sent(stream_id, stream, end=end)

    def send_data(self, stream_id: int, data: bytes | memoryview, *, end: bool) -> None:
        """Queue at most `writable` octets; raises StreamGone."""
        stream = self._live(stream_id)
        with _stream_gone():
            self._http.send_data(stream_id, bytes(data), end_stream=end)
        if self._room is not None:
            self._room -= len(data)
        stream.sent_bytes += len(data)
        self._sent(stream_id, stream, end=end)

    def writable(self, stream_id: int) -> int:
        """Octets that may wait for the peer beside what waits already; 0 if the stream is gone."""
        if stream_id not in self._streams:
            return 0
        if self._room is None:
            self._room = self._in_flight_max() - self._waiting_bytes()
        return max(0, min(self._limits.frame_bytes_max, self._room, self._window(stream_id)))

    def _window(self, stream_id: int) -> int:
        """What the peer allows on a stream; more would take the room of other streams."""
        stream = self._quic._streams.get(stream_id)
        if stream is None:
            return self._limits.frame_bytes_max
        given = int(stream.sender._buffer_stop)
        return int(stream.max_stream_data_remote) - given - FRAME_HEADER_BYTES_MAX

    def _in_flight_max(self) -> int:
        """Octets that may wait for ACKs: on a short path more would only wait at the peer."""
        limits, quic = self._limits, self._quic
        if self._shortest_rtt_s > limits.short_path_s:
            return limits.send_buffer_bytes_max
        few = limits.short_path_datagrams_max * int(quic._max_datagram_size)
        return min(limits.send_buffer_bytes_max, few)

    def _note_rtt(self, now: float) -> None:
        """Keep the shortest round trip of the last seconds."""
        rtt_s = self._quic._loss._rtt_latest
        if rtt_s and (rtt_s < self._shortest_rtt_s or now > self._rtt_until):
            self._shortest_rtt_s = rtt_s
            self._rtt_until = now + self._limits.short_path_window_s

    @property
    def unsent(self) -> bool:
        """Whether octets wait for the peer's acknowledgement: a goodbye would drop them."""
        return self._waiting_bytes() > 0

    def _waiting_bytes(self) -> int:
        """What aioquic holds of requests and answers, sent once or not yet."""
        streams = self._quic._streams.items()
        return sum(len(one.sender._buffer) for number, one in streams if not number & 2)

    def consumed(self, stream_id: int, size: int) -> None:
        """Nothing: aioquic opens its windows as data arrives; `ServerExchange` bounds bodies."""

    def reset(self, stream_id: int, code: int) -> None:
        """End a stream early; nothing happens if it already ended."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        number = _CODES[ResetCode(code)]
        if not stream.received_end:
            self._quic.stop_stream(stream_id, number)
        if not stream.sent_end:
            self._quic.reset_stream(stream_id, number)
        del self._streams[stream_id]
        self._http.head_streams.discard(stream_id)

    def ping(self, payload: bytes) -> None:
        """Queue a PING."""
        self._quic.send_ping(int.from_bytes(payload, "big"))

    def go_away(self, *, final: bool, code: int = 0) -> None:
        """Queue a GOAWAY: first with the highest id there is, finally after the last one seen."""
        self._http.send_goaway(self._highest + 4 if final else LAST_STREAM_ID_MAX)

    def outgoing(self, now: float) -> list[Outgoing]:
        """Take everything that is queued to be sent."""
        datagrams = []
        if self._urgent:
            datagrams = send_first(self._quic, self._urgent, now=now)
            self._urgent.clear()
        datagrams += self._quic.datagrams_to_send(now=now)
        return [Outgoing(data, address) for data, address in datagrams]

    def deadline(self) -> float | None:
        """When the next keepalive ping or its answer is due; the link has QUIC's own timers."""
        if self._pinged is not None:
            return self._pinged + self._limits.ping_timeout_s
        limits = self._limits
        busy = self._client and bool(self._streams)
        return self._last_heard + (limits.ping_after_busy_s if busy else limits.ping_after_s)

    def on_deadline(self, now: float) -> list[StreamEvent]:
        """Ping a silent peer; raises HttpProtocolError when it stays silent."""
        due = self.deadline()
        if due is None or now < due:
            return []
        if self._pinged is not None:
            raise HttpProtocolError(f"silent for {now - self._last_heard:.0f} s, ping unanswered")
        self._pinged = now
        self._quic.send_ping(KEEPALIVE_PING)
        return []

    def _live(self, stream_id: int) -> _Stream:
        stream = self._streams.get(stream_id)
        if stream is None or stream.sent_end:
            raise StreamGone(f"stream {stream_id} is closed")
        return stream

    def _sent(self, stream_id: int, stream: _Stream, *, end: bool) -> None:
        if end and stream.sent_bytes <= SMALL_BYTES_MAX:
            self._urgent.add(stream_id)
        stream.sent_end = stream.sent_end or end
        self._forget_ended(stream_id, stream)

    def _forget_ended(self, stream_id: int, stream: _Stream) -> None:
        if stream.sent_end and stream.received_end:
            self._streams.pop(stream_id, None)
            self._http.head_streams.discard(stream_id)

    def _take(self, event: QuicEvent, found: list[StreamEvent], now: float) -> None:
        match event:
            case PingAcknowledged():
                found.append(PingAcked(int(event.uid).to_bytes(8, "big")))
            case StopSendingReceived() if self._client:
                # The server has answered without the rest of our body (413, for one).
                self._http.handle_event(event)
                if (stream := self._streams.get(event.stream_id)) is not None:
                    self._sent(event.stream_id, stream, end=True)
            case StreamReset() | StopSendingReceived():
                self._charge_reset(now)
                self._http.handle_event(event)
                self._http.head_streams.discard(event.stream_id)
                if self._streams.pop(event.stream_id, None) is not None:
                    code = _OURS.get(event.error_code, ResetCode.INTERNAL_ERROR)
                    found.append(Reset(event.stream_id, int(code), by_peer=True))
            case _:
                for one in self._http.handle_event(event):
                    self._translate(one, found)
                if isinstance(event, StreamDataReceived):
                    self._check_header_size(event.stream_id)
                    self._charge_http_frames(len(event.data), now)

    def _translate(self, event: H3Event, found: list[StreamEvent]) -> None:
        match event:
            case HeadersReceived():
                self._headers(event, found)
            case DataReceived():
                found.append(Data(event.stream_id, event.data, len(event.data)))
                if event.stream_ended:
                    self._ended(event.stream_id, found)
            case _:
                return  # pushes and WebTransport, which nobody here has asked for

    def _headers(self, event: HeadersReceived, found: list[StreamEvent]) -> None:
        size = sum(len(name) + len(value) + 32 for name, value in event.headers)
        if size > self._limits.header_list_bytes_max:
            self._too_large()
        pseudo, fields = fields_of(event.headers)
        if not pseudo:
            pass  # trailers: they carry nothing in SDCP
        elif self._client:
            found.append(response_of(event.stream_id, pseudo, fields))
        else:
            self._highest = max(self._highest, event.stream_id)
            self._streams[event.stream_id] = _Stream()
            found.append(request_of(event.stream_id, pseudo, fields))
        if event.stream_ended:
            self._ended(event.stream_id, found)

    def _ended(self, stream_id: int, found: list[StreamEvent]) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.received_end = True
            self._forget_ended(stream_id, stream)
        found.append(End(stream_id))

    def _check_header_size(self, stream_id: int) -> None:
        if self._http.announced_headers(stream_id) > self._limits.header_list_bytes_max:
            self._too_large()

    def _too_large(self) -> None:
        code = _CODES[ResetCode.ENHANCE_YOUR_CALM]
        self._quic.close(error_code=code)
        raise HttpProtocolError("header section too large", code=code)

    def _charge_reset(self, now: float) -> None:
        # A server that resets only hurts its own answers, so clients do not count.
        if not self._client and self._resets.add(1, now=now):
            self._flood("resets")

    def _charge_frames(self, datagram_bytes: int, now: float) -> None:
        """Count frames that are too many for what a datagram holds."""
        frames = self._quic.frames_seen - self._frames_seen
        self._frames_seen += frames
        self._charge_too_many(frames, datagram_bytes, now)

    def _charge_http_frames(self, stream_bytes: int, now: float) -> None:
        """The same for HTTP/3's frames in what came on a stream."""
        frames, self._http.frames_seen = self._http.frames_seen, 0
        self._charge_too_many(frames, stream_bytes, now)

    def _charge_too_many(self, frames: int, octets: int, now: float) -> None:
        free = self._limits.frames_free + octets // self._limits.octets_per_frame
        if frames > free and self._idle_frames.add(frames - free, now=now):
            self._flood("frames that carry nothing")

    def _flood(self, kind: str) -> None:
        code = _CODES[ResetCode.ENHANCE_YOUR_CALM]
        self._quic.close(error_code=code)
        raise HttpProtocolError(f"flood of {kind}", code=code)


@contextmanager
def _stream_gone() -> Iterator[None]:
    """The library's words for a stream that its peer has stopped, or that it has forgotten since.

    The latter (ValueError) was seen where a cut link healed: an answer to a request whose client
    had given it up meanwhile.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise StreamGone(str(error)) from error
