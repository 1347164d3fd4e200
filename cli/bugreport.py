"""`sdcpctl bugreport`: one file with all that somebody needs who looks at a fault from afar.

No key, certificate, prompt or text is in it: commands show none, and their own output is all that
is collected. Host names, addresses and the ids of sessions are.
"""

from __future__ import annotations

import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

from cli.asking import endpoint_option
from cli.config import file_option
from cli.errors import CtlError
from cli.text import echo

COMMAND_S = 30.0
LOG_LINES = 500
PACKAGES = ("anyio", "aioquic", "cbor2", "cryptography", "h2", "lmdb", "numpy", "torch", "uvloop")


@click.command()
@file_option
@endpoint_option
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="the file to write")
def bugreport(path: Path, endpoint: Path | None, out: Path | None) -> None:
    """Collect what a report of a fault needs into one file: no keys, prompts or texts."""
    stem = f"sdcpd-bugreport-{time.strftime('%Y%m%d-%H%M%S')}"
    out = out or Path(f"{stem}.tar.gz")
    try:
        with tarfile.open(out, "x:gz") as archive:
            for name, text in _parts(path, endpoint):
                octets = text.encode()
                entry = tarfile.TarInfo(f"{stem}/{name}")
                entry.size, entry.mtime = len(octets), time.time()
                archive.addfile(entry, io.BytesIO(octets))
                echo(f"  {name:14} {len(octets):7} octets")
    except FileExistsError as e:
        raise CtlError(f"{out} is there already; name another with --out") from e
    except OSError as e:
        raise CtlError(f"{out} cannot be written: {e.strerror}") from e
    echo(f"{out} has host names, addresses and ids of sessions: look at it before you send it")


def _parts(path: Path, endpoint: Path | None) -> Iterator[tuple[str, str]]:
    """Name and text of each file."""
    at = ["--endpoint", f"unix:{endpoint}"] if endpoint else []
    yield "versions.txt", "".join(f"{line}\n" for line in _versions())
    yield "doctor.txt", _command("doctor", "-c", str(path), *at)
    yield "config.txt", _command("config", "show", "--origin", "-c", str(path))
    yield "status.json", _command("status", "-o", "json", *at)
    yield "cache.json", _command("cache", "tiers", "-o", "json", *at)
    yield "metrics.txt", _metrics(endpoint)
    if nvidia := shutil.which("nvidia-smi"):
        yield "gpu.txt", _output([nvidia, "-q"])
    if journal := shutil.which("journalctl"):
        yield "log.txt", _output([journal, "-u", "sdcpd@*", "-n", str(LOG_LINES), "--no-pager"])


def _versions() -> Iterator[str]:
    from importlib.metadata import PackageNotFoundError, version

    import sdcpd

    yield f"sdcpd {sdcpd.__version__}, Python {platform.python_version()}"
    yield f"{platform.platform()}, {os.cpu_count()} CPUs"
    for name in PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"{name} is not installed"


def _metrics(endpoint: Path | None) -> str:
    from cli.asking import metrics_of

    try:
        return metrics_of(endpoint)
    except CtlError as e:
        return f"{e.message}\n"


def _command(*arguments: str) -> str:
    """What one of our own commands prints, as a process of its own: it may fail as it likes."""
    return _output([sys.executable, "-m", "cli", *arguments])


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=COMMAND_S,
            env=os.environ | {"NO_COLOR": "1"},
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"{e}\n"
    return f"{done.stdout}{done.stderr}exit code {done.returncode}\n"
