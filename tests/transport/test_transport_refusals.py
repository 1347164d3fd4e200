"""Who is not let in, what they see, and what our log says (D-H8, D-I1, D-I2; R-9)."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from certs import Leaf
from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import PeerRefused, Request, Response
from sdcpd.transport.identity_files import IdentityError
from sdcpd.transport.limits import H2Limits
from sdcpd.transport.server import Server
from sdcpd.transport.tls import TlsIdentity
from tests.kit.certs import CertKit


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> CertKit:
    return CertKit(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> CertKit:
    return CertKit(tmp_path_factory.mktemp("foreign"), trust_domain="foreign.example")


class Refusing:
    """A server, its port, and the words that it counted."""

    def __init__(self, server: Server, port: int, reasons: list[str]) -> None:
        self.server, self.port, self.reasons = server, port, reasons
        self.base = f"https://127.0.0.1:{port}"


@pytest.fixture
async def refusing(kit: CertKit) -> AsyncIterator[Refusing]:
    async def never(request: Request) -> Response:
        raise AssertionError("a refused peer got its request handled")

    reasons: list[str] = []
    server = Server(
        never,
        identity=kit.identity("verifier", "v0"),
        host="127.0.0.1",
        port=0,
        body_bytes_max=1000,
        on_refused=reasons.append,
        limits=H2Limits(preface_timeout_s=0.2),
        handshake_timeout_s=0.2,
    )
    port = await server.start()
    yield Refusing(server, port, reasons)
    await server.aclose(grace_s=1)


def client_context(kit: CertKit, leaf: Leaf | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(kit.ca)
    context.set_alpn_protocols(["h2"])
    if leaf is not None:
        context.load_cert_chain(leaf.crt_path, leaf.key_path)
    return context


def blocking_talk(port: int, context: ssl.SSLContext, said: bytes = b"PRI * HTTP/2.0\r\n") -> str:
    """Connect with Python's own TLS, say something, and tell how it ended."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as plain:
        try:
            with context.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
                secure.sendall(said)
                return repr(secure.recv(1000))
        except ssl.SSLError as error:
            return error.reason or str(error)
        except ConnectionError as error:
            return repr(error)


async def talk(port: int, context: ssl.SSLContext) -> str:
    return await asyncio.to_thread(blocking_talk, port, context)


async def test_d_h8_no_certificate_gets_an_alert_and_a_log_line(
    kit: CertKit, refusing: Refusing, caplog: pytest.LogCaptureFixture
) -> None:
    seen = await talk(refusing.port, client_context(kit, None))
    assert seen == "TLSV13_ALERT_CERTIFICATE_REQUIRED"
    assert refusing.reasons == ["no_certificate"]
    assert "refused 127.0.0.1:" in caplog.text
    assert "no client certificate" in caplog.text


async def test_d_h8_foreign_authority_is_refused_with_both_names(
    kit: CertKit, foreign: CertKit, refusing: Refusing, caplog: pytest.LogCaptureFixture
) -> None:
    seen = await talk(refusing.port, client_context(kit, foreign.leaf("drafter", "dx")))
    assert seen == "TLSV1_ALERT_UNKNOWN_CA"
    assert refusing.reasons == ["unknown_ca"]
    assert '"foreign.example SDCP CA"' in caplog.text
    assert '"test.example SDCP CA" sha256 ' in caplog.text


async def test_d_h8_expired_certificate_is_refused_with_its_date(
    kit: CertKit, refusing: Refusing, caplog: pytest.LogCaptureFixture
) -> None:
    old = kit.leaf("drafter", "old", days=1, now=datetime.now(UTC) - timedelta(days=3))
    seen = await talk(refusing.port, client_context(kit, old))
    assert seen == "SSLV3_ALERT_CERTIFICATE_EXPIRED"
    assert refusing.reasons == ["expired"]
    assert "drafter/old expired" in caplog.text


