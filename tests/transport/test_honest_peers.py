"""What honest peers do that looks a little like a flood, and must not be taken for one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from aioquic.asyncio.client import connect
from aioquic.h3.connection import H3Connection
from hyperframe.frame import DataFrame

from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import Request, Response
from tests.attacks.test_http2 import head, opening
from tests.attacks.victim import BIG_BYTES, BODY_BYTES_MAX, victim
from tests.kit.certs import CertKit
from tests.kit.quic import GET, BareClient, Seen, client_configuration
from tests.kit.serving import serving


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> CertKit:
    return CertKit(tmp_path_factory.mktemp("pki"))


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("size", [40, 100, 250])
async def test_a_body_in_small_pieces(kit: CertKit, size: int, announced: bool) -> None:
    """As a program that streams lines sends them, at once and thousands of them."""
    total = BODY_BYTES_MAX // size * size
    length = [("content-length", str(total))] if announced else []
    async with victim(kit) as server, server.octets() as (reader, writer):
        for number in range(1, 9, 2):
            writer.write(opening(number, head("/", *length), end=False))
            for left in range(total - size, -1, -size):
                flags = [] if left else ["END_STREAM"]
                writer.write(DataFrame(number, bytes(size), flags=flags).serialize())
        seen = b""
        async with asyncio.timeout(20):
            while seen.count(b"ok") < 4:
                more = await reader.read(1 << 16)
                assert more, (size, dict(server.reasons))
                seen += more
        assert not server.reasons


PADDED = """
import asyncio, ssl, sys
from hyperframe.frame import SettingsFrame
from tests.attacks.test_http2 import head, opening
from tests.attacks.victim import PREFACE

async def main(port, ca, crt, key):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca)
    context.load_cert_chain(crt, key)
    context.set_alpn_protocols(["h2"])
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname="127.0.0.1"
    )
    writer.write(PREFACE + SettingsFrame(0).serialize())
    for number in range(1, 201, 2):
        writer.write(opening(number, head(), end=True))
        seen = b""
        while not seen.endswith(b"ok"):
            more = await reader.read(1 << 16)
            assert more, number
            seen += more
    print("answered")

asyncio.run(main(int(sys.argv[1]), *sys.argv[2:]))
"""


async def test_records_may_be_padded(kit: CertKit, tmp_path: Path) -> None:
    """RFC 8446 section 5.4: each of them to 4 KiB, by OpenSSL's own setting."""
    settings = tmp_path / "openssl.cnf"
    settings.write_text(
        textwrap.dedent("""\
            openssl_conf = init
            [init]
            ssl_conf = ssl
            [ssl]
            system_default = padded
            [padded]
            RecordPadding = 4096
            """)
    )
    async with victim(kit) as server:
        leaf = server.attacker
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PADDED, str(server.port)),
            *(str(kit.ca), str(leaf.crt_path), str(leaf.key_path)),
            env={
                **os.environ,
                "OPENSSL_CONF": str(settings),
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            stdout=subprocess.PIPE,
        )
        said, _ = await process.communicate()
        assert said == b"answered\n" and not server.reasons


async def test_a_paused_download_holds_up_no_other_answer(kit: CertKit) -> None:
    """HTTP/3: what the peer does not let through on one stream takes no room from the others."""
    seen = Seen()

    def protocol(*args: object, **kwargs: object) -> BareClient:
        made = BareClient(*args, **kwargs)  # type: ignore[arg-type]
        made.seen = seen
        return made

    async with victim(kit) as server:
        made = client_configuration(server.attacker)
        made.max_stream_data = 32 << 10
        async with connect(
            "127.0.0.1", server.port, configuration=made, create_protocol=protocol
        ) as client:
            assert isinstance(client, BareClient)
            client._quic._write_stream_limits = lambda **_: None  # no stream's window is opened
            client.http = H3Connection(client._quic)
            client.leaves = False
            client.ask([*GET[:3], (b":path", b"/big")])
            async with asyncio.timeout(5):
                while len(seen.body) < 30_000:
                    await client.ping()
            assert len(seen.body) < BIG_BYTES
            client.leaves = True
            client.ask()
            async with asyncio.timeout(5):
                await client.wait_closed()
            assert seen.body.endswith(b"ok")


@pytest.mark.parametrize("version", ["h2", "h3"])
async def test_renewals_in_a_row_cost_no_call(kit: CertKit, version: str) -> None:
    """Connections that were retired before they began count as no attempt."""

    async def handle(_: Request) -> Response:
        return Response(200)

    async with serving(kit, handle) as (_, port):
        client = HttpClient(kit.identity("router", "r0"), transport=version)  # type: ignore[arg-type]
        uri = f"https://127.0.0.1:{port}/"
        calls = [asyncio.ensure_future(client.request("GET", uri)) for _ in range(20)]
        for _ in range(6):
            while not any(not one.ready.done() for one in client._connections):
                if all(call.done() for call in calls):
                    break
                await asyncio.sleep(0)
            client.renew_connections()
            await asyncio.sleep(0)
        assert {(await call).status for call in calls} == {200}
        await client.aclose()
