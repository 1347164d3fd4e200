"""Reads `faults.toml`: what is changed in which file, and which rule that breaks."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

FAULTS = Path(__file__).with_name("faults.toml")


@dataclass(frozen=True, slots=True)
class Fault:
    """`find` becomes `replace` in `file`, where it stands once; `breaks` says what then is wrong."""

    id: str
    file: str
    find: str
    replace: str
    breaks: str


def faults() -> list[Fault]:
    """All planted faults, in their order."""
    return [Fault(**entry) for entry in tomllib.loads(FAULTS.read_text())["fault"]]
