"""One HTTP/2 codec, what a peer and its user do to it, and all that it says: for comparing two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hpack import Decoder, Encoder
from hyperframe.frame import Frame, GoAwayFrame, HeadersFrame, SettingsFrame, WindowUpdateFrame

from sdcpd.transport.hpack_static import plain_field
from sdcpd.transport.http import HttpProtocolError, StreamGone
from sdcpd.transport.limits import H2Limits
from tests.kit.http_pair import H2Kind, agree_on_no_table

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
LIMITS = H2Limits(streams_max=3, stream_window_bytes=2000, connection_window_bytes=70_000)
Act = Callable[["Side"], None]


def block(*fields: tuple[str, str]) -> bytes:
    return b"".join(plain_field(name, value) for name, value in fields)


def huffman(*fields: tuple[str, str]) -> bytes:
    encoder = Encoder()
    encoder.header_table.maxsize = 0
    return encoder.encode(fields)


class Side:
    """One codec, and all that it has said."""

    def __init__(self, kind: H2Kind, *, client: bool) -> None:
        self.codec = kind(client=client, now=0.0, limits=LIMITS)
        self.said: list[object] = []
        self.left: dict[int, int] = {}
        """Of the bodies of answers."""
        self._decoder = Decoder()
        preface = b"" if client else PREFACE
        theirs = SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 30_000})
        start = theirs.serialize() + SettingsFrame(0, flags=["ACK"]).serialize()
        self.codec.receive(preface + start, now=0.0)
        agree_on_no_table(self.codec)
        self._wire = bytearray(b"".join(one.data for one in self.codec.outgoing(0.0)))
        if client:
            del self._wire[: len(PREFACE)]
        self.note()

    def take(self, octets: bytes) -> None:
        """Receive; what it makes of it is noted, and what it sends."""
        try:
            self.said += self.codec.receive(octets, now=0.0)
        except HttpProtocolError as error:
            # For a frame on a stream that has ended h2 says one or the other, as it has cleaned
            # up behind the stream or not.
            self.said.append(("refused", "ended" if error.code in (1, 5) else error.code))
            raise
        finally:
            self.note()

    def note(self) -> None:
        """The frames that it has queued, as what they mean."""
        self._wire += b"".join(one.data for one in self.codec.outgoing(0.0))
        while self._wire:
            frame, size = Frame.parse_frame_header(memoryview(bytes(self._wire[:9])))
            body = bytes(self._wire[9 : 9 + size])
            del self._wire[: 9 + size]
            meaning: object = body
            if isinstance(frame, GoAwayFrame):
                continue  # its code is that of the error
            if isinstance(frame, WindowUpdateFrame) and frame.stream_id:
                continue  # the short way needs none: what it takes fits into the window
            if isinstance(frame, HeadersFrame):
                meaning = [tuple(one) for one in self._decoder.decode(body, raw=True)]
            self.said.append((type(frame).__name__, sorted(frame.flags), frame.stream_id, meaning))


@dataclass(frozen=True)
class Octets:
    """Something that a peer sends, cut in pieces of that size."""

    data: bytes
    cut: int

    def __call__(self, side: Side) -> None:
        for start in range(0, len(self.data), self.cut):
            side.take(self.data[start : start + self.cut])


@dataclass(frozen=True)
class Answer:
    """A response as `SendQueue` writes it, or more of one: what the windows allow."""

    stream: int
    size: int
    in_pieces: bool

    def __call__(self, side: Side) -> None:
        fields = ((":status", "200"), ("content-length", str(self.size)))
        try:
            if self.stream not in side.left:
                side.left[self.stream] = self.size
                side.codec.send_headers(self.stream, fields, end=not self.size)
            while left := side.left[self.stream]:
                piece = min(left, side.codec.writable(self.stream), 7 if self.in_pieces else left)
                if not piece:
                    break
                side.left[self.stream] -= piece
                side.codec.send_data(self.stream, bytes(piece), end=piece == left)
        except StreamGone as gone:
            side.said.append(str(gone))
        side.note()


@dataclass(frozen=True)
class Consume:
    """Room given back."""

    stream: int
    size: int

    def __call__(self, side: Side) -> None:
        if not any(getattr(one, "stream_id", 0) >= self.stream for one in side.said):
            return  # nothing came on it
        held = side.codec._h2._inbound_flow_control_window_manager
        side.codec.consumed(
            self.stream, min(self.size, held.max_window_size - held.current_window_size)
        )
        side.said.append(held.current_window_size)
        side.note()


@dataclass(frozen=True)
class Cancel:
    """A stream ended early."""

    stream: int

    def __call__(self, side: Side) -> None:
        side.codec.reset(self.stream, 8)
        side.note()
