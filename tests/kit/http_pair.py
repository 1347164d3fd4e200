"""A client codec and a server codec wired together in memory, with a clock that tests move."""

from __future__ import annotations

from collections.abc import Callable

from sdcpd.transport.client_exchange import ClientExchange, Outcome
from sdcpd.transport.h2_codec import H2Codec
from sdcpd.transport.h2_fast import FastH2Codec
from sdcpd.transport.http import Headers, Peer, Response
from sdcpd.transport.limits import BUFFERED_BYTES_MAX, H2Limits, PaceLimits
from sdcpd.transport.server_exchange import Incoming, ServerExchange

PEER = Peer("test", ("spiffe://test.example/sdcp/drafter/d0",), (), "drafter/d0", "00")


def request_fields(method: str = "POST", path: str = "/", *extra: tuple[str, str]) -> Headers:
    """Header fields of a request as the client makes them."""
    return (
        (":method", method),
        (":scheme", "https"),
        (":authority", "server.example"),
        (":path", path),
        *extra,
    )


H2Kind = type[H2Codec] | type[FastH2Codec]


def agree_on_no_table(*codecs: H2Codec) -> None:
    """As after the first blocks each way, which say that they use no table (RFC 7541, 4.2)."""
    for codec in codecs:
        table = codec._h2.encoder
        table.header_table_size, table.header_table.resized, table.table_size_changes = 0, False, []
        codec._h2.decoder.header_table_size = 0


class HttpPair:
    """One connection without sockets; `move` carries octets until nothing moves any more."""

    def __init__(
        self,
        *,
        client_limits: H2Limits | None = None,
        server_limits: H2Limits | None = None,
        body_bytes_max: Callable[[str, str], int] = lambda _method, _path: 1 << 30,
        pace: PaceLimits | None = None,
        requests_max: int = 100,
        buffered_bytes_max: int = BUFFERED_BYTES_MAX,
        kind: H2Kind = H2Codec,
    ) -> None:
        self.now = 0.0
        self.client_codec = kind(client=True, now=0.0, limits=client_limits)
        self.server_codec = kind(client=False, now=0.0, limits=server_limits)
        self.client = ClientExchange(
            self.client_codec, server="server.example:443", response_bytes_max=1 << 30, pace=pace
        )
        self.server = ServerExchange(
            self.server_codec,
            body_bytes_max=body_bytes_max,
            peer=PEER,
            requests_max=requests_max,
            buffered_bytes_max=buffered_bytes_max,
            pace=pace,
        )
        self.requests: list[Incoming] = []
        self.outcomes: list[Outcome] = []

    def move(self) -> None:
        """Carry octets both ways until both sides are quiet."""
        while self.to_server() | self.to_client():
            pass

    def to_server(self) -> bool:
        """Carry one turn from client to server; returns whether anything moved."""
        self.client.pump()
        data = b"".join(one.data for one in self.client_codec.outgoing(self.now))
        if data:
            events = self.server_codec.receive(data, now=self.now)
            self.requests += self.server.handle(events, now=self.now)
        return bool(data)

    def to_client(self) -> bool:
        """Carry one turn from server to client; returns whether anything moved."""
        self.server.pump()
        data = b"".join(one.data for one in self.server_codec.outgoing(self.now))
        if data:
            self.outcomes += self.client.handle(self.client_codec.receive(data, now=self.now))
        return bool(data)

    def ask(self, body: bytes = b"", path: str = "/", *, method: str = "POST") -> int:
        """Start a request; returns its stream."""
        stream_id = self.client.start(request_fields(method, path), body, now=self.now)
        assert stream_id is not None
        return stream_id

    def answer_all(self, response: Response) -> None:
        """Answer every request that arrived."""
        for incoming in self.requests:
            self.server.respond(incoming.stream_id, response, now=self.now)
        self.requests.clear()
