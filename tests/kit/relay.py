"""A TCP relay on loopback that can lose what passes through it."""

from __future__ import annotations

import asyncio


class Relay:
    """Passes octets on to one port; `lose_answers` cuts at the next answer, before it is passed."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._losing = False
        self.lost = 0
        """Connections that were cut so far."""

    @property
    def address(self) -> str:
        """Where to connect to."""
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    def lose_answers(self) -> None:
        """Let the next request through, and cut the connection instead of passing its answer."""
        self._losing = True

    async def aclose(self) -> None:
        """Cut everything."""
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        below_reader, below_writer = await asyncio.open_connection("127.0.0.1", self._target)
        ways = [
            asyncio.ensure_future(self._pass(reader, below_writer, answers=False)),
            asyncio.ensure_future(self._pass(below_reader, writer, answers=True)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for one in (writer, below_writer):
                one.transport.abort()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        while octets := await reader.read(1 << 16):
            # A frame as small as this is no answer but an acknowledgement.
            if answers and self._losing and len(octets) > 60:
                self._losing = False
                self.lost += 1
                return
            writer.write(octets)
            await writer.drain()
