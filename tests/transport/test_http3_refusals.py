"""Who is not let in over HTTP/3, what they see and what our log says (D-H8, D-I1, D-I2)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
from aioquic.quic.connection import QuicConnection
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from sdcpd.transport import quic_tls
from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import ConnectFailed, PeerRefused, Request, Response
from sdcpd.transport.server import Server
from sdcpd.transport.tls import TlsIdentity
from tests.kit.certs import CertKit
from tests.kit.quic import client_configuration, talk

NO_CERTIFICATE, UNKNOWN_CA, EXPIRED, REVOKED = 116, 48, 45, 44
BAD_CERTIFICATE, UNSUPPORTED, NO_ALPN = 42, 43, 120


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> CertKit:
    return CertKit(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> CertKit:
    return CertKit(tmp_path_factory.mktemp("foreign"), trust_domain="foreign.example")


class Refusing:
    """A server over both transports, the words that it counted and the requests that got in."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.served = 0
        self.port = 0

    async def handle(self, request: Request) -> Response:
        self.served += 1
        return Response(200, (), b"in")

    async def start(self, identity: TlsIdentity, **options: object) -> Server:
        server = Server(
            self.handle,
            identity=identity,
            host="127.0.0.1",
            port=0,
            body_bytes_max=1000,
            on_refused=self.reasons.append,
            http3=True,
            **options,  # type: ignore[arg-type]
        )
        self.port = await server.start()
        return server


@pytest.fixture
async def refusing(kit: CertKit) -> AsyncIterator[Refusing]:
    made = Refusing()
    server = await made.start(kit.identity("verifier", "v0"))
    yield made
    await server.aclose(grace_s=1)


async def test_who_has_a_certificate_is_served(kit: CertKit, refusing: Refusing) -> None:
    """R-5.1-2: the bare client gets its answer, so the refusals below are refusals."""
    seen = await talk(refusing.port, kit.leaf("drafter", "d0"))
    assert (seen.status, seen.body, refusing.served, refusing.reasons) == (200, b"in", 1, [])
    assert seen.tickets == []


async def test_no_certificate_gets_an_alert_and_a_log_line(
    refusing: Refusing, caplog: pytest.LogCaptureFixture
) -> None:
    """R-5.1-3: over HTTP/3 as over HTTP/2; the handshake fails, and there is no HTTP answer."""
    seen = await talk(refusing.port, None)
    assert (seen.alert, seen.status, refusing.served) == (NO_CERTIFICATE, None, 0)
    assert refusing.reasons == ["no_certificate"]
    assert "refused 127.0.0.1:" in caplog.text and "no client certificate" in caplog.text


async def test_a_foreign_authority_is_refused_with_both_names(
    foreign: CertKit, refusing: Refusing, caplog: pytest.LogCaptureFixture
) -> None:
    """R-5.1-4: also over HTTP/3."""
    seen = await talk(refusing.port, foreign.leaf("drafter", "dx"))
    assert (seen.alert, refusing.served, refusing.reasons) == (UNKNOWN_CA, 0, ["unknown_ca"])
    assert '"foreign.example SDCP CA"' in caplog.text
    assert '"test.example SDCP CA" sha256 ' in caplog.text


FORGED = "evil\nW sdcpd: refused 10.0.0.9: forged\r\x1b[2J"


@pytest.mark.parametrize("version", ["h2", "h3"])
async def test_a_name_begins_no_line_of_the_log(
    kit: CertKit,
    foreign: CertKit,
    refusing: Refusing,
    caplog: pytest.LogCaptureFixture,
    version: str,
) -> None:
    """Anybody can put anything into a certificate, and need not be let in to be logged."""
    leaf = foreign.reissued(foreign.leaf("drafter", "dx"), common_name=FORGED)
    if version == "h3":
        await talk(refusing.port, leaf)
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(kit.ca)
        context.load_cert_chain(leaf.crt_path, leaf.key_path)
        context.set_alpn_protocols(["h2"])
        opened = asyncio.open_connection(
            "127.0.0.1", refusing.port, ssl=context, server_hostname="127.0.0.1"
        )
        reader, writer = await opened
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()
    assert refusing.reasons == ["unknown_ca"]
    (line,) = [one for one in caplog.messages if "evil" in one]
    assert line.startswith("refused 127.0.0.1:") and line.isprintable()


