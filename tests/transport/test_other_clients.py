"""Clients of others against our server: curl over HTTP/2, libcurl and qh3 over HTTP/3 (D-H8)."""

from __future__ import annotations

import asyncio
import io
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pycurl
import pytest
from qh3.asyncio.client import connect
from qh3.asyncio.protocol import QuicConnectionProtocol
from qh3.h3.connection import H3Connection
from qh3.h3.events import DataReceived, HeadersReceived
from qh3.quic.configuration import QuicConfiguration
from qh3.quic.events import ConnectionTerminated, QuicEvent

from certs import Leaf
from sdcpd.transport.http import Request, Response
from sdcpd.transport.server import Server
from tests.kit.certs import CertKit

CURL = shutil.which("curl")
HTTP_3_ONLY = 31  # CURL_HTTP_VERSION_3ONLY
BODY = b"what was asked\n" * 2000


@dataclass
class Site:
    """A server over both transports, and who may and may not speak to it."""

    port: int
    kit: CertKit
    good: Leaf
    foreign: Leaf
    requests: list[Request]
    reasons: list[str]


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[CertKit, CertKit]:
    own = CertKit(tmp_path_factory.mktemp("pki"))
    return own, CertKit(tmp_path_factory.mktemp("foreign"), trust_domain="foreign.example")


@pytest.fixture
async def site(authorities: tuple[CertKit, CertKit]) -> AsyncIterator[Site]:
    kit, foreign = authorities
    requests: list[Request] = []
    reasons: list[str] = []

    async def handle(request: Request) -> Response:
        requests.append(request)
        return Response(200, (("content-type", "text/plain"),), request.body or BODY)

    server = Server(
        handle,
        identity=kit.identity("verifier", "v0"),
        host="127.0.0.1",
        port=0,
        body_bytes_max=1 << 20,
        on_refused=reasons.append,
        http3=True,
    )
    port = await server.start()
    leaf, other = kit.leaf("drafter", "d0"), foreign.leaf("drafter", "dx")
    yield Site(port, kit, leaf, other, requests, reasons)
    await server.aclose(1)


# ---- curl, HTTP/2


async def curl(site: Site, leaf: Leaf | None, *more: str) -> subprocess.CompletedProcess[bytes]:
    assert CURL is not None
    command = [CURL, "-sS", "--http2", "--max-time", "10", "--cacert", str(site.kit.ca), "-i"]
    if leaf is not None:
        command += ["--cert", str(leaf.crt_path), "--key", str(leaf.key_path)]
    command += [*more, f"https://127.0.0.1:{site.port}/some/path?x=1"]
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False)


@pytest.mark.skipif(CURL is None, reason="there is no curl here")
async def test_curl_over_http_2(site: Site) -> None:
    """R-5.1-1: with a certificate served, without one or with a foreign one no HTTP answer."""
    done = await curl(site, site.good)
    assert done.stdout.startswith(b"HTTP/2 200") and done.stdout.endswith(BODY), done.stderr
    assert f'alt-svc: h3=":{site.port}"'.encode() in done.stdout
    done = await curl(site, site.good, "--data-binary", "hello")
    assert done.stdout.endswith(b"\r\nhello")
    assert site.requests[-1].path == "/some/path" and site.requests[-1].query == "x=1"
    served = len(site.requests)
    for leaf in (None, site.foreign):
        done = await curl(site, leaf)
        assert done.returncode != 0 and b"HTTP/" not in done.stdout
        assert b"alert" in done.stderr, "OpenSSL's clients see why"
    assert site.reasons == ["no_certificate", "unknown_ca"] and len(site.requests) == served


# ---- libcurl with ngtcp2, HTTP/3


def _ask(site: Site, leaf: Leaf | None, body: bytes | None) -> tuple[int, bytes, int]:
    """Status, body and HTTP version; raises pycurl.error."""
    found = io.BytesIO()
    handle = pycurl.Curl()
    try:
        handle.setopt(pycurl.URL, f"https://127.0.0.1:{site.port}/q")
        handle.setopt(pycurl.HTTP_VERSION, HTTP_3_ONLY)
        handle.setopt(pycurl.CAINFO, str(site.kit.ca))
        handle.setopt(pycurl.TIMEOUT, 10)
        handle.setopt(pycurl.NOSIGNAL, 1)
        handle.setopt(pycurl.WRITEDATA, found)
        if leaf is not None:
            handle.setopt(pycurl.SSLCERT, str(leaf.crt_path))
            handle.setopt(pycurl.SSLKEY, str(leaf.key_path))
        if body is not None:
            handle.setopt(pycurl.POSTFIELDS, body)
        handle.perform()
        status = handle.getinfo(pycurl.RESPONSE_CODE)
        return status, found.getvalue(), handle.getinfo(pycurl.INFO_HTTP_VERSION)
    finally:
        handle.close()


async def test_libcurl_over_http_3(site: Site) -> None:
    """R-5.1-2, R-5.1-3, R-5.1-4: another make of QUIC and TLS is served and refused like our own."""
    status, body, version = await asyncio.to_thread(_ask, site, site.good, None)
    assert (status, body, version) == (200, BODY, 30)
    status, body, _ = await asyncio.to_thread(_ask, site, site.good, b"x" * 300_000)
    assert (status, body) == (200, b"x" * 300_000)
    served = len(site.requests)
    for leaf in (None, site.foreign):
        with pytest.raises(pycurl.error):
            await asyncio.to_thread(_ask, site, leaf, None)
    assert site.reasons == ["no_certificate", "unknown_ca"] and len(site.requests) == served


# ---- qh3


class _Asker(QuicConnectionProtocol):
    status: int | None = None
    body = b""
    closed: int | None = None

    def ask(self) -> None:
        self.http = H3Connection(self._quic)
        fields = [(b":method", b"GET"), (b":scheme", b"https"), (b":authority", b"x")]
        stream = self._quic.get_next_available_stream_id()
        self.http.send_headers(stream, [*fields, (b":path", b"/")], end_stream=True)
        self.transmit()

    def quic_event_received(self, event: QuicEvent) -> None:
        if isinstance(event, ConnectionTerminated):
            self.closed = event.error_code
        http = getattr(self, "http", None)
        for one in http.handle_event(event) if http is not None else ():
            if isinstance(one, HeadersReceived):
                self.status = int(dict(one.headers)[b":status"])
            elif isinstance(one, DataReceived):
                self.body += one.data
            if getattr(one, "stream_ended", False):
                self.close()


async def test_qh3_over_http_3(site: Site) -> None:
    """R-5.1-2, R-5.1-3, R-5.1-4: and a third."""
    for leaf, alert in ((site.good, None), (None, 116), (site.foreign, 48)):
        made = QuicConfiguration(is_client=True, alpn_protocols=["h3"], verify_mode=ssl.CERT_NONE)
        if leaf is not None:
            made.load_cert_chain(str(leaf.crt_path), str(leaf.key_path))
        asker: _Asker | None = None
        try:
            async with connect(
                "127.0.0.1", site.port, configuration=made, create_protocol=_Asker
            ) as client:
                assert isinstance(client, _Asker)
                asker = client
                client.ask()
                async with asyncio.timeout(5):
                    await client.wait_closed()
        except ConnectionError:
            assert alert is not None
        if alert is None:
            assert asker is not None and (asker.status, asker.body) == (200, BODY)
        elif asker is not None:
            assert asker.status is None and asker.closed == 0x100 + alert
    assert len(site.requests) == 1
    assert site.reasons == ["no_certificate", "unknown_ca"]
