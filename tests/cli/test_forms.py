"""sdcpctl: forms of output that every command has, and exit codes of what is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_guard import SESSION, alone, answering
from tests.cli.test_sdcpctl import ROUTER, VERIFIER, answer_of, invoke
from tests.kit.by_hand import write_model

__all__ = ["alone"]  # the fixture


def test_each_line_of_jsonl_names_its_form(tmp_path: Path) -> None:
    for command, answer in (
        (("status",), ROUTER),
        (("status",), VERIFIER),
        (("instances", "list"), ROUTER),
        (("instances", "show", "v0"), ROUTER),
        (("version",), ROUTER),
        (("reload",), {"schema": "sdcpctl/v1", "changed": [], "needs_restart": [], "problems": []}),
        (("cache", "gc", "--yes"), {"schema": "sdcpctl/v1", "objects": 1, "bytes": 2}),
        (("log", "verify", SESSION), {"schema": "sdcpctl/v1", "session": SESSION, "faults": []}),
        (
            ("log", "show", SESSION),
            {"schema": "sdcpctl/v1", "session": SESSION, "records": [{"kind": "fence"}] * 2},
        ),
    ):
        with answering(tmp_path, answer_of(answer)) as path:
            done = invoke(*command, "-o", "jsonl", "--endpoint", f"unix:{path}")
        assert done.exit_code == 0, done.output
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert lines and all(one["schema"] == "sdcpctl/v1" for one in lines)


def test_every_command_that_shows_something_has_the_same_forms() -> None:
    names = "status doctor config/show config/check config/diff log/show log/verify log/fence"
    names += " models/verify cache/gc certs/show certs/check reload top version"
    for name in names.split():
        done = invoke(*name.split("/"), "--help")
        assert "[table|wide|json|jsonl]" in done.stdout, name


def test_forms_of_what_needs_no_instance(tmp_path: Path) -> None:
    pki = tmp_path / "pki"
    assert invoke("certs", "init", "--out", pki, "verifier/v0=https://a:1/").exit_code == 0
    shown = json.loads(invoke("certs", "show", pki, "-o", "json").stdout)["certificates"]
    assert {one["path"] for one in shown} >= {f"{pki}/ca.crt"}
    assert all(one["days_left"] > 89 for one in shown)
    found = invoke("certs", "check", pki, "-o", "jsonl").stdout.splitlines()
    assert {json.loads(line)["level"] for line in found} <= {"ok", "warning"}
    file = tmp_path / "f.toml"
    file.write_text("[node]\nnam = 3\n")
    done = invoke("config", "check", "-c", file, "-o", "json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["problems"][0].startswith(f"{file}:2: unknown key")
    assert invoke("top", "-o", "json").exit_code == 2


def test_a_model_is_told_as_json_too(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    found = json.loads(invoke("models", "verify", model, "-o", "json").stdout)
    assert found["weights"].startswith("sha256:")
    assert [one["level"] for one in found["checks"]].count("ok") == 3


def test_versions_and_colours(tmp_path: Path) -> None:
    with answering(tmp_path, answer_of(ROUTER)) as path:
        done = invoke("version", "--endpoint", f"unix:{path}", "-o", "json")
    assert json.loads(done.stdout)["instance"] == "r0"
    without = invoke("version")
    assert without.exit_code == 0 and "no instance was asked" in without.stderr
    assert invoke("-q", "version").stderr == ""
    with answering(tmp_path, answer_of(ROUTER)) as path:
        done = invoke("--no-color", "status", "--endpoint", f"unix:{path}", color=True)
    assert "not ready" in done.stdout and "\x1b" not in done.stdout


LINES = b'HTTP/1.1 200 OK\r\n\r\n{"session": "x"}\n{"end": "finished", "rest": ""}\n'


def test_what_is_followed(tmp_path: Path) -> None:
    """Each line names its form; lines that no router writes are told to be such."""
    watch = ("sessions", "watch", "--endpoint", f"unix:{tmp_path}/a.sock")
    with answering(tmp_path, LINES):
        done = invoke(*watch, "-o", "jsonl")
    assert done.exit_code == 0
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["schema"] for one in lines] == ["sdcpctl/v1"] * 2
    for line in (b"hello", b"[]", b'{"rounds": [3]}', b"[" * 100_000):
        with answering(tmp_path, b"HTTP/1.1 200 OK\r\n\r\n" + line + b"\n"):
            done = invoke(*watch)
        assert done.exit_code == 3 and "is not understood" in done.stderr


# ---- exit codes


@pytest.mark.parametrize("command", [("sessions", "list"), ("top", "--once")], ids=" ".join)
def test_a_verifiers_socket_is_no_routers(tmp_path: Path, command: tuple[str, ...]) -> None:
    with answering(tmp_path, answer_of(VERIFIER)) as path:
        done = invoke(*command, "--endpoint", f"unix:{path}")
    assert done.exit_code == 1
    assert done.stderr == "that is the verifier v0; name a router's --endpoint\n"


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ('"nosuch" is no session id: sdcpctl status -o json names those open', 5),
        (f"there is no log of {SESSION} here; is it another router's?", 5),
        (f"the log of {SESSION} was deleted 3s ago, log_retention = 2s after its session ended", 5),
        (f"the log of {SESSION} cannot be read to its end: cut", 1),
    ],
)
def test_a_log_that_is_not_there(tmp_path: Path, said: str, code: int) -> None:
    with answering(tmp_path, answer_of({"error": said}, "409 Conflict")) as path:
        done = invoke("log", "verify", "nosuch", "--endpoint", f"unix:{path}")
    assert (done.exit_code, done.stderr) == (code, f"{said}\n")


def test_a_kind_that_is_none() -> None:
    done = invoke("cache", "gc", "--yes", "--kind", "nosuch")
    assert done.exit_code == 2
    assert "q_rows, draft_kv, target_kv, prompt, tokens, other" in " ".join(done.stderr.split())
