"""What two processes of one host say to each other about objects; the octets lie in shared memory.

One JSON object a packet. The client begins with Hello and the memory that both will use, then asks;
one question at a time, its body at the beginning of the memory, and so the answer's. Because they
take turns, nobody writes what the other reads. An answer has a checksum all the same: what a client
gets is given to a model. What a server gets has none, since its cache makes one at once.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from sdcpd.transport.http import Headers

VERSION: Final = 1
MESSAGE_BYTES_MAX: Final = 32 << 10
FIELDS_MAX = 100
_TOKEN = re.compile(r"[A-Za-z0-9_-]{20,64}")
_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,256}")
_TARGET = re.compile(r"/[\x21-\x7e]{0,8191}")
_AUTHORITY = re.compile(r"[\x21-\x7e]{1,300}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_ANNOUNCEMENT = re.compile(
    r'path="(/[\x20\x21\x23-\x5b\x5d-\x7e]{1,106})";boot="([0-9a-f-]{36})";'
    r'token="([A-Za-z0-9_-]{20,64})"'
)


class BadMessage(Exception):
    """The other side sent something that this protocol does not have."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a server says of itself in the field SDCP-Local: where, on which boot, who asks."""

    path: str
    boot: str
    token: str

    def field(self) -> str:
        """As the value of the field."""
        return f'path="{self.path}";boot="{self.boot}";token="{self.token}"'


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message; comes with the descriptor of the memory."""

    token: str
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Ready:
    """The answer to it: the memory is mapped."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request; its body is the first `size_bytes` octets of the memory."""

    token: str
    method: str
    target: str
    authority: str
    headers: Headers
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A response; its body is the first `size_bytes` octets of the memory."""

    status: int
    headers: Headers
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Not this way: nothing was done, or the answer does not fit. The same may go by HTTP.

    `size_bytes` is what the memory should have had, 0 where that is not why.
    """

    reason: str
    size_bytes: int = 0


Message = Hello | Ready | Ask | Answer | Refused
_KINDS: dict[str, type[Message]] = {
    kind.__name__.lower(): kind for kind in (Hello, Ready, Ask, Answer, Refused)
}


def digest_of(octets: bytes | memoryview) -> str:
    """The checksum of a body."""
    return xxhash.xxh3_128_hexdigest(octets)


def parse_announcement(field: str) -> Announcement | None:
    """The value of SDCP-Local, None if it is not one."""
    match = _ANNOUNCEMENT.fullmatch(field)
    return Announcement(match[1], match[2], match[3]) if match else None


def encode(message: Message) -> bytes:
    """A packet; raises BadMessage if it would be too long."""
    # Not asdict, which copies all the way down and takes longer than the rest.
    parts = {name: getattr(message, name) for name in message.__dataclass_fields__}
    packet = json.dumps({"type": type(message).__name__.lower(), **parts}).encode()
    if len(packet) > MESSAGE_BYTES_MAX:
        raise BadMessage(f"a message of {len(packet)} octets is too long")
    return packet


def decode(packet: bytes) -> Message:
    """The message of a packet; raises BadMessage, and nothing else, whatever it holds."""
    try:
        parts = json.loads(packet)
    except (ValueError, RecursionError) as error:
        raise BadMessage("the message is not JSON") from error
    if not isinstance(parts, dict):
        raise BadMessage("the message is no object")
    name = parts.pop("type", None)
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None or parts.keys() != set(kind.__dataclass_fields__):
        raise BadMessage("the message has other parts than it should")
    for part, value in parts.items():
        if not _CHECKS[part](value):
            raise BadMessage(f"{part} of the message is not what it should be")
    if "headers" in parts:
        parts["headers"] = tuple((name, value) for name, value in parts["headers"])
    return kind(**parts)


def _number(low: int, high: int) -> Any:
    # A bool is an int to Python.
    return lambda value: type(value) is int and low <= value <= high


def _text(pattern: re.Pattern[str]) -> Any:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


def _are_headers(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= FIELDS_MAX
        and all(isinstance(field, list) and len(field) == 2 for field in value)
        and all(
            isinstance(name, str)
            and _NAME.fullmatch(name)
            and isinstance(text, str)
            and not any(sign in text for sign in "\r\n\0")
            for name, text in value
        )
    )


_CHECKS: dict[str, Any] = {
    "version": _number(0, 1 << 31),
    "token": _text(_TOKEN),
    "method": _text(re.compile("GET|PUT")),
    "target": _text(_TARGET),
    "authority": _text(_AUTHORITY),
    "headers": _are_headers,
    "size_bytes": _number(0, 1 << 62),
    "digest": _text(_DIGEST),
    "status": _number(100, 999),
    "reason": lambda value: isinstance(value, str) and len(value) <= 500,
}