async def test_revoked_certificate_is_refused_and_others_still_get_in(
    kit: CertKit, caplog: pytest.LogCaptureFixture
) -> None:
    revoked, own = kit.leaf("drafter", "lost"), kit.leaf("verifier", "v0")
    identity = TlsIdentity(ca=kit.ca, cert=own.crt_path, key=own.key_path, crl=kit.revoke(revoked))
    server = Server(_nothing, identity=identity, host="127.0.0.1", port=0, body_bytes_max=0)
    port = await server.start()
    assert await talk(port, client_context(kit, revoked)) == "SSLV3_ALERT_CERTIFICATE_REVOKED"
    assert "certificate of drafter/lost was revoked" in caplog.text
    client = HttpClient(kit.identity("drafter", "d0"))
    assert (await client.request("GET", f"https://127.0.0.1:{port}/")).status == 204
    await client.aclose()
    await server.aclose()


async def test_d_h8_tls_1_2_is_refused(
    kit: CertKit, refusing: Refusing, caplog: pytest.LogCaptureFixture
) -> None:
    context = client_context(kit, kit.leaf("drafter", "d0"))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert await talk(refusing.port, context) == "TLSV1_ALERT_PROTOCOL_VERSION"
    assert refusing.reasons == ["tls_version"]
    assert "TLS 1.3" in caplog.text


