"""Where roles and scripted peers meet: in memory, or over sockets with HTTP/2 and mutual TLS."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from sdcpd.dev.plan import free_ports
from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import Client, ConnectionLost, Handler, Peer, Response
from sdcpd.transport.loopback import LoopbackClient
from sdcpd.transport.server import Server
from tests.kit.certs import CertKit
from tests.kit.cluster import DOMAIN, peer
from tests.kit.scripted import DROP


class Network(Protocol):
    """Gives each instance a base URI, serves its handler there, and makes its client."""

    def base(self, role: str, name: str) -> str: ...

    async def serve(self, role: str, name: str, handler: Handler) -> None: ...

    def client(self, role: str, name: str) -> Client: ...


class DroppingClient(LoopbackClient):
    """Loses the answers that a peer says to drop, as a connection that breaks would."""

    def __init__(self, routes: Mapping[str, Handler], peer: Peer) -> None:
        super().__init__(routes, peer)
        self.patience: dict[str, float] = {}
        """How long the last request of each method and last path segment may wait, in seconds."""

    async def request(self, method: str, uri: str, **rest: Any) -> Response:
        """See Client."""
        self.patience[f"{method} {uri.rpartition('/')[2]}"] = rest.get("timeout_s", 30.0)
        answer = await super().request(method, uri, **rest)
        if answer.status == DROP.status:
            raise ConnectionLost("the connection broke before the answer")
        return answer


class MemoryNetwork:
    """Handlers called in this process; `path` is that of all base URIs, with a slash behind it."""

    def __init__(self, path: str = "") -> None:
        self.handlers: dict[str, Handler] = {}
        self._path = path

    def base(self, role: str, name: str) -> str:
        """See Network."""
        return f"https://{name}.test/{self._path}"

    async def serve(self, role: str, name: str, handler: Handler) -> None:
        """See Network."""
        self.handlers[self.base(role, name)] = handler

    def client(self, role: str, name: str) -> DroppingClient:
        """See Network."""
        return DroppingClient(self.handlers, peer(role, name, self.base(role, name)))


class TlsNetwork:
    """Real servers and clients on loopback, with certificates of one authority."""

    def __init__(self, folder: Path) -> None:
        self._kit = CertKit(folder, trust_domain=DOMAIN)
        self._bases: dict[str, str] = {}
        self._servers: list[Server] = []
        self._clients: list[HttpClient] = []

    def base(self, role: str, name: str) -> str:
        """See Network."""
        if name not in self._bases:
            self._bases[name] = f"https://127.0.0.1:{free_ports(1)[0]}/"
        return self._bases[name]

    async def serve(self, role: str, name: str, handler: Handler) -> None:
        """See Network."""
        base = self.base(role, name)
        server = Server(
            handler,
            identity=self._kit.identity(role, name, base_uri=base),
            host="127.0.0.1",
            port=int(base.rsplit(":", 1)[1].rstrip("/")),
            body_bytes_max=1 << 24,
        )
        await server.start()
        self._servers.append(server)

    def client(self, role: str, name: str) -> HttpClient:
        """See Network."""
        identity = self._kit.identity(role, name, base_uri=self.base(role, name))
        self._clients.append(HttpClient(identity))
        return self._clients[-1]

    async def aclose(self) -> None:
        """Close everything."""
        for client in self._clients:
            await client.aclose()
        for server in self._servers:
            await server.aclose(0.2)


@asynccontextmanager
async def network_of(kind: str, folder: Path) -> AsyncIterator[Network]:
    """A network that is "memory" or "tls"; `folder` is for certificates."""
    if kind == "memory":
        yield MemoryNetwork()
        return
    made = TlsNetwork(folder / "pki")
    try:
        yield made
    finally:
        await made.aclose()
