"""Whole conversations over real sockets and real TLS on loopback (D-H8, D-H9, D-H15)."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import (
    ConnectFailed,
    ConnectionLost,
    Peer,
    PeerRefused,
    Request,
    RequestTimeout,
    Response,
)
from sdcpd.transport.identity_files import IdentityError
from sdcpd.transport.limits import CONNECTIONS_PER_PEER_MAX, H2Limits, ServerLimits
from sdcpd.transport.quic_link import QuicLink
from sdcpd.transport.server import Server
from tests.kit.certs import CertKit

MIB = 1 << 20


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> CertKit:
    return CertKit(tmp_path_factory.mktemp("pki"))


@pytest.fixture(params=["h2", "h3"], autouse=True)
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every conversation over both versions; the server speaks both at the same port number."""
    monkeypatch.setitem(_CLIENT, "transport", request.param)
    return str(request.param)


_CLIENT: dict[str, object] = {}


async def echo(request: Request) -> Response:
    """Answers with what it was asked."""
    if request.path == "/bulk":
        return Response(200, (), bytes(int(request.query)))
    if request.path == "/boom":
        raise RuntimeError("secret prompt text")
    if request.path == "/badheader":
        return Response(200, (("x-bad", "a\r\nb"),))
    peer = request.peer
    assert peer is not None
    headers = (
        ("x-method", request.method),
        ("x-target", f"{request.path}?{request.query}"),
        ("x-digest", hashlib.sha256(request.body).hexdigest()),
        ("x-peer", peer.uris[0]),
        ("x-authority", request.authority),
    )
    return Response(200, headers, request.body[:100])


@asynccontextmanager
async def serving(
    kit: CertKit,
    handler: Callable[[Request], Awaitable[Response]] = echo,
    **options: object,
) -> AsyncIterator[tuple[Server, str]]:
    server = Server(
        handler,
        identity=kit.identity("verifier", "v0"),
        host="127.0.0.1",
        port=0,
        body_bytes_max=8 * MIB,
        http3=True,
        **options,  # type: ignore[arg-type]
    )
    port = await server.start()
    try:
        yield server, f"https://127.0.0.1:{port}"
    finally:
        await server.aclose(grace_s=1.0)


@asynccontextmanager
async def connected(kit: CertKit, **options: object) -> AsyncIterator[HttpClient]:
    client = HttpClient(kit.identity("drafter", "d0"), **_CLIENT, **options)  # type: ignore[arg-type]
    try:
        yield client
    finally:
        await client.aclose()


async def test_request_and_response_carry_everything_and_the_peers_identity(kit: CertKit) -> None:
    async with serving(kit) as (_, base), connected(kit) as client:
        answer = await client.request("POST", f"{base}/a%2Fb?x=1", body=b"hello")
        assert answer.status == 200
        assert answer.header("X-Target") == "/a%2Fb?x=1"
        assert answer.header("x-peer") == "spiffe://test.example/sdcp/drafter/d0"
        assert answer.header("x-authority") == base.removeprefix("https://")
        assert answer.header("x-digest") == hashlib.sha256(b"hello").hexdigest()
        assert answer.body == b"hello"


async def test_host_name_is_checked_and_accepted(kit: CertKit) -> None:
    async with serving(kit) as (_, base), connected(kit) as client:
        answer = await client.request("GET", base.replace("127.0.0.1", "localhost") + "/")
        assert answer.status == 200


async def test_head_has_no_body(kit: CertKit) -> None:
    async with serving(kit) as (_, base), connected(kit) as client:
        answer = await client.request("HEAD", f"{base}/bulk?1000")
        assert (answer.status, answer.body) == (200, b"")
        assert answer.header("content-length") == "1000"


