"""The test vectors, and their notation of octets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors.json").read_text())


def hashes(value: Any) -> Any:
    """The vectors' members with h'..' read as octets."""
    if isinstance(value, str) and value.startswith("h'"):
        return bytes.fromhex(value[2:-1])
    if isinstance(value, dict):
        return {key: hashes(member) for key, member in value.items()}
    return [hashes(member) for member in value] if isinstance(value, list) else value
