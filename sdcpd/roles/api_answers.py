"""The JSON of answers: whole ones, and the chunks of streamed ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sdcpd.roles.api_logprobs import TokenEntry, chat_logprobs, completion_logprobs

# Characters that JSON allows bare and that some clients take for the end of a line.
_LINE_ENDS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\N{LINE SEPARATOR}\N{PARAGRAPH SEPARATOR}"}


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a text: what it added, and what was proposed in vain."""

    accepted: str
    rejected: str
    own: str
    """What the verifier wrote itself."""
    self_decoded: bool
    known: bool = True
    """Whether it is one round; else text that an earlier verifier wrote, in nobody knows which."""


@dataclass(slots=True)
class Piece:
    """What a text grows by at once."""

    text: str
    entries: list[TokenEntry] = field(default_factory=list)
    """Where log-probabilities are wanted: of tokens that begin in this piece."""
    rounds: list[Round] = field(default_factory=list)
    """Where they are wanted: the rounds that it came from."""

    def __bool__(self) -> bool:
        return bool(self.text or self.entries or self.rounds)

    def add(self, other: Piece) -> None:
        """Append what comes after it."""
        self.text += other.text
        self.entries += other.entries
        self.rounds += other.rounds


class Answer(Protocol):
    """One kind of answer to one request, which may have several choices."""

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer that is not streamed."""

    def choice(self, index: int, piece: Piece, finish_reason: str | None) -> dict[str, Any]:
        """One choice of it: the text, and why it ended."""

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Chunks of a choice that come before any text."""

    def piece(self, index: int, piece: Piece) -> dict[str, Any]:
        """A chunk of a choice's text."""

    def end(self, index: int, finish_reason: str) -> dict[str, Any]:
        """The chunk that says why a choice ends."""

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk without choices that carries the usage."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """`chat.completion` and its chunks."""

    session: str
    created: int
    model: str
    logprobs: int | None = None
    """How many alternatives are shown; None: no log-probabilities are."""

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """See Answer."""
        return self._object("chat.completion", choices, usage=usage)

    def choice(self, index: int, piece: Piece, finish_reason: str | None) -> dict[str, Any]:
        """See Answer."""
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        choice = {"index": index, "message": message, "logprobs": self._logprobs(piece)}
        return choice | {"finish_reason": finish_reason}

    def opening(self, index: int) -> list[dict[str, Any]]:
        """See Answer."""
        return [self._chunk(index, {"role": "assistant", "content": ""}, None)]

    def piece(self, index: int, piece: Piece) -> dict[str, Any]:
        """See Answer."""
        logprobs = self._logprobs(piece)
        return self._chunk(index, {"content": piece.text}, None, logprobs) | _rounds(index, piece)

    def end(self, index: int, finish_reason: str) -> dict[str, Any]:
        """See Answer."""
        return self._chunk(index, {}, finish_reason)

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """See Answer."""
        return self._object("chat.completion.chunk", [], usage=usage)

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        return None if self.logprobs is None else chat_logprobs(piece.entries)

    def _chunk(
        self,
        index: int,
        delta: dict[str, str],
        finish_reason: str | None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs}
        choice["finish_reason"] = finish_reason
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
    logprobs: int | None = None
    """As in ChatAnswer."""

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """See Answer."""
        return self._object(choices) | {"usage": usage}

    def opening(self, index: int) -> list[dict[str, Any]]:
        """See Answer."""
        return []

    def piece(self, index: int, piece: Piece) -> dict[str, Any]:
        """See Answer."""
        return self._object([self.choice(index, piece, None)]) | _rounds(index, piece)

    def end(self, index: int, finish_reason: str) -> dict[str, Any]:
        """See Answer."""
        choice = {"index": index, "text": "", "logprobs": None, "finish_reason": finish_reason}
        return self._object([choice])

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """See Answer."""
        return self._object([]) | {"usage": usage}

    def choice(self, index: int, piece: Piece, finish_reason: str | None) -> dict[str, Any]:
        """See Answer."""
        shown = self.logprobs
        logprobs = None if shown is None else completion_logprobs(piece.entries, alternatives=shown)
        choice = {"index": index, "text": piece.text, "logprobs": logprobs}
        return choice | {"finish_reason": finish_reason}

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self.session}",
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def _rounds(index: int, piece: Piece) -> dict[str, Any]:
    """What a chunk tells of the rounds that its text came from, where that was asked for."""
    if not piece.rounds:
        return {}
    rounds = [
        {
            "accepted": one.accepted,
            "rejected": one.rejected,
            "own": one.own,
            "self_decoded": one.self_decoded,
        }
        for one in piece.rounds
    ]
    return {"sdcp": {"index": index, "rounds": rounds}}


async def whole_octets(
    answer: Answer, choices: Sequence[tuple[Piece, str]], usage: dict[str, Any]
) -> bytes:
    """A whole answer, of which each choice is made for itself: others have their turn between."""
    # Within a string the quotes would be escaped, so that it is the member that is found.
    head, choices_begin, tail = octets_of(answer.whole([], usage)).partition(b'"choices":[')
    made = []
    for index, (piece, finish_reason) in enumerate(choices):
        made.append(octets_of(answer.choice(index, piece, finish_reason)))
        await asyncio.sleep(0)
    return b"".join((head, choices_begin, b",".join(made), tail))


def octets_of(value: object) -> bytes:
    """JSON without a character that could be taken for the end of a line."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.translate(_LINE_ENDS).encode()


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + octets_of(value) + b"\n\n"
