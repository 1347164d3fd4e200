"""A peer that is killed or restarted is noticed soon, and by whoever waits for it first."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from sdcpd.transport.client import HttpClient, Transport
from sdcpd.transport.http import ConnectionLost, Request, Response
from sdcpd.transport.limits import STATELESS_RESETS_BURST
from sdcpd.transport.quic_link import QuicLink
from sdcpd.transport.quic_reset import TOKEN_BYTES, ResetTokens
from tests.kit.certs import CertKit
from tests.kit.serving import serving

# A server that answers nothing, in a process of its own.
SILENT = """
import asyncio, sys
from pathlib import Path
from sdcpd.transport.http import Request, Response
from sdcpd.transport.server import Server
from sdcpd.transport.tls import TlsIdentity

async def main(ca, crt, key):
    async def handle(request: Request) -> Response:
        if request.path == "/silent":
            print("asked", flush=True)
            await asyncio.Event().wait()
        return Response(204)

    identity = TlsIdentity(ca=Path(ca), cert=Path(crt), key=Path(key))
    server = Server(
        handle, identity=identity, host="127.0.0.1", port=0, body_bytes_max=100, http3=True
    )
    print(await server.start(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> CertKit:
    return CertKit(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def killed_later(kit: CertKit) -> Iterator[subprocess.Popen[str]]:
    leaf = kit.leaf("verifier", "v0")
    command = [sys.executable, "-c", SILENT, str(kit.ca), str(leaf.crt_path), str(leaf.key_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@asynccontextmanager
async def talking(kit: CertKit, version: Transport) -> AsyncIterator[HttpClient]:
    client = HttpClient(kit.identity("router", "r0"), transport=version)
    yield client
    await client.aclose()


@pytest.mark.parametrize("version", ["h2", "h3"])
async def test_a_killed_server_ends_the_requests_that_wait_for_it(
    kit: CertKit, killed_later: subprocess.Popen[str], version: Transport
) -> None:
    assert killed_later.stdout is not None
    port = int(killed_later.stdout.readline())
    async with talking(kit, version) as client:
        uri = f"https://127.0.0.1:{port}/silent"
        waiting = asyncio.ensure_future(client.request("GET", uri, timeout_s=60))
        asked = await asyncio.to_thread(killed_later.stdout.readline)
        assert asked == "asked\n"
        killed_later.kill()
        with pytest.raises(ConnectionLost, match="may have been processed") as lost:
            await waiting
        assert "silent" not in str(lost.value), "it was told, not given up"


async def no_content(request: Request) -> Response:
    return Response(204)


async def test_a_server_that_knows_nothing_of_a_connection_says_so(kit: CertKit) -> None:
    """RFC 9000 section 10.3, as after a restart: all that it has is the connection's token."""

    async def handle(request: Request) -> Response:
        if request.path == "/silent":
            asked.set()
            await asyncio.Event().wait()
        return Response(204)

    asked = asyncio.Event()
    async with serving(kit, handle, grace_s=0) as (server, port), talking(kit, "h3") as client:
        uri = f"https://127.0.0.1:{port}"
        waiting = asyncio.ensure_future(client.request("GET", f"{uri}/silent", timeout_s=60))
        await asked.wait()
        assert server._quic is not None
        for link in server._quic._links():
            link._finish(None)  # without a word
        with pytest.raises(ConnectionLost, match="it was restarted"):
            await waiting
        assert (await client.request("GET", f"{uri}/")).status == 204


async def test_others_cannot_end_a_connection(kit: CertKit) -> None:
    """Noise of the right form changes nothing, whoever sends it."""
    async with serving(kit, no_content) as (_, port), talking(kit, "h3") as client:
        uri = f"https://127.0.0.1:{port}/"
        await client.request("GET", uri)
        (connection,) = client._connections
        link = connection._link
        assert isinstance(link, QuicLink)
        forged = ResetTokens(ec.generate_private_key(ec.SECP256R1()), listener="127.0.0.1:1")
        for one in link._quic._peer_cid_available:
            packet = forged.packet(one.cid, received_bytes=1200)
            assert packet is not None
            link.datagram_received(packet, ("127.0.0.1", port))
        link.datagram_received(b"", ("127.0.0.1", port))
        await client.request("GET", uri)
        assert set(client._connections) == {connection}


@pytest.mark.slow
async def test_servers_of_one_certificate_do_not_end_each_others_connections(kit: CertKit) -> None:
    """RFC 9000 section 21.11: one that is asked about a connection of the other says nothing of use."""
    async with (
        serving(kit, no_content) as (_, port),
        serving(kit, no_content) as (_, other),
        talking(kit, "h3") as client,
    ):
        uri = f"https://127.0.0.1:{port}/"
        await client.request("GET", uri)
        (connection,) = client._connections
        link = connection._link
        assert isinstance(link, QuicLink)
        for one in (link._quic._peer_cid, *link._quic._peer_cid_available):
            (answer,) = await answers(other, [b"\x40" + one.cid + bytes(60)])
            link.datagram_received(answer, ("127.0.0.1", port))
        await client.request("GET", uri)
        assert set(client._connections) == {connection}


async def answers(port: int, datagrams: list[bytes]) -> list[bytes]:
    """What a server sends back until it is silent."""
    loop = asyncio.get_running_loop()
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.connect(("127.0.0.1", port))
        for one in datagrams:
            await loop.sock_sendall(sender, one)
        while True:
            try:
                found.append(await asyncio.wait_for(loop.sock_recv(sender, 2000), 0.3))
            except TimeoutError:
                return found


async def test_unknown_datagrams_are_answered_with_less_and_not_for_ever(kit: CertKit) -> None:
    """A reset is shorter than what it answers, and a flood of them is bounded."""
    asked = [
        b"\x40" + number.to_bytes(8, "big") + bytes(30)
        for number in range(STATELESS_RESETS_BURST + 50)
    ]
    async with serving(kit, no_content) as (_, port):
        found = await answers(port, asked)
    assert 1 <= len(found) <= STATELESS_RESETS_BURST + 25
    assert {len(one) for one in found} == {38}


async def test_a_version_that_nobody_speaks_is_answered_only_where_that_is_less(
    kit: CertKit,
) -> None:
    """RFC 9000 section 5.2.2: nobody gets more octets sent to another than they send."""
    header = b"\xc0" + b"\x1a\x2a\x3a\x4a" + b"\x01a\x01b"
    async with serving(kit, no_content) as (_, port):
        assert await answers(port, [header, header + bytes(900)]) == []
        (answer,) = await answers(port, [header + bytes(1200)])
    assert answer[1:5] == bytes(4), "a version negotiation"


def test_a_token_outlives_the_process_and_differs_by_connection() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    first, second = (ResetTokens(key, listener="10.0.0.1:7443") for _ in range(2))
    elsewhere = ResetTokens(key, listener="10.0.0.1:7444")
    assert elsewhere.of(b"a" * 8) != first.of(b"a" * 8)
    assert first.of(b"a" * 8) == second.of(b"a" * 8) != first.of(b"b" * 8)
    packet = second.packet(b"a" * 8, received_bytes=1200)
    assert packet is not None and packet[-TOKEN_BYTES:] == first.of(b"a" * 8)
    assert len(packet) == 43 and packet[0] & 0xC0 == 0x40
    assert second.packet(b"a" * 8, received_bytes=21) is None
