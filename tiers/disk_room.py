"""Whether a disk has no room, which LMDB does not always say, and room kept for deletions."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import lmdb

LOCK_FILE = "lock.mdb"
SPARE_FILE = "spare"
SPARE_BYTES, SPARE_BYTES_MIN = 1 << 20, 64 << 10
PROBE_BYTES = 256 << 10  # more than the pages of a group of records
_BLOCK_BYTES = 512  # of stat
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: lmdb.Error, folder: Path) -> bool:
    """Tell whether a transaction failed because map or disk have no room; nothing was written then.

    A disk that is nearly full takes a part of a write, which LMDB calls an input/output error: a
    write of our own tells.
    """
    code = getattr(error, "code", None)
    if isinstance(error, lmdb.MapFullError) or code in _FULL:
        return True
    return code == errno.EIO and not _takes(folder, PROBE_BYTES)


class Spare:
    """A file that holds room: on a full disk LMDB needs some before a deletion gives it any."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SPARE_FILE

    def keep(self) -> None:
        """Take the room, or as much of it as there is, maybe none; what is held already stays."""
        if self._path.exists() and self._path.stat().st_size:
            return
        size_bytes = SPARE_BYTES
        while size_bytes >= SPARE_BYTES_MIN and not self._take(size_bytes):
            size_bytes //= 2

    def give(self) -> bool:
        """Give the room up; tells whether there was any."""
        try:
            held = self._path.stat().st_size > 0
            os.truncate(self._path, 0)
        except OSError:
            return False
        return held

    def _take(self, size_bytes: int) -> bool:
        try:
            with self._path.open("wb") as file:
                try:
                    os.posix_fallocate(file.fileno(), 0, size_bytes)
                except OSError:
                    file.truncate(0)
                    raise
        except OSError:  # a disk may be too full for the file itself: the logs do without
            return False
        return True


def check_lock_room(folder: Path) -> None:
    """Raise OSError if LMDB's table of readers would find no room; the folder exists.

    LMDB makes it as a hole and maps it: the first write there, on a full disk, would kill the
    process by SIGBUS.
    """
    try:
        found = (folder / LOCK_FILE).stat()
    except FileNotFoundError:
        is_hole = True
    else:
        is_hole = found.st_blocks * _BLOCK_BYTES < found.st_size
    if is_hole and not _takes(folder, PROBE_BYTES):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _takes(folder: Path, size_bytes: int) -> bool:
    """Whether there is room for so many octets beside the files of a folder."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(os.urandom(size_bytes))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as failure:
        return failure.errno not in _FULL
    return True
