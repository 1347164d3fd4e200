"""Skips are told at the end of a run; where CI is set, only those that are allowed are forgiven."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ALLOWED = Path(__file__).parents[1] / "allowed_skips.txt"


def allowed_beginnings(text: str) -> tuple[str, ...]:
    """What ids may begin with; raises ValueError for a line without a reason."""
    found = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        beginning, mark, reason = line.partition(" # ")
        if not mark or not reason.strip():
            raise ValueError(f"{ALLOWED.name}: no reason is given in: {line}")
        found.append(beginning.strip())
    return tuple(found)


class SkipsPlugin:
    """Collects what was skipped."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a skip; an expected failure is none."""
        if not hasattr(report, "wasxfail"):
            self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a module of which no test is ever seen, as for want of what it imports."""
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped:
            place = report.longrepr
            self._reasons[report.nodeid] = place[2] if isinstance(place, tuple) else str(place)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the run for a skip that is not allowed."""
        forgiven = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if self._refused() and session.exitstatus in forgiven:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """List them."""
        if not self._reasons:
            return
        terminalreporter.section("skipped tests")
        for nodeid, reason in sorted(self._reasons.items()):
            terminalreporter.line(f"{nodeid}: {reason.removeprefix('Skipped: ')}")
        for nodeid in self._refused():
            terminalreporter.line(f"not allowed by {ALLOWED.name}: {nodeid}", red=True)

    def _refused(self) -> list[str]:
        if not os.environ.get("CI"):
            return []
        allowed = allowed_beginnings(ALLOWED.read_text())
        return [nodeid for nodeid in sorted(self._reasons) if not nodeid.startswith(allowed)]
