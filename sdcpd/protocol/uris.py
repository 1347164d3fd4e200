"""Base URIs, session paths, the output query and trust in cache references.

URIs are compared as written, after only what D-H5 names: no decoding, no normalising of paths. What
a stricter or laxer parser could read in two ways is refused (D-M2).
"""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote

from sdcpd.protocol.limits import SESSION_ID_BYTES, UINT_MAX
from sdcpd.protocol.problems import Malformed

# Host: a name, an IPv4 address or a bracketed IPv6 address; no userinfo, query or fragment can
# match, nor a backslash, a space or anything beyond ASCII.
_URI = re.compile(
    r"(?i:https)://(?P<host>[A-Za-z0-9._~-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[1-9][0-9]{0,4}))?"
    r"(?P<path>(?:/[A-Za-z0-9._~!$&'()*+,;=:@%{}-]*)*)"
)
_DEFAULT_PORT = 443
_PORT_MAX = 65535
# 22 characters of base64url; the last holds two bits of the sixteenth octet and four zeros.
_SESSION_ID = re.compile(r"[A-Za-z0-9_-]{21}[AQgw]")
_HIDDEN_SEGMENT = re.compile(r"%(?:2e|2f|5c)", re.IGNORECASE)
_DIGITS = re.compile(r"[0-9]+")
_SCOPE = "{scope}"
_KEPT_LENGTH_MAX = 256


class _Uri(NamedTuple):
    """An https URI taken apart: host in lower case, port explicit, path as written."""

    host: str
    port: int
    path: str

    @property
    def origin(self) -> tuple[str, int]:
        return self.host, self.port


def _parse(uri: str) -> _Uri | None:
    match = _URI.fullmatch(uri)
    if match is None:
        return None
    port = int(match["port"] or _DEFAULT_PORT)
    return _Uri(match["host"].lower(), port, match["path"]) if port <= _PORT_MAX else None


def normalize_base_uri(uri: str) -> str | None:
    """Return the one spelling of a base URI, or None if it is none (D-H5).

    Host in lower case, port always written, without the one trailing slash that is ignored.
    """
    return _normalized_and_kept(uri) if len(uri) <= _KEPT_LENGTH_MAX else _normalized(uri)


def _normalized(uri: str) -> str | None:
    parts = _parse(uri)
    if parts is None:
        return None
    return f"https://{parts.host}:{parts.port}{parts.path.removesuffix('/')}"


# The same few are compared in every message.
_normalized_and_kept = lru_cache(maxsize=1024)(_normalized)


def base_uri_equal(one: str, other: str) -> bool:
    """Tell whether two base URIs name the same instance (D-H5); what is no base URI equals none."""
    normal = normalize_base_uri(one)
    return normal is not None and normal == normalize_base_uri(other)


def join(base: str, path: str) -> str:
    """Return the URI of the resource `path` (without leading slash) under a base URI (D-H5)."""
    return f"{base.removesuffix('/')}/{path}"


def session_path_id(session: bytes) -> str:
    """Return the `{id}` of session paths: base64url without padding (Section 5.1)."""
    return _base64url(session)


def parse_session_id(segment: str) -> bytes | None:
    """Return the session identifier of a path segment, or None if it names none (D-H6)."""
    if _SESSION_ID.fullmatch(segment) is None:
        return None
    session = urlsafe_b64decode(segment + "==")
    assert len(session) == SESSION_ID_BYTES, "22 characters hold 16 octets and four zero bits"
    return session


def cache_ref_trusted(
    ref: str,
    bases: Sequence[str],
    *,
    scope: bytes | None,
    scoped: Mapping[str, Collection[bytes]] | None = None,
) -> bool:
    """Tell whether a cache reference may be fetched at all (Section 9, D-M2, D-M3).

    `bases` are the configured MLC bases. With a scope (16 octets) the reference must lie in
    `{base}/objects/{scope}/`; without one anywhere below a base. For an MLC of another make, a base
    may hold `{scope}` where its URIs have the scope.  `scoped` are bases that are trusted for some
    scopes, with all that is below them, whatever their URIs look like; for others not at all.
    """
    parts = _parse(ref)
    if parts is None or _HIDDEN_SEGMENT.search(parts.path):
        return False
    if not {".", ".."}.isdisjoint(parts.path.split("/")):
        return False
    for base, scopes in (scoped or {}).items():
        if _lies_below(parts, base, None):
            return scope in scopes
    return any(_lies_below(parts, base, scope) for base in bases)


def _lies_below(ref: _Uri, base: str, scope: bytes | None) -> bool:
    trusted = _parse(base)
    if trusted is None or trusted.origin != ref.origin:
        return False
    path = trusted.path.removesuffix("/")
    if scope is not None:
        segment = _base64url(scope)
        path = path.replace(_SCOPE, segment) if _SCOPE in path else f"{path}/objects/{segment}"
        pattern = re.escape(path)
    else:
        pattern = "[^/]+".join(re.escape(part) for part in path.split(_SCOPE))
    below = re.match(pattern + "/", ref.path)
    return below is not None and ref.path[below.end() :].strip("/") != ""


def _base64url(octets: bytes) -> str:
    return urlsafe_b64encode(octets).rstrip(b"=").decode("ascii")


def parse_from_query(query: str) -> int:
    """Return `from` of an output query, the number of tokens already had (D-G1).

    Raises Malformed unless it stands there once, in decimal digits, and is a uint (D-G3).
    """
    pairs = (part.partition("=") for part in query.split("&"))
    values = [unquote(value) for key, _, value in pairs if unquote(key) == "from"]
    if len(values) != 1:
        raise Malformed("from must be given once")
    digits = values[0].lstrip("0") or values[0][-1:]
    # The length is looked at first: a number of a million digits is slow to read.
    if not _DIGITS.fullmatch(values[0]) or len(digits) > len(str(UINT_MAX)):
        raise Malformed("from is not a number of decimal digits below 2^64")
    value = int(digits)
    if value > UINT_MAX:
        raise Malformed("from is not below 2^64")
    return value
