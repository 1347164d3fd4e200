"""How long a server that could not be connected to is left alone."""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from sdcpd.transport.http import ConnectFailed, PeerRefused
from sdcpd.transport.limits import (
    BACKOFF_FIRST_S,
    BACKOFF_KEPT_MAX,
    BACKOFF_MAX_S,
    BACKOFF_REFUSED_MAX_S,
)

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Trouble:
    error: ConnectFailed
    failures: int = 0
    until: float = 0.0


class Backoff(Generic[K]):
    """Remembers failures; the first is forgiven, so that a peer that is back is found at once.

    The pauses double and are drawn at random, so that the clients of a server that comes back do
    not all come at the same time. Meanwhile nobody waits: callers get the failure at once.
    """

    def __init__(self) -> None:
        self._troubles: dict[K, _Trouble] = {}

    def check(self, key: K, *, now: float) -> None:
        """Raise the last failure again while the pause lasts."""
        trouble = self._troubles.get(key)
        if trouble is not None and now < trouble.until:
            left_s = trouble.until - now
            again = type(trouble.error)(f"{trouble.error} (tried again in {left_s:.1f} s)")
            raise again from trouble.error

    def failed(self, key: K, error: ConnectFailed, *, now: float) -> None:
        """A connection could not be made."""
        trouble = self._troubles.pop(key, None) or _Trouble(error)
        trouble.error = error
        if trouble.failures:
            longest = BACKOFF_REFUSED_MAX_S if isinstance(error, PeerRefused) else BACKOFF_MAX_S
            pause = min(longest, BACKOFF_FIRST_S * 2.0 ** min(trouble.failures - 1, 16))
            trouble.until = now + pause * random.uniform(0.5, 1.0)
        trouble.failures += 1
        while len(self._troubles) >= BACKOFF_KEPT_MAX:
            del self._troubles[next(iter(self._troubles))]
        self._troubles[key] = trouble

    def succeeded(self, key: K) -> None:
        """A connection was made."""
        self._troubles.pop(key, None)

    def forget(self) -> None:
        """Try everybody again at once: our certificate is a new one."""
        self._troubles.clear()
