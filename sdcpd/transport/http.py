"""The vocabulary of the transport: requests, responses, stream events and the face of a codec.

Everything above this package knows only `Request`, `Response`, `Handler`, `Client` and the
errors. Everything below (HTTP/2 now, HTTP/3 beside it) is a sans-IO `HttpConnection`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, from its certificate; `fingerprint` is SHA-256 in hex (D-I1)."""

    address: str
    uris: tuple[str, ...]
    dns: tuple[str, ...]
    common_name: str
    fingerprint: str


def find_header(headers: Headers, name: str) -> str | None:
    """The first value of a field, compared without case, or None."""
    wanted = name.lower()
    return next((value for key, value in headers if key.lower() == wanted), None)


@dataclass(frozen=True, slots=True)
class Request:
    """One whole request; `path` is raw (percent-encoded) and without the query."""

    method: str
    path: str
    query: str
    headers: Headers = ()
    body: bytes = b""
    peer: Peer | None = None
    authority: str = ""
    takes_view: bool = False
    """Whether the body of the response may be a `view`, which is copied at once."""

    def header(self, name: str) -> str | None:
        """The first value of a field, compared without case, or None."""
        return find_header(self.headers, name)


@dataclass(frozen=True, slots=True)
class Response:
    """One whole response; its body may lie in a cache's own memory for a request that takes it."""

    status: int
    headers: Headers = ()
    body: bytes = b""
    view: memoryview | None = None
    """The body, in place of `body`; holds the memory for as long as it is there."""

    def header(self, name: str) -> str | None:
        """The first value of a field, compared without case, or None."""
        return find_header(self.headers, name)


Handler = Callable[[Request], Awaitable[Response]]


class Client(Protocol):
    """Sends requests to other instances; implemented over sockets and in process."""

    async def request(
        self,
        method: str,
        uri: str,
        *,
        headers: Headers = (),
        body: bytes = b"",
        timeout_s: float = 30.0,
    ) -> Response:
        """Send one request and return its whole response; follows no redirect (D-H9).

        Raises ConnectFailed (nothing was sent), PeerRefused, ConnectionLost or RequestTimeout
        (the request may have been processed).
        """
        ...

    async def aclose(self) -> None:
        """Close every connection; requests in flight fail with ConnectionLost."""
        ...


class TransportError(Exception):
    """A request got no response; the text is one sentence for a person."""

    @property
    def reason(self) -> str:
        """The sentence: what failed, with which peer, why, and what to do."""
        return str(self)


class ConnectFailed(TransportError):
    """No connection, so nothing was sent and the request is safe to repeat."""


class PeerRefused(ConnectFailed):
    """TLS or identity failed on one of the two sides, so nothing was sent."""


class OtherProtocol(PeerRefused):
    """What listens there is not what we speak; the other HTTP version may still be."""


class ConnectionLost(TransportError):
    """The connection ended first: the request may or may not have been processed."""


class RequestTimeout(TransportError):
    """No response in time: the request may or may not have been processed."""


class HttpProtocolError(Exception):
    """The peer broke the protocol or a bound of ours: flush what is outgoing, then close."""

    def __init__(self, reason: str, *, code: int = 1) -> None:
        super().__init__(reason)
        self.code = code


class StreamGone(Exception):
    """The stream was ended or reset by the peer, so nothing can be sent on it."""


class ResetCode(IntEnum):
    """Why a stream ends early, in HTTP/2's numbers (RFC 9113 section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    REFUSED_STREAM = 7
    CANCEL = 8
    ENHANCE_YOUR_CALM = 11


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    """A peer opened a stream; `target` is the path with its query."""

    stream_id: int
    method: str
    target: str
    authority: str
    headers: Headers


@dataclass(frozen=True, slots=True)
class ResponseHeaders:
    """The final (not 1xx) response headers of a stream that we opened."""

    stream_id: int
    status: int
    headers: Headers


@dataclass(frozen=True, slots=True)
class Data:
    """Body octets; `flow_bytes` counts padding too and is what `consumed` wants back."""

    stream_id: int
    data: bytes
    flow_bytes: int


@dataclass(frozen=True, slots=True)
class End:
    """The peer's half of a stream is complete."""

    stream_id: int


@dataclass(frozen=True, slots=True)
class Reset:
    """A stream ended early, by the peer or by the codec for a fault of the peer."""

    stream_id: int
    code: int
    by_peer: bool


@dataclass(frozen=True, slots=True)
class GoAway:
    """The peer opens no more streams for us; those above `last_stream_id` were not processed."""

    last_stream_id: int
    code: int
    detail: str


@dataclass(frozen=True, slots=True)
class PeerReady:
    """The peer's first SETTINGS arrived: it accepted us, and the connection works."""


@dataclass(frozen=True, slots=True)
class PingAcked:
    """The peer answered the ping with this payload of 8 octets."""

    payload: bytes


StreamEvent = RequestHeaders | ResponseHeaders | Data | End | Reset | GoAway | PeerReady | PingAcked

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Octets to send; `address` is set for datagrams only."""

    data: bytes
    address: Address | None = None


class HttpConnection(Protocol):
    """One HTTP connection without sockets or clock: octets in, events out, octets pulled.

    Pseudo-header fields (`:method`, `:status`...) stand first in what `send_headers` gets.
    """

    piecewise: bool
    """Whether what arrives in one turn comes in many small pieces, best answered together."""

    def receive(
        self, data: bytes | memoryview, *, address: Address | None = None, now: float
    ) -> list[StreamEvent]:
        """Take octets; raises HttpProtocolError (and nothing else) when the peer is at fault."""
        ...

    def open_stream(self) -> int | None:
        """The next stream id for a request, or None while the peer allows no more streams."""
        ...

    def send_headers(self, stream_id: int, headers: Headers, *, end: bool) -> None:
        """Queue a header section; raises StreamGone, or ValueError for a field not allowed."""
        ...

    def send_data(self, stream_id: int, data: bytes | memoryview, *, end: bool) -> None:
        """Queue at most `writable` octets; raises StreamGone."""
        ...

    @property
    def unsent(self) -> bool:
        """Whether something that was given to it would be lost if the connection were closed."""
        ...

    def writable(self, stream_id: int) -> int:
        """How many octets of body the peer allows on this stream now, at most one frame."""
        ...

    def consumed(self, stream_id: int, size: int) -> None:
        """Give `size` octets of flow control back to the peer."""
        ...

    def reset(self, stream_id: int, code: int) -> None:
        """End a stream early; nothing happens if it already ended."""
        ...

    def ping(self, payload: bytes) -> None:
        """Queue a ping of 8 octets."""
        ...

    def go_away(self, *, final: bool, code: int = 0) -> None:
        """Announce the end; only a `final` one names the last stream that will be served."""
        ...

    def outgoing(self, now: float) -> list[Outgoing]:
        """Take everything that is queued to be sent."""
        ...

    def deadline(self) -> float | None:
        """When `on_deadline` wants to be called, on the clock of `now`."""
        ...

    def on_deadline(self, now: float) -> list[StreamEvent]:
        """Act on time passed; raises HttpProtocolError when the peer is dead or too slow."""
        ...
