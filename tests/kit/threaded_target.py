"""A fake target whose rounds pass through a real engine thread, which a test can hold in a pass."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from sdcpd.engine.api import Score, Scored
from sdcpd.engine.fake import FakeModel, FakeTarget
from sdcpd.engine.kv import SessionKv
from sdcpd.engine.kv_memory import KvMemory
from sdcpd.engine.kv_pool import KvPool
from sdcpd.engine.worker import Worker


class Row:
    """One row of a session."""

    text: Sequence[int] = ()
    scope = b""
    positions = rows_left = 1
    result: Any = None

    def __init__(self, key: Hashable) -> None:
        self.key = key

    def begin(self, kv: SessionKv) -> None:
        """Nothing is kept."""

    def feed(self, rows: int) -> Any:
        return self.key

    def take(self, scores: Any, pass_s: float) -> bool:
        return True


class ThreadedTarget(FakeTarget):
    """`hold` stops its thread in the next pass, as a driver that hangs does; `release` ends that."""

    def __init__(self, model: FakeModel) -> None:
        super().__init__(model)
        self._free = threading.Event()
        self._free.set()
        small = {"layers": 1, "kv_heads": 1, "head_dim": 2}
        pool = KvPool(**small, octets_max=1 << 16, dtype=torch.float32, device=torch.device("cpu"))
        self.worker = Worker(self, KvMemory(pool), rows_max=128)

    def hold(self) -> None:
        """Stop the thread in the next pass."""
        self._free.clear()

    def release(self) -> None:
        """Let the pass end."""
        self._free.set()

    def run(self, feeds: Sequence[Any]) -> Sequence[Any]:
        """A pass, in the thread."""
        self._free.wait()
        return list(feeds)

    async def score(self, work: Score) -> Scored:
        """See TargetEngine."""
        await self.worker.run(Row((work.session, work.epoch)))
        return await super().score(work)

    def forget(self, session: bytes, epoch: int) -> None:
        """See TargetEngine."""
        self.worker.forget((session, epoch))
        super().forget(session, epoch)

    def silence_s(self) -> float:
        """See TargetEngine."""
        return self.worker.silence_s()

    async def aclose(self) -> None:
        """See TargetEngine."""
        self.release()
        await self.worker.aclose()
