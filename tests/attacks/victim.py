"""A server under attack, with honest clients of both versions that must be served meanwhile."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from hyperframe.frame import SettingsFrame

from certs import Leaf
from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import Request, Response
from sdcpd.transport.limits import PaceLimits
from sdcpd.transport.server import Server
from tests.kit.certs import CertKit

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
BIG_BYTES = 300_000
BODY_BYTES_MAX = 100_000
SERVED_MIN = 10
"""How often each honest client must have been served while an attack goes on."""


@dataclass
class Victim:
    """The server; `reasons` counts what it refused, `served` whom it served."""

    kit: CertKit
    port: int
    server: Server
    attacker: Leaf
    """The certificate of whoever attacks."""
    reasons: Counter[str] = field(default_factory=Counter)
    served: Counter[str] = field(default_factory=Counter)

    @property
    def unsent_bytes(self) -> int:
        """Of answers that wait for somebody who does not take them."""
        exchanges = (one._exchange for one in self.server._connections.values())
        return sum(one._queue.buffered_bytes for one in exchanges if one is not None)

    async def under(self, attack: Callable[[], Awaitable[None]]) -> None:
        """Attack again and again until the honest clients have been served so often."""
        async with asyncio.timeout(60), honest(self):
            while min(self.served["h2"], self.served["h3"]) < SERVED_MIN:
                await attack()

    @asynccontextmanager
    async def octets(
        self, settings: dict[int, int] | None = None
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection with a good certificate that has said hello, for frames made by hand."""
        leaf = self.attacker
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.kit.ca)
        context.load_cert_chain(leaf.crt_path, leaf.key_path)
        context.set_alpn_protocols(["h2"])
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=context, server_hostname="127.0.0.1"
        )
        writer.write(PREFACE + SettingsFrame(0, settings or {}).serialize())
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


@asynccontextmanager
async def victim(
    kit: CertKit, *, pace: PaceLimits | None = None, handshake_timeout_s: float = 5.0
) -> AsyncIterator[Victim]:
    """A server of both versions: `/wait` never answers, `/big` does at length."""

    async def handle(request: Request) -> Response:
        if request.path == "/wait":
            await asyncio.Event().wait()
        return Response(200, (), bytes(BIG_BYTES) if request.path == "/big" else b"ok")

    found: Counter[str] = Counter()
    server = Server(
        handle,
        identity=kit.identity("verifier", "v0"),
        host="127.0.0.1",
        port=0,
        body_bytes_max=BODY_BYTES_MAX,
        on_refused=lambda reason: found.update((reason,)),
        pace=pace,
        handshake_timeout_s=handshake_timeout_s,
        http3=True,
    )
    port = await server.start()
    try:
        yield Victim(kit, port, server, kit.leaf("drafter", "d0"), reasons=found)
    finally:
        await server.aclose(0)


@asynccontextmanager
async def honest(of: Victim) -> AsyncIterator[None]:
    """Clients that ask one thing after the other, and must always get it."""

    async def ask(client: HttpClient, version: str) -> None:
        while True:
            answer = await client.request("POST", f"https://127.0.0.1:{of.port}/", body=b"ask")
            assert answer.body == b"ok"
            of.served[version] += 1

    clients = {
        version: HttpClient(of.kit.identity("router", f"r{version}"), transport=version)
        for version in ("h2", "h3")
    }
    asking = [asyncio.ensure_future(ask(client, name)) for name, client in clients.items()]
    try:
        yield
    finally:
        for task in asking:
            task.cancel()
        results = await asyncio.gather(*asking, return_exceptions=True)
        for client in clients.values():
            await client.aclose()
    broken = [one for one in results if not isinstance(one, asyncio.CancelledError)]
    assert not broken, broken