async def test_dates_purpose_and_form(
    kit: CertKit, refusing: Refusing, caplog: pytest.LogCaptureFixture
) -> None:
    """R-5.1-4, R-5.1-3: expired, not yet valid, for servers only, and one that cannot be read."""
    now = datetime.now(UTC)
    cases = [
        (kit.leaf("drafter", "old", days=1, now=now - timedelta(days=3)), EXPIRED, "expired"),
        (kit.leaf("drafter", "new", now=now + timedelta(days=1)), EXPIRED, "not_yet_valid"),
        (
            kit.reissued(kit.leaf("drafter", "srv"), usage=ExtendedKeyUsageOID.SERVER_AUTH),
            UNSUPPORTED,
            "wrong_purpose",
        ),
    ]
    for leaf, alert, word in cases:
        refusing.reasons.clear()
        seen = await talk(refusing.port, leaf)
        assert (seen.alert, refusing.served, refusing.reasons) == (alert, 0, [word])
    assert "drafter/old expired" in caplog.text
    odd = kit.reissued(kit.leaf("drafter", "odd"), raw_names=b"\x30\x05nope")
    seen = await talk(refusing.port, odd)
    assert (seen.alert, refusing.served) == (BAD_CERTIFICATE, 0)
    assert "it cannot be read" in caplog.text


async def test_a_revoked_certificate_is_refused_and_others_get_in(
    kit: CertKit, caplog: pytest.LogCaptureFixture
) -> None:
    """D-H8: the revocation list counts over QUIC as over TCP; one that is out of date lets nobody in."""
    revoked, own = kit.leaf("drafter", "lost"), kit.leaf("verifier", "v0")
    identity = TlsIdentity(ca=kit.ca, cert=own.crt_path, key=own.key_path, crl=kit.revoke(revoked))
    made = Refusing()
    server = await made.start(identity)
    seen = await talk(made.port, revoked)
    assert (seen.alert, made.served, made.reasons) == (REVOKED, 0, ["revoked"])
    assert "certificate of drafter/lost was revoked" in caplog.text
    assert (await talk(made.port, kit.leaf("drafter", "d0"))).status == 200
    await server.aclose()


async def test_another_protocol_is_refused(kit: CertKit, refusing: Refusing) -> None:
    """R-5.1-5: no h3 in ALPN, no HTTP."""
    seen = await talk(refusing.port, kit.leaf("drafter", "d0"), alpn="hq-interop")
    assert (seen.alert, refusing.served, refusing.reasons) == (NO_ALPN, 0, ["alpn"])


async def test_a_certificate_without_its_key_lets_nobody_in(
    kit: CertKit, refusing: Refusing, caplog: pytest.LogCaptureFixture
) -> None:
    """R-5.1-3: whoever shows another's certificate; told as what it is, and as our refusal."""
    stolen, own = kit.leaf("router", "r0"), kit.leaf("drafter", "d0")
    made = client_configuration(own)
    made.certificate = x509.load_pem_x509_certificate(stolen.crt_path.read_bytes())
    seen = await talk(refusing.port, None, configuration=made)
    assert (seen.status, refusing.served, refusing.reasons) == (None, 0, ["bad_certificate"])
    assert "does not have the key that belongs to it" in caplog.text


async def test_whatever_fails_in_the_check_lets_nobody_in(kit: CertKit, refusing: Refusing) -> None:
    """R-5.1-3: a check that raises anything at all refuses, before the state has moved on."""
    with patch("sdcpd.transport.verification._builder", side_effect=RuntimeError("broken")):
        seen = await talk(refusing.port, kit.leaf("drafter", "d0"))
    assert (seen.alert, seen.status, refusing.served) == (BAD_CERTIFICATE, None, 0)


async def test_a_finished_in_a_later_datagram_lets_nobody_in(
    foreign: CertKit, refusing: Refusing
) -> None:
    """R-5.1-4: the client's flight in pieces; whoever was refused stays refused."""
    sent = QuicConnection.datagrams_to_send

    def one_by_one(self: QuicConnection, now: float) -> list[tuple[bytes, object]]:
        self._max_datagram_size = 1200
        return sent(self, now=now)

    with patch.object(QuicConnection, "datagrams_to_send", one_by_one):
        seen = await talk(refusing.port, foreign.leaf("drafter", "dx"))
    assert (seen.alert, seen.status, refusing.served) == (UNKNOWN_CA, None, 0)


async def test_no_resumption_and_so_no_early_data(kit: CertKit, refusing: Refusing) -> None:
    """R-5.1-7: no tickets are given, so there is nothing to send early data with."""
    for _ in range(2):
        seen = await talk(refusing.port, kit.leaf("drafter", "d0"))
        assert seen.status == 200 and seen.tickets == []


