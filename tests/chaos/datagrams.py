"""The relay of HTTP/3: datagrams of a link that is cut are lost, as on a wire."""

from __future__ import annotations

import asyncio
from typing import cast

from tests.chaos.relay import Gate, Link, Links
from tests.chaos.sockets import UDP

Address = tuple[str, int]
PENDING_MAX = 64  # datagrams that wait for the socket below


class DatagramRelay(asyncio.DatagramProtocol):
    """Passes datagrams that arrive at one port on to another instance's real port."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._above: asyncio.DatagramTransport
        self._paths: dict[Address, _Path] = {}
        self._opening: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen."""
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", self._gate.port))

    async def aclose(self) -> None:
        """Pass nothing more."""
        self._above.close()
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for path in self._paths.values():
            path.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It listens."""
        self._above = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: Address) -> None:
        """Of somebody who calls, known or not."""
        path = self._paths.get(addr)
        if path is None:
            link = self._gate.link(addr[1], UDP)
            path = self._paths[addr] = _Path(link, self._gate.links, self._above, addr)
            task = asyncio.ensure_future(path.open(self._gate.target))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        path.down(data)

    def error_received(self, exc: OSError) -> None:
        """Whoever called has gone: a later datagram may be another's at the same port."""


class _Path(asyncio.DatagramProtocol):
    """One caller's socket towards the instance."""

    def __init__(
        self, link: Link, links: Links, above: asyncio.DatagramTransport, caller: Address
    ) -> None:
        self._link, self._links, self._above, self._caller = link, links, above, caller
        self._below: asyncio.DatagramTransport | None = None
        self._pending: list[bytes] = []

    async def open(self, port: int) -> None:
        """Towards the instance's port."""
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(lambda: self, remote_addr=("127.0.0.1", port))

    def close(self) -> None:
        """Pass nothing more."""
        if self._below is not None:
            self._below.close()

    @property
    def _lost(self) -> bool:
        return self._links.is_silent(self._link) or self._links.is_reset(self._link)

    def down(self, data: bytes) -> None:
        """To the instance."""
        if self._lost:
            return
        if self._below is not None:
            self._below.sendto(data)
        elif len(self._pending) < PENDING_MAX:
            self._pending.append(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self._below = cast(asyncio.DatagramTransport, transport)
        for data in self._pending:
            self._below.sendto(data)
        self._pending.clear()

    def datagram_received(self, data: bytes, addr: Address) -> None:
        """From the instance."""
        if not self._lost:
            self._above.sendto(data, self._caller)

    def error_received(self, exc: OSError) -> None:
        """Nobody listens there now."""
