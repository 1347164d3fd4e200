"""The JSON of answers: whole ones, and the chunks of streamed ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

# Characters that JSON allows bare and that some clients take for the end of a line.
_LINE_ENDS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\N{LINE SEPARATOR}\N{PARAGRAPH SEPARATOR}"}


class Answer(Protocol):
    """One kind of answer to one request."""

    def whole(self, text: str, finish_reason: str, usage: dict[str, Any]) -> dict[str, Any]:
        """The answer that is not streamed."""

    def opening(self) -> list[dict[str, Any]]:
        """Chunks that come before any text."""

    def piece(self, text: str) -> dict[str, Any]:
        """A chunk of text."""

    def end(self, finish_reason: str) -> dict[str, Any]:
        """The chunk that says why the text ends."""

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk without choices that carries the usage."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """`chat.completion` and its chunks."""

    session: str
    created: int
    model: str

    def whole(self, text: str, finish_reason: str, usage: dict[str, Any]) -> dict[str, Any]:
        """See Answer."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
        return self._object("chat.completion", [choice], usage=usage)

    def opening(self) -> list[dict[str, Any]]:
        """See Answer."""
        return [self._chunk({"role": "assistant", "content": ""}, None)]

    def piece(self, text: str) -> dict[str, Any]:
        """See Answer."""
        return self._chunk({"content": text}, None)

    def end(self, finish_reason: str) -> dict[str, Any]:
        """See Answer."""
        return self._chunk({}, finish_reason)

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """See Answer."""
        return self._object("chat.completion.chunk", [], usage=usage)

    def _chunk(self, delta: dict[str, str], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._object("chat.completion.chunk", [choice])

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: object) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.session}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


@dataclass(frozen=True, slots=True)
class CompletionAnswer:
    """`text_completion`, whose chunks have the same shape."""

    session: str
    created: int
    model: str

    def whole(self, text: str, finish_reason: str, usage: dict[str, Any]) -> dict[str, Any]:
        """See Answer."""
        return self._object(text, finish_reason) | {"usage": usage}

    def opening(self) -> list[dict[str, Any]]:
        """See Answer."""
        return []

    def piece(self, text: str) -> dict[str, Any]:
        """See Answer."""
        return self._object(text, None)

    def end(self, finish_reason: str) -> dict[str, Any]:
        """See Answer."""
        return self._object("", finish_reason)

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """See Answer."""
        return self._object("", None) | {"choices": [], "usage": usage}

    def _object(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return {
            "id": f"cmpl-{self.session}",
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        }


def octets_of(value: object) -> bytes:
    """JSON without a character that could be taken for the end of a line."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.translate(_LINE_ENDS).encode()


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + octets_of(value) + b"\n\n"
