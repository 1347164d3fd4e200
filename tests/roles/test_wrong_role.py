"""Who has a certificate, but not the role for what it asks: told, logged and counted (D-I3)."""

from __future__ import annotations

import json
import logging
from collections import Counter
from typing import Literal

import pytest

from sdcpd.roles.base import Call, Listener, Route
from sdcpd.roles.peers import PeerTable
from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import PeerRefused, Response
from sdcpd.transport.limits import REFUSAL_LINES_BURST
from sdcpd.transport.refusal_log import RefusalLog
from tests.kit.certs import CertKit
from tests.kit.serving import serving

Version = Literal["h2", "h3"]


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> CertKit:
    return CertKit(tmp_path_factory.mktemp("pki"))


@pytest.mark.parametrize("version", ["h2", "h3"])
async def test_r_5_1_a_drafter_that_asks_what_is_the_routers_to_ask(
    kit: CertKit, caplog: pytest.LogCaptureFixture, version: Version
) -> None:
    handled: list[Call] = []
    counted: Counter[str] = Counter()

    async def handle(call: Call) -> Response:
        handled.append(call)
        return Response(204)

    route = Route("POST", "sessions", handle, roles=("router",), body=False)
    listener = Listener("https://127.0.0.1", [route], peers=PeerTable("test.example"))
    listener.refusals = RefusalLog(logging.getLogger("sdcpd"), lambda word: counted.update((word,)))
    async with serving(kit, listener.handle) as (_, port):
        uri = f"https://127.0.0.1:{port}/sessions"
        drafter = HttpClient(kit.identity("drafter", "d0"), transport=version)
        router = HttpClient(kit.identity("router", "r0"), transport=version)
        refused, served = await drafter.request("POST", uri), await router.request("POST", uri)
        for one in (drafter, router):
            await one.aclose()
    assert refused.status == 403 and served.status == 204 and len(handled) == 1
    assert refused.header("content-type") == "application/problem+json"
    detail = "this needs the role router; you are drafter/d0"
    assert json.loads(refused.body)["detail"] == detail
    assert f"(drafter/d0): POST '/sessions': {detail}" in caplog.text
    assert counted == {"wrong_role": 1}


@pytest.mark.parametrize("version", ["h2", "h3"])
async def test_a_server_without_a_role_of_the_cluster_gets_no_request(
    kit: CertKit, version: Version
) -> None:
    """D-I2: the authority alone makes nobody a verifier; the trust domain and role must fit."""
    handled = []

    async def handle(request: object) -> Response:
        handled.append(request)
        return Response(204)

    async with serving(kit, handle) as (_, port):
        client = HttpClient(
            kit.identity("drafter", "d0"),
            transport=version,
            check_peer=PeerTable("other.example").check_server,
        )
        with pytest.raises(PeerRefused, match="without a role of this cluster"):
            await client.request("GET", f"https://127.0.0.1:{port}/")
        await client.aclose()
    assert not handled


def test_a_flood_of_refusals_is_told_by_its_number(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are counted; the log gets a line a second, which says how many it has not got."""
    now = 0.0
    monkeypatch.setattr("sdcpd.transport.refusal_log.time.monotonic", lambda: now)
    counted: Counter[str] = Counter()
    refusals = RefusalLog(logging.getLogger("sdcpd"), lambda word: counted.update((word,)))
    for _ in range(1000):
        refusals.note("plain_http", "10.0.0.9:1", "plain HTTP on the TLS port; use https")
    assert counted == {"plain_http": 1000}
    assert len(caplog.records) == REFUSAL_LINES_BURST
    now = 2.0
    refusals.note("revoked", "10.0.0.9:2", "it was revoked")
    untold = 1000 - REFUSAL_LINES_BURST
    assert caplog.messages[-1] == (
        f"refused 10.0.0.9:2: it was revoked (and {untold} refusals before it that were not logged)"
    )
