"""Secrets that the configuration names by the file they lie in."""

from __future__ import annotations

import stat
from pathlib import Path

from tiers.api import TierError

CHARS_MAX = 4096


def secret_of(path: Path, *, setting: str, what: str) -> str:
    """Return the one line of a file; raises TierError, which never shows any of it."""
    try:
        if stat.S_IMODE(path.stat().st_mode) & stat.S_IROTH:
            raise TierError(f"{setting} {path} can be read by everybody: chmod 0640 it")
        with path.open(encoding="utf-8") as file:
            text = file.read(CHARS_MAX + 1).strip()
    except UnicodeDecodeError:
        text = ""
    except OSError as error:
        raise TierError(
            f"{setting} {path} cannot be read ({error.strerror}): name a readable file"
        ) from error
    if not 0 < len(text) <= CHARS_MAX or not text.isprintable():
        raise TierError(f"{setting} {path} holds no {what}: put it there on one line")
    return text
