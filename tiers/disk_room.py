"""Whether a disk has no room, which LMDB does not always say."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import lmdb

LOCK_FILE = "lock.mdb"
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
