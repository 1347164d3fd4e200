"""One HTTP/1.1 response with a stream of events, read without I/O and with little work a token."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from cli.api import message_of

HEAD_BYTES_MAX = 64 << 10
LINE_BYTES_MAX = 4 << 20  # of one event; more is no answer of an API
REFUSAL_BYTES_MAX = 64 << 10  # kept of a body that tells of an error


class NotHttp(Exception):
    """What came is no response that can be read."""


@dataclass(slots=True)
class Events:
    """What the events of a stream have told so far."""

    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When text came, and how many characters."""
    usage: dict[str, Any] | None = None
    error: str | None = None
    ended: bool = False
    """Whether [DONE] has come."""
    _rest: bytes = b""

    def feed(self, octets: bytes, now: float) -> None:
        """Take in content that has come; raises NotHttp."""
        *lines, self._rest = (self._rest + octets).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            raise NotHttp("an event without an end")
        characters = 0
        for line in lines:
            if line.startswith(b"data:"):
                characters += self._event(line[5:].strip())
        if characters:
            self.arrivals.append((now, characters))

    def _event(self, octets: bytes) -> int:
        """How many characters of text an event brings."""
        if octets == b"[DONE]":
            self.ended = True
            return 0
        try:
            event = json.loads(octets)
            if (error := event.get("error")) is not None:
                self.error = str(error["message"])
                return 0
            if (usage := event.get("usage")) is not None:
                self.usage = dict(usage)
            return sum(len(_text(one)) for one in event["choices"])
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise NotHttp("an event that is none of the OpenAI API") from e


def _text(choice: dict[str, Any]) -> str:
    return choice.get("text") or choice.get("delta", {}).get("content") or ""


class Answer:
    """A response as its octets come: fixed length, chunked, or up to the end of the connection."""

    def __init__(self) -> None:
        self.status = 0
        self.done = self.keep = False
        """`keep`: whether the connection can carry another request."""
        self.retry_after_s: float | None = None
        self.begun = False
        self.events = Events()
        self._refusal = b""
        self._buffer = bytearray()
        self._left = 0
        self._step = self._head

    @property
    def message(self) -> str:
        """What a refusal says."""
        return message_of(self._refusal)

    def feed(self, octets: bytes, now: float) -> None:
        """Take in octets; raises NotHttp."""
        self.begun = True
        self._buffer += octets
        while not self.done and self._step(now):
            pass

    def eof(self) -> None:
        """The connection has ended, which may be how the body does."""
        if self._step == self._all:
            self.done = True

    def _head(self, now: float) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > HEAD_BYTES_MAX:
                raise NotHttp("a head without an end")
            return False
        first, *lines = self._cut(end, 4).decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
            raise NotHttp("no answer of HTTP/1.1")
        self.status = int(rest[:3])
        if self.status >= 200:  # others only announce it
            fields = {name.lower(): value.strip() for name, _, value in _fields(lines)}
            self._begin_body(version, fields)
        return True

    def _begin_body(self, version: str, fields: dict[str, str]) -> None:
        wait = fields.get("retry-after", "")
        self.retry_after_s = float(wait) if wait.isdecimal() else None
        self.keep = version != "HTTP/1.0" and fields.get("connection", "").lower() != "close"
        if fields.get("transfer-encoding", "").lower() == "chunked":
            self._step = self._size
        elif (length := fields.get("content-length")) is not None:
            if not length.isdecimal():
                raise NotHttp("a length that is none")
            self._left, self._step = int(length), self._counted
            self.done = not self._left
        else:
            self.keep, self._step = False, self._all

    def _size(self, now: float) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            return False
        try:
            self._left = int(self._cut(end, 2).partition(b";")[0], 16)
        except ValueError as e:
            raise NotHttp("a chunk without its size") from e
        self._step = self._chunk if self._left else self._trailer
        return True

    def _chunk(self, now: float) -> bool:
        if len(self._buffer) < self._left + 2:
            return False
        self._content(self._cut(self._left, 2), now)
        self._step = self._size
        return True

    def _trailer(self, now: float) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            return False
        self.done = not self._cut(end, 2)
        return True

    def _counted(self, now: float) -> bool:
        part = self._cut(min(self._left, len(self._buffer)), 0)
        self._left -= len(part)
        self.done = not self._left
        self._content(part, now)
        return False

    def _all(self, now: float) -> bool:
        self._content(self._cut(len(self._buffer), 0), now)
        return False

    def _cut(self, size: int, more: int) -> bytes:
        """The first octets of what is there, without `more` that follow them."""
        octets = bytes(self._buffer[:size])
        del self._buffer[: size + more]
        return octets

    def _content(self, octets: bytes, now: float) -> None:
        if self.status == 200:
            self.events.feed(octets, now)
        else:
            self._refusal = (self._refusal + octets)[:REFUSAL_BYTES_MAX]


def _fields(lines: list[str]) -> list[tuple[str, str, str]]:
    return [line.partition(":") for line in lines]
