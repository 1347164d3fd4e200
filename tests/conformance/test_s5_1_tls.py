"""Section 5.1 below HTTP: versions, certificates and what is refused before any of our octets."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from certs import Leaf
from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import PeerRefused, Request, Response
from sdcpd.transport.limits import H2Limits
from sdcpd.transport.server import Server
from tests.kit.certs import CertKit
from tests.kit.drafter_rig import drafter_rig
from tests.kit.network import TlsNetwork
from tests.kit.scripted import ScriptedVerifier


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> CertKit:
    return CertKit(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> CertKit:
    return CertKit(tmp_path_factory.mktemp("foreign"))


class Port:
    """A server's port, and the requests that reached its handler."""

    def __init__(self) -> None:
        self.number = 0
        self.requests: list[Request] = []

    async def handle(self, request: Request) -> Response:
        """Note a request."""
        self.requests.append(request)
        return Response(204)


@pytest.fixture
async def port(kit: CertKit) -> AsyncIterator[Port]:
    made = Port()
    server = Server(
        made.handle,
        identity=kit.identity("verifier", "v0"),
        host="127.0.0.1",
        port=0,
        body_bytes_max=1000,
        limits=H2Limits(preface_timeout_s=0.3),
    )
    made.number = await server.start()
    yield made
    await server.aclose(0.2)


