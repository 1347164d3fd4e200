"""Certificates that are reloaded while a connection is being made, on either side."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import ConnectFailed, Request, Response
from sdcpd.transport.server import Server
from sdcpd.transport.tls import TlsIdentity
from tests.kit.certs import CertKit
from tests.kit.serving import serving


@pytest.fixture
def kit(tmp_path_factory: pytest.TempPathFactory) -> CertKit:
    return CertKit(tmp_path_factory.mktemp("pki"))


class Gate:
    """Between a client and a server: lets nothing through before it is opened."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.reached, self.opened = asyncio.Event(), asyncio.Event()
        self.connections = 0

    async def start(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self.reached.set()
        await self.opened.wait()

        async def pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                sink.write(data)
            sink.close()

        await asyncio.gather(pipe(reader, inner_writer), pipe(inner_reader, writer))


async def ok(_: Request) -> Response:
    return Response(200, (), b"ok")


async def test_who_is_revoked_in_its_handshake_is_drained(kit: CertKit) -> None:
    """One of the old connections: what it asks later must come over a new one, which is refused."""
    own, evil = kit.leaf("verifier", "v0"), kit.leaf("router", "evil")
    crl = kit.revoke(kit.leaf("router", "other"))
    identity = TlsIdentity(ca=kit.ca, cert=own.crt_path, key=own.key_path, crl=crl)
    server = Server(ok, identity=identity, host="127.0.0.1", port=0, body_bytes_max=1000)
    port = await server.start()
    gate = Gate(port)
    listener = await gate.start()
    client = HttpClient(TlsIdentity(ca=kit.ca, cert=evil.crt_path, key=evil.key_path))
    uri = f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}/"
    first = asyncio.ensure_future(client.request("GET", uri))
    await gate.reached.wait()
    while not server._pending:  # the server's loop is ours
        await asyncio.sleep(0)
    kit.revoke(evil)
    identity.reload()
    server.drain_connections()
    gate.opened.set()
    await asyncio.gather(first, return_exceptions=True)
    async with asyncio.timeout(5):
        while server._connections:
            await asyncio.sleep(0.01)  # until it has left; the deadline is above
    with pytest.raises(ConnectFailed, match="revoked"):
        await client.request("GET", uri)
    await client.aclose()
    await server.aclose()
    listener.close()


async def test_a_client_shows_its_new_certificate_although_it_was_connecting(kit: CertKit) -> None:
    leaf = kit.leaf("router", "r0")
    identity = TlsIdentity(ca=kit.ca, cert=leaf.crt_path, key=leaf.key_path)
    seen: list[str] = []

    async def handle(request: Request) -> Response:
        assert request.peer is not None
        seen.append(request.peer.fingerprint)
        return Response(200)

    async with serving(kit, handle) as (_, port):
        gate = Gate(port)
        listener = await gate.start()
        uri = f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}/"
        client = HttpClient(identity, transport="h2")
        first = asyncio.ensure_future(client.request("GET", uri))
        await gate.reached.wait()
        kit.leaf("router", "r0")
        identity.reload()
        client.renew_connections()
        gate.opened.set()
        assert (await first).status == 200, "whoever waited has its answer"
        await client.request("GET", uri)
        await client.aclose()
        listener.close()
    new = hashlib.sha256(identity.certificate.public_bytes(Encoding.DER)).hexdigest()
    assert seen[-1] == new and gate.connections == 2


async def test_a_client_that_is_closed_while_it_connects_says_so(kit: CertKit) -> None:
    silent = await asyncio.start_server(lambda reader, writer: reader.read(), "127.0.0.1", 0)
    client = HttpClient(kit.identity("router", "r0"))
    uri = f"https://127.0.0.1:{silent.sockets[0].getsockname()[1]}/"
    call = asyncio.ensure_future(client.request("GET", uri))
    while not client._connecting:
        await asyncio.sleep(0)
    await client.aclose()
    with pytest.raises(ConnectFailed, match="this client is closed"):
        await call
    silent.close()
