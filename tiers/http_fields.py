"""Request fields of the cache resources: conditions, ranges, leases, media types (RFC 9110).

Every parser raises Malformed for what is not in the field's grammar, except where RFC 9110 has the
field ignored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sdcpd.protocol.limits import UINT_MAX
from sdcpd.protocol.problems import Malformed, PlainProblem
from sdcpd.transport.http import Request

HOP = "sdcp-tier"
"""Says that another cache asks for a tier of its own."""
AFTER = "sdcp-after"
"""Names what an object continues, as Entry.after does."""
OCTET_STREAM = "application/octet-stream"
LEASE_MS_MAX = 24 * 3600 * 1000  # a day: a session is long over, so more is a mistake
MEDIA_TYPE_CHARS_MAX = 255
FIELD_CHARS_MAX = 8192  # a field of conditions that is longer is no honest one

_ETAG = r'(?:W/)?"[\x21\x23-\x7e\x80-\xff]*"'
_ETAGS = re.compile(rf"[ \t]*{_ETAG}[ \t]*(?:,[ \t]*{_ETAG}[ \t]*)*")
_ONE_ETAG = re.compile(_ETAG)
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+(?:[ \t]*;[\x20-\x7e]*)?")
_RANGE = re.compile(r"bytes=[ \t]*(\d{0,20})-(\d{0,20})[ \t]*", re.ASCII | re.IGNORECASE)
_CONTENT_RANGE = re.compile(r"bytes (\d{1,20})-(\d{1,20})/\*", re.ASCII | re.IGNORECASE)
_NAME = re.compile(r"[\x21-\x7e]{1,255}")
_LEASE = re.compile(r"\d{1,15}", re.ASCII)


class RangeNotSatisfiable(PlainProblem):
    """A range that the object has no octet of (RFC 9110 Section 15.5.17)."""

    status = 416


@dataclass(frozen=True, slots=True)
class Tags:
    """The value of If-Match or If-None-Match; `any` for `*`."""

    tags: tuple[str, ...] = ()
    any: bool = False

    def match_strongly(self, etag: str | None) -> bool:
        """Strong comparison with what is there (None: nothing); weak tags match nothing."""
        return etag is not None and (self.any or etag in self.tags)

    def match_weakly(self, etag: str | None) -> bool:
        """Weak comparison with what is there (None: nothing)."""
        weak = {tag.removeprefix("W/") for tag in self.tags}
        return etag is not None and (self.any or etag in weak)


def field(request: Request, name: str) -> str | None:
    """Return all values of a field as one, None if it is absent."""
    values = [value for key, value in request.headers if key.lower() == name]
    combined = ", ".join(values)
    if len(combined) > FIELD_CHARS_MAX:
        raise Malformed(f"{name} is too long")
    return combined.strip(" \t") if values else None


def tags(request: Request, name: str) -> Tags | None:
    """Parse if-match or if-none-match."""
    value = field(request, name)
    if value is None:
        return None
    if value == "*":
        return Tags(any=True)
    if _ETAGS.fullmatch(value) is None:
        raise Malformed(f"{name} is no list of entity tags")
    return Tags(tuple(_ONE_ETAG.findall(value)))


def lease_s(request: Request) -> float | None:
    """Parse SDCP-Lease, milliseconds on the wire, to seconds; 0 releases (D-M10)."""
    value = field(request, "sdcp-lease")
    if value is None:
        return None
    if _LEASE.fullmatch(value) is None or int(value) > LEASE_MS_MAX:
        raise Malformed(f"sdcp-lease is not a number of milliseconds up to {LEASE_MS_MAX}")
    return int(value) / 1000


def after(request: Request) -> str:
    """Return the name in SDCP-After, empty if absent."""
    value = field(request, AFTER) or ""
    if value and _NAME.fullmatch(value) is None:
        raise Malformed(f"{AFTER} is not the name of an object")
    return value


def media_type(request: Request) -> str | None:
    """Return the content type as sent, None if absent."""
    value = field(request, "content-type")
    if value is not None and (
        len(value) > MEDIA_TYPE_CHARS_MAX or _MEDIA_TYPE.fullmatch(value) is None
    ):
        raise Malformed("content-type is no media type")
    return value


def essence(value: str | None) -> str | None:
    """Return a media type in lower case and without parameters."""
    return value and value.partition(";")[0].strip().lower()


def accepts(request: Request, coding: str) -> bool:
    """Tell whether Accept-Encoding allows a coding (RFC 9110 Section 12.5.3); none does if absent.

    A client that says nothing takes any by the letter, and cannot decode by experience; nor can one
    that says `*` decode what is private to us.
    """
    found = False
    for part in (field(request, "accept-encoding") or "").lower().split(","):
        name, *parameters = (piece.strip() for piece in part.split(";"))
        weights = [one.removeprefix("q=") for one in parameters if one.startswith("q=")]
        wanted = all(weight.strip("0.") for weight in weights)
        if name == coding:
            return wanted
        found = found or (name == "*" and wanted and not coding.startswith("sdcp-"))
    return found


def content_range(request: Request) -> tuple[int, int] | None:
    """Parse `bytes L-M/*` of a partial PUT to first and last octet; checks the body's length."""
    value = field(request, "content-range")
    if value is None:
        return None
    match = _CONTENT_RANGE.fullmatch(value)
    if match is None:
        raise Malformed("content-range of an append is not bytes L-M/*")
    first, last = int(match[1]), int(match[2])
    if last > UINT_MAX or last - first + 1 != len(request.body) or not request.body:
        raise Malformed("content-range does not agree with the length of the body")
    return first, last


def wanted_range(request: Request, *, etag: str, size_bytes: int) -> range | None:
    """Return the octets that a GET asks for, None for all of them (RFC 9110 Section 14.2).

    Several ranges, another unit, a malformed field, or an If-Range that doesn't hold: all. Raises
    RangeNotSatisfiable.
    """
    match = _RANGE.fullmatch(field(request, "range") or "")
    condition = field(request, "if-range")
    if match is None or (condition is not None and condition != etag):
        return None
    first, last = match[1], match[2]
    if not first and not last:
        return None
    if not first:
        wanted = range(max(0, size_bytes - int(last)), size_bytes)
    elif last and int(last) < int(first):
        return None
    else:
        wanted = range(int(first), min(int(last) + 1 if last else size_bytes, size_bytes))
    if not len(wanted):
        raise RangeNotSatisfiable(
            "the range has no octet of the object",
            headers={"content-range": f"bytes */{size_bytes}"},
        )
    return wanted
