"""A running `sdcpd dev`, as a person would start it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdcpd.admin_client import ask
from sdcpd.dev.plan import free_ports

PAIR = Path(__file__).parents[2] / "sdcpd" / "dev" / "pair"
COMMAND = [sys.executable, "-m", "sdcpd", "dev"]


def environment() -> dict[str, str]:
    """Ours, without what would point at another cluster."""
    return {**os.environ, "XDG_RUNTIME_DIR": "", "OMP_WAIT_POLICY": "PASSIVE"}


@dataclass
class Dev:
    """The running cluster."""

    process: subprocess.Popen[str]
    directory: Path
    state: dict[str, Any]
    banner: str

    @property
    def api(self) -> str:
        """Base URL of the OpenAI API."""
        return str(self.state["api"])

    def instance(self, name: str) -> dict[str, Any]:
        """One entry of dev.json."""
        return dict(next(i for i in self.state["instances"] if i["name"] == name))

    def generate(self, prompt: str, max_tokens: int, **options: Any) -> dict[str, Any]:
        """One text, with its token ids and what it took."""
        body = {"prompt": prompt, "max_tokens": max_tokens, **options}
        return ask(Path(self.instance("r0")["admin"]), "POST", "/generate", body, timeout_s=120)

    def stop(self) -> str:
        """Ctrl-C; returns what it still said."""
        self.process.send_signal(signal.SIGINT)
        rest, _ = self.process.communicate(timeout=20)
        return rest


@contextmanager
def dev(directory: Path, *options: str) -> Iterator[Dev]:
    """Start `sdcpd dev --keep directory` on a free port and wait for its banner."""
    port = free_ports(1)[0]
    process = subprocess.Popen(
        [*COMMAND, "--keep", str(directory), "--port", str(port), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )
    try:
        banner = _read_until(process, "Stop: Ctrl-C")
        state = json.loads((directory / "dev.json").read_text())
        yield Dev(process, directory, state, banner)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(20)
        if process.stdout is not None:
            process.stdout.close()


def _read_until(process: subprocess.Popen[str], marker: str) -> str:
    assert process.stdout is not None
    said = ""
    while marker not in said:
        line = process.stdout.readline()
        assert line, f"sdcpd dev did not get ready; it said:\n{said}"
        said += line
    return said


def once(*options: str) -> dict[str, Any]:
    """`sdcpd dev --once --json`"""
    done = subprocess.run(
        [*COMMAND, "--once", "--json", *options],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return dict(json.loads(done.stdout))
