"""sdcpctl never shows a traceback: whatever answers at a socket, and wherever its output goes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli import status as status_module
from sdcpd import admin_client
from sdcpd.admin_client import AdminUnreachable, ask, fetch, follow
from tests.cli.test_sdcpctl import ROUTER, Answering, answer_of, invoke

SESSION = "AAECAwQFBgcICQoLDA0ODw"
COMMANDS = (
    ("status",),
    ("top", "--once", "--interval", "0.1"),
    ("cache", "tiers"),
    ("cache", "ls"),
    ("cache", "gc", "--yes"),
    ("sessions", "list"),
    ("sessions", "cancel", SESSION),
    ("instances", "list"),
    ("instances", "show", "v0"),
    ("instances", "drain", "v0"),
    ("log", "show", SESSION),
    ("log", "verify", SESSION),
    ("log", "fence", SESSION, "--yes"),
    ("models", "list"),
    ("reload",),
    ("version",),
    ("doctor",),
)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SDCPCTL_ENDPOINT", "SDCPCTL_CONTEXT", "XDG_RUNTIME_DIR", "SDCPCTL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-contexts"))


@contextmanager
def answering(tmp_path: Path, octets: bytes) -> Iterator[Path]:
    server = Answering(tmp_path / "a.sock", octets)
    try:
        yield tmp_path / "a.sock"
    finally:
        server.close()
        (tmp_path / "a.sock").unlink()


def of_body(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_is_no_answer_of_an_instance_is_a_sentence(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    """An empty object, one without members, members of other kinds, and nested too deeply."""
    other: dict[str, object] = {"schema": "sdcpctl/v1", "role": "router", "name": 3, "version": []}
    names = ("tiers", "holdings", "instances", "sessions", "records", "changed", "objects")
    other |= dict.fromkeys((*names, "faults", "epoch", "moving", "session", "up_s"), 7)
    for octets in (
        answer_of({}),
        answer_of({"schema": "sdcpctl/v1"}),
        of_body(b"[" * 200_000),
        of_body(b'{"a":' * 200_000),
    ):
        with answering(tmp_path, octets) as path:
            done = invoke(*command, "--endpoint", f"unix:{path}")
        assert done.exit_code in ({1, 3} if command == ("doctor",) else {3}), done.output
        assert "no admin socket of" in done.output
        assert "Traceback" not in done.output
    with answering(tmp_path, answer_of(other)) as path:
        done = invoke(*command, "--endpoint", f"unix:{path}")
    assert isinstance(done.exception, SystemExit | None), done.exception
    assert done.exit_code in (0, 3) and "fault" not in done.output, done.output


def test_a_foreign_404_is_no_instances(tmp_path: Path) -> None:
    with answering(tmp_path, answer_of({"detail": "Not Found"}, "404 Not Found")) as path:
        done = invoke("status", "--endpoint", f"unix:{path}")
    assert done.exit_code == 3 and "is no admin socket of sdcpd" in done.stderr


def test_an_answer_has_a_bound_of_octets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_client, "ANSWER_BYTES_MAX", 3 << 20)
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    with (
        answering(tmp_path, head + b"x" * (4 << 20)) as path,
        pytest.raises(AdminUnreachable, match="does not end its answer, of which 3 MiB came"),
    ):
        ask(path, "GET", "/status")


def test_a_line_that_is_followed_has_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_client, "LINE_BYTES_MAX", 1 << 10)
    with (
        answering(tmp_path, b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (4 << 10)) as path,
        pytest.raises(AdminUnreachable, match="is no admin socket"),
    ):
        list(follow(path, "/sessions/watch", {}))


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\n\r\n"], ids=["head", "body"])
def test_the_time_is_that_of_the_whole_answer(tmp_path: Path, begin: bytes) -> None:
    """However often an octet drips."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(tmp_path / "a.sock"))
    server.listen()
    ended = threading.Event()

    def drip() -> None:
        with server.accept()[0] as connection:
            connection.recv(65536)
            try:
                connection.sendall(begin)
                while not ended.wait(0.02):
                    connection.sendall(b"H")
            except OSError:
                pass

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        with pytest.raises(AdminUnreachable, match=r"has not answered in 0\.3 s"):
            ask(tmp_path / "a.sock", "GET", "/status", timeout_s=0.3)
    finally:
        ended.set()
        thread.join(10)
        server.close()


def test_an_answer_cut_short_and_metrics_that_are_no_text(tmp_path: Path) -> None:
    with (
        answering(tmp_path, b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}") as path,
        pytest.raises(AdminUnreachable, match="does not answer"),
    ):
        ask(path, "GET", "/status")
    with answering(tmp_path, of_body(b"\xff")) as path, pytest.raises(AdminUnreachable):
        fetch(path, "/metrics")


def test_the_time_may_be_given(tmp_path: Path) -> None:
    """By --timeout, of sdcpctl itself."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(str(tmp_path / "a.sock"))
        silent.listen()
        done = invoke("--timeout", "0.2", "status", "--endpoint", f"unix:{tmp_path}/a.sock")
    assert done.exit_code == 3 and "has not answered in 0.2 s" in done.stderr


def test_a_fault_of_its_own_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(status_module, "ask_instance", broken)
    done = invoke("status")
    assert done.exit_code == 1
    assert "a fault (RecursionError: too deep)" in done.stderr
    assert "sdcpctl bugreport" in done.stderr and "Traceback" not in done.stderr
    monkeypatch.setenv("SDCPCTL_DEBUG", "1")
    assert "Traceback" in invoke("status").stderr


def run(line: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """By a shell, which closes and redirects."""
    environment = os.environ | {"PY": sys.executable}
    return subprocess.run(
        ["bash", "-c", line.replace("sdcpctl", '"$PY" -m cli')],
        env=environment, capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip


@pytest.mark.parametrize(
    "command", ["--help", "status --help", "config schema", "completion bash", "context list"]
)
def test_a_full_disk_under_the_output(command: str, tmp_path: Path) -> None:
    done = run(f"sdcpctl {command} >/dev/full", tmp_path)
    assert (done.returncode, done.stderr) == (
        1,
        "standard output cannot be written: No space left on device.  Make room, or send it"
        " elsewhere\n",
    )


def test_a_full_disk_under_an_answer(tmp_path: Path) -> None:
    with answering(tmp_path, answer_of(ROUTER)) as path:
        done = run(f"sdcpctl status --endpoint unix:{path} >/dev/full", tmp_path)
    assert done.returncode == 1
    assert (
        done.stderr.startswith("standard output cannot be written") and "\n" not in done.stderr[:-1]
    )


def test_who_reads_may_go_away(tmp_path: Path) -> None:
    done = run("sdcpctl config schema | head -c 1 >/dev/null; exit ${PIPESTATUS[0]}", tmp_path)
    assert done.stderr == "" and done.returncode in (0, 1)


def test_closed_streams(tmp_path: Path) -> None:
    done = run(f"sdcpctl top --endpoint unix:{tmp_path}/a.sock <&- >&-", tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("standard output is closed")
    done = run("sdcpctl chat <&-", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
