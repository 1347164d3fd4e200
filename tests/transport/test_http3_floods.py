"""What one peer with a certificate can cost over HTTP/3, and that others are served meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aioquic.asyncio.client import connect
from aioquic.h3.connection import H3Connection

from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import Request, Response
from sdcpd.transport.server import Server
from tests.kit.certs import CertKit
from tests.kit.quic import GET, BareClient, Seen, client_configuration

EXCESSIVE_LOAD = 0x107
Attack = Callable[[BareClient], Awaitable[None]]


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> CertKit:
    return CertKit(tmp_path_factory.mktemp("pki"))


@asynccontextmanager
async def attacked(kit: CertKit, handled: list[Request]) -> AsyncIterator[tuple[int, list[str]]]:
    async def handle(request: Request) -> Response:
        handled.append(request)
        return Response(200, (), b"ok")

    reasons: list[str] = []
    server = Server(
        handle,
        identity=kit.identity("verifier", "v0"),
        host="127.0.0.1",
        port=0,
        body_bytes_max=1000,
        on_refused=reasons.append,
        http3=True,
    )
    port = await server.start()
    try:
        yield port, reasons
        client = HttpClient(kit.identity("router", "r0"), transport="h3")
        answer = await client.request("GET", f"https://127.0.0.1:{port}/")
        assert answer.status == 200, "others are served"
        await client.aclose()
    finally:
        await server.aclose(1)


async def bare(kit: CertKit, port: int, attack: Attack) -> Seen:
    """A connection with a good certificate that then does something."""
    seen = Seen()

    def protocol(*args: object, **kwargs: object) -> BareClient:
        made = BareClient(*args, **kwargs)  # type: ignore[arg-type]
        made.seen = seen
        return made

    configuration = client_configuration(kit.leaf("drafter", "d0"))
    async with connect(
        "127.0.0.1", port, configuration=configuration, create_protocol=protocol
    ) as client:
        assert isinstance(client, BareClient)
        await attack(client)
        async with asyncio.timeout(5):
            await client.wait_closed()
    return seen


async def test_a_header_section_without_end_is_cut_off(kit: CertKit) -> None:
    """RFC 9114 section 10.5: refused by what it announces, long before it is here."""

    async def attack(client: BareClient) -> None:
        stream = client._quic.get_next_available_stream_id()
        client._quic.send_stream_data(stream, b"\x01\x80\xb7\x1b\x00" + bytes(2000))
        client.transmit()

    handled: list[Request] = []
    async with attacked(kit, handled) as (port, reasons):
        seen = await bare(kit, port, attack)
    assert seen.closed == EXCESSIVE_LOAD and reasons == ["http_error"] and len(handled) == 1


async def test_many_fields_are_too_many(kit: CertKit) -> None:
    """A section that is small on the wire and large when it is decoded."""

    async def attack(client: BareClient) -> None:
        client.ask([*GET, *((b"x-%d" % number, b"v" * 50) for number in range(300))])

    async with attacked(kit, []) as (port, reasons):
        seen = await bare(kit, port, attack)
    assert seen.closed == EXCESSIVE_LOAD and reasons == ["http_error"]


async def test_a_section_that_waits_for_a_table_entry_holds_nothing(kit: CertKit) -> None:
    """QPACK: what refers to an entry that never comes would make the library buffer the rest."""

    async def attack(client: BareClient) -> None:
        client.http = H3Connection(client._quic)
        stream = client._quic.get_next_available_stream_id()
        client._quic.send_stream_data(stream, b"\x01\x03\x02\x00\x80" + b"\x00\x80\x10\x00\x00")
        client._quic.send_stream_data(stream, bytes(1 << 20))
        client.transmit()

    handled: list[Request] = []
    async with attacked(kit, handled) as (port, _):
        seen = await bare(kit, port, attack)
    assert seen.closed is not None and 0x200 <= seen.closed < 0x210, "a QPACK error"


async def test_rapid_reset_ends_the_connection(kit: CertKit) -> None:
    """Streams that are opened only to be reset cost their handler, so they are counted."""

    async def attack(client: BareClient) -> None:
        for _ in range(60):
            for _ in range(5):
                stream = client.ask()
                client._quic.reset_stream(stream, 0x10C)
                client._quic.stop_stream(stream, 0x10C)
            client.transmit()
            await client.ping()
            if client.seen.closed is not None:
                return

    async with attacked(kit, []) as (port, reasons):
        try:
            seen = await bare(kit, port, attack)
        except ConnectionError:  # a ping that the server did not wait to answer
            return
    assert seen.closed == EXCESSIVE_LOAD and reasons == ["http_error"]


async def test_a_body_over_the_limit_is_413(kit: CertKit) -> None:
    """R-5.1-19: the size is refused while it arrives."""

    async def attack(client: BareClient) -> None:
        client.ask(GET, body=bytes(5000))

    handled: list[Request] = []
    async with attacked(kit, handled) as (port, _):
        seen = await bare(kit, port, attack)
    assert seen.status == 413 and len(handled) == 1


def test_an_aioquic_without_what_is_relied_on_is_noticed(tmp_path: Path) -> None:
    """A release that renames a step would otherwise let everybody in without a word."""
    import subprocess
    import sys

    code = (
        "from aioquic import tls\n"
        "del tls.Context._server_handle_certificate_verify\n"
        "import sdcpd.transport.quic_tls"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "HTTP/3 cannot check peers" in done.stderr
