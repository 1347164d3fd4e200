"""Header fields between the libraries' events and ours, both ways; the same in both versions."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import h2.events

from sdcpd.transport.http import GoAway, Headers, RequestHeaders, ResponseHeaders

FIELDS_KEPT = 1024  # the same few fields stand in every message
_FORBIDDEN_FIELDS = frozenset(
    ("connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade")
)


@lru_cache(maxsize=FIELDS_KEPT)
def encoded_field(name: str, value: str) -> tuple[bytes, bytes]:
    """One field for the wire; raises ValueError where it would break the peer's connection."""
    key = name.lower()
    if key in _FORBIDDEN_FIELDS or not key.isascii() or any(sign in key for sign in " \r\n\0"):
        raise ValueError(f'header field "{name}" is not allowed')
    if any(sign in value for sign in "\r\n\0"):
        raise ValueError(f'the value of header field "{name}" holds a line break or NUL')
    try:
        return key.encode("ascii"), value.strip().encode("latin-1")
    except UnicodeEncodeError as error:
        raise ValueError(f'the value of header field "{name}" is not Latin-1') from error


def fields_of(raw: Iterable[tuple[bytes, bytes]]) -> tuple[dict[str, str], Headers]:
    """Pseudo-header fields by name, and the others in order."""
    pseudo: dict[str, str] = {}
    plain: list[tuple[str, str]] = []
    for raw_name, raw_value in raw:
        name, value = bytes(raw_name).decode("latin-1"), bytes(raw_value).decode("latin-1")
        if name.startswith(":"):
            pseudo[name] = value
        else:
            plain.append((name, value))
    return pseudo, tuple(plain)


def request_of(stream_id: int, pseudo: dict[str, str], headers: Headers) -> RequestHeaders:
    """Our event for a request's header section."""
    authority = pseudo.get(":authority") or next(
        (value for name, value in headers if name == "host"), ""
    )
    return RequestHeaders(
        stream_id,
        method=pseudo.get(":method", ""),
        target=pseudo.get(":path", ""),
        authority=authority,
        headers=headers,
    )


def response_of(stream_id: int, pseudo: dict[str, str], headers: Headers) -> ResponseHeaders:
    """Our event for a response's header section."""
    status = pseudo.get(":status", "")
    # A status that is no number of three digits is the peer's fault; 502 tells the caller so.
    sound = len(status) == 3 and status.isascii() and status.isdecimal()
    return ResponseHeaders(stream_id, int(status) if sound else 502, headers)


def request_headers(event: h2.events.RequestReceived) -> RequestHeaders:
    """Our event for h2's."""
    return request_of(event.stream_id or 0, *fields_of(event.headers or ()))


def response_headers(event: h2.events.ResponseReceived) -> ResponseHeaders:
    """Our event for h2's."""
    return response_of(event.stream_id or 0, *fields_of(event.headers or ()))


def go_away_of(event: h2.events.ConnectionTerminated) -> GoAway:
    """Our event for a GOAWAY frame."""
    detail = (event.additional_data or b"")[:200].decode("latin-1")
    return GoAway(event.last_stream_id or 0, int(event.error_code or 0), detail)
