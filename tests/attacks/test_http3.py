"""The same over HTTP/3, and what only UDP makes possible."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aioquic.asyncio.client import connect
from aioquic.h3.connection import H3Connection
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet import QuicFrameType
from aioquic.quic.packet_builder import QuicPacketBuilder

from sdcpd.transport.limits import (
    CONNECTIONS_PER_PEER_MAX,
    PENDING_HANDSHAKES_MAX,
    H3Limits,
    PaceLimits,
)
from tests.attacks.victim import BIG_BYTES, BODY_BYTES_MAX, Victim, victim
from tests.kit.certs import CertKit
from tests.kit.quic import GET, BareClient, Seen, client_configuration

EXCESSIVE_LOAD = 0x107
STREAM_LIMIT_ERROR = 0x4
BIG = [*GET[:3], (b":path", b"/big")]
WAIT = [*GET[:3], (b":path", b"/wait")]
QUICK = PaceLimits(grace_s=0.3, bytes_per_s_min=1 << 20)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> CertKit:
    return CertKit(tmp_path_factory.mktemp("pki"))


@asynccontextmanager
async def bare(
    server: Victim, configuration: QuicConfiguration | None = None
) -> AsyncIterator[BareClient]:
    """A connection with a good certificate, in the hands of a test."""
    seen = Seen()

    def protocol(*args: object, **kwargs: object) -> BareClient:
        made = BareClient(*args, **kwargs)  # type: ignore[arg-type]
        made.seen = seen
        return made

    made = configuration or client_configuration(server.attacker)
    async with connect(
        "127.0.0.1", server.port, configuration=made, create_protocol=protocol
    ) as client:
        assert isinstance(client, BareClient)
        yield client


def rapid_reset(client: BareClient) -> None:
    client.leaves = False
    for _ in range(5):
        stream = client.ask()
        client._quic.reset_stream(stream, 0x10C)
        client._quic.stop_stream(stream, 0x10C)


def pings(client: BareClient) -> None:
    """A thousand in a datagram, an octet each; the library alone would send one."""

    def write(builder: QuicPacketBuilder, *_: object, **__: object) -> None:
        for _ in range(1000):
            builder.start_frame(QuicFrameType.PING, capacity=1)

    client._quic._write_ping_frame = write
    client._quic.send_ping(0)


def endless_headers(client: BareClient) -> None:
    """A section of megabytes, refused by what it announces."""
    stream = client._quic.get_next_available_stream_id()
    client._quic.send_stream_data(stream, b"\x01\x80\xb7\x1b\x00" + bytes(2000))


def empty_data(client: BareClient) -> None:
    """Frames of HTTP/3 with nothing in them, two octets each."""
    client.http = client.http or H3Connection(client._quic)
    stream = client._quic.get_next_available_stream_id()
    client.http.send_headers(stream, WAIT, end_stream=False)
    client._quic.send_stream_data(stream, b"\x00\x00" * 500)


def unknown_frames(client: BareClient) -> None:
    """The same of a kind that nobody knows."""
    client.http = client.http or H3Connection(client._quic)
    stream = client._quic.get_next_available_stream_id()
    client.http.send_headers(stream, WAIT, end_stream=False)
    client._quic.send_stream_data(stream, b"\x21\x00" * 500)


@pytest.mark.parametrize(
    "piece",
    [
        pings,
        empty_data,
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (rapid_reset, endless_headers, unknown_frames)
        ),
    ],
)
async def test_a_flood_ends_its_connection_and_no_other(
    kit: CertKit, piece: Callable[[BareClient], None]
) -> None:
    async with victim(kit) as server:

        async def attack() -> None:
            async with bare(server) as client:
                while client.seen.closed is None:
                    piece(client)
                    client.transmit()
                    await asyncio.sleep(0.01)  # a peer's pace, not a wait
                await client.wait_closed()
                assert client.seen.closed == EXCESSIVE_LOAD

        await server.under(attack)
        assert server.reasons["http_error"] >= 1


@pytest.mark.slow
async def test_connections_of_one_peer_are_bounded(kit: CertKit) -> None:
    async with victim(kit) as server, contextlib.AsyncExitStack() as held:

        async def attack() -> None:
            for _ in range(CONNECTIONS_PER_PEER_MAX + 4):
                client = await held.enter_async_context(bare(server))
                await client.ping()

        await server.under(attack)
        assert server.reasons["too_many_connections"] >= 4
        assert len(server.server._connections) <= CONNECTIONS_PER_PEER_MAX + 2


@pytest.mark.slow
async def test_streams_above_the_limit_end_the_connection(kit: CertKit) -> None:
    async with victim(kit) as server:

        async def attack() -> None:
            async with bare(server) as client:
                client._quic._remote_max_streams_bidi = 10_000
                for _ in range(H3Limits().streams_max + 10):
                    client.ask(WAIT)
                await client.wait_closed()
                assert client.seen.closed == STREAM_LIMIT_ERROR

        await server.under(attack)


async def test_bodies_that_are_too_large_are_refused(kit: CertKit) -> None:
    async with victim(kit) as server:

        async def attack() -> None:
            async with bare(server) as client:
                client.ask([(b":method", b"POST"), *GET[1:]], body=bytes(BODY_BYTES_MAX + 1))
                await client.wait_closed()
                assert client.seen.status == 413

        await server.under(attack)
        assert server.reasons["body_too_large"] >= 1


async def test_bodies_that_come_too_slowly_are_given_up(kit: CertKit) -> None:
    async with victim(kit, pace=QUICK) as server:

        async def attack() -> None:
            async with bare(server) as client:
                client.ask(WAIT)
                for _ in range(40):
                    stream = client._quic.get_next_available_stream_id()
                    assert client.http is not None
                    client.http.send_headers(stream, GET)
                seen = server.reasons["slow_body"]
                async with asyncio.timeout(10):
                    while server.reasons["slow_body"] < seen + 40:
                        client.transmit()
                        await asyncio.sleep(0.05)  # a peer's pace, not a wait

        await server.under(attack)


async def test_windows_that_stay_shut_are_given_up(kit: CertKit) -> None:
    async with victim(kit, pace=QUICK) as server:

        async def attack() -> None:
            shut = client_configuration(server.attacker)
            shut.max_stream_data = 0
            async with bare(server, shut) as client:
                for _ in range(40):
                    client.ask(BIG)
                seen = server.reasons["slow_body"]
                async with asyncio.timeout(10):
                    while server.reasons["slow_body"] < seen + 40:
                        await asyncio.sleep(0.05)  # a peer's pace, not a wait
                assert server.unsent_bytes < BIG_BYTES

        await server.under(attack)


async def test_handshakes_that_do_not_end_are_dropped(kit: CertKit) -> None:
    """Clients that answer the Retry, and are never heard of again."""
    async with victim(kit, handshake_timeout_s=1.0) as server:

        async def attack() -> None:
            for _ in range(PENDING_HANDSHAKES_MAX // 8):
                await asyncio.to_thread(begin_handshake, server)
                assert len(server.server._pending) <= PENDING_HANDSHAKES_MAX

        await server.under(attack)
        async with asyncio.timeout(10):
            while server.server._pending:
                await asyncio.sleep(0.05)  # until their time is over
        assert server.reasons["handshake_timeout"] >= PENDING_HANDSHAKES_MAX // 8


def begin_handshake(server: Victim) -> None:
    """As far as the server's first flight."""
    quic = QuicConnection(configuration=client_configuration(server.attacker))
    address = ("127.0.0.1", server.port)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain:
        plain.settimeout(5)
        quic.connect(address, now=0.0)
        for data, _ in quic.datagrams_to_send(now=0.0):
            plain.sendto(data, address)
        quic.receive_datagram(plain.recv(2000), address, now=0.0)  # the Retry
        for data, _ in quic.datagrams_to_send(now=0.0):
            plain.sendto(data, address)
        plain.recv(2000)


async def test_datagrams_from_addresses_that_are_not_theirs_cost_nothing(kit: CertKit) -> None:
    """First packets by thousands, with tokens that are noise, and datagrams that are nothing."""
    async with victim(kit) as server:
        initials = []
        for token in (b"", os.urandom(60)):
            quic = QuicConnection(configuration=client_configuration(server.attacker))
            quic._peer_token = token
            quic.connect(("127.0.0.1", server.port), now=0.0)
            initials += [data for data, _ in quic.datagrams_to_send(now=0.0)]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain:
            plain.setblocking(False)
            plain.connect(("127.0.0.1", server.port))

            async def attack() -> None:
                for data in (*initials, b"\x40" + os.urandom(40), os.urandom(1200)):
                    with contextlib.suppress(BlockingIOError):
                        plain.send(data)
                await asyncio.sleep(0.001)  # thousands a second; more fills the socket itself
                # The honest client's handshake, at most: nothing is kept of these.
                assert len(server.server._pending) <= 2
                assert server.server._quic is not None
                assert len(server.server._quic._links()) <= 1

            await server.under(attack)
        assert not server.reasons
