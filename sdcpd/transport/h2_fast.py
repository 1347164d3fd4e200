"""A short way through HTTP/2 for the steady exchange: one small request, one small answer.

h2 costs a frame object, a header list and several state machines for each frame. Here a stream
whose messages are plain (a HEADERS frame that ends its block, DATA without padding, bodies whose
announced length fits into the window) is a few numbers, and its frames are read and written in
place. Whatever is not plain belongs to h2: the stream is handed over as it stands, h2 sees the
frame, and from then on it is h2's. So h2 alone decides what is a fault.
"""

from __future__ import annotations

from struct import Struct

from h2.connection import ConnectionInputs

from sdcpd.transport.h2_blocks import Block, BlockReader
from sdcpd.transport.h2_codec import H2Codec
from sdcpd.transport.h2_plain_stream import PlainStream
from sdcpd.transport.hpack_static import plain_field
from sdcpd.transport.http import (
    Data,
    End,
    Headers,
    RequestHeaders,
    ResponseHeaders,
    StreamEvent,
    StreamGone,
)
from sdcpd.transport.limits import FAST_BODY_BYTES_MAX, H2Limits

_FRAME = Struct(">HBBBL")
_FRAME_BYTES = 9
_DATA, _HEADERS, _SETTINGS, _WINDOW_UPDATE = 0x0, 0x1, 0x4, 0x8
_END_STREAM, _END_HEADERS = 0x1, 0x4


