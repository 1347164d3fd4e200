"""Plants each fault of `faults.toml` in a copy, and runs the tests that hold its requirement.

`python -m tests.mutants [ID ...]`: exit status 1 if a fault survives, or if a test fails without
one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kit.conformance import ROOT, holding_tests
from tests.mutants.faults import Fault, faults

TIME_LIMIT_S = 900.0  # of one run; a test that hangs has failed long before
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "build", "dist"
)
NEVER_ENDED = -1
TESTS_FAILED = 1  # pytest's exit status; a higher one says that no test came to a result
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


def main(ids: list[str]) -> int:
    """Run the faults of these requirements, or all; returns the exit status."""
    chosen = [fault for fault in faults() if not ids or fault.id in ids]
    if unknown := set(ids) - {fault.id for fault in chosen}:
        print(f"no fault is planted for {', '.join(sorted(unknown))}")
        return 1
    tests = holding_tests()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "project"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        _check_imports(copy)
        status, output = _pytest(copy, {test for fault in chosen for test in tests[fault.id]})
        if status != 0:
            print(f"without a fault the tests must pass:\n{output}")
            return 1
        results = [_survives(copy, fault, tests[fault.id]) for fault in chosen]
    print(f"{results.count(False)} of {len(results)} faults caught")
    return int(any(results))


def _survives(copy: Path, fault: Fault, tests: list[str]) -> bool:
    with _planted(copy, fault):
        status, output = _pytest(copy, tests, "-x")
    failed = _FAILED.search(output)
    caught = status == TESTS_FAILED and failed is not None
    found = f"caught by {failed[1]}" if caught and failed else "SURVIVED"
    print(f"{fault.id:<12} {found}  [{fault.breaks}]", flush=True)
    if status != 0 and not caught:
        print(f"pytest ended with {status} and no failed test:\n{output}")
    return not caught


@contextmanager
def _planted(copy: Path, fault: Fault) -> Iterator[None]:
    path = copy / fault.file
    text = path.read_text()
    assert text.count(fault.find) == 1, f"{fault.id}: find must stand once in {fault.file}"
    path.write_text(text.replace(fault.find, fault.replace))
    try:
        yield
    finally:
        path.write_text(text)


def _environment(copy: Path) -> dict[str, str]:
    # A compiled file is thought current when time and length agree; a quick change keeps both.
    return {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}


def _check_imports(copy: Path) -> None:
    """The packages under test must be the copy's, not those installed."""
    code = "import sdcpd, tiers, certs, tests.kit as t; print(sdcpd.__file__, t.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=copy,
        env=_environment(copy),
        check=True,
        capture_output=True,
        text=True,
    )
    assert all(path.startswith(str(copy)) for path in found.stdout.split()), found.stdout


def _pytest(copy: Path, tests: Iterable[str], *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short", "-m", "not device"]
    try:
        done = subprocess.run(
            [*command, *options, *sorted(tests)],
            cwd=copy,
            env=_environment(copy),
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return NEVER_ENDED, f"no result within {TIME_LIMIT_S:.0f} s"
    return done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
