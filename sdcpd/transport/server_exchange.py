"""The server's half: requests on streams to whole requests, and responses back.

Sans-IO: stream events and `now` in; whole requests or responses out. The pump (pump.py) moves the
octets, server.py runs the tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from sdcpd.transport.http import (
    Data,
    End,
    Headers,
    HttpConnection,
    Peer,
    PingAcked,
    Request,
    RequestHeaders,
    Reset,
    ResetCode,
    Response,
    StreamEvent,
    StreamGone,
    find_header,
)
from sdcpd.transport.limits import BUFFERED_BYTES_MAX, PaceLimits
from sdcpd.transport.problem import problem
from sdcpd.transport.send_queue import SendQueue

DRAIN_PING = b"sdcpdrn1"
DRAIN_PING_TIMEOUT_S = 1.0
LENGTH_DIGITS_MAX = 19
BODILESS_STATUS = frozenset((204, 304))


@dataclass(frozen=True, slots=True)
class Incoming:
    """A whole request and the stream to answer on."""

    stream_id: int
    request: Request


@dataclass(slots=True)
class _Inbound:
    head: RequestHeaders
    bytes_max: int
    started: float
    announced: int | None = None
    chunks: list[bytes] = field(default_factory=list)
    size: int = 0


class ServerExchange:
    """Assembles the requests of one connection and sends their responses."""

    def __init__(
        self,
        codec: HttpConnection,
        *,
        body_bytes_max: Callable[[str, str], int],
        peer: Peer | None,
        requests_max: int = 100,
        buffered_bytes_max: int = BUFFERED_BYTES_MAX,
        pace: PaceLimits | None = None,
    ) -> None:
        self._codec = codec
        self._body_bytes_max = body_bytes_max
        self._peer = peer
        self._requests_max = requests_max
        self._buffered_bytes_max = buffered_bytes_max
        self._pace = pace or PaceLimits()
        self._queue = SendQueue(codec, pace=self._pace)
        self._inbound: dict[int, _Inbound] = {}
        self._inbound_bytes = 0
        # Handlers, not streams: a stream that its client reset still costs us its handler.
        self._handling: dict[int, str] = {}
        self._drain_started: float | None = None
        self._last_announced = False
        self.refusals: list[str] = []
        """Why requests were refused, for whoever counts them (refusals.REQUEST_REASONS)."""

    @property
    def drained(self) -> bool:
        """Whether a drain was announced and nothing is left to receive, answer or send."""
        busy = self._inbound or self._handling or not self._queue.is_empty
        return self._last_announced and not busy

    def handle(self, events: list[StreamEvent], *, now: float) -> list[Incoming]:
        """Take stream events in order; returns the requests that became whole."""
        complete: list[Incoming] = []
        for event in events:
            match event:
                case RequestHeaders():
                    self._begin(event, now)
                case Data():
                    self._collect(event, now)
                case End() if (one := self._inbound.get(event.stream_id)) is not None:
                    if one.announced is None or one.announced == one.size:
                        complete.append(self._complete(event.stream_id))
                    else:  # which the libraries do not see where there is no DATA at all
                        detail = "the body is not as long as content-length says"
                        self._refuse(event.stream_id, problem(400, detail), now)
                case Reset():
                    self._drop(event.stream_id)
                    self._queue.cancel(event.stream_id)
                case PingAcked(payload=payload) if payload == DRAIN_PING:
                    self._announce_last()
                case _:
                    continue  # A client's GOAWAY or SETTINGS change nothing here.
        return complete

    def respond(self, stream_id: int, response: Response, *, now: float) -> None:
        """Send a handler's response; raises StreamGone (client left) or ValueError (bad field)."""
        method = self._handling.pop(stream_id)
        if self._queue.buffered_bytes > self._buffered_bytes_max:
            # A few octets of requests ask for many of answers, all of which would have to be kept.
            self.refusals.append("too_many_bytes")
            detail = "too many answers wait on this connection; read them, and ask again later"
            response = problem(503, detail)
            response = replace(response, headers=(*response.headers, ("retry-after", "1")))
        self._send(stream_id, response, head=method == "HEAD", now=now)

    def fail(self, stream_id: int, response: Response, *, now: float) -> None:
        """Send what replaces a response that could not be sent; raises StreamGone."""
        self._send(stream_id, response, head=False, now=now)

    def pump(self) -> bool:
        """One turn of sending; returns whether more could go at once."""
        return self._queue.pump()

    def on_tick(self, now: float) -> None:
        """Give up on bodies that are too slow, and on a drain ping that nobody answers."""
        self.refusals += ["slow_body" for _ in self._queue.expire(now)]
        for stream_id, one in list(self._inbound.items()):
            if self._pace.too_slow(started=one.started, moved_bytes=one.size, now=now):
                self.refusals.append("slow_body")
                self._drop(stream_id)
                self._codec.reset(stream_id, ResetCode.CANCEL)
        if self._drain_started is not None and now > self._drain_started + DRAIN_PING_TIMEOUT_S:
            self._announce_last()

    def start_drain(self, now: float) -> None:
        """Tell the client to open no more streams, and find out which ones are on their way."""
        if self._drain_started is None:
            self._drain_started = now
            self._codec.go_away(final=False)
            self._codec.ping(DRAIN_PING)

    def _announce_last(self) -> None:
        if not self._last_announced:
            self._last_announced = True
            self._codec.go_away(final=True)

    def _begin(self, head: RequestHeaders, now: float) -> None:
        in_flight = len(self._inbound) + len(self._handling)
        buffered = self._inbound_bytes + self._queue.buffered_bytes
        full = in_flight >= self._requests_max or buffered > self._buffered_bytes_max
        if self._last_announced or full:
            if not self._last_announced:  # a drain is no fault of the client's
                self.refusals.append("too_many_requests")
            self._codec.reset(head.stream_id, ResetCode.REFUSED_STREAM)
            return
        path = head.target.partition("?")[0]
        one = _Inbound(head, self._body_bytes_max(head.method, path), started=now)
        self._inbound[head.stream_id] = one
        announced = find_header(head.headers, "content-length") or ""
        if announced.isascii() and announced.isdecimal() and len(announced) < LENGTH_DIGITS_MAX:
            one.announced = int(announced)
        if not head.target.startswith(("/", "*")):
            self._refuse(head.stream_id, problem(400, "the request has no path"), now)
        elif one.announced is not None and one.announced > one.bytes_max:
            self._refuse_size(head.stream_id, one, now)

    def _collect(self, data: Data, now: float) -> None:
        self._codec.consumed(data.stream_id, data.flow_bytes)
        one = self._inbound.get(data.stream_id)
        if one is None:
            return  # The rest of a request that was refused or reset.
        one.chunks.append(data.data)
        one.size += len(data.data)
        self._inbound_bytes += len(data.data)
        if one.size > one.bytes_max:
            self._refuse_size(data.stream_id, one, now)
        elif self._inbound_bytes > self._buffered_bytes_max and len(self._inbound) > 1:
            self.refusals.append("too_many_bytes")
            detail = "too many request bodies at once on this connection; send it again later"
            self._refuse(data.stream_id, problem(503, detail), now)

    def _complete(self, stream_id: int) -> Incoming:
        one = self._drop(stream_id)
        assert one is not None  # `handle` asked only for streams that are here.
        self._handling[stream_id] = one.head.method
        path, _, query = one.head.target.partition("?")
        request = Request(
            one.head.method,
            path,
            query,
            headers=one.head.headers,
            body=b"".join(one.chunks),
            peer=self._peer,
            authority=one.head.authority,
        )
        return Incoming(stream_id, request)

    def _drop(self, stream_id: int) -> _Inbound | None:
        one = self._inbound.pop(stream_id, None)
        if one is not None:
            self._inbound_bytes -= one.size
        return one

    def _refuse_size(self, stream_id: int, one: _Inbound, now: float) -> None:
        self.refusals.append("body_too_large")
        detail = f"the body of this request may hold at most {one.bytes_max} octets"
        self._refuse(stream_id, problem(413, detail), now)

    def _refuse(self, stream_id: int, response: Response, now: float) -> None:
        self._drop(stream_id)
        # Its client may have reset it in the same octets; then nobody waits for this answer.
        with suppress(StreamGone):
            self._queue.add(
                stream_id, _response_fields(response), response.body, now=now, reset_after=True
            )

    def _send(self, stream_id: int, response: Response, *, head: bool, now: float) -> None:
        body = b"" if head or response.status in BODILESS_STATUS else response.body
        self._queue.add(stream_id, _response_fields(response), body, now=now)


def _response_fields(response: Response) -> Headers:
    fields: list[tuple[str, str]] = [(":status", str(response.status)), *response.headers]
    if response.status not in BODILESS_STATUS and response.header("content-length") is None:
        fields.append(("content-length", str(len(response.body))))
    return tuple(fields)
