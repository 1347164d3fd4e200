"""Ask an instance through its admin socket (see `admin`); synchronous, standard library only."""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAME_ONE = "name an admin socket, such as unix:/run/sdcpd/router/admin.sock"
FOREIGN = f"something else answers there; {NAME_ONE}"
SCHEMA = "sdcpctl/v1"  # as every answer of status 200 says (see `admin_resources`)
ANSWER_BYTES_MAX = 256 << 20  # the records of the longest log are a tenth of it
LINE_BYTES_MAX = 16 << 20  # of an answer that is followed: what a session commits in one part
_PIECE_BYTES = 1 << 20


def dev_state_path() -> Path | None:
    """Where a running `sdcpd dev` leaves its `dev.json`, if the session has such a place."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "sdcpd" / "dev.json" if base and Path(base).is_dir() else None


class AdminUnreachable(Exception):
    """Nobody answers at the socket; the text says why and what to do."""


class AdminRefused(Exception):
    """The instance answered with an error; `status` is that of HTTP."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class Answer(dict[str, Any]):
    """An object in an answer; a member that it lacks is told as what no instance would say."""

    path = Path()
    """The socket that has answered."""

    def __missing__(self, key: str) -> Any:
        raise AdminUnreachable(
            f"{self.path} answers without the member {key}: it is no admin socket of this version"
            f" of sdcpd; compare with sdcpctl version, or {NAME_ONE}"
        )


class _Deadlined(socket.socket):
    """Reads until a point in time, however little comes at once."""

    until = float("inf")

    def recv_into(self, *args: Any, **options: Any) -> int:
        """As a socket's; raises TimeoutError when the time is over."""
        if self.until != float("inf"):
            left = self.until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self.settimeout(left)
        return super().recv_into(*args, **options)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float, *, whole: bool) -> None:
        """`whole`: the time is that of the answer, not of each piece."""
        super().__init__("localhost", timeout=timeout_s)
        self._path, self._timeout_s, self._whole = path, timeout_s, whole

    def connect(self) -> None:
        sock = _Deadlined(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock = sock
        if self._whole:
            sock.until = time.monotonic() + self._timeout_s
        sock.settimeout(self._timeout_s)
        sock.connect(str(self._path))


def ask(
    path: Path,
    method: str,
    resource: str,
    body: dict[str, Any] | None = None,
    *,
    timeout_s: float = 10.0,
) -> dict[str, Any]:
    """Send one request; raises AdminUnreachable or AdminRefused.

    `timeout_s` is for the whole answer.
    """
    octets = None if body is None else json.dumps(body).encode()
    status, said = _exchange(path, method, resource, octets, timeout_s=timeout_s)
    answer = _object(path, said)
    if status != 200:
        raise _refusal(path, answer, status)
    if answer.get("schema") != SCHEMA:
        raise _foreign(path)
    return answer


def _object(path: Path, said: bytes) -> dict[str, Any]:
    """A JSON object; raises AdminUnreachable for what no instance would say."""
    kind = type("Answer", (Answer,), {"path": path})
    try:
        answer = json.loads(said, object_hook=kind)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise _foreign(path)
    return answer


def _refusal(path: Path, answer: dict[str, Any], status: int) -> Exception:
    """What an instance refuses with a sentence; anything else is none's."""
    error = answer.get("error")
    return AdminRefused(error, status=status) if isinstance(error, str) else _foreign(path)


def _foreign(path: Path) -> AdminUnreachable:
    return AdminUnreachable(f"{path} is no admin socket of sdcpd: {FOREIGN}")


def fetch(path: Path, resource: str, *, timeout_s: float = 10.0) -> str:
    """What an instance shows as text, such as /metrics; raises as `ask` does."""
    status, said = _exchange(path, "GET", resource, None, timeout_s=timeout_s)
    if status != 200:
        raise AdminRefused(f"{resource}: status {status}", status=status)
    try:
        return said.decode()
    except UnicodeDecodeError as e:
        raise _foreign(path) from e


def follow(
    path: Path, resource: str, body: dict[str, Any], *, timeout_s: float = 600.0
) -> Iterator[str]:
    """The lines of an answer as they come, `timeout_s` for each; raises as `ask` does."""
    octets = json.dumps(body).encode()
    with _answered(path, "POST", resource, octets, timeout_s=timeout_s, whole=False) as response:
        if response.status != 200:
            raise _refusal(path, _object(path, _read(path, response)), response.status)
        while line := response.readline(LINE_BYTES_MAX):
            if len(line) == LINE_BYTES_MAX:
                raise _foreign(path)
            try:
                yield line.decode().rstrip("\n")
            except UnicodeDecodeError as e:
                raise _foreign(path) from e


def _exchange(
    path: Path, method: str, resource: str, octets: bytes | None, *, timeout_s: float
) -> tuple[int, bytes]:
    with _answered(path, method, resource, octets, timeout_s=timeout_s) as response:
        return response.status, _read(path, response)


def _read(path: Path, response: http.client.HTTPResponse) -> bytes:
    """The whole body, if it is of a size that an instance would send."""
    said = bytearray()
    while piece := response.read(_PIECE_BYTES):
        said += piece
        if len(said) > ANSWER_BYTES_MAX:
            raise AdminUnreachable(
                f"{path} does not end its answer, of which {ANSWER_BYTES_MAX >> 20} MiB came:"
                f" {FOREIGN}"
            )
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return bytes(said)


@contextmanager
def _answered(
    path: Path,
    method: str,
    resource: str,
    octets: bytes | None,
    *,
    timeout_s: float,
    whole: bool = True,
) -> Iterator[http.client.HTTPResponse]:
    """A response whose body is still to be read; what fails until then is told as well."""
    connection = _UnixConnection(path, timeout_s, whole=whole)
    try:
        connection.request(method, resource, octets, {"content-type": "application/json"})
        yield connection.getresponse()
    except (OSError, http.client.HTTPException) as e:
        raise AdminUnreachable(_why(path, e, timeout_s)) from e
    finally:
        connection.close()


def _why(path: Path, error: Exception, timeout_s: float) -> str:
    """What has happened at a socket, and what to do."""
    match error:
        case FileNotFoundError():
            return f"there is no admin socket {path}; is the instance running on this host?"
        case PermissionError():
            return (
                f"admin socket {path}: permission denied; join the group that owns it, or use sudo"
            )
        case ConnectionRefusedError():
            if not path.is_socket():
                return f"{path} is no socket; {NAME_ONE}"
            return (
                f"nobody listens at admin socket {path}; the instance that made it has died,"
                " start it"
            )
        case TimeoutError():
            return (
                f"admin socket {path} has not answered in {timeout_s:g} s; look at the instance's"
                " log"
            )
        case OSError() | http.client.IncompleteRead():
            return f"admin socket {path} does not answer: {error}"
    return f"{path} is no admin socket of sdcpd: {FOREIGN}"
