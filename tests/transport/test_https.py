"""The API's listener over TLS: what clients see, what is refused, and new files in place of old."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx2
import pytest

from certs import Leaf
from sdcpd.certificates import Certificates
from sdcpd.transport.http import Request, Response
from sdcpd.transport.http1 import Http1Server
from sdcpd.transport.https import HttpsIdentity
from sdcpd.transport.identity_files import IdentityError
from tests.kit.certs import CertKit


@pytest.fixture
def kit(tmp_path: Path) -> CertKit:
    return CertKit(tmp_path / "pki")


def of(leaf: Leaf) -> HttpsIdentity:
    return HttpsIdentity(cert=leaf.crt_path, key=leaf.key_path)


async def hello(_: Request) -> Response:
    return Response(200, (), b"hello")


@asynccontextmanager
async def serving(identity: HttpsIdentity) -> AsyncIterator[str]:
    server = Http1Server(hello, tls=identity.context)
    port = await server.start()
    try:
        yield f"https://127.0.0.1:{port}/"
    finally:
        await server.aclose()


async def ask(kit: CertKit, url: str) -> httpx2.Response:
    context = ssl.create_default_context(cafile=str(kit.ca))
    async with httpx2.AsyncClient(verify=context, trust_env=False) as client:
        return await client.get(url)


async def serial(kit: CertKit, url: str) -> int:
    """Of the certificate that a new connection is shown."""
    context = ssl.create_default_context(cafile=str(kit.ca))
    port = int(url.rsplit(":", 1)[1].strip("/"))
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        return int(writer.get_extra_info("peercert")["serialNumber"], 16)
    finally:
        writer.transport.abort()


async def test_a_client_that_knows_the_authority_is_served(kit: CertKit) -> None:
    """It shows no certificate of its own."""
    async with serving(of(kit.leaf())) as url:
        assert (await ask(kit, url)).content == b"hello"


async def test_others_are_not_and_neither_is_plain_http(kit: CertKit, tmp_path: Path) -> None:
    other = CertKit(tmp_path / "other")
    async with serving(of(kit.leaf())) as url:
        with pytest.raises(httpx2.ConnectError, match="certificate verify failed"):
            await ask(other, url)
        async with httpx2.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx2.TransportError):
                await client.get(url.replace("https", "http"))
        assert (await ask(kit, url)).status_code == 200, "whoever comes after is not touched"


async def test_new_files_count_for_new_connections(
    kit: CertKit, caplog: pytest.LogCaptureFixture
) -> None:
    """Taken as the process's other certificates are; half a pair leaves the old one in use."""
    leaf = kit.leaf()
    identity, certificates = of(leaf), Certificates()
    certificates.add(identity)
    async with serving(identity) as url:
        before, old_key = await serial(kit, url), leaf.key_path.read_bytes()
        kit.leaf()
        key = leaf.key_path.read_bytes()
        leaf.key_path.write_bytes(old_key)
        certificates.reload()
        assert "not reloaded, the old ones stay in use" in caplog.text
        assert await serial(kit, url) == before
        leaf.key_path.write_bytes(key)
        certificates.reload()
        assert await serial(kit, url) != before


def test_what_cannot_be_used_is_told(kit: CertKit, tmp_path: Path) -> None:
    leaf, other = kit.leaf(), kit.leaf("verifier", "v0")
    with pytest.raises(IdentityError, match="cannot be read"):
        HttpsIdentity(cert=tmp_path / "none.crt", key=leaf.key_path)
    with pytest.raises(IdentityError, match="not the key of"):
        HttpsIdentity(cert=leaf.crt_path, key=other.key_path)
    leaf.key_path.chmod(0o644)
    with pytest.raises(IdentityError, match="open to others"):
        of(leaf)
    past = datetime.now(UTC) - timedelta(days=9)
    with pytest.raises(IdentityError, match=r"expired .*renew it where it came from"):
        of(kit.leaf("router", "old", days=1, now=past))


def test_it_is_told_of_before_it_expires(kit: CertKit) -> None:
    identity = of(kit.leaf(days=2))
    assert timedelta(days=1) < identity.not_after - datetime.now(UTC) <= timedelta(days=2)
    assert "https://127.0.0.1:7441/" in identity.uris and "localhost" in identity.uris
