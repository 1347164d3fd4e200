"""A bare QUIC client, with whatever certificate a test gives it: aioquic alone, none of our code."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field

from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.h3.connection import H3Connection
from aioquic.h3.events import DataReceived, HeadersReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import ConnectionTerminated, QuicEvent
from aioquic.tls import SessionTicket

from certs import Leaf

CRYPTO_ERROR = 0x100
GET = [(b":method", b"GET"), (b":scheme", b"https"), (b":authority", b"x"), (b":path", b"/")]


@dataclass
class Seen:
    """What came of a connection."""

    status: int | None = None
    body: bytes = b""
    closed: int | None = None
    """The error code with which the server ended it."""
    tickets: list[SessionTicket] = field(default_factory=list)

    @property
    def alert(self) -> int | None:
        """The TLS alert that it stands for."""
        return None if self.closed is None else self.closed - CRYPTO_ERROR


class BareClient(QuicConnectionProtocol):
    """Sends one GET as soon as it may, and notes what comes."""

    seen: Seen
    http: H3Connection | None = None
    leaves = True
    """Whether the first answer is all that it came for."""

    def ask(self, headers: list[tuple[bytes, bytes]] = GET, body: bytes = b"") -> int:
        """Send a request on a new stream."""
        if self.http is None:
            self.http = H3Connection(self._quic)
        stream_id: int = self._quic.get_next_available_stream_id()
        self.http.send_headers(stream_id, headers, end_stream=not body)
        if body:
            self.http.send_data(stream_id, body, end_stream=True)
        self.transmit()
        return stream_id

    def quic_event_received(self, event: QuicEvent) -> None:
        """See QuicConnectionProtocol."""
        if isinstance(event, ConnectionTerminated):
            self.seen.closed = event.error_code
        if self.http is None:
            return
        for one in self.http.handle_event(event):
            if isinstance(one, HeadersReceived):
                self.seen.status = int(dict(one.headers)[b":status"])
            elif isinstance(one, DataReceived):
                self.seen.body += one.data
            if self.leaves and getattr(one, "stream_ended", False):
                self.close()


def client_configuration(leaf: Leaf | None, *, alpn: str = "h3") -> QuicConfiguration:
    """A client that takes any server and shows that certificate, or none."""
    made = QuicConfiguration(
        is_client=True, alpn_protocols=[alpn], verify_mode=ssl.CERT_NONE, idle_timeout=3.0
    )
    if leaf is not None:
        made.load_cert_chain(leaf.crt_path, leaf.key_path)
    return made


async def talk(
    port: int,
    leaf: Leaf | None,
    *,
    alpn: str = "h3",
    configuration: QuicConfiguration | None = None,
) -> Seen:
    """Connect, send a GET, and wait for its answer or the end."""
    seen = Seen()

    def protocol(*args: object, **kwargs: object) -> BareClient:
        made = BareClient(*args, **kwargs)  # type: ignore[arg-type]
        made.seen = seen
        return made

    made = configuration or client_configuration(leaf, alpn=alpn)
    try:
        async with connect(
            "127.0.0.1",
            port,
            configuration=made,
            create_protocol=protocol,
            session_ticket_handler=seen.tickets.append,
        ) as client:
            assert isinstance(client, BareClient)
            client.ask()
            await client.wait_closed()
    except ConnectionError:
        assert seen.closed is not None, "the handshake ended without a word"
    return seen
