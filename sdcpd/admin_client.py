"""Ask an instance through its admin socket (see `admin`); synchronous, standard library only."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAME_ONE = "name an admin socket, such as unix:/run/sdcpd/router/admin.sock"
FOREIGN = f"something else answers there; {NAME_ONE}"


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


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def ask(
    path: Path,
    method: str,
    resource: str,
    body: dict[str, Any] | None = None,
    *,
    timeout_s: float = 10.0,
) -> dict[str, Any]:
    """Send one request; raises AdminUnreachable or AdminRefused."""
    octets = None if body is None else json.dumps(body).encode()
    status, said = _exchange(path, method, resource, octets, timeout_s=timeout_s)
    answer = _object(path, said)
    if status != 200:
        raise AdminRefused(str(answer.get("error", f"status {status}")), status=status)
    return answer


def _object(path: Path, said: bytes) -> dict[str, Any]:
    """A JSON object; raises AdminUnreachable for what no instance would say."""
    try:
        answer = json.loads(said)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise AdminUnreachable(f"{path} is no admin socket of sdcpd: {FOREIGN}")
    return answer


def fetch(path: Path, resource: str, *, timeout_s: float = 10.0) -> str:
    """What an instance shows as text, such as /metrics; raises as `ask` does."""
    status, said = _exchange(path, "GET", resource, None, timeout_s=timeout_s)
    if status != 200:
        raise AdminRefused(f"{resource}: status {status}", status=status)
    return said.decode()


def follow(
    path: Path, resource: str, body: dict[str, Any], *, timeout_s: float = 600.0
) -> Iterator[str]:
    """The lines of an answer as they come; raises as `ask` does."""
    octets = json.dumps(body).encode()
    with _answered(path, "POST", resource, octets, timeout_s=timeout_s) as response:
        if response.status != 200:
            said, status = _object(path, response.read()), response.status
            raise AdminRefused(str(said.get("error", f"status {status}")), status=status)
        for line in response:
            yield line.decode().rstrip("\n")


def _exchange(
    path: Path, method: str, resource: str, octets: bytes | None, *, timeout_s: float
) -> tuple[int, bytes]:
    with _answered(path, method, resource, octets, timeout_s=timeout_s) as response:
        return response.status, response.read()


@contextmanager
def _answered(
    path: Path, method: str, resource: str, octets: bytes | None, *, timeout_s: float
) -> Iterator[http.client.HTTPResponse]:
    """A response whose body is still to be read; what fails until then is told as well."""
    connection = _UnixConnection(path, timeout_s)
    try:
        connection.request(method, resource, octets, {"content-type": "application/json"})
        yield connection.getresponse()
    except FileNotFoundError as e:
        raise AdminUnreachable(
            f"there is no admin socket {path}; is the instance running on this host?"
        ) from e
    except PermissionError as e:
        raise AdminUnreachable(
            f"admin socket {path}: permission denied; join the group that owns it, or use sudo"
        ) from e
    except ConnectionRefusedError as e:
        if not path.is_socket():
            raise AdminUnreachable(f"{path} is no socket; {NAME_ONE}") from e
        raise AdminUnreachable(
            f"nobody listens at admin socket {path}; the instance that made it has died, start it"
        ) from e
    except TimeoutError as e:
        raise AdminUnreachable(
            f"admin socket {path} has not answered for {timeout_s:g} s; look at the instance's log"
        ) from e
    except (OSError, http.client.IncompleteRead) as e:
        raise AdminUnreachable(f"admin socket {path} does not answer: {e}") from e
    except http.client.HTTPException as e:
        raise AdminUnreachable(f"{path} is no admin socket of sdcpd: {FOREIGN}") from e
    finally:
        connection.close()
