"""A real drafter beside a wire, and a wire over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from sdcpd.dev.plan import free_ports
from sdcpd.engine.fake import FakeDrafter, FakeModel
from sdcpd.roles.drafter import Drafter, DrafterConfig
from sdcpd.roles.objects import Objects
from sdcpd.transport.client import HttpClient, Transport
from sdcpd.transport.server import Server
from tests.kit.certs import CertKit
from tests.kit.cluster import DOMAIN, PEERS, ROUTER
from tests.kit.verifier_wire import DRAFTER, OTHER, Wire


def add_drafter(wire: Wire) -> Drafter:
    """A real drafter in the wire's network, of a model of its own."""
    client = wire.clients["drafter"]
    made = Drafter(
        DrafterConfig(DRAFTER),
        engine=FakeDrafter(FakeModel()),
        client=client,
        objects=Objects(client, bases=(ROUTER,), own=ROUTER),
        peers=PEERS,
        mlc=None,
        name="d0.x",
    )
    wire.network[DRAFTER] = made.listener.handle
    return made


@asynccontextmanager
async def tls_wire(folder: Path, transport: Transport = "h2") -> AsyncIterator[Wire]:
    """A wire whose verifier is reached over HTTP/2 or HTTP/3, with certificates on both sides."""
    kit = CertKit(folder / "pki", trust_domain=DOMAIN)
    base = f"https://127.0.0.1:{free_ports(1)[0]}/"
    made = Wire(base=base)
    server = Server(
        made.verifier.listener.handle,
        identity=kit.identity("verifier", "v0", base_uri=base),
        host="127.0.0.1",
        port=int(base.rsplit(":", 1)[1].rstrip("/")),
        body_bytes_max=1 << 24,
        http3=True,
    )
    await server.start()
    made.clients = {
        "router": HttpClient(kit.identity("router", "r0", base_uri=ROUTER), transport=transport),
        "drafter": HttpClient(kit.identity("drafter", "d0", base_uri=DRAFTER), transport=transport),
        "other": HttpClient(kit.identity("drafter", "d1", base_uri=OTHER), transport=transport),
        "front_end": HttpClient(
            kit.identity("front_end", "f0", base_uri="https://f0.test/"), transport=transport
        ),
    }
    try:
        yield made
    finally:
        for client in made.clients.values():
            await client.aclose()
        await server.aclose(1.0)
        await made.verifier.aclose()
