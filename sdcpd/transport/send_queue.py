"""The one flow-controlled way out of a connection: small messages first, bulk in turns.

A bulk body can empty the connection's window and fill the socket for milliseconds; a verdict of
200 octets must not wait behind it. So everything with a body goes through here.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdcpd.transport.http import Headers, HttpConnection, ResetCode, StreamGone
from sdcpd.transport.limits import (
    BULK_TURN_BYTES,
    SMALL_BYTES_MAX,
    SMALL_TURN_BYTES,
    PaceLimits,
)


@dataclass(slots=True)
class _Sending:
    body: memoryview
    started: float
    reset_after: bool
    sent: int = 0


class SendQueue:
    """Bodies waiting for window, written to one codec."""

    def __init__(self, codec: HttpConnection, *, pace: PaceLimits | None = None) -> None:
        self._codec = codec
        self._pace = pace or PaceLimits()
        self._small: dict[int, _Sending] = {}
        self._bulk: dict[int, _Sending] = {}
        self.buffered_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Whether every body was handed to the codec."""
        return not self._small and not self._bulk

    def add(
        self,
        stream_id: int,
        headers: Headers,
        body: bytes,
        *,
        now: float,
        reset_after: bool = False,
    ) -> None:
        """Send headers now and the body as windows allow; raises StreamGone or ValueError.

        `reset_after` ends the stream with NO_ERROR afterwards: an answer to a request whose rest
        is not wanted (RFC 9113 section 8.1).
        """
        self._codec.send_headers(stream_id, headers, end=not body)
        if not body:
            if reset_after:
                self._codec.reset(stream_id, ResetCode.NO_ERROR)
            return
        queue = self._small if len(body) <= SMALL_BYTES_MAX else self._bulk
        queue[stream_id] = _Sending(memoryview(body), started=now, reset_after=reset_after)
        self.buffered_bytes += len(body)

    def cancel(self, stream_id: int) -> None:
        """Drop what is left of a body, if anything is."""
        sending = self._small.pop(stream_id, None) or self._bulk.pop(stream_id, None)
        if sending is not None:
            self.buffered_bytes -= len(sending.body) - sending.sent

    def pump(self) -> bool:
        """Hand over one turn's worth; returns whether more could go at once in the next turn."""
        return self._turn(self._small, SMALL_TURN_BYTES) | self._turn(self._bulk, BULK_TURN_BYTES)

    def expire(self, now: float) -> list[int]:
        """Reset the streams whose reader is too slow, and return them."""
        slow = [
            stream_id
            for queue in (self._small, self._bulk)
            for stream_id, one in queue.items()
            if self._pace.too_slow(started=one.started, moved_bytes=one.sent, now=now)
        ]
        for stream_id in slow:
            self.cancel(stream_id)
            self._codec.reset(stream_id, ResetCode.CANCEL)
        return slow

    def _turn(self, queue: dict[int, _Sending], budget_bytes: int) -> bool:
        moved = True
        while queue and moved:
            moved = False
            for stream_id in list(queue):
                if budget_bytes <= 0:
                    return True
                sent = self._send_frame(queue, stream_id)
                moved = moved or sent > 0
                budget_bytes -= sent
        return False

    def _send_frame(self, queue: dict[int, _Sending], stream_id: int) -> int:
        sending = queue[stream_id]
        size = min(self._codec.writable(stream_id), len(sending.body) - sending.sent)
        if size <= 0:
            return 0
        end = sending.sent + size
        last = end == len(sending.body)
        try:
            self._codec.send_data(stream_id, sending.body[sending.sent : end], end=last)
        except StreamGone:
            self.cancel(stream_id)
            return 0
        sending.sent = end
        self.buffered_bytes -= size
        del queue[stream_id]
        if not last:
            queue[stream_id] = sending  # Back to the end of the line.
        elif sending.reset_after:
            self._codec.reset(stream_id, ResetCode.NO_ERROR)
        return size
