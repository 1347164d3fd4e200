"""For all tests: the outside check of messages, and the table of conformance."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import cddl
from tests.kit.conformance import ROOT, ConformancePlugin
from tests.kit.skips import SkipsPlugin

_violations: list[str] = []
_sent: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--conformance FILE` writes the table from the results of this run."""
    parser.addoption("--conformance", type=Path, default=None, help="write docs/conformance.md")


def pytest_configure(config: pytest.Config) -> None:
    """Check what roles encode, from the start."""
    config.pluginmanager.register(SkipsPlugin())
    path = config.getoption("--conformance")
    if path is not None:
        config.pluginmanager.register(ConformancePlugin(path))
    cddl.install(_violations.append, lambda kind: _sent.update((kind,)))


@pytest.fixture(scope="session", autouse=True)
def _messages_of_children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Processes that tests start check what they send as well, and report to one file."""
    report = tmp_path_factory.mktemp("cddl") / "violations"
    os.environ[cddl.REPORT] = str(report)
    os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT / "tests" / "kit" / "site"), str(ROOT)))
    yield report
    del os.environ[cddl.REPORT], os.environ["PYTHONPATH"]


@pytest.fixture(autouse=True)
def _messages_are_valid(_messages_of_children: Path) -> Iterator[None]:
    """R-5.2-18: fails the test in which a role sent something the CDDL does not allow."""
    yield
    found = list(_violations)
    _violations.clear()
    if _messages_of_children.exists():
        found += _messages_of_children.read_text().splitlines()
        _messages_of_children.unlink()
    assert not found, "messages that the draft's CDDL does not allow"


@pytest.fixture
def messages_sent() -> Counter[str]:
    """How many messages of each kind the roles have sent since the run began."""
    return _sent
