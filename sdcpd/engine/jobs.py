"""What the engine's thread is given to do, and who waits for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from sdcpd.engine.kv import SessionKv

log = logging.getLogger("sdcpd.engine")


class Job(Protocol):
    """A piece of work that is fed to the model in one or more passes."""

    @property
    def key(self) -> Hashable:
        """Which session's KV it works on."""

    @property
    def text(self) -> Sequence[int]:
        """The tokens that are its session's for good; another's may begin alike."""

    @property
    def scope(self) -> bytes:
        """Whose texts may begin with each other's KV."""

    @property
    def positions(self) -> int:
        """How many positions its session has at most when it is done."""

    def begin(self, kv: SessionKv) -> None:
        """Attach the session's KV and find out what is still to be fed."""

    @property
    def rows_left(self) -> int: ...

    def feed(self, rows: int) -> Any:
        """The next `rows` tokens for the pass."""

    def take(self, scores: Any, pass_s: float) -> bool:
        """Use the pass's scores; True when the job is finished and `result` is set."""

    result: Any


class Pass(Protocol):
    """What runs a pass: `engine.runner.Runner`, or a fake."""

    def run(self, feeds: Sequence[Any]) -> Sequence[Any]: ...


class Ticket:
    """A job and the future that waits for it."""

    def __init__(
        self,
        job: Job,
        future: asyncio.Future[Any],
        wait_until: float | None,
        *,
        is_round: bool = False,
    ) -> None:
        """`wait_until`: when it is told that there is no room; None: it waits for ever.

        `is_round`: whether it counts where rounds of a pass are counted.
        """
        self.job, self.future, self.wait_until = job, future, wait_until
        self.is_round = is_round
        self._arrived = self._entered = time.monotonic()
        self.queue_s: float | None = None
        """How long it waited for memory and for the pass before, once it is in one."""
        self.batch_wait_s: float | None = None
        """How long its first pass waited for others."""

    def entered(self) -> None:
        """There is memory for it."""
        self._entered = time.monotonic()

    def passes(self, at: float, *, since: float) -> None:
        """It is in a pass that begins now, and could have begun at `since`."""
        if self.queue_s is None:
            ready = min(at, max(since, self._entered))
            self.queue_s, self.batch_wait_s = ready - self._arrived, at - ready

    @property
    def rows_left(self) -> int:
        return self.job.rows_left

    def finish(self, error: Exception | None = None) -> None:
        settle(self.future, self.job.result, error)


def settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    """Hand a result, or an error, from the thread to whoever waits in an event loop."""

    def hand_over() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    try:
        future.get_loop().call_soon_threadsafe(hand_over)
    except RuntimeError:
        log.debug("a result came after its event loop had ended")