async def test_datagrams_that_are_nothing_change_nothing(kit: CertKit, refusing: Refusing) -> None:
    """R-5.1-5: garbage on the UDP port is not answered and harms nobody."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain:
        plain.setblocking(False)
        for size in (0, 1, 20, 1200):
            plain.sendto(os.urandom(size), ("127.0.0.1", refusing.port))
        plain.sendto(b"GET / HTTP/1.1\r\n\r\n", ("127.0.0.1", refusing.port))
        assert (await talk(refusing.port, kit.leaf("drafter", "d0"))).status == 200
    assert refusing.reasons == []


async def test_nothing_is_kept_of_clients_that_do_not_answer_a_retry(
    kit: CertKit, refusing: Refusing
) -> None:
    """RFC 9000 section 8.1: a spoofed address costs one datagram, and no memory."""
    server_sent = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain:
        plain.setblocking(False)
        for number in range(50):
            quic = QuicConnection(
                configuration=quic_tls.configuration(
                    kit.identity("drafter", f"n{number % 2}"), server_name="127.0.0.1"
                )
            )
            quic.connect(("127.0.0.1", refusing.port), now=0.0)
            for data, _ in quic.datagrams_to_send(now=0.0):
                plain.sendto(data, ("127.0.0.1", refusing.port))
        assert (await talk(refusing.port, kit.leaf("drafter", "d0"))).status == 200
        while True:
            try:
                first = plain.recv(2000)[0]
            except BlockingIOError:
                break
            server_sent += 1
            assert first & 0xF0 == 0xF0, "a Retry, and nothing else"
    assert server_sent == 50


# ---- our client


def client(identity: TlsIdentity, **options: object) -> HttpClient:
    return HttpClient(identity, transport="h3", **options)  # type: ignore[arg-type]


async def test_our_client_is_told_why_it_is_refused(
    kit: CertKit, foreign: CertKit, refusing: Refusing
) -> None:
    """D-I2: the server's alert as a sentence."""
    both = foreign.folder / "both.crt"
    both.write_bytes(kit.ca.read_bytes() + foreign.ca.read_bytes())
    leaf = foreign.leaf("drafter", "dx")
    made = client(TlsIdentity(ca=both, cert=leaf.crt_path, key=leaf.key_path))
    with pytest.raises(PeerRefused, match="does not know the CA of our certificate"):
        await made.request("GET", f"https://127.0.0.1:{refusing.port}/")
    await made.aclose()


async def test_our_client_refuses_a_server_of_a_foreign_authority(
    foreign: CertKit, refusing: Refusing
) -> None:
    """R-5.1-6: over HTTP/3 too."""
    made = client(foreign.identity("drafter", "dx"))
    with pytest.raises(PeerRefused, match=r'unknown CA \("test.example SDCP CA"\).*"foreign'):
        await made.request("GET", f"https://127.0.0.1:{refusing.port}/")
    await made.aclose()
    async with asyncio.timeout(2):
        while not refusing.reasons:
            await asyncio.sleep(0)  # the client's last datagram is on its way
    assert refusing.served == 0 and refusing.reasons == ["peer_alert"]


@pytest.mark.parametrize("what", ["host", "purpose"])
async def test_our_client_refuses_a_certificate_for_another_host_or_purpose(
    kit: CertKit, what: str
) -> None:
    """R-5.1-6, D-I2: aioquic itself does not look at the purpose."""
    if what == "host":
        leaf = kit.leaf("verifier", "elsewhere", base_uri="https://gpu1:7443/", sans=())
        text = r'is for gpu1, not "127\.0\.0\.1"'
    else:
        leaf = kit.reissued(kit.leaf("drafter", "cli"), usage=ExtendedKeyUsageOID.CLIENT_AUTH)
        text = "for another purpose"
    refusing = Refusing()
    server = await refusing.start(TlsIdentity(ca=kit.ca, cert=leaf.crt_path, key=leaf.key_path))
    made = client(kit.identity("drafter", "d0"))
    with pytest.raises(PeerRefused, match=text):
        await made.request("GET", f"https://127.0.0.1:{refusing.port}/")
    await made.aclose()
    await server.aclose()