@pytest.mark.parametrize("protocols", [["http/1.1"], []])
async def test_d_h8_client_without_h2_gets_no_http_octet(
    kit: CertKit, refusing: Refusing, protocols: list[str]
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(kit.ca)
    leaf = kit.leaf("drafter", "d0")
    context.load_cert_chain(leaf.crt_path, leaf.key_path)
    if protocols:
        context.set_alpn_protocols(protocols)
    assert await talk(refusing.port, context) == "b''"
    assert refusing.reasons == ["alpn"]


async def test_plain_http_is_closed_without_an_answer(
    refusing: Refusing, caplog: pytest.LogCaptureFixture
) -> None:
    """R-5.1-5, D-H8: not one octet of HTTP in the clear; our log says what was wrong."""
    reader, writer = await asyncio.open_connection("127.0.0.1", refusing.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert await reader.read() == b""
    writer.close()
    assert refusing.reasons == ["plain_http"]
    assert "plain HTTP on the TLS port; use https" in caplog.text


async def test_binary_garbage_is_closed_without_an_answer(refusing: Refusing) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", refusing.port)
    writer.write(b"\x00\x01\x02")
    assert await reader.read() == b""
    writer.close()
    assert refusing.reasons == ["plain_http"]


async def test_silent_client_is_closed_at_the_handshake_deadline(refusing: Refusing) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", refusing.port)
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    assert refusing.reasons == ["handshake_timeout"]


async def test_slow_preface_is_closed(
    kit: CertKit, refusing: Refusing, caplog: pytest.LogCaptureFixture
) -> None:
    context = client_context(kit, kit.leaf("drafter", "d0"))
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", refusing.port, ssl=context, server_hostname="127.0.0.1"
    )
    writer.write(b"PRI * HTTP/2.0\r\n")  # Eight octets short.
    await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert refusing.reasons == ["http_error"]
    assert "no HTTP/2 preface within 0.2 s" in caplog.text


async def test_our_client_without_a_known_certificate_is_told_why(
    kit: CertKit, foreign: CertKit, refusing: Refusing
) -> None:
    leaf = foreign.leaf("drafter", "dx")
    identity = TlsIdentity(
        ca=_bundle(foreign.folder / "both.crt", kit, foreign),
        cert=leaf.crt_path,
        key=leaf.key_path,
    )
    client = HttpClient(identity)
    with pytest.raises(PeerRefused, match="does not know the CA of our certificate"):
        await client.request("GET", f"{refusing.base}/")
    await client.aclose()


async def test_our_client_refuses_a_server_of_a_foreign_authority_with_both_names(
    foreign: CertKit, refusing: Refusing, caplog: pytest.LogCaptureFixture
) -> None:
    client = HttpClient(foreign.identity("drafter", "dx"))
    with pytest.raises(PeerRefused, match=r'unknown CA \("test.example SDCP CA"\).*"foreign'):
        await client.request("GET", f"{refusing.base}/")
    await client.aclose()
    assert refusing.reasons == ["peer_alert"]


async def test_d_i2_client_refuses_a_certificate_for_another_host(
    kit: CertKit, refusing: Refusing
) -> None:
    leaf = kit.leaf("verifier", "elsewhere", base_uri="https://gpu1:7443/", sans=())
    identity = TlsIdentity(ca=kit.ca, cert=leaf.crt_path, key=leaf.key_path)
    server = Server(_nothing, identity=identity, host="127.0.0.1", port=0, body_bytes_max=0)
    port = await server.start()
    client = HttpClient(kit.identity("drafter", "d0"))
    with pytest.raises(
        PeerRefused, match=r'is for gpu1, not "127\.0\.0\.1"; reissue it with --san'
    ):
        await client.request("GET", f"https://127.0.0.1:{port}/")
    await client.aclose()
    await server.aclose()


async def test_client_says_when_a_port_speaks_plain_http(kit: CertKit) -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(plain, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    client = HttpClient(kit.identity("drafter", "d0"))
    with pytest.raises(PeerRefused, match="speaks plain HTTP, not TLS"):
        await client.request("GET", f"https://127.0.0.1:{port}/")
    await client.aclose()
    listener.close()


async def test_client_helps_when_the_server_closes_without_an_alert(kit: CertKit) -> None:
    async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.close()

    listener = await asyncio.start_server(closes, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    client = HttpClient(kit.identity("drafter", "d0"))
    with pytest.raises(PeerRefused, match=r"sdcpctl certs check --peer 127\.0"):
        await client.request("GET", f"https://127.0.0.1:{port}/")
    await client.aclose()
    listener.close()


async def test_a_refused_flood_of_connections_leaves_the_server_working(
    kit: CertKit, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(
        _nothing,
        identity=kit.identity("verifier", "v0"),
        host="127.0.0.1",
        port=0,
        body_bytes_max=0,
    )
    port = await server.start()
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(140)]
    client = HttpClient(kit.identity("drafter", "d0"))
    assert (await client.request("GET", f"https://127.0.0.1:{port}/")).status == 204
    assert "too many handshakes at once" in caplog.text
    for _, writer in idle:
        writer.close()
    await client.aclose()
    await server.aclose()


def test_key_that_others_can_read_is_refused_with_the_command(kit: CertKit) -> None:
    leaf = kit.leaf("drafter", "open")
    os.chmod(leaf.key_path, 0o644)
    with pytest.raises(IdentityError, match=r"chmod 0640 .*drafter\.open\.key"):
        TlsIdentity(ca=kit.ca, cert=leaf.crt_path, key=leaf.key_path)
    os.chmod(leaf.key_path, 0o640)
    assert TlsIdentity(ca=kit.ca, cert=leaf.crt_path, key=leaf.key_path).uris == leaf.uris


def test_identity_files_that_do_not_fit_are_refused(kit: CertKit, foreign: CertKit) -> None:
    now = datetime.now(UTC)
    good, other = kit.leaf("drafter", "d0"), kit.leaf("drafter", "d1")
    expired = kit.leaf("drafter", "d2", days=1, now=now - timedelta(days=3))
    early = kit.leaf("drafter", "d3", now=now + timedelta(days=1))
    cases = [
        (good.crt_path, other.key_path, kit.ca, "not the key of"),
        (expired.crt_path, expired.key_path, kit.ca, "expired"),
        (early.crt_path, early.key_path, kit.ca, "not valid before"),
        (good.crt_path, good.key_path, foreign.ca, "is not in"),
        (good.key_path, good.key_path, kit.ca, "no certificate in PEM form"),
        (good.crt_path, Path("/nonexistent.key"), kit.ca, "cannot be read"),
    ]
    for cert, key, ca, text in cases:
        with pytest.raises(IdentityError, match=text):
            TlsIdentity(ca=ca, cert=cert, key=key)


async def _nothing(request: Request) -> Response:
    return Response(204)


def _bundle(path: Path, *kits: CertKit) -> Path:
    path.write_bytes(b"".join(kit.ca.read_bytes() for kit in kits))
    return path
