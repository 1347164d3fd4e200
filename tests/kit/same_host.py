"""A real MLC over mutual TLS and over the local socket, and clients that say which way they went."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sdcpd.config import parse_config
from sdcpd.parts import Parts
from sdcpd.roles.base import Listener
from sdcpd.stores import Stores
from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import Client, Handler, Headers, Response
from sdcpd.transport.local_client import LocalClient
from sdcpd.transport.local_server import LocalServer
from tests.kit.certs import CertKit
from tests.kit.serving import serving
from tiers.api import Tier
from tiers.host import HostTier

CONFIG = '[node]\ntrust_domain = "test.example"\n'
OBJECT_MAX = 64 << 20
MIB = 1 << 20


class Recording:
    """A client that writes down what passes, as "METHOD octets"."""

    def __init__(self, inner: Client) -> None:
        self._inner = inner
        self.passed: list[str] = []

    async def request(
        self,
        method: str,
        uri: str,
        *,
        headers: Headers = (),
        body: bytes = b"",
        timeout_s: float = 30.0,
    ) -> Response:
        """See Client."""
        self.passed.append(f"{method} {len(body)}")
        return await self._inner.request(
            method, uri, headers=headers, body=body, timeout_s=timeout_s
        )

    async def aclose(self) -> None:
        """See Client."""
        await self._inner.aclose()


@dataclass
class Site:
    """One server, and everybody who talks to it."""

    kit: CertKit
    local: LocalServer
    base: str
    clients: list[tuple[LocalClient, Recording]] = field(default_factory=list)

    def client(
        self, role: str = "drafter", name: str = "d0", **options: Any
    ) -> tuple[LocalClient, Recording]:
        """A client that the server knows as that instance."""
        http = HttpClient(self.kit.identity(role, name), check_peer=lambda *_: None)
        over_tls = Recording(http)
        made = LocalClient(over_tls, **options)
        self.clients.append((made, over_tls))
        return made, over_tls

    async def ready(self, **options: Any) -> tuple[LocalClient, Recording]:
        """A client that has been told of the local socket."""
        client, over_tls = self.client(**options)
        await client.request("OPTIONS", self.uri("q_rows.any"))
        assert client.is_near(self.base)
        over_tls.passed.clear()
        return client, over_tls

    def uri(self, name: str) -> str:
        """Of an object."""
        return f"{self.base}objects/scope/{name}"


def mlc_handler(base: str, tier: Tier) -> Handler:
    """What a role's listener does with objects, with the real checks of who may do what."""
    parts = Parts(parse_config(CONFIG, name="test"))
    return Listener(base, (), peers=parts.peers, mlc=Stores(parts).mlc(base, tier)).handle


@asynccontextmanager
async def same_host(
    folder: Path, *, tier: Tier | None = None, handler: Handler | None = None, **options: Any
) -> AsyncIterator[Site]:
    """A site; `options` are those of LocalServer."""
    kit = CertKit(folder / "pki")
    objects = tier or HostTier(256 * MIB)
    handle = handler or mlc_handler("https://127.0.0.1/", objects)
    with TemporaryDirectory(prefix="sdcpd-") as short:
        local = LocalServer(
            handle,
            path=Path(short) / "objects.sock",
            objects_path="/objects/",
            body_bytes_max=lambda _method, _path: OBJECT_MAX,
            **options,
        )
        local.start()
        try:
            async with serving(
                kit, local.announcing(handle), body_bytes_max=OBJECT_MAX, http3=False
            ) as (_, port):
                site = Site(kit, local, f"https://127.0.0.1:{port}/")
                try:
                    yield site
                finally:
                    for client, over_tls in site.clients:
                        await client.aclose()
                        await over_tls.aclose()
        finally:
            await local.aclose()
            await objects.aclose()


async def turns(count: int = 5) -> None:
    """Let others run."""
    for _ in range(count):
        await asyncio.sleep(0)
