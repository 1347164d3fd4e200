"""packaging/install.sh: what it lays, that it can be run again, and that it takes away no more."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.kit.units import ROOT, UnitFile, furnish, program, run, tool

SCRIPT = ROOT / "packaging" / "install.sh"
ENVIRONMENT = {**os.environ, "PYTHON": sys.executable}
LAID = (
    "usr/bin/sdcpd",
    "usr/bin/sdcpctl",
    "usr/lib/systemd/system/sdcpd@.service",
    "usr/lib/systemd/system/sdcpd@router.service.d/10-nogpu.conf",
    "usr/lib/systemd/system/sdcpd-gpu.service",
    "usr/lib/systemd/system/sdcpd.target",
    "usr/lib/sysusers.d/sdcpd.conf",
    "usr/lib/tmpfiles.d/sdcpd.conf",
    "usr/share/doc/sdcpd/examples/sdcpd.toml.example",
    "usr/share/man/man1/sdcpctl.1",
    "usr/share/man/man1/sdcpctl-certs-init.1",
    "usr/share/bash-completion/completions/sdcpctl",
)


def install(root: Path, *arguments: str) -> str:
    """Run the script; what it said."""
    done = run("sh", SCRIPT, "--root", root, *arguments, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def refused(*arguments: str | Path, status: int = 1) -> str:
    done = run("sh", SCRIPT, *arguments, env=ENVIRONMENT)
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stderr.startswith("install.sh: ") and done.stderr.count("\n") == 1
    return done.stderr


def contents(root: Path) -> dict[str, str]:
    """All paths, with what is in them."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        else:
            found[name] = path.read_text("latin-1") if path.is_file() else ""
    return found


@pytest.mark.slow
def test_laid_again_and_taken_away(tmp_path: Path) -> None:
    furnish(tmp_path)
    before = contents(tmp_path)
    said = install(tmp_path, "--no-venv")
    first = contents(tmp_path)
    assert set(LAID) <= first.keys()
    assert first["usr/bin/sdcpd"] == "-> /opt/sdcpd/bin/sdcpd"
    assert "complete" in first["usr/share/bash-completion/completions/sdcpctl"]
    assert "sdcpctl doctor" in said and "/opt/sdcpd/bin/sdcpd" in said
    install(tmp_path, "--no-venv")
    assert contents(tmp_path) == first
    mine = tmp_path / "usr/lib/systemd/system/sdcpd@router.service.d/20-mine.conf"
    mine.write_text("[Service]\n")
    install(tmp_path, "--uninstall")
    kept = str(mine.relative_to(tmp_path))
    folder = str(mine.parent.relative_to(tmp_path))
    assert contents(tmp_path) == before | {folder: "", kept: "[Service]\n"}
    assert "not installed" in install(tmp_path, "--uninstall")


def test_the_units_as_they_are_laid(tmp_path: Path) -> None:
    """By systemd's own judgement, with the program where the link points to."""
    install(furnish(tmp_path), "--no-venv", "--prefix", "/srv/sdcpd")
    program(tmp_path / "srv/sdcpd/bin/sdcpd")
    verify = tool("systemd-analyze"), "verify", "--man=no", f"--root={tmp_path}"
    done = run(*verify, "sdcpd@router.service", "sdcpd@verifier.service", "sdcpd.target")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.slow
def test_every_path_that_a_unit_names_is_there(tmp_path: Path) -> None:
    """Programs of Exec lines, after the programs' own installation."""
    install(furnish(tmp_path), "--no-venv", "--prefix", "/srv/sdcpd")
    units = tmp_path / "usr/lib/systemd/system"
    named = []
    for path in (units / "sdcpd@.service", units / "sdcpd-gpu.service"):
        unit = UnitFile(path)
        for key in ("ExecStart", "ExecReload", "ExecStartPre", "ExecStop"):
            if unit.has_option("Service", key):
                named += [line.split()[0] for line in unit.all("Service", key)]
    assert "/usr/bin/sdcpd" in named
    for name in named:
        assert os.path.lexists(tmp_path / name.lstrip("/-")), name


@pytest.mark.slow
def test_what_an_earlier_version_laid_goes(tmp_path: Path) -> None:
    install(tmp_path, "--no-venv")
    old = tmp_path / "usr/share/man/man1/sdcpctl-old.1"
    old.write_text("")
    with (tmp_path / "usr/share/sdcpd/installed").open("a") as manifest:
        manifest.write("f /usr/share/man/man1/sdcpctl-old.1\n")
    install(tmp_path, "--no-venv")
    assert not old.exists()
    assert "sdcpctl-old" not in (tmp_path / "usr/share/sdcpd/installed").read_text()


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    stranger = program(tmp_path / "usr/bin/sdcpd")
    assert str(stranger) in refused("--root", tmp_path, "--no-venv")
    assert contents(tmp_path).keys() == {"usr", "usr/bin", "usr/bin/sdcpd"}


def test_a_prefix_of_others_is_left_alone(tmp_path: Path) -> None:
    program(tmp_path / "opt/sdcpd/bin/other")
    assert "--prefix" in refused("--root", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        (("--root", ""), 1, "empty"),
        (("--root", "/tmp", "--prefix", "/home/me/sdcpd"), 1, "cannot see"),
        (("--root", "/tmp", "--prefix", "/usr"), 1, "a folder of its own"),
        (("--rot", "/x"), 2, "--help"),
        (("--root",), 2, "value"),
        (("--root", "here"), 1, "begins with /"),
        (("--root", "/nowhere/at/all"), 1, "mkdir"),
        (("--prefix", "/a b"), 1, "letters"),
        (("--prefix", "/"), 1, "of its own"),
    ],
)
def test_refusals(arguments: tuple[str, ...], status: int, word: str) -> None:
    assert word in refused(*arguments, status=status)


def test_help_names_every_option() -> None:
    done = run("sh", SCRIPT, "--help")
    assert done.returncode == 0
    taken = set(re.findall(r"^    (?:-h \| )?(--[a-z-]+)\)", SCRIPT.read_text(), re.MULTILINE))
    assert len(taken) == 6 and all(option in done.stdout for option in taken)
