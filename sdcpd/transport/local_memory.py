"""Memory that processes of this host share: a memfd of fixed size, mapped once and kept.

Fresh shared memory costs ten times a copy (every page is zeroed at its first touch), so whoever
makes some keeps it. The seals F_SEAL_SHRINK and F_SEAL_GROW let nobody take pages away from
under a reader, which would kill it by SIGBUS.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import Final

_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; not named in Python 3.11
_TOUCH_BYTES = 1 << 30  # at a time


class BadMemory(Exception):
    """What was handed over is no memory that is safe to map; the text says why."""


def available() -> bool:
    """Whether this system has memory files that can be sealed (Linux)."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


class SharedMemory:
    """Mapped memory of `size_bytes`; copies in and out, checks nothing of what lies there.

    Others may write to it at any time, so what matters is copied out before it is looked at.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map a file that is known to be good, which stays the caller's; raises OSError."""
        self.size_bytes = size_bytes
        self._map = mmap.mmap(fd, size_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @property
    def address(self) -> int:
        """Where it lies in this process."""
        return self._address

    def touch(self) -> None:
        """Have all pages there before they are needed; raises OSError where memory is short."""
        for start in range(0, self.size_bytes, _TOUCH_BYTES):
            size_bytes = min(_TOUCH_BYTES, self.size_bytes - start)
            try:
                self._map.madvise(_MADV_POPULATE_WRITE, start, size_bytes)
            except OSError as error:
                if error.errno != 22:  # EINVAL: an older kernel, where writing does it
                    raise
                ctypes.memset(self._address + start, 0, size_bytes)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Copy octets in; the GIL is free meanwhile where they are `bytes`."""
        end = offset + len(data)
        assert 0 <= offset <= end <= self.size_bytes, "within the memory"
        if isinstance(data, bytes):
            ctypes.memmove(self._address + offset, data, len(data))
        else:
            self._map[offset:end] = data

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Copy octets out."""
        assert 0 <= offset <= offset + size_bytes <= self.size_bytes, "within the memory"
        return self._map[offset : offset + size_bytes]

    def exporter(self, offset: int, size_bytes: int) -> ctypes.Array[ctypes.c_ubyte]:
        """What views of a part are made from; it lives as long as the last of them."""
        return (ctypes.c_ubyte * size_bytes).from_buffer(self._map, offset)

    def close(self) -> None:
        """Unmap, or have it unmapped with the last view of it."""
        try:
            self._map.close()
        except BufferError:
            pass  # views are out: the mapping goes with them


def create(size_bytes: int, *, name: str) -> tuple[SharedMemory, int]:
    """Make memory that keeps its size, with all its pages; returns it and its descriptor.

    Raises OSError. `name` is for people who look at /proc.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        memory = SharedMemory(fd, size_bytes)
    except BaseException:
        os.close(fd)
        raise
    try:
        memory.touch()
    except BaseException:
        memory.close()
        os.close(fd)
        raise
    return memory, fd


def attach(fd: int, *, bytes_max: int) -> SharedMemory:
    """Map what another process has made, if it cannot hurt this one; raises BadMemory.

    The descriptor stays the caller's, and can be closed at once.
    """
    needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size_bytes = os.fstat(fd).st_size
        page_bytes = os.fstatvfs(fd).f_bsize
    except OSError as error:
        raise BadMemory(f"no memory file: {error.strerror}") from error
    if seals & needed != needed:
        raise BadMemory("its size is not sealed")
    # Pages of another size come from a pool that can run dry, which kills who touches them.
    if page_bytes != mmap.PAGESIZE:
        raise BadMemory("it has pages of an unusual size")
    if not 0 < size_bytes <= bytes_max:
        raise BadMemory(f"it has {size_bytes} octets, of at most {bytes_max}")
    try:
        return SharedMemory(fd, size_bytes)
    except (OSError, ValueError) as error:
        raise BadMemory(f"it cannot be mapped: {error}") from error
