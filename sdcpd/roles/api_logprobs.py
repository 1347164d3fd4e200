"""Log-probabilities in the two shapes that clients know, of tokens as they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sdcpd.engine.token_octets import TokenOctets
from sdcpd.protocol.logprobs import Row


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token and how probable it was, as the natural logarithm."""

    octets: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token of a text; `chosen` has no logprob where nothing stands before it."""

    offset: int
    """Characters of the text before it, or before the character that it is a part of."""
    octets: bytes
    logprob: float | None
    best: tuple[Alternative, ...] = ()
    """The most probable tokens there, the best first; its own may be among them."""


def entry(octets: TokenOctets, token: int, row: Row | None, *, offset: int) -> TokenEntry:
    """The entry of a token; without a row, of the first of all."""
    if row is None:
        return TokenEntry(offset, octets[token], None)
    best = tuple(Alternative(octets[one], _nats(value)) for one, value in _pairs(row))
    return TokenEntry(offset, octets[token], _nats(row[0]), best)


def chat_logprobs(entries: Sequence[TokenEntry]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    return {
        "content": [
            _chat_token(one.octets, one.logprob)
            | {"top_logprobs": [_chat_token(other.octets, other.logprob) for other in one.best]}
            for one in entries
        ],
        "refusal": None,
    }


def completion_logprobs(entries: Sequence[TokenEntry], *, alternatives: int) -> dict[str, Any]:
    """`choices[].logprobs` of a completion: lists of one length, an element a token."""
    return {
        "tokens": [_written(one.octets, "bytes:") for one in entries],
        "token_logprobs": [one.logprob for one in entries],
        "top_logprobs": [_by_text(one) for one in entries] if alternatives else None,
        "text_offset": [one.offset for one in entries],
    }


def _by_text(one: TokenEntry) -> dict[str, float] | None:
    """The alternatives and the token itself; of two that are written alike, the more probable."""
    if one.logprob is None:
        return None
    found: dict[str, float] = {}
    for other in (*one.best, Alternative(one.octets, one.logprob)):
        found.setdefault(_written(other.octets, "bytes:"), other.logprob)
    return found


def _chat_token(octets: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": _written(octets, ""), "logprob": logprob, "bytes": list(octets)}


def _written(octets: bytes, mark: str) -> str:
    """A token as text; a part of a character as escaped octets, as OpenAI writes them."""
    try:
        return octets.decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{octet:02x}" for octet in octets)


def _pairs(row: Row) -> list[tuple[int, int]]:
    return list(zip(row[1::2], row[2::2], strict=True))


def _nats(micronats: int) -> float:
    return -micronats / 1e6 if micronats else 0.0
