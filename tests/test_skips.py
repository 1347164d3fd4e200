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


ABSENT = """
import pytest

pytest.importorskip("sdcpd_absent", reason="the extra is not installed")

def test_one():
    pass
"""
ONE = "test_skipping.py::test_one"


def run(folder: Path, *, allowed: str, ci: str) -> subprocess.CompletedProcess[str]:
    (folder / "allowed.txt").write_text(allowed)
    (folder / "conftest.py").write_text(
        "from tests.kit.skips import SkipsPlugin\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(SkipsPlugin())\n"
    )
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=folder,
        env={**os.environ, "CI": ci, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("allowed", "ci", "code"), [("", "1", 1), ("", "", 0), (f"{ONE} # no server here", "1", 0)]
)
@pytest.mark.slow
def test_only_allowed_skips_are_forgiven(tmp_path: Path, allowed: str, ci: str, code: int) -> None:
    (tmp_path / "test_skipping.py").write_text(SKIPPING)
    done = run(tmp_path, allowed=allowed, ci=ci)
    assert done.returncode == code, done.stdout + done.stderr
    assert f"{ONE}: there is no server" in done.stdout
    assert ("not allowed by allowed.txt" in done.stdout) == bool(code)


@pytest.mark.parametrize("ci", ["", "true"])
@pytest.mark.parametrize("module", ["", "test_absent.py # not installed here"])
@pytest.mark.slow
def test_modules_that_are_skipped_at_collection_are_seen(
    tmp_path: Path, module: str, ci: str
) -> None:
    """Beside tests that run, no other line tells that they are missing."""
    (tmp_path / "test_skipping.py").write_text(SKIPPING)
    (tmp_path / "test_absent.py").write_text(ABSENT)
    done = run(tmp_path, allowed=f"{ONE} # no server here\n{module}", ci=ci)
    refused = bool(ci) and not module
    assert done.returncode == int(refused), done.stdout + done.stderr
    assert "test_absent.py: the extra is not installed" in done.stdout
    assert ("not allowed by allowed.txt: test_absent.py" in done.stdout) == refused


@pytest.mark.slow
def test_a_run_of_nothing_but_such_a_module_fails_where_it_is_not_allowed(tmp_path: Path) -> None:
    (tmp_path / "test_absent.py").write_text(
        "from tests.kit import skips\n"
        "from pathlib import Path\n"
        'skips.ALLOWED = Path(__file__).parent / "allowed.txt"\n' + ABSENT
    )
    assert run(tmp_path, allowed="", ci="true").returncode == pytest.ExitCode.TESTS_FAILED


def test_every_allowance_has_a_reason() -> None:
    allowed_beginnings(ALLOWED.read_text())
    with pytest.raises(ValueError, match="no reason"):
        allowed_beginnings("tests/test_a.py")
