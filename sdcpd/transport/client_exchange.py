"""The client's half of an exchange: sends requests on streams and assembles their responses.

Sans-IO, written once on `HttpConnection` for both HTTP versions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sdcpd.transport.http import (
    ConnectFailed,
    ConnectionLost,
    Data,
    End,
    GoAway,
    Headers,
    HttpConnection,
    PeerReady,
    Reset,
    ResetCode,
    Response,
    ResponseHeaders,
    StreamEvent,
    TransportError,
)
from sdcpd.transport.limits import PaceLimits
from sdcpd.transport.send_queue import SendQueue


class NotProcessed(ConnectFailed):
    """The peer gave the request back without looking at it: safe to send again."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request of ours ended."""

    stream_id: int
    result: Response | TransportError


@dataclass(slots=True)
class _Call:
    status: int = 0
    headers: Headers = ()
    chunks: list[bytes] = field(default_factory=list)
    size: int = 0


class ClientExchange:
    """Sends the requests of one connection and assembles their responses.

    `server` names the peer in error texts.
    """

    def __init__(
        self,
        codec: HttpConnection,
        *,
        server: str,
        response_bytes_max: int,
        pace: PaceLimits | None = None,
    ) -> None:
        self._codec = codec
        self._server = server
        self._response_bytes_max = response_bytes_max
        self._queue = SendQueue(codec, pace=pace)
        self._calls: dict[int, _Call] = {}
        self.ready = False
        self.going = False

    @property
    def drained(self) -> bool:
        """Whether the server said goodbye and nothing of ours is left there."""
        return self.going and not self._calls

    @property
    def can_start(self) -> bool:
        """Whether the server allows another request now."""
        return not self.going and self._codec.open_stream() is not None

    def start(self, headers: Headers, body: bytes, *, now: float) -> int | None:
        """Open a stream for a request, or return None while the server allows no more.

        Raises ValueError for a header field that HTTP/2 does not allow.
        """
        stream_id = self._codec.open_stream()
        if stream_id is None:
            return None
        self._queue.add(stream_id, headers, body, now=now)
        self._calls[stream_id] = _Call()
        return stream_id

    def cancel(self, stream_id: int) -> None:
        """Give up on a request; the server may still process it."""
        if self._calls.pop(stream_id, None) is not None:
            self._queue.cancel(stream_id)
            self._codec.reset(stream_id, ResetCode.CANCEL)

    def pump(self) -> bool:
        """One turn of sending; returns whether more could go at once."""
        return self._queue.pump()

    def on_tick(self, now: float) -> list[Outcome]:
        """Give up on requests whose body the server takes too slowly."""
        reason = f"{self._server} takes the request body too slowly; check its load and the network"
        return [
            Outcome(stream_id, ConnectionLost(reason))
            for stream_id in self._queue.expire(now)
            if self._calls.pop(stream_id, None) is not None
        ]

    def handle(self, events: list[StreamEvent]) -> list[Outcome]:
        """Take stream events in order; returns the requests that ended."""
        ended: list[Outcome] = []
        for event in events:
            match event:
                case PeerReady():
                    self.ready = True
                case ResponseHeaders() if call := self._calls.get(event.stream_id):
                    call.status, call.headers = event.status, event.headers
                case Data():
                    self._collect(event, ended)
                case End() if call := self._calls.get(event.stream_id):
                    ended.append(self._answered(event.stream_id, call))
                case Reset():
                    self._broken(event, ended)
                case GoAway():
                    self._leave(event, ended)
                case _:
                    continue  # Late frames of a request that we gave up.
        return ended

    def _collect(self, data: Data, ended: list[Outcome]) -> None:
        self._codec.consumed(data.stream_id, data.flow_bytes)
        call = self._calls.get(data.stream_id)
        if call is None:
            return
        call.chunks.append(data.data)
        call.size += len(data.data)
        if call.size > self._response_bytes_max:
            self.cancel(data.stream_id)
            reason = f"{self._server} answered with more than {self._response_bytes_max} octets"
            ended.append(Outcome(data.stream_id, ConnectionLost(reason)))

    def _answered(self, stream_id: int, call: _Call) -> Outcome:
        del self._calls[stream_id]
        # An answer before the end of our body: the rest is not wanted (413, for one).
        self._queue.cancel(stream_id)
        self._codec.reset(stream_id, ResetCode.NO_ERROR)
        return Outcome(stream_id, Response(call.status, call.headers, b"".join(call.chunks)))

    def _broken(self, event: Reset, ended: list[Outcome]) -> None:
        self._queue.cancel(event.stream_id)
        if self._calls.pop(event.stream_id, None) is None:
            return
        error: TransportError
        if event.code == ResetCode.REFUSED_STREAM:
            error = NotProcessed(f"{self._server} is too busy for another request; try again later")
        else:
            error = ConnectionLost(
                f"{self._server} reset the request (HTTP/2 code {event.code}); see its log"
            )
        ended.append(Outcome(event.stream_id, error))

    def _leave(self, event: GoAway, ended: list[Outcome]) -> None:
        self.going = True
        reason = f"{self._server} is closing the connection (HTTP/2 code {event.code})"
        for stream_id in [one for one in self._calls if one > event.last_stream_id]:
            self._queue.cancel(stream_id)
            del self._calls[stream_id]
            ended.append(Outcome(stream_id, NotProcessed(reason)))
