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


@pytest.mark.parametrize(
    "wrong",
    [("--endpoint", "foo"), ("--api", "htp://lab/v1"), ("--api", "http://"), ("--api", "lab:8000")],
)
def test_what_can_not_be_asked_is_not_kept(home: Path, wrong: tuple[str, str]) -> None:
    done = run("context", "add", "lab", *wrong)
    assert done.exit_code == 2 and wrong[0] in done.stderr
    assert not (home / "sdcpctl").exists()


@pytest.mark.parametrize(
    ("key", "value", "command"),
    [
        ("endpoint", "foo", ("status",)),
        ("endpoint", "foo", ("doctor",)),
        ("api", "htp://x", ("chat", "--once", "x")),
        ("api", "htp://x", ("bench",)),
    ],
)
def test_a_kept_value_that_is_wrong_is_told_with_its_context(
    home: Path, key: str, value: str, command: tuple[str, ...]
) -> None:
    (home / "sdcpctl").mkdir()
    kept = {"current": "the lab", "contexts": {"the lab": {key: value}}}
    (home / "sdcpctl" / "contexts.json").write_text(json.dumps(kept))
    done = run(*command)
    assert done.exit_code == 1
    assert done.stderr.startswith(f'context the lab: its {key} "{value}" must look like ')
    assert "sdcpctl context remove 'the lab'" in done.stderr
    assert run("context", "remove", "the lab").exit_code == 0


def test_a_current_context_that_is_gone_can_be_mended(home: Path) -> None:
    run("context", "add", "lab", "--api", "http://lab/v1")
    path = home / "sdcpctl" / "contexts.json"
    path.write_text(path.read_text().replace('"current": "lab"', '"current": "old"'))
    assert run("status").exit_code == 5
    assert run("context", "use", "lab").exit_code == 0
