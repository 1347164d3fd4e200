"""Requests that are reset in the same octets as they come: refused or not, others go on."""

from __future__ import annotations

import asyncio
import logging

import pytest
from aioquic.asyncio.client import connect
from aioquic.h3.connection import H3Connection
from hyperframe.frame import DataFrame, RstStreamFrame

from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import Request, Response
from tests.attacks.test_http2 import head, opening
from tests.attacks.victim import BODY_BYTES_MAX, victim
from tests.kit.certs import CertKit
from tests.kit.quic import GET, BareClient, Seen, client_configuration
from tests.kit.serving import serving

TOO_LONG = ("content-length", str(BODY_BYTES_MAX + 1))


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> CertKit:
    return CertKit(tmp_path_factory.mktemp("pki"))


@pytest.mark.parametrize(
    "request_octets",
    [
        opening(1, head("nopath"), end=False),
        opening(1, head("/", TOO_LONG), end=False),
        opening(1, head("/"), end=False) + DataFrame(1, bytes(10_000)).serialize() * 11,
        opening(1, head("/", ("content-length", "5")), end=True),
    ],
    ids=["no path", "announced too long", "too long", "another length"],
)
async def test_a_refused_request_that_is_reset_takes_nothing_along(
    kit: CertKit, request_octets: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with victim(kit) as server, server.octets() as (reader, writer):
        good = opening(3, head("/"), end=True)
        writer.write(request_octets + RstStreamFrame(1, 8).serialize() + good)
        seen = b""
        async with asyncio.timeout(5):
            while not seen.endswith(b"ok"):
                more = await reader.read(1 << 16)
                assert more, "the connection lives"
                seen += more
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


async def test_the_same_over_http_3(kit: CertKit, caplog: pytest.LogCaptureFixture) -> None:
    """Stopped in the datagram that asks: the next request in it is answered."""
    seen = Seen()

    def protocol(*args: object, **kwargs: object) -> BareClient:
        made = BareClient(*args, **kwargs)  # type: ignore[arg-type]
        made.seen = seen
        return made

    async with victim(kit) as server:
        made = client_configuration(server.attacker)
        async with connect(
            "127.0.0.1", server.port, configuration=made, create_protocol=protocol
        ) as client:
            assert isinstance(client, BareClient)
            client.http = H3Connection(client._quic)
            stream = client._quic.get_next_available_stream_id()
            too_long = (b"content-length", TOO_LONG[1].encode())
            client.http.send_headers(stream, [*GET, too_long], end_stream=False)
            client._quic.stop_stream(stream, 0x10C)
            client.ask()
            async with asyncio.timeout(5):
                await client.wait_closed()
    assert (seen.status, seen.body) == (200, b"ok")
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


@pytest.mark.parametrize("version", ["h2", "h3"])
async def test_a_cancelled_call_does_not_disturb_another(kit: CertKit, version: str) -> None:
    """Two callers share a connection; one begins a body that is too large and gives up at once."""
    asked, answer = asyncio.Event(), asyncio.Event()

    async def handle(request: Request) -> Response:
        if request.body == b"slow":
            asked.set()
            await answer.wait()
        return Response(200, (), b"ok")

    async with serving(kit, handle) as (_, port):
        client = HttpClient(kit.identity("drafter", "d0"), transport=version)  # type: ignore[arg-type]
        uri = f"https://127.0.0.1:{port}/"
        other = asyncio.ensure_future(client.request("POST", uri, body=b"slow"))
        await asked.wait()
        for turns in range(4):
            big = asyncio.ensure_future(client.request("POST", uri, body=bytes(5000)))
            for _ in range(turns):
                await asyncio.sleep(0)
            big.cancel()
            await asyncio.gather(big, return_exceptions=True)
        answer.set()
        assert (await other).status == 200
        await client.aclose()
