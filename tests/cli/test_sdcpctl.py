"""sdcpctl in general: versions, usage, endpoints, exit codes, and how quickly it starts."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import sdcpd
from cli import endpoint as endpoints
from cli.__main__ import main
from cli.text import duration, table
from sdcpd.admin_client import AdminRefused, dev_state_path
from sdcpd.admin_client import ask as ask_socket
from tests.kit.by_hand import sdcpctl

ROUTER = {
    "schema": "sdcpctl/v1",
    "role": "router",
    "name": "r0",
    "version": "0.1.0",
    "up_s": 273.0,
    "base_uri": "https://127.0.0.1:7442/",
    "model": "tiny",
    "api": None,
    "ready": False,
    "reason": "no verifier has reported; the cache fails",
    "reasons": ["no verifier has reported", "the disk of the commit logs is full"],
    "degraded": ["the cache fails"],
    "instances": [
        {
            "instance": "d0.ab",
            "role": "drafter",
            "base_uri": "https://gpu3:7444/",
            "state": "expired",
            "load": 12,
            "queue": 0,
            "accept": 0.784,
            "sessions": 2,
            "engine": None,
            "seen_s": 12.1,
            "certificate_left_s": 6 * 86400 + 100,
        },
        {
            "instance": "v0.cd",
            "role": "verifier",
            "base_uri": "https://gpu1:7443/",
            "state": "loading",
            "load": 5,
            "queue": 3,
            "accept": None,
            "sessions": 0,
            "engine": None,
            "seen_s": 0.4,
            "certificate_left_s": 71 * 86400 + 100,
        },
    ],
    "sessions": [],
    "counts": {"sessions": 7},
}


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that happens to run on this machine is asked."""
    for name in ("SDCPCTL_ENDPOINT", "XDG_RUNTIME_DIR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


def invoke(*arguments: str | Path, color: bool = False) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments], prog_name="sdcpctl", color=color)


class Answering:
    """A Unix socket that gives each caller the same octets."""

    def __init__(self, path: Path, octets: bytes) -> None:
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen()
        self._octets = octets
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):  # which ends the waiting for callers
            while True:
                connection, _ = self._server.accept()
                with connection, suppress(OSError):  # a caller may have had enough
                    self._read(connection)
                    connection.sendall(self._octets)

    @staticmethod
    def _read(connection: socket.socket) -> None:
        """A whole request: its body may come by itself."""
        said = b""
        while (more := connection.recv(65536)) and b"\r\n\r\n" not in (said := said + more):
            continue
        head, _, body = said.partition(b"\r\n\r\n")
        length = int((re.search(rb"content-length: (\d+)", head.lower()) or [0, 0])[1])
        while len(body) < length and (more := connection.recv(65536)):
            body += more

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._server.close()


def answer_of(value: object, status: str = "200 OK") -> bytes:
    body = json.dumps(value).encode()
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def ask(tmp_path: Path, octets: bytes, *arguments: str, color: bool = False) -> Result:
    path = tmp_path / "a.sock"
    answering = Answering(path, octets)
    try:
        return invoke("status", "--endpoint", f"unix:{path}", *arguments, color=color)
    finally:
        answering.close()


