"""A wall clock that a test can set, for the processes that it starts."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("wall_clock.c")


class WallClock:
    """Processes started while it is in the environment take the time from it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler is installed")
        library, offset = directory / "wall_clock.so", directory / "wall_clock.offset"
        command = [compiler, "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True, timeout=30)
        offset.write_bytes(bytes(8))
        with offset.open("r+b") as file:
            self._at = mmap.mmap(file.fileno(), 8)
        monkeypatch.setenv("WALL_CLOCK_OFFSET", str(offset))
        monkeypatch.setenv("LD_PRELOAD", str(library))

    def set(self, days: float) -> None:
        """So far from the true time, from now on."""
        self._at[:] = struct.pack("=q", round(days * 86400))
