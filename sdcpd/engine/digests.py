"""SHA-256 of large files, hashed once and remembered by size, times and inode (D-C9).

The time of the last change of the inode is one of them, which no one but the system sets: a file
that was changed and given its old times again is hashed again. Whoever can write to the user's
cache, which is the user alone, could make a file pass for another; `[verifier.model] digest` pins
a model whatever the cache says.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

log = logging.getLogger("sdcpd.engine")
REPORT_EVERY_S = 2.0
PIECE_BYTES = 8 << 20
REMEMBERED_BYTES_MIN = 64 << 20  # less is hashed in a blink
ENTRIES_MAX = 256
Report = Callable[[str], None]


def cache_file(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The service's cache directory has it, else the user's; None where there is neither."""
    if given := environment.get("CACHE_DIRECTORY"):
        return Path(given.partition(":")[0]) / "digests.json"
    base = environment.get("XDG_CACHE_HOME")
    try:
        home = Path(base) if base and base.startswith("/") else Path.home() / ".cache"
    except RuntimeError:
        return None  # a user without a home
    return home / "sdcpd" / "digests.json"


def file_digest(
    path: Path, *, remembered: Path | None = None, report: Report = lambda _: None
) -> bytes:
    """SHA-256 of a file, from what is remembered if it has not changed since; raises OSError."""
    before = path.stat()
    if remembered is None or before.st_size < REMEMBERED_BYTES_MIN:
        return _hashed(path, before.st_size, report)
    state = _state(before)
    key = str(path.resolve())
    entry = _read(remembered).get(key)
    if isinstance(entry, list) and entry[:-1] == state and _is_digest(entry[-1]):
        return bytes.fromhex(entry[-1])
    digest = _hashed(path, before.st_size, report)
    if _state(path.stat()) == state:
        _remember(remembered, key, [*state, digest.hex()])
    return digest


def _state(stat: os.stat_result) -> list[int]:
    """What changes with a file's content."""
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _hashed(path: Path, size_bytes: int, report: Report) -> bytes:
    total, done, told = hashlib.sha256(), 0, time.monotonic()
    piece = bytearray(min(PIECE_BYTES, max(size_bytes, 1)))
    view = memoryview(piece)
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(piece):
            total.update(view[:count])
            done += count
            if time.monotonic() - told >= REPORT_EVERY_S:
                told = time.monotonic()
                share = 100 * done // max(1, size_bytes)
                report(f"hashing {path.name}: {share} % of {size_bytes / (1 << 30):.1f} GiB")
    return total.digest()


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _read(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # not there yet, or not what was written: it is made anew
    return found if isinstance(found, dict) else {}


def _remember(path: Path, key: str, entry: list[object]) -> None:
    entries = _read(path)
    entries.pop(key, None)
    kept = dict([*entries.items(), (key, entry)][-ENTRIES_MAX:])
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as new:
            json.dump(kept, new)
        os.replace(new.name, path)
    except OSError as e:
        log.info("digests are not remembered at %s: %s", path, e)
