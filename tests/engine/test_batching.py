"""Section 8: a pass waits for rounds that are due, a little, and nobody waits alone."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable

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


class UntilBoth(BatchWindow):
    """Expects a second session, whenever it may come."""

    def __init__(self) -> None:
        super().__init__()
        self.here: set[Hashable] = set()

    def arrived(self, session: Hashable, now: float) -> None:
        """See BatchWindow."""
        self.here.add(session)

    def done(self, session: Hashable, now: float) -> None:
        """See BatchWindow."""
        self.here.discard(session)

    def left_s(self, now: float, *, since: float, pass_s: float) -> float:
        """See BatchWindow."""
        return 0.0 if len(self.here) == 2 else 30.0


async def test_the_engine_waits_as_the_window_says_and_not_beyond_who_is_due() -> None:
    runner = Pass()
    worker = Worker(runner, memory(), rows_max=8, window=UntilBoth())

    async def rounds(key: str) -> None:
        for _ in range(4):
            await worker.run(Job(key))

    await asyncio.wait_for(asyncio.gather(rounds("a"), rounds("b")), 20)
    await worker.aclose()
    assert [sorted(feeds) for feeds in runner.passes] == 4 * [["a", "b"]]
