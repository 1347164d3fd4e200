"""The sockets by which processes of this host find the short way to each other's objects."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sdcpd.transport.http import Handler
from sdcpd.transport.local_listener import SUFFIX, remove_dead
from sdcpd.transport.local_memory import available
from sdcpd.transport.local_server import LocalServer

log = logging.getLogger("sdcpd")
OWN_PREFIX = "sdcpd-objects-"


class SameHost:
    """Opens local servers in a directory; where that fails, says so once, and objects go by TLS."""

    def __init__(self) -> None:
        self._own_directory: Path | None = None

    def serve(
        self,
        handler: Handler,
        *,
        directory: Path | None,
        name: str,
        objects_path: str,
        body_bytes_max: Callable[[str, str], int],
    ) -> LocalServer | None:
        """A server that listens, None if there can be none; `directory` None is one of our own."""
        if not available():
            return None
        try:
            where = self._directory(directory)
            server = LocalServer(
                handler,
                path=where / f"{name}{SUFFIX}",
                objects_path=objects_path,
                body_bytes_max=body_bytes_max,
            )
            server.start()
        except OSError as error:
            log.warning(
                "objects go over TLS to processes of this host too: no socket for them can be made"
                " (%s); set [mlc] local_dir to a directory with a short name that can be written",
                error,
            )
            return None
        return server

    async def close(self, server: LocalServer) -> None:
        """Close a server, and remove the directory with the last of them."""
        await server.aclose()
        if self._own_directory is not None:
            with suppress(OSError):  # another one is still in it
                self._own_directory.rmdir()
                self._own_directory = None

    def _directory(self, configured: Path | None) -> Path:
        if configured is not None:
            configured.mkdir(mode=0o700, parents=True, exist_ok=True)
            return configured
        if self._own_directory is None:
            _remove_left_behind()
            self._own_directory = Path(tempfile.mkdtemp(prefix=OWN_PREFIX))
        return self._own_directory


def _remove_left_behind() -> None:
    """Remove the directories of processes of this user that were killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{OWN_PREFIX}*"):
        with suppress(OSError):  # somebody else is at it, or it is not ours
            remove_dead(directory)
