"""The files of a Hugging Face model directory and their digests (D-C9); needs no torch."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sdcpd.engine.api import ModelError
from sdcpd.engine.digests import file_digest

HEADER_BYTES_MAX = 100 << 20  # as the library has it


def require(path: Path, what: str) -> Path:
    """The path, if there is a file; raises ModelError."""
    if not path.is_file():
        raise ModelError(
            f"model directory {path.parent}: {path.name} is missing ({what}); "
            "expected a Hugging Face directory with config.json, *.safetensors and tokenizer.json"
        )
    return path


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; raises ModelError."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ModelError(f"{path}: not readable as JSON ({e}); fetch the file again") from e
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds no JSON object; fetch the file again")
    return value


def weight_files(directory: Path) -> list[Path]:
    """The `*.safetensors` files, in ascending octet order of name; raises ModelError."""
    files = sorted(directory.glob("*.safetensors"), key=lambda p: p.name.encode())
    if not files:
        require(directory / "model.safetensors", "the weights")
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        for name in sorted(set(read_json(index).get("weight_map", {}).values())):
            require(directory / name, "a weight file named in model.safetensors.index.json")
    return files


def digest_files(
    paths: list[Path],
    label: str,
    *,
    remembered: Path | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> bytes:
    """SHA-256 of one file, or of the names and digests of several (D-C9); raises ModelError."""
    try:
        digests = [file_digest(path, remembered=remembered, report=report) for path in paths]
    except OSError as e:
        raise ModelError(f"{e.filename}: not readable ({e.strerror}); check the file") from e
    if len(paths) == 1:
        return digests[0]
    total = hashlib.sha256(label.encode() + b"\0")
    for path, digest in zip(paths, digests, strict=True):
        name = path.name.encode()
        total.update(struct.pack(">I", len(name)) + name + digest)
    return total.digest()


def model_digest(
    directory: Path,
    *,
    remembered: Path | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> bytes:
    """The contract's `target` (or drafter) digest of a directory's weights; raises ModelError.

    `remembered` is the file of digests.py; None hashes anew.
    """
    files = weight_files(directory)
    return digest_files(files, "SDCP-WEIGHTS-1", remembered=remembered, report=report)


def tokenizer_digest(directory: Path) -> bytes:
    """The contract's `tokenizer` digest."""
    path = require(directory / "tokenizer.json", "the tokenizer")
    return digest_files([path], "SDCP-TOKENIZER-1")


def check_whole(path: Path) -> int:
    """The number of tensors that a safetensors file names; raises ModelError if it is cut short."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > HEADER_BYTES_MAX:
                raise ValueError("its header is too long")
            header = json.loads(file.read(size))
        ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
        wanted = 8 + size + max(ends, default=0)
        have = path.stat().st_size
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as e:
        raise ModelError(f"{path} is no safetensors file ({e}); fetch it again") from e
    if have != wanted:
        raise ModelError(f"{path} has {have} octets and should have {wanted}; fetch it again")
    return len(ends)
