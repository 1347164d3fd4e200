"""Floods over real TLS: the connection dies, the server lives, the log says why."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hyperframe.frame import HeadersFrame, RstStreamFrame, SettingsFrame

from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import Request, Response
from sdcpd.transport.server import Server
from tests.kit.certs import CertKit

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SettingsFrame(0).serialize()
GET_FIELDS = b"\x82\x87\x84\x41\x01x"


async def no_content(request: Request) -> Response:
    return Response(204)


@asynccontextmanager
async def attacked(
    kit: CertKit,
) -> AsyncIterator[tuple[int, asyncio.StreamReader, asyncio.StreamWriter]]:
    server = Server(
        no_content,
        identity=kit.identity("verifier", "v0"),
        host="127.0.0.1",
        port=0,
        body_bytes_max=1000,
    )
    port = await server.start()
    leaf = kit.leaf("drafter", "d0")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(kit.ca)
    context.load_cert_chain(leaf.crt_path, leaf.key_path)
    context.set_alpn_protocols(["h2"])
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname="127.0.0.1"
    )
    writer.write(PREFACE)
    yield port, reader, writer
    writer.close()
    client = HttpClient(kit.identity("router", "r0"))
    assert (await client.request("GET", f"https://127.0.0.1:{port}/")).status == 204
    await client.aclose()
    await server.aclose(grace_s=1)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> CertKit:
    return CertKit(tmp_path_factory.mktemp("pki"))


async def test_rapid_reset_flood_ends_the_connection_and_not_the_server(
    kit: CertKit, caplog: pytest.LogCaptureFixture
) -> None:
    async with attacked(kit) as (_, reader, writer):
        for number in range(1, 1200, 2):
            block = HeadersFrame(number, GET_FIELDS, flags=["END_HEADERS", "END_STREAM"])
            writer.write(block.serialize() + RstStreamFrame(number, 8).serialize())
        answer = await asyncio.wait_for(reader.read(), 10)
        assert (11).to_bytes(4, "big") in answer  # GOAWAY ENHANCE_YOUR_CALM
    assert "(drafter/d0): flood of resets" in caplog.text


async def test_frame_header_over_the_limit_ends_the_connection_at_once(
    kit: CertKit, caplog: pytest.LogCaptureFixture
) -> None:
    async with attacked(kit) as (_, reader, writer):
        writer.write((1 << 20).to_bytes(3, "big") + b"\x00\x00" + (1).to_bytes(4, "big"))
        await asyncio.wait_for(reader.read(), 10)
    assert "SETTINGS_MAX_FRAME_SIZE" in caplog.text


async def test_ping_flood_that_reads_nothing_is_bounded(
    kit: CertKit, caplog: pytest.LogCaptureFixture
) -> None:
    async with attacked(kit) as (_, reader, writer):
        ping = (8).to_bytes(3, "big") + b"\x06\x00" + bytes(4) + b"12345678"
        writer.write(ping * 5000)
        await asyncio.wait_for(reader.read(), 10)
    assert "carry nothing" in caplog.text