def test_version() -> None:
    assert invoke("--version").output == f"sdcpctl, version {sdcpd.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["stats"], "Did you mean 'status'?"),
        (["status", "--endpont", "x"], "Did you mean '--endpoint'?"),
        (["certs", "ini"], "Did you mean 'init'?"),
        (["status", "-o", "yaml"], "'yaml' is not one of 'table', 'wide', 'json'"),
        (["status", "--endpoint", "http://x"], "must look like unix:/run/sdcpd/router/admin.sock"),
        (["status", "--endpoint", "unix:"], "must look like unix:/run/sdcpd/router/admin.sock"),
        (["certs", "issue"], "Missing argument"),
        (["certs", "init", "verifer/v0=https://a:1/"], 'did you mean "verifier"?'),
        (["certs", "init", "v0=https://a:1/"], "must look like ROLE/NAME=BASE_URI"),
        (["certs", "check", "/none"], "does not exist"),
    ],
)
def test_usage_errors_exit_2(arguments: list[str], says: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert says in re.sub(r"\s+", " ", result.output)


def test_it_starts_quickly_and_without_the_large_libraries() -> None:
    """Scripts call it often: torch alone would be 1.5 s, and aioquic is of no use here."""
    code = (
        "import sys, time; begin = time.process_time()\n"
        "from cli.__main__ import main\n"
        "try: main(['status'], prog_name='sdcpctl')\n"
        "except SystemExit: pass\n"
        "seconds = time.process_time() - begin\n"
        "large = {'torch', 'transformers', 'aioquic', 'numpy', 'pydantic', 'cryptography', 'rich'}\n"
        "print(seconds, sorted(large & set(sys.modules)))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "XDG_RUNTIME_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    seconds, loaded = done.stdout.split(maxsplit=1)
    assert loaded.strip() == "[]"
    assert float(seconds) < 0.2


def test_certs_loads_nothing_large_either() -> None:
    code = (
        "import sys\nfrom cli.__main__ import main\n"
        "try: main(['certs', 'show', '/'], prog_name='sdcpctl')\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'aioquic', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr.strip() == "/ holds no certificate (*.crt)"


# ---- status


def test_the_table(tmp_path: Path) -> None:
    result = ask(tmp_path, answer_of(ROUTER))
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "Router r0  up 4min 33s   not ready   model tiny   version 0.1.0",
        "INSTANCE  ROLE      STATE    LOAD  QUEUE  ACCEPT  SESS   SEEN  CERT  BASE URI",
        "v0.cd     verifier  loading    5%      3       -     0   0.4s   71d  https://gpu1:7443/",
        "d0.ab     drafter   expired     -      -    0.78     2  12.1s  6d !  https://gpu3:7444/",
        "Sessions 0 open, 7 since start",
        "! not ready: no verifier has reported",
        "! not ready: the disk of the commit logs is full",
        "! degraded: the cache fails",
        "! d0.ab: its certificate expires in 6d.  Run, where ca.key is: sdcpctl certs renew "
        "drafter/d0, and copy it there",
        "! d0.ab: no status for 12.1 s.  Look at its log, at https://gpu3:7444/: "
        "journalctl -u 'sdcpd@drafter*' -n 50",
    ]


def test_an_instance_that_is_stuck_is_told_from_one_that_has_ended(tmp_path: Path) -> None:
    one, other = ROUTER["instances"]  # type: ignore[misc]
    instances = [{**one, "state": "gone"}, {**other, "state": "stuck"}]  # type: ignore[dict-item]
    shown = ask(tmp_path, answer_of({**ROUTER, "instances": instances})).output.splitlines()
    assert [line for line in shown if line.startswith(("! d0", "! v0"))] == [
        "! v0.cd: it has withdrawn, because its engine does not go on.  Look at its log, at "
        "https://gpu1:7443/: journalctl -u 'sdcpd@verifier*' -n 50"
    ]


VERIFIER = {
    "schema": "sdcpctl/v1",
    "role": "verifier",
    "name": "v0",
    "instance": "v0.cd",
    "version": "0.1.0",
    "up_s": 5.0,
    "base_uri": "https://gpu1:7443/",
    "load": 3,
    "sessions": [],
    "counts": {},
}


def test_an_instance_says_itself_what_is_wrong(tmp_path: Path) -> None:
    state = {"ready": False, "reasons": ["the engine hangs"], "degraded": ["the cache fails"]}
    assert ask(tmp_path, answer_of(VERIFIER | state)).output.splitlines() == [
        "Verifier v0.cd  up 5s   not ready   load 3%   https://gpu1:7443/   version 0.1.0",
        "no sessions",
        "! verifier v0 not ready: the engine hangs",
        "! verifier v0 degraded: the cache fails",
    ]


def test_one_of_an_older_version_is_shown_as_ever(tmp_path: Path) -> None:
    assert ask(tmp_path, answer_of(VERIFIER)).output.splitlines() == [
        "Verifier v0.cd  up 5s   load 3%   https://gpu1:7443/   version 0.1.0",
        "no sessions",
    ]


def test_not_ready_is_a_refusal_with_its_reason(tmp_path: Path) -> None:
    """As a script asks for it: GET /ready at the admin socket."""
    octets = answer_of({"ready": False, "error": "not ready: the disk is full"}, "503 Oops")
    answering = Answering(tmp_path / "a.sock", octets)
    with pytest.raises(AdminRefused, match=r"^not ready: the disk is full$"):
        ask_socket(tmp_path / "a.sock", "GET", "/ready")
    answering.close()


def test_colour_on_a_terminal_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[31mnot ready" in ask(tmp_path, answer_of(ROUTER), color=True).output
    (tmp_path / "a.sock").unlink()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in ask(tmp_path, answer_of(ROUTER), color=True).output


def test_json_is_what_the_router_says(tmp_path: Path) -> None:
    assert json.loads(ask(tmp_path, answer_of(ROUTER), "-o", "json").output) == ROUTER


def test_a_refusal_exits_1(tmp_path: Path) -> None:
    result = ask(tmp_path, answer_of({"error": "the request failed"}, "500 Oops"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"{tmp_path}/a.sock refused: the request failed\n"


def test_an_answer_that_is_no_http_exits_3(tmp_path: Path) -> None:
    result = ask(tmp_path, b"SSH-2.0-x\r\n")
    assert result.exit_code == 3
    assert "is no admin socket of sdcpd" in result.stderr


@pytest.mark.parametrize("body", ["[]", "<html>"])
def test_an_answer_that_is_no_object_exits_3(tmp_path: Path, body: str) -> None:
    said = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
    result = ask(tmp_path, said)
    assert result.exit_code == 3
    assert "is no admin socket of sdcpd" in result.stderr


def test_a_file_that_is_no_socket_exits_3(tmp_path: Path) -> None:
    (tmp_path / "a.sock").write_text("not one")
    result = CliRunner().invoke(main, ["status", "--endpoint", f"unix:{tmp_path}/a.sock"])
    assert result.exit_code == 3 and "is no socket; name an admin socket" in result.stderr


def test_no_socket_exits_3(tmp_path: Path) -> None:
    result = invoke("status", "--endpoint", f"unix:{tmp_path}/none.sock")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "is the instance running on this host?" in result.stderr


def test_a_socket_of_a_dead_instance_exits_3(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(tmp_path / "left.sock"))
    result = invoke("status", "--endpoint", f"unix:{tmp_path}/left.sock")
    assert result.exit_code == 3
    assert "the instance that made it has died" in result.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_no_permission_exits_3(tmp_path: Path) -> None:
    private = Path("/tmp") / f"sdcpctl-test-{os.getpid()}"
    private.mkdir(mode=0o700)
    code = (
        "import os; os.setgid(65534); os.setuid(65534)\n"
        "from pathlib import Path\n"
        "from sdcpd.admin_client import AdminUnreachable, ask\n"
        f"try: ask(Path('{private}/a.sock'), 'GET', '/status')\n"
        "except AdminUnreachable as e: print(e)\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", "import sdcpd.admin_client\n" + code],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    finally:
        private.rmdir()
    assert "permission denied; join the group that owns it, or use sudo" in done.stdout


# ---- which socket


def test_without_an_endpoint_it_says_what_to_start(tmp_path: Path) -> None:
    with pytest.raises(click.ClickException) as caught:
        endpoints.default_endpoint(tmp_path)
    assert caught.value.exit_code == 3
    assert "use the line that sdcpd dev prints" in caught.value.message


def test_another_instance_of_this_host_is_named(tmp_path: Path) -> None:
    (tmp_path / "verifier").mkdir()
    (tmp_path / "verifier" / "admin.sock").touch()
    with pytest.raises(click.ClickException, match=f"--endpoint unix:{tmp_path}/verifier/admin"):
        endpoints.default_endpoint(tmp_path)


def test_the_installed_router_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "router").mkdir()
    assert endpoints.default_endpoint(tmp_path) == tmp_path / "router" / "admin.sock"


def test_a_running_dev_cluster_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert dev_state_path() == tmp_path / "sdcpd" / "dev.json"
    (tmp_path / "router").mkdir()
    state = tmp_path / "sdcpd" / "dev.json"
    state.parent.mkdir()
    admin = tmp_path / "r0.sock"
    instances = [{"role": "drafter", "admin": "x"}, {"role": "router", "admin": str(admin)}]
    state.write_text(json.dumps({"instances": instances}))
    assert endpoints.default_endpoint(tmp_path) == tmp_path / "router" / "admin.sock"
    admin.touch()
    assert endpoints.default_endpoint(tmp_path) == admin
    state.write_text("{")
    assert endpoints.default_endpoint(tmp_path) == tmp_path / "router" / "admin.sock"


@pytest.mark.parametrize("text", ["unix:/a/b.sock", "unix:///a/b.sock", "/a/b.sock"])
def test_spellings_of_an_endpoint(text: str) -> None:
    assert endpoints.Endpoint().convert(text, None, None) == Path("/a/b.sock")


# ---- text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (61, "1min 1s"), (7260, "2h 1min"), (90000, "1d 1h"), (273600, "3d 4h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_columns_are_as_wide_as_what_is_seen() -> None:
    rows = [["a", click.style("x", fg="red"), "1"], ["bb", "yyy", "22"]]
    assert [click.unstyle(line) for line in table(rows, right=(2,))] == [
        "a   x     1",
        "bb  yyy  22",
    ]
    assert table([]) == []


def test_the_real_command_does_the_same(tmp_path: Path) -> None:
    begin = time.monotonic()
    done = sdcpctl("status", "--endpoint", f"unix:{tmp_path}/none.sock")
    assert done.returncode == 3
    assert time.monotonic() - begin < 5
