"""A host name whose address changes while its instance moves: the name is asked anew (D-I2)."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from sdcpd.transport.client import HttpClient, Transport
from sdcpd.transport.http import ConnectFailed, ConnectionLost, Request, Response
from sdcpd.transport.server import Server
from tests.kit.certs import CertKit

NAME = "verifier.lab"
OLD, NEW = "127.0.0.1", "127.0.0.2"


class Names:
    """What the system's resolver says of the name; everything else it is really asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.address: str | None = OLD
        self._really = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._getaddrinfo)

    def _getaddrinfo(self, host: Any, *rest: Any, **named: Any) -> Any:
        if host != NAME:
            return self._really(host, *rest, **named)
        if self.address is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self._really(self.address, *rest, **named)


@pytest.mark.parametrize("version", ["h2", "h3"])
async def test_an_instance_that_moves_is_found_under_its_name(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, version: Transport
) -> None:
    kit, names = CertKit(tmp_path), Names(monkeypatch)
    identity = kit.identity("verifier", "v0", base_uri=f"https://{NAME}:7443/")

    async def start(host: str, port: int) -> tuple[Server, int]:
        async def handle(_: Request) -> Response:
            return Response(200, (), host.encode())

        server = Server(
            handle, identity=identity, host=host, port=port, body_bytes_max=100, http3=True
        )
        return server, await server.start()

    async def where(client: HttpClient) -> str:
        return (await client.request("GET", f"https://{NAME}:{port}/", timeout_s=20)).body.decode()

    old, port = await start(OLD, 0)
    client = HttpClient(kit.identity("router", "r0"), transport=version)
    assert await where(client) == OLD

    names.address = None
    assert await where(client) == OLD, "what is connected needs no name"
    await old.aclose()
    with pytest.raises((ConnectFailed, ConnectionLost)):
        for _ in range(3):  # the first may meet the connection that is just ending
            await where(client)

    names.address = NEW
    new, _ = await start(NEW, port)
    async with asyncio.timeout(20):
        assert await where(client) == NEW
    await client.aclose()
    await new.aclose()
