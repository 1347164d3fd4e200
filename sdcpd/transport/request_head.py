"""Where a request goes, from its URI, and its header section."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import urlsplit

from sdcpd.transport.client_connection import Origin
from sdcpd.transport.http import Headers, find_header

ORIGINS_KEPT = 256  # parsed; the same few resources are called again and again


def split_uri(uri: str) -> tuple[Origin, str, str]:
    """Origin, authority and request target of an absolute https URI; raises ValueError."""
    scheme, _, rest = uri.partition("#")[0].partition("://")
    path, mark, query = rest.partition("?")
    authority, _, path = path.partition("/")
    target = f"/{path}" + (f"{mark}{query}" if query else "")
    return _origin(scheme, authority), authority, target


@lru_cache(maxsize=ORIGINS_KEPT)
def _origin(scheme: str, authority: str) -> Origin:
    """Of these there are few, while targets are many; raises ValueError."""
    parts = urlsplit(f"{scheme}://{authority}")
    if scheme.lower() != "https" or not parts.hostname or "@" in authority:
        raise ValueError(f'"{scheme}://{authority}" is not an https URI with a host')
    return Origin(parts.hostname, parts.port or 443)


def request_fields(
    method: str, authority: str, target: str, headers: Headers, body: bytes
) -> Headers:
    """The header section of a request; its length is told where it has a body."""
    fields: list[tuple[str, str]] = [
        (":method", method),
        (":scheme", "https"),
        (":authority", authority),
        (":path", target),
        *headers,
    ]
    if body and find_header(headers, "content-length") is None:
        fields.append(("content-length", str(len(body))))
    return tuple(fields)
