"""The verifier over a real socket: HTTP/2, TLS 1.3, certificates on both sides."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sdcpd.protocol.messages import Output, SessionState, Verdict
from sdcpd.protocol.problems import ProblemDocument
from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import PeerRefused
from tests.kit.certs import CertKit
from tests.kit.cluster import DOMAIN, ROUTER
from tests.kit.verifier_machine import SESSION
from tests.kit.verifier_wire import Wire
from tests.kit.wire_peers import tls_wire


@pytest.fixture
async def wire(tmp_path: Path) -> AsyncIterator[Wire]:
    async with tls_wire(tmp_path) as made:
        yield made


async def test_a_whole_round(wire: Wire) -> None:
    """R-5.1-1, R-5.1-9: open, name, propose, read; identities come from certificates."""
    assert isinstance(await wire.open(), SessionState)
    assert isinstance(await wire.name(), SessionState)
    found = await wire.propose(wire.good(3))
    output = await wire.output()
    assert isinstance(found, Verdict) and isinstance(output, Output)
    assert output.tokens == found.emitted and len(found.emitted) == 4


async def test_malformed_bodies_and_wrong_roles(wire: Wire) -> None:
    """R-5.2-6, R-9-2: 400 and 403 with a problem document that says what is wrong."""
    await wire.ready()
    for body in (b"", b"\xff", b"\xa1\x61x", b"\x80", b"\xa0\xa0"):
        response = await wire.send("drafter", "POST", "proposals", body)
        assert response.status == 400
        assert response.header("content-type") == "application/problem+json"
    refused = await wire.send("drafter", "POST", "sessions", b"\xa0")
    assert refused.status == 403 and b"role router" in refused.body
    answer = await wire.ask("router", "POST", "proposals", None, Verdict)
    assert isinstance(answer, ProblemDocument) and answer.status == 400
    assert wire.verifier.sessions[0].machine.session == SESSION


async def test_foreign_authority_is_refused(wire: Wire, tmp_path: Path) -> None:
    """R-5.1-4, R-5.1-6: both sides refuse, and the client's error says what to do."""
    other = CertKit(tmp_path / "other", trust_domain=DOMAIN)
    client = HttpClient(other.identity("router", "r0", base_uri=ROUTER))
    with pytest.raises(PeerRefused, match="certificate"):
        await client.request("GET", wire.base)
    await client.aclose()
