"""Which requirement each test holds: ids are in the docstrings of tests, results in a table.

`pytest --conformance FILE` writes the table of `docs/conformance.md` from the results of that run.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
REQUIREMENTS = ROOT / "docs" / "spec" / "requirements.md"
TABLE = ROOT / "docs" / "conformance.md"
_ID = re.compile(r"\bR-(?:\d+(?:\.\d+)*|A|Z)-\d+\b")
_ROW = re.compile(r"^\| (R-\S+) \| (\S.*?) \| (.*?) \| (.*) \| (.*) \| (!?) *\|$")

UNTESTABLE = {
    "R-6.3-23": "permits an order of work that no peer can see; both orders give the same answers"
}
"""Rows without a test, and why."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """One row of the requirements: who it binds, what it says."""

    id: str
    binds: str
    text: str


def requirements() -> list[Requirement]:
    """All rows, in their order."""
    found = []
    for line in REQUIREMENTS.read_text().splitlines():
        if line.startswith("| R-"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            found.append(Requirement(cells[0], cells[2], cells[3].replace("\\|", "|")))
    return found


def ids_in(text: str | None) -> list[str]:
    """The requirement ids that a docstring names."""
    return list(dict.fromkeys(_ID.findall(text or "")))


def holding_tests() -> dict[str, list[str]]:
    """Node ids (without parameters) of the tests that name each requirement, by id."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for name, doc in _functions(path):
            for requirement in ids_in(doc):
                found[requirement].append(f"{path.relative_to(ROOT).as_posix()}::{name}")
    return found


def _functions(path: Path) -> Iterator[tuple[str, str | None]]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(
            "test"
        ):
            yield node.name, ast.get_docstring(node)


def write_table(path: Path, outcomes: dict[str, str]) -> None:
    """Write the table; `outcomes` tells passed, failed or skipped by node id without parameters."""
    tests = holding_tests()
    lines = [
        "# Conformance",
        "",
        "One line a requirement of [the draft and its decisions](spec/requirements.md): the tests that",
        "name it, and what they came to when this file was written (`make conformance`).",
        "",
        "| id | binds | tests | result |",
        "|---|---|---|---|",
    ]
    rows = requirements()
    for row in rows:
        names = tests.get(row.id, [])
        result = _result([outcomes.get(name, "not run") for name in names])
        shown = "<br>".join(f"`{name.removeprefix('tests/')}`" for name in names)
        if row.id in UNTESTABLE:
            shown, result = UNTESTABLE[row.id], "no test"
        lines.append(f"| {row.id} | {row.binds} | {shown} | {result} |")
    held = sum(line.endswith("| passed |") for line in lines)
    lines += ["", f"{held} of {len(rows)} held.", ""]
    path.write_text("\n".join(lines))


def _result(results: list[str]) -> str:
    for result in ("failed", "not run", "skipped", "passed"):
        if result in results:
            return result
    return "no test"


class ConformancePlugin:
    """Collects outcomes while tests run, and writes the table at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that fails in any part or with any parameter has failed."""
        name = report.nodeid.split("[", 1)[0]
        if report.when == "call" or report.outcome != "passed":
            known = self._outcomes.get(name)
            if known != "failed":
                self._outcomes[name] = report.outcome if known != "skipped" else known
            if report.outcome == "failed":
                self._outcomes[name] = "failed"

    def pytest_sessionfinish(self) -> None:
        """Write what was found."""
        write_table(self._path, self._outcomes)
