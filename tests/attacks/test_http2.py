"""What a peer with a certificate can do over HTTP/2, and that others are served meanwhile.

Each attack meets one bound of `transport/limits.py`, is counted, and is repeated until clients of
both versions have been served many times beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from sdcpd.transport.hpack_static import plain_field
from sdcpd.transport.limits import (
    CONNECTIONS_PER_PEER_MAX,
    LINGERING_MAX,
    PENDING_HANDSHAKES_MAX,
    PaceLimits,
)
from tests.attacks.victim import BIG_BYTES, BODY_BYTES_MAX, victim
from tests.kit.certs import CertKit

ENHANCE_YOUR_CALM = (11).to_bytes(4, "big")
NO_EMPTY_TABLE = b"\x20"
QUICK = PaceLimits(grace_s=0.3, bytes_per_s_min=1 << 20)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> CertKit:
    return CertKit(tmp_path_factory.mktemp("pki"))


def head(path: str = "/", *fields: tuple[str, str], method: str = "POST") -> bytes:
    every = ((":method", method), (":scheme", "https"), (":authority", "x"), (":path", path))
    return b"".join(plain_field(*one) for one in (*every, *fields))


def opening(number: int, block: bytes, *, end: bool) -> bytes:
    flags = ["END_HEADERS", "END_STREAM"] if end else ["END_HEADERS"]
    return HeadersFrame(number, block, flags=flags).serialize()


def rapid_reset(number: int) -> bytes:
    return opening(number, head(), end=True) + RstStreamFrame(number, 8).serialize()


def window_overflow(number: int) -> bytes:
    update = WindowUpdateFrame(number, 2**31 - 1).serialize()
    return opening(number, head("/wait"), end=True) + update


def data_after_the_end(number: int) -> bytes:
    return opening(number, head("/wait"), end=True) + DataFrame(number, b"x").serialize() * 10


def headers_after_the_end(number: int) -> bytes:
    return opening(number, head("/wait"), end=True) * 2


def settings(number: int) -> bytes:
    return SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 65_535}).serialize() * 10


def pings(number: int) -> bytes:
    return PingFrame(0, b"12345678").serialize() * 10


def priorities(number: int) -> bytes:
    return PriorityFrame(number, depends_on=0, stream_weight=1).serialize() * 10


def empty_data(number: int) -> bytes:
    opened = opening(1, head("/"), end=False) if number == 1 else b""
    return opened + DataFrame(1, b"").serialize() * 10


def tiny_data(number: int) -> bytes:
    opened = opening(1, head("/"), end=False) if number == 1 else b""
    return opened + DataFrame(1, b"x").serialize() * 10


def tiny_announced_data(number: int) -> bytes:
    """The same on the short way."""
    length = ("content-length", "65536")
    opened = opening(1, head("/", length), end=False) if number == 1 else b""
    return opened + DataFrame(1, b"x").serialize() * 10


def unknown(number: int) -> bytes:
    return b"\x00\x00\x01\xfa\x00\x00\x00\x00\x00x" * 10


def refused_streams(number: int) -> bytes:
    return opening(number, head("/wait"), end=True)


@pytest.mark.parametrize(
    "piece",
    [
        rapid_reset,
        pytest.param(window_overflow, marks=pytest.mark.slow),
        pytest.param(data_after_the_end, marks=pytest.mark.slow),
        pytest.param(headers_after_the_end, marks=pytest.mark.slow),
        settings,
        pings,
        pytest.param(priorities, marks=pytest.mark.slow),
        pytest.param(empty_data, marks=pytest.mark.slow),
        tiny_data,
        pytest.param(tiny_announced_data, marks=pytest.mark.slow),
        pytest.param(unknown, marks=pytest.mark.slow),
        pytest.param(refused_streams, marks=pytest.mark.slow),
    ],
)
async def test_a_flood_ends_its_connection_and_no_other(
    kit: CertKit, piece: Callable[[int], bytes]
) -> None:
    async with victim(kit) as server:

        async def attack() -> None:
            async with server.octets() as (reader, writer):
                for number in range(1, 700, 2):
                    writer.write(piece(number))
                assert await reader.read(), "its last words: a GOAWAY"

        await server.under(attack)
        assert server.reasons["http_error"] >= 1


@pytest.mark.slow
async def test_tls_records_that_carry_next_to_nothing(kit: CertKit) -> None:
    """A record for each octet; whatever else TLS lets a peer send for nothing is counted alike."""
    async with victim(kit) as server:

        async def attack() -> None:
            async with server.octets() as (reader, writer):
                ping = PingFrame(0, b"12345678").serialize()
                seen = b""
                while not reader.at_eof() and ENHANCE_YOUR_CALM not in seen:
                    for octet in ping * 200:
                        writer.write(bytes((octet,)))
                    await writer.drain()
                    seen += await reader.read(1 << 16)

        await server.under(attack)
        assert server.reasons["http_error"] >= 1


async def test_who_was_refused_holds_no_more_sockets_than_a_few(kit: CertKit) -> None:
    """Plain HTTP needs no certificate, and a socket that is kept open is a descriptor of ours."""
    async with victim(kit) as server:

        async def attack() -> None:
            many = LINGERING_MAX + 50
            held = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(many)]
            for _, writer in held:
                writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await asyncio.gather(*(reader.read() for reader, _ in held))
            assert len(server.server._lingering) <= LINGERING_MAX
            for _, writer in held:
                writer.close()

        await server.under(attack)
        assert server.reasons["plain_http"] >= LINGERING_MAX


def continuations() -> bytes:
    more = ContinuationFrame(1, head() * 2000).serialize()
    return HeadersFrame(1, head()).serialize() + more * 20


def bomb() -> bytes:
    """A block that is small on the wire and large when it is read."""
    entry = b"\x40\x01a\x7f\x81\x1f" + b"v" * 4096
    return opening(1, entry + b"\xbe" * 4000, end=True)


def overlong_frame() -> bytes:
    return (1 << 20).to_bytes(3, "big") + b"\x00\x00" + (1).to_bytes(4, "big") + bytes(1000)


@pytest.mark.parametrize("octets", [continuations, bomb, overlong_frame])
@pytest.mark.slow
async def test_what_is_too_large_is_refused_before_it_is_here(
    kit: CertKit, octets: Callable[[], bytes]
) -> None:
    async with victim(kit) as server:

        async def attack() -> None:
            async with server.octets() as (reader, writer):
                writer.write(octets())
                await reader.read()

        await server.under(attack)
        assert server.reasons["http_error"] >= 1


@pytest.mark.slow
async def test_replies_that_are_not_read_stop_the_reading(kit: CertKit) -> None:
    """PINGs in numbers below the flood's, whose answers nobody takes."""
    async with victim(kit) as server:

        async def attack() -> None:
            async with server.octets() as (reader, writer):
                reader._transport.pause_reading()  # type: ignore[attr-defined]
                writer.write(pings(1) * 150)
                await asyncio.sleep(0)
                connections = list(server.server._connections.values())
                for one in connections:
                    waiting = one.link._transport  # type: ignore[union-attr]
                    if hasattr(waiting, "get_write_buffer_size"):
                        assert waiting.get_write_buffer_size() < 2 << 20

        await server.under(attack)


