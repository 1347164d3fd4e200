"""Memory registered with CUDA, so that GPUs copy from and to it directly, without a bounce.

Registering takes 0.1 s a GiB and may fail for reasons of the driver's own; neither keeps a tier
from serving. PyTorch is imported here alone among the tiers, when such a tier is configured, in the
thread that registers.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

log = logging.getLogger("sdcpd.tiers")
STOP_S = 60.0  # the longest that a close waits for a chunk that is being registered


class NotPinned(Exception):
    """The memory cannot be registered; the text says why."""


class Runtime(Protocol):
    """What of CUDA is needed."""

    def register(self, address: int, size_bytes: int) -> None:
        """Pin memory; raises NotPinned, and leaves no error behind for others to find."""
        ...

    def unregister(self, address: int) -> None:
        """Undo it; raises NotPinned."""
        ...


class TorchRuntime:
    """CUDA as PyTorch has loaded it."""

    def __init__(self) -> None:
        """Start CUDA; raises NotPinned where there is none that works."""
        try:
            import torch

            if not torch.cuda.is_available():
                raise NotPinned("PyTorch finds no CUDA device")
            self._torch: Any = torch
            self._cudart: Any = torch.cuda.cudart()
        except (ImportError, AssertionError, RuntimeError, OSError) as error:
            raise NotPinned(f"CUDA does not start: {error}") from error

    def register(self, address: int, size_bytes: int) -> None:
        """See Runtime."""
        # 1: portable, pinned for every device's context.
        self._done(self._cudart.cudaHostRegister, address, size_bytes, 1)

    def unregister(self, address: int) -> None:
        """See Runtime."""
        self._done(self._cudart.cudaHostUnregister, address)

    def _done(self, call: Callable[..., Any], *arguments: int) -> None:
        try:
            code = int(call(*arguments))
        except (AssertionError, RuntimeError, OSError) as error:
            self._clear()
            raise NotPinned(str(error)) from error
        if code:
            self._clear()
            raise NotPinned(f"{call.__name__} failed with CUDA error {code}")

    def _clear(self) -> None:
        """Take the error that is pending, which the next kernel of this thread would report."""
        with suppress(OSError, AttributeError, TypeError):
            major = str(self._torch.version.cuda).partition(".")[0]
            ctypes.CDLL(f"libcudart.so.{major}").cudaGetLastError()
            return
        with suppress(RuntimeError):
            self._torch.zeros(1, device="cuda")


class Registration:
    """Registers memory chunk by chunk in a thread of its own, and tells whether it is done."""

    def __init__(
        self,
        address: int,
        size_bytes: int,
        *,
        chunk_bytes: int,
        runtime: Callable[[], Runtime] = TorchRuntime,
    ) -> None:
        """Begin; the memory must stay mapped until `close` has returned."""
        self._chunks = [
            (address + start, min(chunk_bytes, size_bytes - start))
            for start in range(0, size_bytes, chunk_bytes)
        ]
        self._make_runtime = runtime
        self._registered: list[int] = []
        self._runtime: Runtime | None = None
        self._pinned = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mlc-pin", daemon=True)
        self._thread.start()

    @property
    def pinned(self) -> bool:
        """Whether all of the memory is registered."""
        return self._pinned

    def settled(self, timeout_s: float = STOP_S) -> bool:
        """Wait until it is registered or known not to be; False if that takes longer. Blocks."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> bool:
        """Stop, and unregister what is registered; blocks for one chunk at most.

        False if the driver does not come back: the memory must stay mapped for ever then.
        """
        self._stopping.set()
        self._pinned = False
        if not self.settled():
            log.warning("the pinned tier: CUDA still registers memory; it is left as it is")
            return False
        self._undo()
        return True

    def _run(self) -> None:
        try:
            self._runtime = self._make_runtime()
            for address, size_bytes in self._chunks:
                if self._stopping.is_set():
                    return
                self._runtime.register(address, size_bytes)
                self._registered.append(address)
        except NotPinned as error:
            self._undo()
            log.warning("the pinned tier is ordinary memory, copies to a GPU are slower: %s", error)
            return
        self._pinned = True
        log.info("the pinned tier: %d octets are registered with CUDA", self._size_bytes())

    def _undo(self) -> None:
        while self._registered and self._runtime is not None:
            address = self._registered.pop()
            try:
                self._runtime.unregister(address)
            except NotPinned as error:
                log.warning("memory of the pinned tier stays registered with CUDA: %s", error)

    def _size_bytes(self) -> int:
        return sum(size_bytes for _, size_bytes in self._chunks)
