"""CUDA as far as the pinned tier knows it, in the ways in which it works and fails."""

from __future__ import annotations

import threading

from tiers.cuda_memory import NotPinned, Runtime


def no_cuda() -> Runtime:
    """A machine without."""
    raise NotPinned("there is no CUDA here")


class FakeRuntime:
    """Registers memory in a set; fails, or waits, at a chunk."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.registered: dict[int, int] = {}
        self.most = 0
        self._fails_at = fails_at
        self.held: threading.Event | None = None
        self.entered = threading.Event()

    def register(self, address: int, size_bytes: int) -> None:
        """See Runtime."""
        self.entered.set()
        if self.held is not None:
            assert self.held.wait(30)
        if self._fails_at == len(self.registered):
            raise NotPinned("cudaHostRegister failed with CUDA error 2")
        self.registered[address] = size_bytes
        self.most = max(self.most, len(self.registered))

    def unregister(self, address: int) -> None:
        """See Runtime."""
        del self.registered[address]