async def test_large_bodies_in_both_directions_at_once(kit: CertKit) -> None:
    body = bytes(range(256)) * (5 * MIB // 256)
    async with serving(kit) as (_, base), connected(kit) as client:
        up, down, small = await asyncio.gather(
            client.request("PUT", f"{base}/up", body=body),
            client.request("GET", f"{base}/bulk?{5 * MIB}"),
            client.request("GET", f"{base}/small"),
        )
        assert up.header("x-digest") == hashlib.sha256(body).hexdigest()
        assert len(down.body) == 5 * MIB
        assert small.status == 200


async def test_hundreds_of_requests_at_once_share_one_connection(kit: CertKit) -> None:
    peers: set[str] = set()

    async def note(request: Request) -> Response:
        assert request.peer is not None
        peers.add(request.peer.address)
        await asyncio.sleep(0)
        return Response(200, (), request.query.encode())

    async with serving(kit, note) as (_, base), connected(kit) as client:
        calls = [client.request("GET", f"{base}/?{number}") for number in range(250)]
        answers = await asyncio.gather(*calls)
        assert [answer.body for answer in answers] == [
            str(number).encode() for number in range(250)
        ]
        assert len(peers) == 1


async def test_handler_error_is_500_without_its_text_and_logged(
    kit: CertKit, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(kit) as (_, base), connected(kit) as client:
        for path in ("/boom", "/badheader"):
            answer = await client.request("GET", base + path)
            assert answer.status == 500
            assert answer.header("content-type") == "application/problem+json"
            assert b"secret" not in answer.body
    assert "secret prompt text" in caplog.text


async def test_body_over_the_limit_is_413_and_the_connection_lives_on(kit: CertKit) -> None:
    async with serving(kit) as (_, base), connected(kit) as client:
        big = await client.request("PUT", f"{base}/up", body=bytes(9 * MIB))
        assert big.status == 413
        assert (await client.request("GET", f"{base}/")).status == 200


async def test_request_timeout_says_it_may_have_been_processed_and_handler_finishes(
    kit: CertKit,
) -> None:
    release, finished = asyncio.Event(), asyncio.Event()

    async def slow(request: Request) -> Response:
        if request.path == "/slow":
            await release.wait()
            finished.set()
        return Response(204)

    async with serving(kit, slow) as (_, base), connected(kit) as client:
        await client.request("GET", f"{base}/")  # a connection is not what is timed
        with pytest.raises(RequestTimeout, match="may have been processed"):
            await client.request("POST", f"{base}/slow", timeout_s=0.3)
        release.set()
        await asyncio.wait_for(finished.wait(), 5)


async def test_d_h15_handler_survives_a_client_that_disconnects(kit: CertKit) -> None:
    started, release, finished = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(request: Request) -> Response:
        started.set()
        await release.wait()
        finished.set()
        return Response(204)

    async with serving(kit, slow) as (_, base):
        client = HttpClient(kit.identity("drafter", "d0"), **_CLIENT)  # type: ignore[arg-type]
        call = asyncio.create_task(client.request("POST", f"{base}/"))
        await started.wait()
        await client.aclose()
        with pytest.raises(ConnectionLost):
            await call
        release.set()
        await asyncio.wait_for(finished.wait(), 5)


async def test_drain_lets_a_request_in_flight_finish(kit: CertKit) -> None:
    started, release = asyncio.Event(), asyncio.Event()

    async def slow(request: Request) -> Response:
        started.set()
        await release.wait()
        return Response(200, (), bytes(2 * MIB))

    async with serving(kit, slow) as (server, base), connected(kit) as client:
        call = asyncio.create_task(client.request("GET", f"{base}/"))
        await started.wait()
        closing = asyncio.create_task(server.aclose(grace_s=10))
        await asyncio.sleep(0)
        release.set()
        assert len((await call).body) == 2 * MIB
        await closing
        with pytest.raises(ConnectFailed, match="nothing listens"):
            await client.request("GET", f"{base}/")


async def test_drain_of_live_connections_makes_clients_reconnect_without_loss(kit: CertKit) -> None:
    async with serving(kit) as (server, base), connected(kit) as client:
        for _ in range(3):
            calls = [client.request("GET", f"{base}/?{number}") for number in range(20)]
            gathered = asyncio.gather(*calls)
            await asyncio.sleep(0)
            server.drain_connections()
            assert {answer.status for answer in await gathered} == {200}


async def test_renewed_client_connections_show_the_reloaded_certificate(
    kit: CertKit, tmp_path: Path
) -> None:
    async def who(request: Request) -> Response:
        assert request.peer is not None
        return Response(200, (), request.peer.fingerprint.encode())

    own = CertKit(tmp_path)
    identity = own.identity("drafter", "d0")
    async with serving(own, who) as (_, base):
        client = HttpClient(identity, **_CLIENT)  # type: ignore[arg-type]
        before = (await client.request("GET", f"{base}/")).body
        own.leaf("drafter", "d0")
        identity.reload()
        assert (await client.request("GET", f"{base}/")).body == before
        client.renew_connections()
        assert (await client.request("GET", f"{base}/")).body != before
        await client.aclose()


async def test_unfinished_handlers_are_cancelled_after_the_grace(
    kit: CertKit, caplog: pytest.LogCaptureFixture
) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def forever(request: Request) -> Response:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    async with serving(kit, forever) as (server, base), connected(kit) as client:
        call = asyncio.create_task(client.request("GET", f"{base}/"))
        await started.wait()
        await server.aclose(grace_s=0.05)
        assert cancelled.is_set()
        with pytest.raises(ConnectionLost):
            await call


async def test_client_to_a_closed_port_sends_nothing(kit: CertKit) -> None:
    async with serving(kit) as (server, base), connected(kit) as client:
        await server.aclose()
        with pytest.raises(ConnectFailed, match=r"nothing listens at 127\.0\.0\.1"):
            await client.request("GET", f"{base}/")


async def test_client_reconnects_to_a_server_that_came_back(kit: CertKit) -> None:
    identity = kit.identity("verifier", "v0")
    options: dict[str, object] = {"identity": identity, "body_bytes_max": MIB, "http3": True}
    first = Server(echo, host="127.0.0.1", port=0, **options)  # type: ignore[arg-type]
    port = await first.start()
    async with connected(kit) as client:
        assert (await client.request("GET", f"https://127.0.0.1:{port}/")).status == 200
        await first.aclose()
        second = Server(echo, host="127.0.0.1", port=port, **options)  # type: ignore[arg-type]
        await second.start()
        assert (await client.request("GET", f"https://127.0.0.1:{port}/")).status == 200
    await second.aclose()


async def test_d_i2_server_whose_identity_is_refused_gets_no_request(kit: CertKit) -> None:
    seen: list[tuple[Peer, str]] = []

    def only_routers(peer: Peer, authority: str) -> None:
        seen.append((peer, authority))
        raise PeerRefused(f"{authority} is {peer.uris[0]}, not a router")

    async with serving(kit) as (_, base), connected(kit, check_peer=only_routers) as client:
        with pytest.raises(PeerRefused, match="not a router"):
            await client.request("GET", f"{base}/")
    assert seen[0][1] == base.removeprefix("https://")


async def test_connect_timeout_when_the_server_says_nothing(kit: CertKit, version: str) -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(mute, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    silent.bind(("127.0.0.1", port))
    async with connected(kit, connect_timeout_s=0.2) as client:
        with pytest.raises(ConnectFailed, match=r"within 0\.2 s"):
            await client.request("GET", f"https://127.0.0.1:{port}/")
    listener.close()
    silent.close()


async def test_reload_takes_a_new_certificate_and_keeps_the_old_when_it_does_not_fit(
    kit: CertKit, tmp_path: Path
) -> None:
    own = CertKit(tmp_path)
    identity = own.identity("verifier", "v0")
    before = identity.certificate.serial_number
    fresh = own.leaf("verifier", "v0")
    identity.reload()
    assert identity.certificate.serial_number != before
    kept = identity.certificate.serial_number
    fresh.key_path.write_bytes(kit.leaf("verifier", "other").key_path.read_bytes())
    with pytest.raises(IdentityError, match="not the key of"):
        identity.reload()
    assert identity.certificate.serial_number == kept


async def test_the_operator_may_set_the_bounds(
    kit: CertKit, caplog: pytest.LogCaptureFixture
) -> None:
    """[transport.limits]: connections of one certificate, and requests of one, over both versions."""
    identity, bounds = kit.identity("drafter", "many"), ServerLimits(connections_per_peer=1)
    limits = H2Limits(streams_max=3)
    clients = [HttpClient(identity, transport=version) for version in ("h2", "h3")]
    async with serving(kit, bounds=bounds, limits=limits) as (server, base):
        for client in clients:
            assert (await client.request("GET", f"{base}/")).status == 200
            link, connection = list(server._connections.items())[-1]
            assert connection._exchange is not None
            assert connection._exchange._requests_max == 3
            if isinstance(link, QuicLink):
                assert link._quic._local_max_streams_bidi.value == 3
        for client in clients:
            await client.aclose()
    assert caplog.text.count("too many connections of one peer") == 1, "the second took its place"


async def test_connections_of_one_peer_are_bounded_and_the_newest_stays(
    kit: CertKit, caplog: pytest.LogCaptureFixture
) -> None:
    """One certificate cannot take all that the server has; others are not touched."""
    identity = kit.identity("drafter", "many")
    async with serving(kit) as (server, base), connected(kit) as other:
        assert (await other.request("GET", f"{base}/")).status == 200
        clients = [
            HttpClient(identity, **_CLIENT)  # type: ignore[arg-type]
            for _ in range(CONNECTIONS_PER_PEER_MAX + 4)
        ]
        for client in clients:
            assert (await client.request("GET", f"{base}/")).status == 200
        same = [c for c in server._connections.values() if c.peer != ""]
        assert len(same) <= CONNECTIONS_PER_PEER_MAX + 1
        assert caplog.text.count("too many connections of one peer") == 4
        assert (await other.request("GET", f"{base}/")).status == 200
        for client in clients:
            await client.aclose()
