"""systemd's watchdog: fed from the event loop while every instance can do its work, and not else."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sdcpd import service
from sdcpd.admin_client import ask
from sdcpd.engine import worker
from sdcpd.engine.fake import FakeModel
from sdcpd.roles.health import Health, Level, engine_check
from tests.kit.by_hand_site import Site, make_site
from tests.kit.threaded_target import Row, ThreadedTarget

TICK_S = 0.01


@pytest.fixture
def notified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", str(int(3e6 * TICK_S)))
        yield receiver


async def fed(receiver: socket.socket) -> None:
    """Wait for the next sign of life."""
    assert await asyncio.get_running_loop().sock_recv(receiver, 100) == b"WATCHDOG=1"


def drained(receiver: socket.socket) -> int:
    count = 0
    while True:
        try:
            receiver.recv(100)
        except BlockingIOError:
            return count
        count += 1


@asynccontextmanager
async def kept(*healths: Health) -> AsyncIterator[None]:
    task = asyncio.ensure_future(service.keep_watch(healths))
    try:
        async with asyncio.timeout(10):
            yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("usec", "pid", "seconds"),
    [
        ("30000000", None, 30.0),
        ("30000000", "own", 30.0),
        ("30000000", "1", None),
        (None, None, None),
        ("0", None, None),
        ("soon", None, None),
    ],
)
def test_whether_systemd_waits_for_this_process(
    monkeypatch: pytest.MonkeyPatch, usec: str | None, pid: str | None, seconds: float | None
) -> None:
    """As sd_watchdog_enabled(3) decides it."""
    pid = str(os.getpid()) if pid == "own" else pid
    for name, value in (("WATCHDOG_USEC", usec), ("WATCHDOG_PID", pid)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert service.watchdog_s() == seconds


async def test_a_thread_that_hangs_is_told_by_silence(
    notified: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The event loop lives and could go on feeding; one line when it stops, one when all is well."""
    monkeypatch.setattr(worker, "IDLE_S", 0.02)
    caplog.set_level(logging.WARNING, "sdcpd")
    engine = ThreadedTarget(FakeModel())
    good, stuck = Health("drafter d0"), Health("verifier v0")
    stuck.watch("engine", Level.WEDGED, engine_check(engine.silence_s, 0.3))
    async with kept(good, stuck):
        await fed(notified)
        await fed(notified)
        engine.hold()
        working = asyncio.ensure_future(engine.worker.run(Row("a")))
        # Read as systemd does: a socket that nobody reads is full after ten messages.
        await until(lambda: drained(notified) >= 0 and stuck.wedged)
        await until(lambda: drained(notified) >= 0 and caplog.records)
        begun = stuck.troubles()[0].since
        await until(lambda: time.monotonic() > begun + 10 * TICK_S)
        assert drained(notified) == 0
        engine.release()
        await fed(notified)
        await working
        assert stuck.ready
    stopped, again = [record.getMessage() for record in caplog.records]
    assert stopped.startswith("verifier v0: the engine's thread has shown no sign of life for ")
    assert stopped.endswith("; systemd's watchdog is not fed")
    assert again == "verifier v0: its engine goes on"
    await engine.aclose()


async def test_what_is_not_ready_is_fed_all_the_same(notified: socket.socket) -> None:
    """A restart gives a full disk no room."""
    health = Health("router r0")
    health.note("commit logs", Level.UNREADY, "the disk is full")
    async with kept(health):
        await fed(notified)
        await fed(notified)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return make_site(tmp_path_factory.mktemp("watchdog"))


@pytest.mark.parametrize(
    "role",
    [
        pytest.param("verifier", marks=pytest.mark.slow),  # loads torch
        "drafter",
    ],
)
def test_a_real_process_feeds_it_from_when_it_is_ready(
    site: Site, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """With a router that is not there, which is not its trouble."""
    monkeypatch.setenv("WATCHDOG_USEC", "150000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    name = f"{role}-{role[0]}0"
    process = site.start(name, site.config(role, *site.section(role, role)))
    try:
        process.wait_notified("WATCHDOG=1", count=4)
        first = next(i for i, one in enumerate(process.notified) if one == "WATCHDOG=1")
        assert process.notified[first - 1] == "READY=1"
        socket_path = site.directory / f"{name}.sock"
        assert ask(socket_path, "GET", "/health")["status"] == "ok"
        assert ask(socket_path, "GET", "/ready")["ready"] is True
    finally:
        assert process.stop() == 0, process.log
    assert process.notified.count("STOPPING=1") == 1