class FastH2Codec(H2Codec):
    """As `H2Codec`, and held to the same tests."""

    def __init__(self, *, client: bool, now: float, limits: H2Limits | None = None) -> None:
        super().__init__(client=client, now=now, limits=limits)
        self._fast: dict[int, PlainStream] = {}
        self._blocks = BlockReader(
            self._h2.decoder,
            client=client,
            header_list_bytes_max=self._limits.header_list_bytes_max,
        )
        self._rest = b""
        """The beginning of a frame header."""
        self._begun = False
        self._body_bytes_max = min(FAST_BODY_BYTES_MAX, self._limits.stream_window_bytes)

    # ---- in

    def _read(self, data: bytes | memoryview, found: list[StreamEvent], now: float) -> None:
        if not self._peer_ready:
            super()._read(data, found, now)  # the preface
            return
        if self._rest:
            data, self._rest = self._rest + bytes(data), b""
        view = memoryview(data)
        position, end = 0, len(view)
        while position < end:
            owed = self._owed()
            if owed:
                # Streams may have begun since the first half of this frame.
                self._unusual(*self._half_read())
                stop = min(end, position + owed)
            elif end - position < _FRAME_BYTES:
                self._rest = bytes(view[position:])
                break
            else:
                high, low, kind, flags, number = _FRAME.unpack_from(view, position)
                body = position + _FRAME_BYTES
                stop = body + (high << 8 | low)
                number &= 0x7FFFFFFF
                whole = stop <= end and stop - body <= self._limits.frame_bytes_max
                if whole and self._take(kind, flags, number, view[body:stop], found):
                    position = stop
                    continue
                self._unusual(kind, number)
                stop = min(end, stop)
            super()._read(view[position:stop], found, now)
            position = stop
        self._charge_silent_work(now)  # which h2 may not hear of for long

    def _owed(self) -> int:
        """Octets of a frame that h2 has begun to read."""
        held = self._h2.incoming_buffer._data
        if not held:
            return 0
        if len(held) < _FRAME_BYTES:
            return _FRAME_BYTES - len(held)
        return _FRAME_BYTES + int.from_bytes(held[:3], "big") - len(held)

    def _half_read(self) -> tuple[int, int]:
        """Kind and stream of the frame that h2 has begun; as SETTINGS while they are unknown."""
        held = self._h2.incoming_buffer._data
        if len(held) < _FRAME_BYTES:
            return _SETTINGS, 0
        return held[3], int.from_bytes(held[5:9], "big") & 0x7FFFFFFF

    def _take(
        self, kind: int, flags: int, number: int, body: memoryview, found: list[StreamEvent]
    ) -> bool:
        """Read a whole frame here; False leaves it, untouched, to h2."""
        if self._h2.incoming_buffer._headers_buffer:
            return False  # only CONTINUATION may come now
        if kind == _DATA:
            stream = self._fast.get(number)
            return stream is not None and self._take_data(stream, flags, number, body, found)
        if kind == _HEADERS and not flags & ~(_END_HEADERS | _END_STREAM) and flags & _END_HEADERS:
            return self._take_headers(flags, number, bytes(body), found)
        return False

    def _take_headers(self, flags: int, number: int, raw: bytes, found: list[StreamEvent]) -> bool:
        h2 = self._h2
        if h2.decoder.header_table.maxsize:
            return False
        block = self._blocks.read(raw)
        if block is None:
            return False
        end = bool(flags & _END_STREAM)
        if self._client:
            stream = self._answered(number, block, found, end=end)
        else:
            stream = self._asked(number, block, found, end=end)
        if stream is None:
            return False
        self._messages += 1
        stream.got_headers, stream.announced = True, block.announced
        if end:
            self._received_end(number, stream, found)
        return True

    def _asked(
        self, number: int, block: Block, found: list[StreamEvent], *, end: bool
    ) -> PlainStream | None:
        """The stream of a request, if it is plain."""
        new = number & 1 and number > self._h2.highest_inbound_stream_id
        event = block.event
        if not new or not block.fits(self._body_bytes_max, end=end):
            return None
        if len(self._fast) + len(self._h2.streams) >= self._limits.streams_max:
            # Above the limit all are h2's: it forgets those that have ended and counts the others.
            self._hand_over_all()
            return None
        assert isinstance(event, RequestHeaders), "a server reads requests"
        found.append(
            RequestHeaders(number, event.method, event.target, event.authority, event.headers)
        )
        return self._opened(number, event.method)

    def _answered(
        self, number: int, block: Block, found: list[StreamEvent], *, end: bool
    ) -> PlainStream | None:
        """The stream of an answer, if it is plain."""
        stream, event = self._fast.get(number), block.event
        if stream is None or stream.got_headers:
            return None
        plain = end if stream.method == "HEAD" else block.fits(self._body_bytes_max, end=end)
        if not plain:
            return None
        assert isinstance(event, ResponseHeaders), "a client reads answers"
        found.append(ResponseHeaders(number, event.status, event.headers))
        return stream

    def _opened(self, number: int, method: str) -> PlainStream:
        """Note a new stream, whoever opened it."""
        h2 = self._h2
        if not self._begun:
            self._begun = True
            opens = ConnectionInputs.SEND_HEADERS if self._client else ConnectionInputs.RECV_HEADERS
            h2.state_machine.process_input(opens)
        if self._client:
            h2.highest_outbound_stream_id = number
        else:
            h2.highest_inbound_stream_id = number
        stream = PlainStream(window=h2.remote_settings.initial_window_size, method=method)
        self._fast[number] = stream
        return stream

    def _take_data(
        self,
        stream: PlainStream,
        flags: int,
        number: int,
        body: memoryview,
        found: list[StreamEvent],
    ) -> bool:
        size = len(body)
        end = bool(flags & _END_STREAM)
        window = self._h2._inbound_flow_control_window_manager
        received = stream.received + size
        announced = stream.announced if stream.announced is not None else 0
        plain = not flags & ~_END_STREAM and stream.got_headers and stream.receiving
        fits = received <= announced and size <= window.current_window_size
        if not plain or not fits or (end and received != announced) or not (size or end):
            return False
        window.current_window_size -= size
        stream.received = received
        self._data_frames += 1
        self._data_octets += size
        found.append(Data(number, bytes(body), size))
        if end:
            self._received_end(number, stream, found)
        return True

    def _received_end(self, number: int, stream: PlainStream, found: list[StreamEvent]) -> None:
        stream.receiving = False
        found.append(End(number))
        self._forget_ended(number, stream)

    # ---- out

    @property
    def busy(self) -> bool:
        """See H2Codec."""
        return (self._client and bool(self._fast)) or super().busy

    def open_stream(self) -> int | None:
        """See HttpConnection."""
        if self._fast and not self._peer_going:
            h2 = self._h2
            open_streams = len(self._fast) + h2.open_outbound_streams
            if open_streams >= h2.remote_settings.max_concurrent_streams:
                return None
        return super().open_stream()

    def send_headers(self, stream_id: int, headers: Headers, *, end: bool) -> None:
        """See HttpConnection."""
        h2, stream = self._h2, self._fast.get(stream_id)
        table = h2.encoder.header_table
        new = self._client and stream_id > h2.highest_outbound_stream_id
        plain = not table.maxsize and not table.resized
        if plain and (new or (stream is not None and not stream.sent_headers)):
            block = b"".join([plain_field(name, value) for name, value in headers])
            if len(block) <= h2.max_outbound_frame_size:
                if stream is None:
                    stream = self._opened(stream_id, _method(headers))
                self._write(_HEADERS, _END_HEADERS | end, stream_id, block)
                stream.sent_headers = True
                self._sent(stream_id, stream, end=end)
                return
        self._hand_over(stream_id)
        super().send_headers(stream_id, headers, end=end)

    def send_data(self, stream_id: int, data: bytes | memoryview, *, end: bool) -> None:
        """See HttpConnection."""
        stream = self._fast.get(stream_id)
        if stream is None:
            super().send_data(stream_id, data, end=end)
            return
        if not stream.sending:
            raise StreamGone(f"stream {stream_id} is closed")
        size = len(data)
        stream.window -= size
        self._h2.outbound_flow_control_window -= size
        self._write(_DATA, int(end), stream_id, data)
        self._sent(stream_id, stream, end=end)

    def writable(self, stream_id: int) -> int:
        """See HttpConnection."""
        stream = self._fast.get(stream_id)
        if stream is None:
            return super().writable(stream_id)
        h2 = self._h2
        window = min(h2.outbound_flow_control_window, stream.window)
        return max(0, min(window, h2.max_outbound_frame_size, self._limits.frame_bytes_max))

    def consumed(self, stream_id: int, size: int) -> None:
        """See HttpConnection."""
        if stream_id in self._h2.streams:
            super().consumed(stream_id, size)
            return
        stream = self._fast.get(stream_id)
        if stream is not None:
            stream.consumed += size
        increment = self._h2._inbound_flow_control_window_manager.process_bytes(size)
        if increment:
            self._write(_WINDOW_UPDATE, 0, 0, increment.to_bytes(4, "big"))

    def reset(self, stream_id: int, code: int) -> None:
        """See HttpConnection."""
        self._hand_over(stream_id)
        super().reset(stream_id, code)

    def _write(self, kind: int, flags: int, number: int, body: bytes | memoryview) -> None:
        size = len(body)
        out = self._h2._data_to_send
        out += _FRAME.pack(size >> 8, size & 0xFF, kind, flags, number)
        out += body

    def _sent(self, number: int, stream: PlainStream, *, end: bool) -> None:
        if end:
            stream.sending = False
            self._forget_ended(number, stream)

    def _forget_ended(self, number: int, stream: PlainStream) -> None:
        if not stream.sending and not stream.receiving:
            del self._fast[number]

    # ---- handing over

    def _unusual(self, kind: int, number: int) -> None:
        """Give h2 what it must know before it sees such a frame."""
        if kind == _SETTINGS:
            self._hand_over_all()  # it may change the windows of all
        else:
            self._hand_over(number)

    def _hand_over_all(self) -> None:
        for number in list(self._fast):
            self._hand_over(number)

    def _hand_over(self, number: int) -> None:
        """Make a stream h2's, in the state that it is in."""
        stream = self._fast.pop(number, None)
        if stream is None:
            return
        self._h2.streams[number] = stream.of_h2(number, self._h2, client=self._client)


def _method(headers: Headers) -> str:
    return next((value for name, value in headers if name == ":method"), "")