def context(kit: CertKit, leaf: Leaf | None, *protocols: str) -> ssl.SSLContext:
    """Python's own TLS client."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.load_verify_locations(kit.ca)
    if protocols:
        made.set_alpn_protocols(list(protocols))
    if leaf is not None:
        made.load_cert_chain(leaf.crt_path, leaf.key_path)
    return made


def _talk(port: int, tls: ssl.SSLContext | None) -> tuple[str, bytes]:
    """How the handshake ended (protocol, ALPN, or the alert), and all octets that came back."""
    said = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    plain = socket.create_connection(("127.0.0.1", port), timeout=5)
    try:
        link = tls.wrap_socket(plain, server_hostname="127.0.0.1") if tls else plain
        with link:
            if tls and isinstance(link, ssl.SSLSocket) and link.selected_alpn_protocol() == "h2":
                said = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
            link.sendall(said)
            version = link.version() if isinstance(link, ssl.SSLSocket) else "clear"
            return str(version), link.recv(1000)
    except ssl.SSLError as error:
        return error.reason or str(error), b""
    except ConnectionError as error:
        return type(error).__name__, b""
    finally:
        plain.close()


async def talk(port: Port, tls: ssl.SSLContext | None) -> tuple[str, bytes]:
    return await asyncio.to_thread(_talk, port.number, tls)


async def test_http_2_over_tls_1_3_with_a_certificate(kit: CertKit, port: Port) -> None:
    """R-5.1-1: a foreign TLS client gets an HTTP/2 SETTINGS frame; ours is served."""
    leaf = kit.leaf("drafter", "d0")
    version, octets = await talk(port, context(kit, leaf, "h2"))
    assert version == "TLSv1.3" and octets[3] == 4  # the type of a SETTINGS frame
    client = HttpClient(kit.identity("drafter", "d0"))
    assert (await client.request("GET", f"https://127.0.0.1:{port.number}/x")).status == 204
    await client.aclose()
    (served,) = port.requests
    assert served.peer is not None and "spiffe://test.example/sdcp/drafter/d0" in served.peer.uris


async def test_tls_1_2_gets_an_alert(kit: CertKit, port: Port) -> None:
    """R-5.1-1: TLS 1.3 is required."""
    tls = context(kit, kit.leaf("drafter", "d0"), "h2")
    tls.maximum_version = ssl.TLSVersion.TLSv1_2
    assert await talk(port, tls) == ("TLSV1_ALERT_PROTOCOL_VERSION", b"")


async def test_no_certificate_no_service(kit: CertKit, port: Port) -> None:
    """R-5.1-3, R-9-1: an alert, no HTTP answer."""
    assert await talk(port, context(kit, None, "h2")) == ("TLSV13_ALERT_CERTIFICATE_REQUIRED", b"")
    assert port.requests == []


async def test_certificates_of_another_authority_are_refused(
    kit: CertKit, foreign: CertKit, port: Port
) -> None:
    """R-5.1-4: even one that carries the same names."""
    leaf = foreign.leaf("drafter", "d0")
    assert await talk(port, context(kit, leaf, "h2")) == ("TLSV1_ALERT_UNKNOWN_CA", b"")
    assert port.requests == []


@pytest.mark.parametrize("protocols", [("http/1.1",), (), ("h2c",), ("http/1.0", "http/1.1")])
async def test_no_http_1_1(kit: CertKit, port: Port, protocols: tuple[str, ...]) -> None:
    """R-5.1-5: closed or an alert, before any HTTP octet."""
    _, octets = await talk(port, context(kit, kit.leaf("drafter", "d0"), *protocols))
    assert octets == b"" and port.requests == []


async def test_no_cleartext(port: Port) -> None:
    """R-5.1-5: a plain GET gets nothing back."""
    _, octets = await talk(port, None)
    assert octets == b"" and port.requests == []


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
async def test_early_data_is_not_offered(kit: CertKit, port: Port, tmp_path: Path) -> None:
    """R-5.1-7, D-H8: no ticket allows 0-RTT data, and what is sent so is rejected."""
    leaf, saved, early = kit.leaf("drafter", "d0"), tmp_path / "session", tmp_path / "early"
    early.write_bytes(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{port.number}", "-alpn", "h2"]
    command += ["-cert", str(leaf.crt_path), "-key", str(leaf.key_path), "-CAfile", str(kit.ca)]

    def run(*more: str) -> str:
        done = subprocess.run(
            [*command, *more], input=b"", capture_output=True, timeout=20, check=False
        )
        return (done.stdout + done.stderr).decode(errors="replace")

    first = await asyncio.to_thread(run, "-sess_out", str(saved), "-ign_eof")
    assert "TLSv1.3" in first
    for line in first.splitlines():
        if "Max Early Data" in line:
            assert line.split(":")[1].strip() == "0"
    if saved.exists():
        again = await asyncio.to_thread(
            run, "-sess_in", str(saved), "-early_data", str(early), "-ign_eof"
        )
        assert "Early data was accepted" not in again
    assert port.requests == []


async def test_a_server_of_another_authority_gets_no_request(
    kit: CertKit, foreign: CertKit, port: Port
) -> None:
    """R-5.1-6: our client ends the handshake and says why."""
    client = HttpClient(foreign.identity("drafter", "d0"))
    with pytest.raises(PeerRefused, match="unknown CA"):
        await client.request("POST", f"https://127.0.0.1:{port.number}/proposals", body=b"x")
    await client.aclose()
    assert port.requests == []


async def test_a_drafter_sends_no_proposal_to_a_foreign_verifier(
    foreign: CertKit, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """R-5.1-6: the assignment may come from the router; the verifier that it names is not ours."""
    caplog.set_level("INFO")
    network = TlsNetwork(tmp_path / "pki")
    async with drafter_rig(network) as rig:
        impostor = ScriptedVerifier("https://127.0.0.1:1/")
        server = Server(
            impostor.handle,
            identity=foreign.identity("verifier", "v0"),
            host="127.0.0.1",
            port=0,
            body_bytes_max=1 << 20,
        )
        base = f"https://127.0.0.1:{await server.start()}/"
        rig.holds()
        assert await rig.assign(verifier=base) is None
        await refused(caplog)
        assert impostor.seen == []
        await server.aclose(0.2)
    await network.aclose()


async def refused(caplog: pytest.LogCaptureFixture) -> None:
    """Wait until our client has said that it refuses the server."""
    async with asyncio.timeout(10):
        while "refuse" not in caplog.text:
            await asyncio.sleep(0.01)
