"""An HTTP/2 client that costs next to nothing, so that what is measured is the server.

Writes the same small POST again and again in frames made beforehand, and counts the frames that
end a stream: no HPACK, no checks, windows opened wide. For servers that are known to be sound.
"""

from __future__ import annotations

import asyncio
import ssl
import statistics
import time
from struct import Struct
from typing import cast

from hpack import Encoder

_FRAME = Struct(">HBBBL")
_DATA, _HEADERS, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 4, 6, 7, 8
_WIDE = (1 << 31) - 1 - 65_535


def frame(kind: int, flags: int, stream_id: int, body: bytes) -> bytes:
    """One frame for the wire."""
    size = len(body)
    return _FRAME.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + body


class BareClient(asyncio.Protocol):
    """Keeps so many requests in flight until its time is over."""

    def __init__(self, authority: str, body: bytes, streams: int, seconds: float) -> None:
        encoder = Encoder()
        encoder.header_table.maxsize = 0
        self._block = encoder.encode(
            [
                (":method", "POST"),
                (":scheme", "https"),
                (":authority", authority),
                (":path", "/"),
                ("content-length", str(len(body))),
            ]
        )
        self._body, self._streams, self._seconds = body, streams, seconds
        self._rest = b""
        self._next = 1
        self._begun: dict[int, float] = {}
        self._end = 0.0
        self.times: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say hello and ask."""
        self._transport = talking = cast("asyncio.Transport", transport)
        self._end = time.perf_counter() + self._seconds
        table_size = (1).to_bytes(2, "big") + bytes(4)
        hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(_SETTINGS, 0, 0, table_size)
        hello += frame(_WINDOW_UPDATE, 0, 0, _WIDE.to_bytes(4, "big"))
        # The table is given up in the first block (RFC 7541 section 4.2).
        talking.write(hello + self._ask(b"\x20"))

    def data_received(self, data: bytes) -> None:
        """Ask again for each answer that has ended."""
        data = self._rest + data
        position, end, out = 0, len(data), []
        while end - position >= 9:
            high, low, kind, flags, stream_id = _FRAME.unpack_from(data, position)
            stop = position + 9 + (high << 8 | low)
            if stop > end:
                break
            if kind in (_DATA, _HEADERS):
                if flags & 1:
                    out.append(self._ended(stream_id))
            elif kind in (_SETTINGS, _PING) and not flags & 1:
                out.append(frame(kind, 1, 0, data[position + 9 : stop] if kind == _PING else b""))
            elif kind not in (_SETTINGS, _PING, _WINDOW_UPDATE):
                raise AssertionError(f"frame of type {kind}")
            position = stop
        self._rest = data[position:]
        if out:
            self._transport.write(b"".join(out))

    def connection_lost(self, exc: Exception | None) -> None:
        """The end, or a fault."""
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the server closed"))

    def _ask(self, before: bytes = b"") -> bytes:
        stream_id, self._next = self._next, self._next + 2
        self._begun[stream_id] = time.perf_counter()
        head = frame(_HEADERS, 4, stream_id, before + self._block)
        return head + frame(_DATA, 1, stream_id, self._body)

    def _ended(self, stream_id: int) -> bytes:
        now = time.perf_counter()
        self.times.append(now - self._begun.pop(stream_id))
        if now > self._end:
            if not self._begun and not self.done.done():
                self.done.set_result(None)
            return b""
        more = self._streams if len(self.times) == 1 else 1  # all of them after the first answer
        return b"".join(self._ask() for _ in range(more))


async def load(
    context: ssl.SSLContext, port: int, body: bytes, *, streams: int, seconds: float
) -> dict[str, float]:
    """Requests a second, and the median of one exchange in milliseconds."""
    context.set_alpn_protocols(["h2"])
    begin = time.perf_counter()
    _, client = await asyncio.get_running_loop().create_connection(
        lambda: BareClient(f"127.0.0.1:{port}", body, streams, seconds),
        "127.0.0.1",
        port,
        ssl=context,
        server_hostname="127.0.0.1",
    )
    await client.done
    spent = time.perf_counter() - begin
    client._transport.abort()
    return {
        "per_s": len(client.times) / spent,
        "median_ms": 1000 * statistics.median(client.times),
    }
