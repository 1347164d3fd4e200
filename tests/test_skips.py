"""A skip that nobody has allowed fails a run in CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.skips import ALLOWED, allowed_beginnings

ROOT = Path(__file__).parents[1]
SKIPPING = """
import pytest
from tests.kit import skips
from pathlib import Path

skips.ALLOWED = Path(__file__).parent / "allowed.txt"

def test_one():
    pytest.skip("there is no server")
"""


@pytest.mark.parametrize(
    ("allowed", "ci", "code"),
    [("", "1", 1), ("", "", 0), ("test_skipping.py::test_one # no server here", "1", 0)],
)
def test_only_allowed_skips_are_forgiven(tmp_path: Path, allowed: str, ci: str, code: int) -> None:
    (tmp_path / "test_skipping.py").write_text(SKIPPING)
    (tmp_path / "allowed.txt").write_text(allowed)
    (tmp_path / "conftest.py").write_text(
        "from tests.kit.skips import SkipsPlugin\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(SkipsPlugin())\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_skipping.py"],
        cwd=tmp_path,
        env={**os.environ, "CI": ci, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "test_skipping.py::test_one: there is no server" in done.stdout
    assert ("not allowed by allowed.txt" in done.stdout) == bool(code)


def test_every_allowance_has_a_reason() -> None:
    allowed_beginnings(ALLOWED.read_text())
    with pytest.raises(ValueError, match="no reason"):
        allowed_beginnings("tests/test_a.py")
