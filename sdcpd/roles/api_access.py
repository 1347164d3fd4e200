"""Who may use the API: keys, the Host of loopback listeners, and pages of other origins."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from sdcpd.roles.api_errors import ApiError
from sdcpd.transport.http import Headers, Request, Response
from sdcpd.transport.http1 import StreamingResponse

log = logging.getLogger("sdcpd.api")
R = TypeVar("R", Response, StreamingResponse, Response | StreamingResponse)
PREFLIGHT_AGE_S = 600
EXPOSED = "x-request-id, retry-after"


class KeysError(Exception):
    """The file of keys can't be used; the text says where and what is expected."""


class Keys:
    """The keys of a file of lines `name:sha256:hex`, read again when the file has changed."""

    def __init__(self, path: Path) -> None:
        """Raises KeysError."""
        self._path = path
        self._seen = self._stamp()
        self._keys = _read_keys(path)

    def owner(self, authorization: str | None) -> str:
        """The name of the key that was shown; raises ApiError 401."""
        self._refresh()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("no API key: send it as Authorization: Bearer KEY")
        shown = hashlib.sha256(key.strip().encode("latin-1")).digest()
        # Every key is compared, each in constant time, so that time tells nothing about them.
        found = [name for name, known in self._keys if hmac.compare_digest(known, shown)]
        if not found:
            raise _unauthorized("this API key is not known here")
        return found[0]

    def _refresh(self) -> None:
        try:
            stamp = self._stamp()
            if stamp != self._seen:
                self._seen = stamp
                self._keys = _read_keys(self._path)
                log.info("API keys: read %s again, %d keys", self._path, len(self._keys))
        except KeysError as e:
            log.error("API keys: the old ones stay: %s", e)

    def reload(self) -> list[str]:
        """Read the file again; a sentence if it can't be used, and then the old ones stay."""
        try:
            self._seen, self._keys = self._stamp(), _read_keys(self._path)
        except KeysError as e:
            log.error("API keys: the old ones stay: %s", e)
            return [f"API keys not read again, the old ones stay in use: {e}"]
        return []

    def _stamp(self) -> tuple[int, int, int]:
        try:
            found = os.stat(self._path)
        except OSError as e:
            raise KeysError(f"{self._path}: {e.strerror}; create it, or fix its mode") from e
        return found.st_mtime_ns, found.st_size, found.st_ino


class Access:
    """Decides before anything else is looked at; `keys_file` None asks for no key."""

    def __init__(
        self,
        *,
        keys_file: Path | None,
        origins: tuple[str, ...],
        loopback_only: bool,
        hosts: tuple[str, ...] = (),
    ) -> None:
        """`hosts` are names beside those of loopback. Raises KeysError."""
        self._hosts = frozenset(host.lower() for host in hosts)
        self._keys = Keys(keys_file) if keys_file is not None else None
        self._origins = frozenset(origin.rstrip("/") for origin in origins)
        self._loopback_only = loopback_only

    def reload_keys(self) -> list[str]:
        """As Keys.reload, where there are any."""
        return self._keys.reload() if self._keys is not None else []

    def check_host(self, request: Request) -> None:
        """Refuse names that other people's DNS may point at a loopback listener (rebinding)."""
        if not self._loopback_only or not request.authority:
            return
        host = _host_of(request.authority)
        if not _is_loopback(host) and host not in self._hosts:
            raise ApiError(
                403,
                f"Host {request.authority} is not a name of this machine's loopback address; "
                "use localhost or 127.0.0.1, or name it in [api] hosts",
                code="host_not_allowed",
            )

    def check_key(self, request: Request) -> str:
        """The name of the caller's key, or "anonymous"; raises ApiError 401."""
        if self._keys is None:
            return "anonymous"
        return self._keys.owner(request.header("authorization"))

    def check_origin(self, request: Request) -> None:
        """Refuse what a page of another origin wants done: a browser needs no leave to send it."""
        origin = request.header("origin")
        if origin is None or self._allows(origin):
            return
        if origin.partition("://")[2] == request.authority:
            return  # a page of this very server
        raise ApiError(
            403, f"origin {origin} is not in [api] cors_origins", code="origin_not_allowed"
        )

    def preflight(self, request: Request, methods: str) -> Response:
        """Answer OPTIONS; a browser reads from the absence of fields that it may not go on."""
        allow: Headers = (("allow", methods),)
        if self._allows(request.header("origin")):
            wanted = request.header("access-control-request-headers")
            allow += (
                ("access-control-allow-methods", methods),
                ("access-control-allow-headers", wanted or "authorization, content-type"),
                ("access-control-max-age", str(PREFLIGHT_AGE_S)),
            )
        return Response(204, allow)

    def with_cors(self, request: Request, response: R) -> R:
        """Add what lets a page of an allowed origin read the response."""
        origin = request.header("origin")
        if not self._origins or origin is None:
            return response
        added: Headers = (("vary", "origin"),)
        if self._allows(origin):
            added += (
                ("access-control-allow-origin", origin),
                ("access-control-expose-headers", EXPOSED),
            )
        return replace(response, headers=(*response.headers, *added))

    def _allows(self, origin: str | None) -> bool:
        return origin is not None and bool({origin, "*"} & self._origins)


def _unauthorized(message: str) -> ApiError:
    headers = (("www-authenticate", 'Bearer realm="sdcpd"'),)
    return ApiError(401, message, code="invalid_api_key", headers=headers)


def _read_keys(path: Path) -> list[tuple[str, bytes]]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise KeysError(f"{path}: {e}; expected lines name:sha256:hex") from e
    keys = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, digest = line.strip().partition(":sha256:")
        try:
            octets = bytes.fromhex(digest)
        except ValueError:
            octets = b""
        if not name or len(octets) != 32:
            raise KeysError(f"{path}:{number}: expected name:sha256:hex, the SHA-256 of the key")
        keys.append((name, octets))
    return keys


def _host_of(authority: str) -> str:
    host = authority.rpartition("]")[0].removeprefix("[") or authority.partition(":")[0]
    return host.lower().removesuffix(".")


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
