"""Certificates that change while a process runs: taken, refused, and old connections renewed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from sdcpd.certificates import Certificates, warning_every_s
from sdcpd.transport.client import HttpClient, Transport
from sdcpd.transport.http import ConnectFailed, Request, Response
from sdcpd.transport.server import Server
from sdcpd.transport.tls import TlsIdentity
from tests.kit.certs import CertKit


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def watching(certificates: Certificates) -> AsyncIterator[None]:
    task = asyncio.ensure_future(certificates.watch(every_s=0.01))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_changed_files_are_taken_and_half_changed_ones_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A certificate without its key yet stays out; the pair is taken as soon as it is one."""
    kit = CertKit(tmp_path / "pki")
    identity = kit.identity("verifier", "v0")
    certificates, renewed = Certificates(), []
    certificates.add(identity)
    certificates.on_renewal(identity, lambda: renewed.append(1))
    before = identity.certificate.serial_number
    old_key = (tmp_path / "pki" / "verifier.v0.key").read_bytes()
    async with watching(certificates):
        fresh = kit.leaf("verifier", "v0")
        key = fresh.key_path.read_bytes()
        fresh.key_path.write_bytes(old_key)
        await until(lambda: "the old ones stay in use" in caplog.text)
        assert identity.certificate.serial_number == before and renewed == []
        fresh.key_path.write_bytes(key)
        await until(lambda: len(renewed) == 1)
    assert identity.certificate.serial_number != before
    assert caplog.text.count("not reloaded") == 1, "told once for one state of the files"


async def test_a_certificate_that_cannot_be_read_leaves_the_watch_alive(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does a connection that stumbles over a new one keep others from it."""
    kit = CertKit(tmp_path / "pki")
    leaf = kit.leaf("verifier", "v0")
    identity = TlsIdentity(ca=kit.ca, cert=leaf.crt_path, key=leaf.key_path)
    certificates, renewed = Certificates(), []
    certificates.add(identity)
    certificates.on_renewal(identity, lambda: 1 // 0)
    certificates.on_renewal(identity, lambda: renewed.append(1))
    async with watching(certificates):
        kit.reissued(leaf, raw_names=b"\x30\x05abc")
        await until(lambda: "cannot be understood" in caplog.text)
        certificates.reload()
        kit.leaf("verifier", "v0")
        await until(lambda: renewed == [1])
    assert "did not take the new certificate" in caplog.text


async def test_files_that_stay_are_left_alone(tmp_path: Path) -> None:
    kit = CertKit(tmp_path / "pki")
    identity = kit.identity("verifier", "v0")
    certificates, renewed = Certificates(), []
    certificates.add(identity)
    certificates.on_renewal(identity, lambda: renewed.append(1))
    async with watching(certificates):
        for _ in range(20):
            await asyncio.sleep(0.005)
    assert renewed == []


@pytest.mark.parametrize("transport", ["h2", "h3"])
async def test_a_revoked_peer_loses_its_connection_and_gets_no_other(
    tmp_path: Path, transport: Transport
) -> None:
    """After a reload the old connection drains, the next is refused, and others are served."""
    kit = CertKit(tmp_path / "pki")
    own = kit.leaf("verifier", "v0")
    crl = kit.revoke(kit.leaf("drafter", "somebody"))
    identity = TlsIdentity(ca=kit.ca, cert=own.crt_path, key=own.key_path, crl=crl)
    reasons: list[str] = []

    async def serve(request: Request) -> Response:
        return Response(200)

    server = Server(
        serve,
        identity=identity,
        host="127.0.0.1",
        port=0,
        body_bytes_max=0,
        on_refused=reasons.append,
        http3=True,
    )
    uri = f"https://127.0.0.1:{await server.start()}/"
    certificates = Certificates()
    certificates.add(identity)
    certificates.on_renewal(identity, server.drain_connections)
    lost = kit.leaf("drafter", "lost")
    drafter = HttpClient(
        TlsIdentity(ca=kit.ca, cert=lost.crt_path, key=lost.key_path), transport=transport
    )
    other = HttpClient(kit.identity("router", "r0"), transport=transport)
    assert (await drafter.request("GET", uri)).status == 200
    kit.revoke(lost)
    assert (await drafter.request("GET", uri)).status == 200, "not before the reload"
    certificates.reload()
    with pytest.raises(ConnectFailed, match="revoked"):
        async with asyncio.timeout(5):
            while True:
                await drafter.request("GET", uri)
    assert reasons[0] == "revoked"
    assert (await other.request("GET", uri)).status == 200
    for client in (drafter, other):
        await client.aclose()
    await server.aclose()


@pytest.mark.parametrize(
    ("days", "every_s"),
    [(90, None), (14.1, None), (13.9, 86400), (1.1, 86400), (0.9, 3600), (0, 3600), (-3, 3600)],
)
def test_expiry_is_told_once_a_day_and_at_the_end_once_an_hour(
    days: float, every_s: float | None
) -> None:
    """ux 4"""
    found = warning_every_s(days * 86400, warn_before_s=14 * 86400)
    assert found == every_s


async def test_what_is_about_to_expire_is_told_with_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Old:
        uris = ("spiffe://a/sdcp/router/r0",)
        not_after = datetime.now(UTC) + timedelta(hours=5)
        renewal = "run: sdcpctl certs renew"

    certificates = Certificates()
    certificates.add(Old())  # type: ignore[arg-type]
    task = asyncio.ensure_future(certificates.watch(every_s=0, warn_before_s=86400))
    while not caplog.records:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "router/r0 expires" in record.message
    assert "sdcpctl certs renew" in record.message
