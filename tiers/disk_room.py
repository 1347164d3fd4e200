"""Whether a write failed for want of room, which LMDB does not always say."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import lmdb

PROBE_BYTES = 256 << 10  # more than the pages of a group of records
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
