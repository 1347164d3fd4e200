"""Header fields between h2's events and ours, both ways."""

from __future__ import annotations

import h2.events

from sdcpd.transport.http import GoAway, Headers, RequestHeaders, ResponseHeaders

_FORBIDDEN_FIELDS = frozenset(
    ("connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade")
)


def encoded_field(name: str, value: str) -> tuple[bytes, bytes]:
    """One field for the wire; raises ValueError where it would break the peer's connection."""
    key = name.lower()
    if key in _FORBIDDEN_FIELDS or not key.isascii() or any(sign in key for sign in " \r\n\0"):
        raise ValueError(f'header field "{name}" is not allowed in HTTP/2')
    if any(sign in value for sign in "\r\n\0"):
        raise ValueError(f'the value of header field "{name}" holds a line break or NUL')
    try:
        return key.encode("ascii"), value.strip().encode("latin-1")
    except UnicodeEncodeError as error:
        raise ValueError(f'the value of header field "{name}" is not Latin-1') from error


def _split(
    event: h2.events.RequestReceived | h2.events.ResponseReceived,
) -> tuple[dict[str, str], Headers]:
    pseudo: dict[str, str] = {}
    plain: list[tuple[str, str]] = []
    for raw_name, raw_value in event.headers or ():
        name, value = bytes(raw_name).decode("latin-1"), bytes(raw_value).decode("latin-1")
        if name.startswith(":"):
            pseudo[name] = value
        else:
            plain.append((name, value))
    return pseudo, tuple(plain)


def request_headers(event: h2.events.RequestReceived) -> RequestHeaders:
    """Our event for a request's header section."""
    pseudo, headers = _split(event)
    authority = pseudo.get(":authority") or next(
        (value for name, value in headers if name == "host"), ""
    )
    return RequestHeaders(
        event.stream_id or 0,
        method=pseudo.get(":method", ""),
        target=pseudo.get(":path", ""),
        authority=authority,
        headers=headers,
    )


def response_headers(event: h2.events.ResponseReceived) -> ResponseHeaders:
    """Our event for a response's header section."""
    pseudo, headers = _split(event)
    status = pseudo.get(":status", "")
    # A status that is no number is the peer's fault; 502 tells the caller so.
    return ResponseHeaders(
        event.stream_id or 0, int(status) if status.isdecimal() else 502, headers
    )


def go_away_of(event: h2.events.ConnectionTerminated) -> GoAway:
    """Our event for a GOAWAY frame."""
    detail = (event.additional_data or b"")[:200].decode("latin-1")
    return GoAway(event.last_stream_id or 0, int(event.error_code or 0), detail)
