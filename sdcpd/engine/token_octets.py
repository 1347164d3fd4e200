"""What one token stands for, in octets: of a character that is split over tokens, its part."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's mark for a space


class TokenOctets:
    """Octets of a tokenizer's tokens, by the way in which its decoder makes text of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        """The octets of one token, special ones as they are written; empty for one it has not."""
        octets = self._known.get(token)
        if octets is None:
            octets = self._known[token] = self._octets(token)
        return octets

    def _octets(self, token: int) -> bytes:
        written = self._tokenizer.id_to_token(token)
        if written is None:
            return b""
        if token in self._added:
            return str(written).encode()
        if "ByteLevel" in self._decoders:
            return b"".join(_BYTE_OF.get(c) or c.encode() for c in written)
        if "ByteFallback" in self._decoders and (found := _BYTE.fullmatch(written)):
            return bytes.fromhex(found[1])
        if self._decoders & {"Replace", "Metaspace"}:
            return str(written).replace(_SPACE, " ").encode()
        return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()

    @cached_property
    def longest(self) -> int | None:
        """How many octets of a text one token stands for at most; None where that can't be told."""
        if "ByteLevel" not in self._decoders or self._tokenizer.normalizer is not None:
            return None  # a normalizer may shorten a text
        sizes = (len(self[token]) for token in self._tokenizer.get_vocab().values())
        return max(sizes, default=None)

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """The kinds of decoder that it is made of."""
        decoder = self._tokenizer.decoder
        if decoder is None:
            return frozenset()
        described: dict[str, Any] = json.loads(decoder.__getstate__())
        parts = described.get("decoders", [described])
        return frozenset(part["type"] for part in parts)


def _byte_level() -> dict[str, bytes]:
    """The characters that GPT-2's vocabulary writes octets with.

    Printable ones of Latin-1 stand for themselves, the others for what comes from U+0100 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [octet for octet in range(256) if octet not in plain]
    table = {chr(octet): bytes([octet]) for octet in plain}
    return table | {chr(0x100 + at): bytes([octet]) for at, octet in enumerate(others)}


_BYTE_OF = _byte_level()
