"""The weights of a Hugging Face model directory: their tensors, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sdcpd.engine.api import ModelError
from sdcpd.engine.model_files import weight_files

REPORT_EVERY_S = 2.0


class Weights:
    """The tensors of a directory, read one after the other from files that are mapped.

    What is taken is a copy in memory of its own: a file may be replaced while the model runs.
    """

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        *,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Open the files; raises ModelError. Floating tensors are converted to `dtype`."""
        self._dtype, self._report = dtype, report
        self._places: dict[str, tuple[Path, Any]] = {}
        files = weight_files(directory)
        self._total_bytes = sum(path.stat().st_size for path in files)
        self._taken_bytes, self._reported = 0, time.monotonic()
        for path in files:
            try:
                opened = safe_open(path, framework="pt")
                self._places |= dict.fromkeys(opened.keys(), (path, opened))
            except (SafetensorError, OSError) as e:
                raise _damaged(path, e) from e

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def names(self) -> list[str]:
        """Those that were not taken, in order."""
        return sorted(self._places)

    def pop(self, name: str) -> torch.Tensor:
        """Take a tensor out; raises KeyError or ModelError."""
        path, opened = self._places.pop(name)
        try:
            stored = opened.get_tensor(name)
        except (SafetensorError, OSError) as e:
            raise _damaged(path, e) from e
        self._tell(stored.numel() * stored.element_size())
        wanted = self._dtype if stored.is_floating_point() else stored.dtype
        return torch.empty_like(stored, dtype=wanted).copy_(stored)

    def _tell(self, taken_bytes: int) -> None:
        self._taken_bytes += taken_bytes
        if time.monotonic() - self._reported >= REPORT_EVERY_S:
            self._reported = time.monotonic()
            share = 100 * self._taken_bytes // max(1, self._total_bytes)
            self._report(f"weights {share} % of {self._total_bytes / (1 << 30):.1f} GiB")


def _damaged(path: Path, error: Exception) -> ModelError:
    return ModelError(f"{path}: damaged or incomplete ({error}); fetch the file again")
