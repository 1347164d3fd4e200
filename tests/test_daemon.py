"""Signals: they end a start as well, are heard until the end, and promise nothing too early."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sdcpd.config import Config
from sdcpd.daemon import Daemon, Instance, StartError


class SlowStart(Daemon):
    """Starts for as long as a test wants."""

    def __init__(self) -> None:
        super().__init__(Config(), [])
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.closing, self.may_close = asyncio.Event(), asyncio.Event()

    async def _start_all(self) -> None:
        self._parts.stack.push_async_callback(self._close)
        self.begun.set()
        await self.may_end.wait()

    async def _close(self) -> None:
        self.closing.set()
        await self.may_close.wait()


@pytest.fixture
def notified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield receiver


def told(receiver: socket.socket) -> list[bytes]:
    found = []
    while True:
        try:
            found.append(receiver.recv(1000))
        except BlockingIOError:
            return found


async def test_a_signal_ends_a_start_and_a_second_one_cuts_nothing_short(
    notified: socket.socket,
) -> None:
    daemon = SlowStart()
    running = asyncio.ensure_future(daemon.run())
    await daemon.begun.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await daemon.closing.wait()
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(0)
    assert not running.done()
    daemon.may_close.set()
    async with asyncio.timeout(5):
        await running
    assert told(notified) == [b"STOPPING=1"]


async def test_what_cannot_go_on_ends_in_order_and_is_told(notified: socket.socket) -> None:
    """With the status after which a supervisor starts nothing anew."""
    daemon = SlowStart()
    running = asyncio.ensure_future(daemon.run())
    await daemon.begun.wait()
    daemon._parts.on_fatal("router r0: it is another's now")
    daemon.may_close.set()
    async with asyncio.timeout(5):
        with pytest.raises(StartError, match="router r0: it is another's now") as caught:
            await running
    assert caught.value.status == 78
    assert told(notified) == [b"STOPPING=1"]


async def test_a_signal_ends_a_start_that_waits_for_a_bucket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its server takes connections and says nothing, for which the probe has half a minute."""
    pytest.importorskip("obstore", reason="the extra s3 is not installed")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    asked, over = asyncio.Event(), asyncio.Event()
    waiting: set[asyncio.Task[None]] = set()

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        waiting.add(task)
        asked.set()
        await over.wait()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        memory = {"kind": "host", "size": "1MiB"}
        tier = {"kind": "s3", "size": "1GiB", "bucket": "abc", "endpoint": f"http://{host}:{port}"}
        config = Config.model_validate({"mlc": {"tiers": [memory, tier]}})
        daemon = Daemon(config, [Instance("router", "r0")])
        running = asyncio.ensure_future(daemon.run())
        async with asyncio.timeout(10):
            await asked.wait()
        assert not running.done()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(10):
            await running
    over.set()
    await asyncio.wait(waiting)


async def test_a_reload_while_starting_does_not_say_ready(
    notified: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, reloaded = SlowStart(), asyncio.Event()
    monkeypatch.setattr(daemon._parts.certificates, "reload", lambda: reloaded.set() or [])
    running = asyncio.ensure_future(daemon.run())
    await daemon.begun.wait()
    os.kill(os.getpid(), signal.SIGHUP)
    async with asyncio.timeout(5):
        await reloaded.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    daemon.may_close.set()
    async with asyncio.timeout(5):
        await running
    assert told(notified) == [b"STOPPING=1"]
