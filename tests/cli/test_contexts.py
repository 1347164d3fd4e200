"""sdcpctl context: names for clusters, and what goes before them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cli.__main__ import main


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("SDCPCTL_ENDPOINT", "SDCPCTL_CONTEXT", "SDCPCTL_API", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_commands_ask_the_current_one_or_the_one_that_is_named(home: Path) -> None:
    assert run("context", "add", "lab", "--endpoint", f"unix:{home}/lab.sock").exit_code == 0
    added = run(
        "context", "add", "far", "--endpoint", f"unix:{home}/far.sock", "--api", "http://far/v1"
    )
    assert "sdcpctl context use far" in added.stdout
    assert f"{home}/lab.sock" in run("status").stderr
    assert f"{home}/far.sock" in run("--context", "far", "status").stderr
    assert f"{home}/far.sock" in run("--context", "far", "sessions", "list").stderr
    assert run("context", "use", "far").exit_code == 0
    assert f"{home}/far.sock" in run("instances", "list").stderr
    assert "http://far/v1" in run("chat", "--once", "hello").stderr
    listed = json.loads(run("context", "list", "-o", "json").stdout)["contexts"]
    assert [(one["name"], one["current"]) for one in listed] == [("far", True), ("lab", False)]


def test_an_option_and_its_variable_go_before_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("context", "add", "lab", "--endpoint", f"unix:{home}/lab.sock")
    monkeypatch.setenv("SDCPCTL_ENDPOINT", f"unix:{home}/variable.sock")
    assert f"{home}/variable.sock" in run("status").stderr
    assert f"{home}/option.sock" in run("status", "--endpoint", f"unix:{home}/option.sock").stderr


def test_one_that_is_forgotten_is_asked_no_more(home: Path) -> None:
    run("context", "add", "lab", "--endpoint", f"unix:{home}/lab.sock")
    assert run("context", "remove", "lab").exit_code == 0
    assert "no running `sdcpd dev`" in run("status").stderr
    assert run("context", "list").stdout == "no context is kept\n"


def test_names_that_are_none(home: Path) -> None:
    run("context", "add", "lab", "--api", "http://lab/v1")
    for arguments in (
        ("context", "use", "x"),
        ("context", "remove", "x"),
        ("--context", "x", "status"),
    ):
        done = run(*arguments)
        assert done.exit_code == 5 and "no context x; there are: lab" in done.stderr
    assert run("context", "add", "empty").exit_code == 2
    assert run("context", "add", " ", "--api", "http://x").exit_code == 2


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"current": 1, "contexts": {}}', '{"contexts": 3}']
)
def test_a_file_that_is_no_longer_what_was_written(home: Path, text: str) -> None:
    (home / "sdcpctl").mkdir()
    (home / "sdcpctl" / "contexts.json").write_text(text)
    done = run("status")
    assert done.exit_code == 1 and "is not what sdcpctl wrote" in done.stderr
    assert (home / "sdcpctl" / "contexts.json").read_text() == text
