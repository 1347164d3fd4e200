"""Section 8: a pass waits for rounds that are due, a little, and nobody waits alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from sdcpd.engine.batching import LATE, BatchWindow
from sdcpd.engine.worker import Worker
from tests.engine.test_worker import Job, Pass, memory


def known(window: BatchWindow, session: str, pause_s: float) -> None:
    """A session that has taken so long between its rounds."""
    for _ in range(8):
        window.done(session, 0.0)
        window.arrived(session, pause_s)


def test_a_session_that_is_alone_does_not_wait() -> None:
    """R-8-1"""
    window = BatchWindow()
    known(window, "a", 0.002)
    assert window.left_s(5.0, since=5.0, pass_s=0.1) == 0


def test_a_pass_waits_for_who_is_due_and_no_longer() -> None:
    window = BatchWindow(0.2)
    known(window, "b", 0.004)
    window.done("b", 5.0)
    assert window.left_s(5.001, since=5.001, pass_s=0.1) == pytest.approx(LATE * 0.004 - 0.001)
    assert window.left_s(5.0 + LATE * 0.004, since=5.001, pass_s=0.1) == 0, "it is late"
    window.arrived("b", 5.002)
    assert window.left_s(5.002, since=5.001, pass_s=0.1) == 0, "it is here"


def test_who_would_come_after_the_window_is_not_waited_for() -> None:
    window = BatchWindow(0.2)
    known(window, "b", 0.03)
    window.done("b", 5.0)
    assert window.left_s(5.0, since=5.0, pass_s=0.1) == 0
    assert BatchWindow(0.0).left_s(5.0, since=5.0, pass_s=0.1) == 0


def test_who_has_ended_is_not_waited_for() -> None:
    window = BatchWindow(0.2)
    known(window, "b", 0.004)
    window.done("b", 5.0)
    window.forget("b")
    assert window.left_s(5.001, since=5.001, pass_s=0.1) == 0


class Slow(Pass):
    """A device whose passes take a while."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def run(self, feeds: Sequence[Any]) -> Sequence[Any]:
        self.begun.set()
        time.sleep(0.03)  # what the device needs
        return super().run(feeds)


async def test_sessions_that_took_turns_come_to_share_passes() -> None:
    """Without a window they would go on taking turns: each comes while the other's pass runs."""
    runner = Slow()
    worker = Worker(runner, memory(), rows_max=8, window=BatchWindow(0.5))

    async def rounds(key: str) -> None:
        for _ in range(10):
            await worker.run(Job(key))

    first = asyncio.ensure_future(rounds("a"))
    await asyncio.to_thread(runner.begun.wait)
    await asyncio.gather(first, rounds("b"))
    await worker.aclose()
    assert runner.passes[0] == ["a"] and sum(len(feeds) == 2 for feeds in runner.passes) >= 5
