"""Lines of the log: for people, for machines, for the journal."""

from __future__ import annotations

import io
import json
import logging

import pytest

from sdcpd.logs import formatter

SESSION = "AAAAAAAAAAAAAAAAAAAAAA"


def written(form: str, *arguments: object, level: int = logging.WARNING) -> str:
    logger = logging.Logger("sdcpd.router")
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter(form))
    logger.addHandler(handler)
    try:
        raise ValueError("broken\nin two lines")
    except ValueError:
        logger.log(level, *arguments, exc_info=level == logging.ERROR)  # type: ignore[arg-type]
    return stream.getvalue()


def test_json_is_an_object_a_line_that_names_the_session() -> None:
    line = json.loads(written("json", "session %s: %s", SESSION, 'said "no"'))
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "sdcpd.router",
        "message": f'session {SESSION}: said "no"',
        "session": SESSION,
    }
    text = written("json", "failed", level=logging.ERROR)
    assert text.count("\n") == 1
    failed = json.loads(text)
    assert "session" not in failed
    assert failed["trace"].endswith("in two lines")


@pytest.mark.parametrize(
    ("level", "priority"),
    [(logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.DEBUG, 7)],
)
def test_the_journal_gets_the_priority_of_each_line(level: int, priority: int) -> None:
    lines = written("journal", "failed", level=level).splitlines()
    assert all(line.startswith(f"<{priority}>") for line in lines)
    assert lines[0].endswith("sdcpd.router: failed")


def test_auto_goes_by_who_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    assert written("auto", "x")[2] == ":"
    monkeypatch.setenv("JOURNAL_STREAM", "8:1")
    assert written("auto", "x").startswith("<4>")
