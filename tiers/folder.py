"""A directory that belongs to one running store: claimed, private, and told apart after a crash."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from tiers.api import TierError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_OWNER = "owner.lock"
_STATE = "state.json"


def boot_id() -> str:
    """Return what identifies this boot of the machine, "" where the system doesn't say."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


class Folder:
    """A claimed directory; LMDB must not be opened twice on one, in one process or in two."""

    def __init__(self, path: Path, *, setting: str) -> None:
        """Create and claim it; raises TierError, which names `setting` as what to change."""
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._owner = os.open(path / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TierError(
                f"{path} cannot be written ({error.strerror}): create it for the user that sdcpd"
                f" runs as, or change {setting}"
            ) from error
        try:
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._owner)
            raise TierError(
                f"{path} is in use by another sdcpd: stop that one, or change {setting}"
            ) from error

    def release(self) -> None:
        """Give the directory up; a process that dies has done so."""
        os.close(self._owner)

    def sync(self) -> None:
        """Make the names of the files in it durable."""
        handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def intact(self, boot: str) -> bool:
        """Tell whether files written without flushing can be trusted.

        They can within the boot that wrote them (a killed process loses nothing), and after a
        clean close; not after a power loss.
        """
        try:
            state = json.loads((self.path / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        if not isinstance(state, dict):
            return False
        return state.get("clean") is True or (boot != "" and state.get("boot") == boot)

    def mark(self, boot: str, *, clean: bool) -> None:
        """Write down, durably, whose files these are; raises OSError."""
        fresh = self.path / (_STATE + ".new")
        with fresh.open("w", encoding="utf-8") as file:
            json.dump({"boot": boot, "clean": clean}, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.path / _STATE)
        self.sync()

    @property
    def used(self) -> bool:
        """Whether a store has kept something here before."""
        return (self.path / _STATE).exists()

    def mark_used(self) -> None:
        """Write that down, once, and make the names of the files durable; raises OSError."""
        if self.used:
            self.sync()
        else:
            self.mark(boot_id(), clean=False)

    def wipe(self) -> None:
        """Delete the LMDB files."""
        for name in ("data.mdb", "lock.mdb"):
            (self.path / name).unlink(missing_ok=True)
