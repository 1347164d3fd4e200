"""How certificate files are written, and the one error of this package."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


class CertsError(Exception):
    """A certificate task cannot be done; the text is one sentence that says what to do."""


def replace_file(path: Path, data: bytes, *, mode: int) -> None:
    """Write a file under a temporary name and rename it, so that no reader sees half of it."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise CertsError(f"{path} cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise CertsError(f"{path} cannot be written: {error.strerror}") from error
