"""The engine's thread survives its jobs, and one session's failure is its own."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch

from sdcpd.engine import worker as worker_module
from sdcpd.engine.api import ContextFull, EngineError
from sdcpd.engine.batching import BatchWindow
from sdcpd.engine.kv import SessionKv
from sdcpd.engine.kv_memory import KvMemory
from sdcpd.engine.kv_pool import KvPool
from sdcpd.engine.scheduler import plan
from sdcpd.engine.worker import Worker


def memory() -> KvMemory:
    """For a thousand tokens of a very small model."""
    small = {"layers": 1, "kv_heads": 1, "head_dim": 2}
    pool = KvPool(**small, octets_max=1 << 14, dtype=torch.float32, device=torch.device("cpu"))
    return KvMemory(pool)


@dataclass
class Job:
    """Wants `rows` rows; its feed is its key."""

    key: Hashable
    rows: int = 1
    broken: bool = False
    result: Any = "done"
    text: Sequence[int] = ()
    scope: bytes = b""
    positions: int = 1

    def begin(self, kv: SessionKv) -> None:
        if self.broken:
            raise ValueError("cannot begin")

    @property
    def rows_left(self) -> int:
        return self.rows

    def feed(self, rows: int) -> Any:
        return self.key

    def take(self, scores: Any, pass_s: float) -> bool:
        return True


@dataclass
class Pass:
    """Fails every pass that holds the feed "full"."""

    passes: list[list[Any]] = field(default_factory=list)

    def run(self, feeds: Sequence[Any]) -> Sequence[Any]:
        self.passes.append(list(feeds))
        if "full" in feeds:
            raise ContextFull("no room")
        return list(feeds)


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    made = Worker(Pass(), memory(), rows_max=128)
    yield made
    await made.aclose()


async def test_context_full_does_not_touch_the_others_of_its_pass(worker: Worker) -> None:
    """D-K12: only the session whose context is full may be failed for it."""
    results = await asyncio.gather(
        *(worker.run(Job(key)) for key in ("a", "full", "b")), return_exceptions=True
    )
    assert results[0] == results[2] == "done"
    assert isinstance(results[1], ContextFull)


async def test_a_job_that_cannot_begin_fails_and_the_thread_lives(worker: Worker) -> None:
    with pytest.raises(EngineError):
        await worker.run(Job("a", broken=True))
    assert await asyncio.wait_for(worker.run(Job("b")), 5) == "done"


async def test_work_that_is_done_already_needs_no_pass(worker: Worker) -> None:
    """A session-open repeated after its prompt was computed."""
    assert await asyncio.wait_for(worker.run(Job("a", rows=0)), 5) == "done"
    assert worker.passes == 0


async def test_work_after_the_end_is_refused() -> None:
    worker = Worker(Pass(), memory(), rows_max=128)
    await worker.aclose()
    with pytest.raises(EngineError):
        await asyncio.wait_for(worker.run(Job("a")), 5)


@pytest.mark.parametrize("rows_max", [16, 32, 64, 128])
def test_every_pass_moves_the_oldest_round_and_the_oldest_prefill(rows_max: int) -> None:
    """`batch_rows` may be smaller than a round of 64 proposed tokens: it must not wait for ever."""
    jobs = [Job("a", 68), Job("b", 3), Job("c", 400)]
    chosen = {job.key: rows for job, rows in plan(jobs, rows_max=rows_max)}
    assert chosen["a"] == 68 and chosen["c"] >= 4
    assert sum(chosen.values()) <= 128


async def test_a_single_job_waits_for_no_batch() -> None:
    """R-8-1: nothing in the engine's thread waits for a time; what is there is what is run."""

    windows: list[float] = []
    made: list[Worker] = []  # the thread begins before there is a name for it

    class Watched(queue.SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            if timeout is not None and made and made[0]._waiting:
                windows.append(timeout)  # there is work, and it waits for more
            return super().get(block, timeout)

    runner = Pass()
    no_sleep = patch.object(worker_module.time, "sleep", side_effect=AssertionError("a window"))
    with patch.object(worker_module.queue, "SimpleQueue", Watched), no_sleep:
        worker = Worker(runner, memory(), rows_max=8, window=BatchWindow())
        made.append(worker)
        for key in range(5):
            await worker.run(Job(key))
        await worker.aclose()
    assert len(runner.passes) == 5 and windows == []


async def test_what_a_round_waits_for_is_told_and_passes_count_their_rounds() -> None:
    """What a job waited before its pass: for the pass before it, and for others that are due."""
    passes = HeldPass()
    worker = Worker(passes, memory(), rows_max=128)
    first = worker.submit(Job("first"), is_round=True)
    await asyncio.to_thread(passes.begun.acquire)
    second = worker.submit(Job("second"), is_round=True)
    third = worker.submit(Job("third"), is_round=True)
    beside = worker.submit(Job("beside"))
    passes.go_on.release(2)
    await asyncio.gather(*(one.future for one in (first, second, third, beside)))
    await worker.aclose()
    assert passes.passes == [["first"], ["second", "third", "beside"]]
    assert (worker.batches.counts[:2], worker.batches.total) == ([1, 1], 3)
    for one in (first, second, third, beside):
        assert one.queue_s is not None and one.batch_wait_s is not None
        assert one.queue_s >= 0 <= one.batch_wait_s
    assert second.queue_s >= third.queue_s > 0  # type: ignore[operator]


@dataclass
class HeldPass(Pass):
    """Each pass waits until it may go on."""

    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    go_on: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def run(self, feeds: Sequence[Any]) -> Sequence[Any]:
        self.begun.release()
        self.go_on.acquire()
        return super().run(feeds)
