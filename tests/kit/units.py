"""A root folder in which systemd's own tools can look at installed units."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "systemd"
# What units name and a host has: systemd's targets, and other people's programs.
_TARGETS = ("sysinit", "basic", "shutdown", "network-online", "multi-user")
_PROGRAMS = ("bin/kill", "usr/bin/nvidia-modprobe")


class UnitFile(configparser.RawConfigParser):
    """A unit file; a key that stands several times is a list of lines."""

    def __init__(self, path: Path) -> None:
        super().__init__(strict=False, delimiters=("=",), comment_prefixes=("#",), dict_type=_Lists)
        self.optionxform = str  # type: ignore[assignment, method-assign]
        self.read_string(path.read_text())

    def all(self, section: str, key: str) -> list[str]:
        """Every line of a key."""
        return self.get(section, key).split("\n")


class _Lists(dict[str, object]):
    """configparser reads each value as a list of its lines; ours go on."""

    def __setitem__(self, key: str, value: object) -> None:
        known = self.get(key)
        if isinstance(value, list) and isinstance(known, list):
            known.extend(value)
        else:
            super().__setitem__(key, value)


def tool(name: str) -> str:
    """A program of systemd's; the test is skipped without it."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; on Debian it is in the package systemd")
    return found


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a program and keep what it says."""
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        **options,
    )


def program(path: Path) -> Path:
    """A program that does nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def furnish(root: Path) -> Path:
    """Put what every host has into a root, beside what is there."""
    for name in _PROGRAMS:
        program(root / name)
    units = root / "usr/lib/systemd/system"
    units.mkdir(parents=True, exist_ok=True)
    for name in _TARGETS:
        (units / f"{name}.target").write_text(f"[Unit]\nDescription={name}\n")
    (root / "etc").mkdir(exist_ok=True)
    return root
