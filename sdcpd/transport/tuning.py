"""Two settings of the process that the transport's speed depends on (measured, docs)."""

from __future__ import annotations

import ctypes
import resource

import hpack.hpack
import hpack.table
from hyperframe.frame import Frame

# glibc's mallopt parameters (malloc.h).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
FILES_WANTED = 1 << 20
MMAP_THRESHOLD_BYTES = 32 << 20
TRIM_THRESHOLD_BYTES = 128 << 20


def tune_process() -> bool:
    """Set the allocator and h2's frame text for a daemon; call once at process start.

    glibc maps and unmaps memory for each large read, which doubles the latency of a small TLS
    message. Returns whether the allocator could be set: other C libraries have no such call.
    """
    silence_frame_text()
    raise_file_limit()
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    set_mmap = mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
    set_trim = mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
    return bool(set_mmap and set_trim)


def raise_file_limit() -> None:
    """Allow as many open files as the process may have: each peer and client is one.

    What shells allow at first, 1024, is for programs that use select().
    """
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if most == resource.RLIM_INFINITY else min(most, FILES_WANTED)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def silence_frame_text() -> None:
    """Stop frames from describing themselves.

    h2 builds `repr(frame)`, a hex dump of the whole body, for each frame that it receives, even
    with logging off.
    """
    Frame.__repr__ = _frame_name
    hpack.hpack.log = hpack.table.log = _Silent()  # type: ignore[assignment]


class _Silent:
    """A logger that hears nothing: hpack tells one of each field of each message."""

    def debug(self, *_: object) -> None:
        """Nothing."""


def _frame_name(frame: Frame) -> str:
    return type(frame).__name__