async def test_bodies_that_are_too_large_are_refused(kit: CertKit) -> None:
    """By what they announce, and by what comes of those that announce nothing."""
    async with victim(kit) as server:

        async def attack() -> None:
            async with server.octets() as (reader, writer):
                length = ("content-length", str(BODY_BYTES_MAX + 1))
                writer.write(opening(1, head("/", length), end=False))
                writer.write(opening(3, head("/"), end=False))
                for _ in range(BODY_BYTES_MAX // 10_000 + 1):
                    writer.write(DataFrame(3, bytes(10_000)).serialize())
                seen = b""
                while seen.count(b"413") < 2:
                    seen += await reader.read(1 << 16)

        await server.under(attack)
        assert server.reasons["body_too_large"] >= 2
        assert set(server.reasons) == {"body_too_large"}


@pytest.mark.slow
async def test_bodies_that_come_too_slowly_are_given_up(kit: CertKit) -> None:
    """An octet now and then stretches nothing."""
    async with victim(kit, pace=QUICK) as server:

        async def attack() -> None:
            async with server.octets() as (_, writer):
                block = head("/", ("content-length", "1000"))
                for number in range(1, 100, 2):
                    writer.write(opening(number, block, end=False))
                async with asyncio.timeout(10):
                    while not server.reasons["slow_body"]:
                        for number in range(1, 100, 2):
                            writer.write(DataFrame(number, b"x").serialize())
                        await asyncio.sleep(0.05)  # a peer's pace, not a wait

        await server.under(attack)
        assert server.reasons["slow_body"] >= 50


async def test_windows_that_stay_shut_are_given_up(kit: CertKit) -> None:
    """Answers that nobody takes are dropped after their time, with all that they hold."""
    async with victim(kit, pace=QUICK) as server:

        async def attack() -> None:
            shut = {SettingsFrame.INITIAL_WINDOW_SIZE: 0}
            async with server.octets(shut) as (_, writer):
                for number in range(1, 100, 2):
                    writer.write(opening(number, head("/big", method="GET"), end=True))
                seen = server.reasons["slow_body"]
                async with asyncio.timeout(10):
                    while server.reasons["slow_body"] < seen + 50:
                        writer.write(WindowUpdateFrame(1, 1).serialize())
                        await asyncio.sleep(0.05)  # a peer's pace, not a wait
                assert server.unsent_bytes < BIG_BYTES

        await server.under(attack)


async def test_streams_above_the_limit_are_given_back(kit: CertKit) -> None:
    async with victim(kit) as server:

        async def attack() -> None:
            async with server.octets() as (reader, writer):
                for number in range(1, 241, 2):
                    writer.write(opening(number, head("/wait"), end=True))
                refused = RstStreamFrame(239, 7).serialize()
                seen = b""
                while refused not in seen:
                    seen += await reader.read(1 << 16)

        await server.under(attack)
        assert server.reasons["too_many_requests"] >= 20


async def test_handshakes_that_do_not_end_are_dropped(kit: CertKit) -> None:
    """Connections that say nothing, more than may be pending, and those that hang up half way."""
    async with victim(kit, handshake_timeout_s=1.0) as server:

        async def attack() -> None:
            idle = [
                await asyncio.open_connection("127.0.0.1", server.port)
                for _ in range(PENDING_HANDSHAKES_MAX + 20)
            ]
            hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
            assert len(server.server._pending) <= PENDING_HANDSHAKES_MAX
            for _, writer in idle[::2]:
                writer.write(hello)
                writer.transport.abort()
            for _, writer in idle[1::2]:
                writer.write(hello[:1])
            await asyncio.gather(*(reader.read() for reader, _ in idle[1::2]))
            for _, writer in idle:
                writer.close()

        await server.under(attack)
        assert server.reasons["handshake_flood"] or server.reasons["handshake_timeout"]
        assert len(server.server._pending) < 5


async def test_connections_of_one_peer_are_bounded(kit: CertKit) -> None:
    async with victim(kit) as server:
        held = []

        async def attack() -> None:
            for _ in range(CONNECTIONS_PER_PEER_MAX + 4):
                opened = server.octets()
                held.append(opened)
                reader, _ = await opened.__aenter__()
                await reader.read(9)

        await server.under(attack)
        assert server.reasons["too_many_connections"] >= 4
        assert len(server.server._connections) <= CONNECTIONS_PER_PEER_MAX + 2
        for opened in held:
            await opened.__aexit__(None, None, None)
