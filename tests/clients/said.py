"""What all clients have in common: a request, and what a client makes of the answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

PROMPT = "Write a short story about a tiny dragon."


class ClientFailed(Exception):
    """A client without exceptions of its own has failed; the text is what it says."""


@dataclass(frozen=True)
class Said:
    """An answer; `finish` is None where a client doesn't tell."""

    text: str
    finish: str | None
    pieces: int = 1


@dataclass(frozen=True)
class Wanted:
    """A request in the words of the API."""

    url: str
    prompt: str = PROMPT
    model: str = "tiny"
    options: Mapping[str, Any] = field(default_factory=lambda: {"max_tokens": 24, "temperature": 0})


class Client(Protocol):
    """One client."""

    failures: tuple[type[Exception], ...]
    """What it raises when the API refuses or breaks off."""
    chat: bool
    tells_finish: bool

    def whole(self, wanted: Wanted) -> Said:
        """An answer that is not streamed."""

    def streamed(self, wanted: Wanted) -> Said:
        """One that is."""


def joined(pieces: Iterable[tuple[str | None, str | None]]) -> Said:
    """The answer of a stream of texts, each with the reason to finish that came with it."""
    texts, finish = [], None
    for text, reason in pieces:
        if text:
            texts.append(text)
        finish = reason or finish
    return Said("".join(texts), finish, len(texts))
