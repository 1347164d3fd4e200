"""The file of a listening UNIX socket: whose it is, and what is left of a process that was killed.

A socket's file outlives its process, and nothing tells it from one in use but to connect. So that
nobody takes one for dead that is bound and does not listen yet, its directory is locked meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sdcpd.transport.local_link import new_socket

SUFFIX = ".objects.sock"


class LocalListener:
    """A socket that listens at a path, and removes that at its close unless another took it."""

    def __init__(self, path: Path, *, backlog: int) -> None:
        """Listen, for this user alone; raises OSError, EADDRINUSE where somebody listens."""
        self._path = path
        self.socket = new_socket()
        try:
            with _locked(path.parent):
                _make_room(path)
                self.socket.bind(str(path))
                self._identity = _identity(path)
                # Before it listens, so that nobody comes in between.
                path.chmod(0o600)
                self.socket.listen(backlog)
        except BaseException:
            self.socket.close()
            raise

    def close(self) -> None:
        """Stop listening."""
        self.socket.close()
        with suppress(OSError), _locked(self._path.parent):
            if _identity(self._path) == self._identity:
                self._path.unlink()


def is_listened(path: Path) -> bool:
    """Whether a process listens at a path, as far as can be told."""
    with new_socket() as probe:
        try:
            probe.connect(str(path))
        except OSError as error:
            # Of a process that is gone: refused. Of one that is busy: to be tried again.
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return True


def remove_dead(directory: Path) -> None:
    """Remove a directory of our own that holds nothing but sockets that nobody listens at.

    An empty one stays: its process may be about to listen there. Raises OSError.
    """
    about = directory.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        return
    with _locked(directory, wait=False):
        found = list(directory.iterdir())
        if found and all(one.name.endswith(SUFFIX) and _is_dead(one) for one in found):
            for one in found:
                one.unlink()
            directory.rmdir()


def _make_room(path: Path) -> None:
    """Remove what a process that was killed has left; raises OSError for one that runs."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return  # binding says what is wrong
        if is_listened(path):
            raise OSError(errno.EADDRINUSE, f"another process listens at {path}")
        path.unlink()


def _is_dead(path: Path) -> bool:
    return stat.S_ISSOCK(path.lstat().st_mode) and not is_listened(path)


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


@contextmanager
def _locked(directory: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a directory for a moment; all who do so do nothing meanwhile that could take long."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)
