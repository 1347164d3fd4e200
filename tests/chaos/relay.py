"""What stands between the instances: relays that can cut the link of any two of them.

Every instance is named by the port of its relay and listens at another.  The relay finds out which
instance a connection comes from, so that a link may be cut in the middle of a cluster whose parts
all see each other otherwise.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.sockets import TCP, owner_of

log = logging.getLogger("chaos")
CHUNK = 1 << 16
Link = frozenset[str]


class Links:
    """Which links are cut: silently (nothing passes, as with a lost cable) or with resets."""

    def __init__(self) -> None:
        self._silent: dict[Link, asyncio.Event] = {}
        self._reset: set[Link] = set()
        self._wires: dict[Link, set[Wire]] = {}

    def cut(self, a: str, b: str) -> None:
        """Let nothing pass any more; connections stay as they are."""
        self._silent.setdefault(frozenset((a, b)), asyncio.Event())

    def break_off(self, a: str, b: str) -> None:
        """End all connections, and every new one at once."""
        link = frozenset((a, b))
        self._reset.add(link)
        for wire in list(self._wires.get(link, ())):
            wire.abort()

    def heal(self, a: str, b: str) -> None:
        """Let everything pass again, what has waited first."""
        link = frozenset((a, b))
        self._reset.discard(link)
        if (waiting := self._silent.pop(link, None)) is not None:
            waiting.set()

    def is_reset(self, link: Link) -> bool:
        """Whether connections of this link end at once."""
        return link in self._reset

    def is_silent(self, link: Link) -> bool:
        """Whether nothing passes."""
        return link in self._silent

    async def passable(self, link: Link) -> None:
        """Wait while the link is cut."""
        while (waiting := self._silent.get(link)) is not None:
            await waiting.wait()

    def add(self, link: Link, wire: Wire) -> None:
        """Remember a connection."""
        self._wires.setdefault(link, set()).add(wire)

    def remove(self, link: Link, wire: Wire) -> None:
        """Forget it."""
        self._wires[link].discard(wire)


class Wire:
    """One connection through a relay."""

    def __init__(self, *writers: asyncio.StreamWriter) -> None:
        self._writers = writers

    def abort(self) -> None:
        """Reset both ends."""
        for writer in self._writers:
            writer.transport.abort()


@dataclass(frozen=True, slots=True)
class Gate:
    """Where an instance is called, where it listens, and who may be calling."""

    name: str
    port: int
    target: int
    """The port at which it listens."""
    links: Links
    pids: Callable[[], Mapping[str, int]]
    """Of all instances."""

    def link(self, caller_port: int, table: Path) -> Link:
        """Between the instance and whoever calls from that port."""
        caller = owner_of(caller_port, self.port, self.pids(), table=table) or "outside"
        return frozenset((caller, self.name))


class Relay:
    """Passes what arrives at one port on to another instance's real port."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._links = gate, gate.links
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._gate.port)

    async def aclose(self) -> None:
        """Cut everything."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await self._relay(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # an end has gone, or the relay closes: the other learns it by the abort below
        finally:
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = self._gate.link(writer.get_extra_info("peername")[1], TCP)
        if self._links.is_reset(link):
            return
        await self._links.passable(link)
        below_reader, below_writer = await asyncio.open_connection("127.0.0.1", self._gate.target)
        wire = Wire(writer, below_writer)
        self._links.add(link, wire)
        ways = [
            asyncio.ensure_future(self._pass(link, reader, below_writer)),
            asyncio.ensure_future(self._pass(link, below_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._links.remove(link, wire)
            # Of an end that was killed nothing more passes while the link is cut, nor its end.
            await self._links.passable(link)
            below_writer.transport.abort()

    async def _pass(
        self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while octets := await reader.read(CHUNK):
            await self._links.passable(link)
            writer.write(octets)
            await writer.drain()
        await self._links.passable(link)
        writer.write_eof()
