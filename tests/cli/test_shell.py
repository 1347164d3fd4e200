"""sdcpctl as a program: completion, pages for man, and what it costs to start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.__main__ import main


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    done = CliRunner().invoke(main, ["completion", shell])
    assert done.exit_code == 0
    assert "_SDCPCTL_COMPLETE" in done.output


@pytest.mark.filterwarnings("ignore:.*make_default_short_help:DeprecationWarning")
def test_a_page_for_each_command(tmp_path: Path) -> None:
    assert CliRunner().invoke(main, ["manpages", str(tmp_path)]).exit_code == 0
    pages = {path.name for path in tmp_path.iterdir()}
    assert {"sdcpctl.1", "sdcpctl-status.1", "sdcpctl-certs-renew.1"} <= pages
    assert ".TH" in (tmp_path / "sdcpctl-reload.1").read_text()


def test_neither_torch_nor_what_is_slow_is_imported() -> None:
    """ux 0.10: what is not needed to say what there is to say."""
    code = (
        "import sys\nfrom cli.__main__ import main\n"
        "print(sorted({'torch', 'numpy', 'pydantic', 'asyncio', 'cryptography', 'jinja2', 'h2'}"
        " & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", code]
    own = {"PATH": os.environ["PATH"]}  # without what the tests put into every process
    made = subprocess.run(command, capture_output=True, text=True, check=True, env=own)
    assert made.stdout == "[]\n"
