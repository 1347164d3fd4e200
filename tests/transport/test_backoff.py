"""A server that cannot be reached is not tried without end, and not by all at the same time."""

from __future__ import annotations

import pytest

from sdcpd.transport.backoff import Backoff
from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import ConnectFailed, PeerRefused, Request, Response
from sdcpd.transport.limits import BACKOFF_KEPT_MAX, BACKOFF_MAX_S, BACKOFF_REFUSED_MAX_S
from sdcpd.transport.server import Server
from tests.kit.certs import CertKit

DOWN = ConnectFailed("nothing listens at v0:7443")


def pause(backoff: Backoff[str], *, now: float) -> float:
    """How long it lasts, found by asking."""
    low, high = now, now + 60.0
    for _ in range(60):
        middle = (low + high) / 2
        try:
            backoff.check("v0", now=middle)
        except ConnectFailed:
            low = middle
        else:
            high = middle
    return high - now


def test_the_first_failure_is_forgiven_and_pauses_double_up_to_a_bound() -> None:
    backoff: Backoff[str] = Backoff()
    pauses = []
    for number in range(12):
        now = number * 100.0
        backoff.failed("v0", DOWN, now=now)
        pauses.append(pause(backoff, now=now))
    assert pauses[0] < 1e-6
    for number, found in enumerate(pauses[1:]):
        longest = min(BACKOFF_MAX_S, 0.05 * 2**number)
        assert longest / 2 <= found + 1e-6 <= longest + 1e-3
    backoff.succeeded("v0")
    backoff.check("v0", now=1100.0)


def test_no_two_clients_wait_alike() -> None:
    found = set()
    for _ in range(20):
        backoff: Backoff[str] = Backoff()
        backoff.failed("v0", DOWN, now=0.0)
        backoff.failed("v0", DOWN, now=0.0)
        found.add(round(pause(backoff, now=0.0), 9))
    assert len(found) > 15


def test_a_refusal_pauses_longer_and_keeps_its_kind_and_words() -> None:
    backoff: Backoff[str] = Backoff()
    for _ in range(20):
        backoff.failed("v0", PeerRefused("v0:7443 got no certificate from us"), now=0.0)
    with pytest.raises(PeerRefused, match=r"no certificate from us \(tried again in \d\.\d s\)"):
        backoff.check("v0", now=0.0)
    assert BACKOFF_REFUSED_MAX_S / 2 <= pause(backoff, now=0.0) <= BACKOFF_REFUSED_MAX_S + 1e-3
    backoff.forget()
    backoff.check("v0", now=0.0)


def test_what_is_remembered_is_bounded() -> None:
    backoff: Backoff[int] = Backoff()
    for number in range(3 * BACKOFF_KEPT_MAX):
        backoff.failed(number, DOWN, now=0.0)
    assert len(backoff._troubles) == BACKOFF_KEPT_MAX


async def test_a_client_leaves_a_dead_server_alone_and_finds_it_again(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = CertKit(tmp_path_factory.mktemp("pki"))

    async def handle(request: Request) -> Response:
        return Response(204)

    def server(port: int) -> Server:
        identity = kit.identity("verifier", "v0")
        return Server(handle, identity=identity, host="127.0.0.1", port=port, body_bytes_max=100)

    first = server(0)
    port = await first.start()
    uri = f"https://127.0.0.1:{port}/"
    client = HttpClient(kit.identity("router", "r0"), transport="h2")
    await client.request("GET", uri)
    await first.aclose(1)
    tried = 0
    connect = client._connect_somehow

    async def counted(origin: object) -> object:
        nonlocal tried
        tried += 1
        return await connect(origin)  # type: ignore[arg-type]

    monkeypatch.setattr(client, "_connect_somehow", counted)
    for _ in range(500):
        with pytest.raises(ConnectFailed, match="nothing listens"):
            await client.request("GET", uri)
    assert tried <= 20, "500 requests, and one attempt to connect in each pause"
    second = server(port)
    await second.start()
    client.renew_connections()  # or after a pause
    assert (await client.request("GET", uri)).status == 204
    await client.aclose()
    await second.aclose(1)
