"""Virtual time: an event loop whose clock jumps to the next timer, and seeded randomness."""

from __future__ import annotations

import asyncio
import random
import secrets
import selectors
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

EPOCH_S = 1000.0  # no code may take the clock for starting at zero


class NothingLeft(Exception):
    """All wait for something that no timer and no message will bring."""


class _Jump(selectors.BaseSelector):
    """Never waits for descriptors: the time until the next timer passes at once."""

    def __init__(self) -> None:
        self.now = EPOCH_S
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(
        self, fileobj: Any, events: int, data: Any = None
    ) -> selectors.SelectorKey:  # the loop's own wake-up pipe, which nobody uses here
        key = selectors.SelectorKey(fileobj, 0, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingLeft
        self.now += timeout
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs timers in their order without waiting for them."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Virtual seconds."""
        return self._jump.now


@contextmanager
def _deterministic(loop: VirtualLoop, seed: int) -> Iterator[None]:
    """The product's clock is the loop's, and what it takes for secrets comes from the seed."""
    rng = random.Random(f"secrets {seed}")
    with (
        patch.object(time, "monotonic", loop.time),
        patch.object(secrets, "token_bytes", lambda n=32: rng.randbytes(n)),
        patch.object(secrets, "token_hex", lambda n=32: rng.randbytes(n).hex()),
        patch.object(secrets, "token_urlsafe", lambda n=32: rng.randbytes(n).hex()),
        patch.object(secrets, "randbits", rng.getrandbits),
    ):
        yield


def run_virtual(main: Coroutine[Any, Any, None], *, seed: int) -> None:
    """Run a coroutine in virtual time; what still runs after it is cancelled."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        with _deterministic(loop, seed):
            try:
                loop.run_until_complete(main)
            finally:
                _cancel_all(loop)
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def _cancel_all(loop: VirtualLoop) -> None:
    while left := asyncio.all_tasks(loop):
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