@pytest.mark.parametrize("name", ["lost", "v0"])
async def test_our_client_refuses_a_revoked_server(kit: CertKit, name: str) -> None:
    """D-H8, D-I2: a client with a revocation list; a server that is not on it is spoken to."""
    own, leaves = kit.leaf("drafter", "d0"), {n: kit.leaf("verifier", n) for n in ("lost", "v0")}
    crl = kit.revoke(leaves["lost"])
    refusing = Refusing()
    leaf = leaves[name]
    server = await refusing.start(TlsIdentity(ca=kit.ca, cert=leaf.crt_path, key=leaf.key_path))
    made = client(TlsIdentity(ca=kit.ca, cert=own.crt_path, key=own.key_path, crl=crl))
    told = ""
    try:
        await made.request("GET", f"https://127.0.0.1:{refusing.port}/")
    except PeerRefused as error:
        told = str(error)
    await made.aclose()
    await server.aclose()
    assert ("revoked" in told, refusing.served) == ((True, 0) if name == "lost" else (False, 1))


async def test_a_peer_that_serves_one_version_alone_is_reached(kit: CertKit) -> None:
    """R-5.1-2: auto begins with HTTP/2 and takes HTTP/3 where that cannot be connected to."""
    refusing = Refusing()
    server = await refusing.start(kit.identity("verifier", "v0"))
    assert server._listener is not None
    server._listener.close()  # no TCP any more
    await server._listener.wait_closed()
    uri = f"https://127.0.0.1:{refusing.port}/"
    auto = HttpClient(kit.identity("drafter", "d0"))
    assert (await auto.request("GET", uri)).status == 200
    only2 = HttpClient(kit.identity("drafter", "d1"), transport="h2")
    with pytest.raises(ConnectFailed, match="nothing listens"):
        await only2.request("GET", uri)
    for made in (auto, only2):
        await made.aclose()
    await server.aclose()


async def test_auto_remembers_what_works_and_tries_the_other_behind_another_program(
    kit: CertKit,
) -> None:
    """D-H8: another program at the TCP port is no reason to give up; a refused certificate is."""
    refusing = Refusing()
    server = await refusing.start(kit.identity("verifier", "v0"))
    assert server._listener is not None
    server._listener.close()
    await server._listener.wait_closed()

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.read(1))
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    seen: list[bytes] = []
    program = await asyncio.start_server(other, "127.0.0.1", refusing.port)
    auto = HttpClient(kit.identity("drafter", "d0"))
    for _ in range(3):
        assert (await auto.request("GET", f"https://127.0.0.1:{refusing.port}/")).status == 200
        auto.renew_connections()
    assert len(seen) == 1, "HTTP/2 is not tried again where HTTP/3 has worked"
    await auto.aclose()
    program.close()
    await server.aclose()


async def test_answers_over_http_2_name_the_other_transport(kit: CertKit) -> None:
    """D-H8: Alt-Svc on HTTP/2 answers, at the same port number, and not on those of HTTP/3."""
    refusing = Refusing()
    server = await refusing.start(kit.identity("verifier", "v0"))
    uri = f"https://127.0.0.1:{refusing.port}/"
    for transport, wanted in (("h2", f'h3=":{refusing.port}"; ma=86400'), ("h3", None)):
        made = HttpClient(kit.identity("drafter", "d0"), transport=transport)  # type: ignore[arg-type]
        answer = await made.request("GET", uri)
        assert answer.header("alt-svc") == wanted
        await made.aclose()
    await server.aclose()


async def test_new_connections_show_a_reloaded_certificate(kit: CertKit, tmp_path: Path) -> None:
    """A reload counts for HTTP/3 as well."""
    own = CertKit(tmp_path)
    identity = own.identity("verifier", "v0")
    refusing = Refusing()
    server = await refusing.start(identity)
    seen: list[str] = []
    for _ in range(2):
        made = client(
            own.identity("drafter", "d0"), check_peer=lambda peer, _: seen.append(peer.fingerprint)
        )
        await made.request("GET", f"https://127.0.0.1:{refusing.port}/")
        await made.aclose()
        own.leaf("verifier", "v0")
        identity.reload()
    assert len(set(seen)) == 2
    await server.aclose()


class _Garbage:
    """A certificate whose octets are something else."""

    def __init__(self, real: object, octets: bytes) -> None:
        self._real, self._octets = real, octets

    def public_bytes(self, _: object) -> bytes:
        return self._octets

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)


async def test_a_certificate_that_is_none_is_told_of(
    kit: CertKit, refusing: Refusing, caplog: pytest.LogCaptureFixture
) -> None:
    """The library refuses it by itself; the log and the counter say so all the same."""
    made = client_configuration(kit.leaf("drafter", "d0"))
    made.certificate = _Garbage(made.certificate, b"garbage")
    seen = await talk(refusing.port, None, configuration=made)
    assert (seen.alert, refusing.served) == (BAD_CERTIFICATE, 0)
    assert refusing.reasons == ["bad_certificate"]
    assert "the peer's certificate cannot be understood" in caplog.text
