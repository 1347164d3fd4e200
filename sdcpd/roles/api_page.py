"""The chat and status page at the front end's `/`: a few files, read once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from sdcpd.roles.api_errors import ApiError
from sdcpd.transport.http import Headers, Request, Response

FOLDER = "page"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
}
_NAMES = {
    "/": "index.html",
    "/page.css": "page.css",
    "/page.js": "page.js",
    "/page-requests.js": "page-requests.js",
    "/page-answer.js": "page-answer.js",
    "/page-live.js": "page-live.js",
}
PATHS = frozenset(_NAMES)
# A model's text that gets past the page's code still finds nothing that would run or fetch it.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_FOR_ALL: Headers = (
    ("cache-control", "no-cache"),  # kept, and asked for again: an upgrade shows at once
    ("content-security-policy", POLICY),
    ("referrer-policy", "no-referrer"),
    ("x-content-type-options", "nosniff"),
)


@dataclass(frozen=True, slots=True)
class _File:
    octets: bytes
    tag: str
    headers: Headers


class Page:
    """The page's files, in memory."""

    def __init__(self) -> None:
        """Raises OSError where the package lacks one."""
        folder = files("sdcpd.roles").joinpath(FOLDER)
        self._files = {
            path: _file(name, folder.joinpath(name).read_bytes()) for path, name in _NAMES.items()
        }

    def answer(self, request: Request) -> Response:
        """One of the files, or that the browser's copy is still right; raises ApiError."""
        found = self._files.get(request.path)
        if found is None:
            raise ApiError(404, f"no such page: {request.path}", code="not_found")
        if _has(request.header("if-none-match"), found.tag):
            return Response(304, found.headers)
        return Response(200, found.headers, found.octets)


def _file(name: str, octets: bytes) -> _File:
    tag = f'"{hashlib.sha256(octets).hexdigest()[:32]}"'
    own: Headers = (
        ("content-type", _TYPES[name.rpartition(".")[2]]),
        ("content-length", str(len(octets))),
        ("etag", tag),
    )
    return _File(octets, tag, own + _FOR_ALL)


def _has(field: str | None, tag: str) -> bool:
    """Whether If-None-Match names what there is, weakly compared (RFC 9110 13.1.2)."""
    named = [one.strip().removeprefix("W/") for one in (field or "").split(",")]
    return tag in named or named == ["*"]
