"""What single tokens stand for, by the kind of the tokenizer's decoder."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from sdcpd.engine.token_octets import TokenOctets
from tests.kit.api import tokenizer

TEXT = "Naïve café, 中文字 🙂👨‍👩‍👧\n\x7f\xad fox"


def sentencepiece() -> Tokenizer:
    """One character a token, octets for the rest, spaces as SentencePiece writes them."""
    pieces = [f"<0x{octet:02X}>" for octet in range(256)] + ["▁", "f", "o", "x", "▁fo"]
    made = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, [], fuse_unk=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens([AddedToken("<s>", special=True)])
    return made


def test_byte_level_tokens_are_octets() -> None:
    octets = TokenOctets(tokenizer())
    ids = tokenizer().encode(TEXT + "<|im_end|>").ids
    assert b"".join(octets[token] for token in ids).decode() == TEXT + "<|im_end|>"
    assert any(len(octets[token]) > 1 for token in ids)


@pytest.mark.parametrize(
    ("piece", "octets"),
    [("<0xF0>", b"\xf0"), ("▁", b" "), ("▁fo", b" fo"), ("x", b"x"), ("<s>", b"<s>")],
)
def test_sentencepiece_tokens(piece: str, octets: bytes) -> None:
    made = sentencepiece()
    assert TokenOctets(made)[made.token_to_id(piece)] == octets


def test_without_a_decoder_and_beyond_the_vocabulary() -> None:
    plain = Tokenizer(models.WordLevel({"fox": 0, "dog": 1}, unk_token="fox"))
    assert TokenOctets(plain)[1] == b"dog"
    assert TokenOctets(plain)[7] == b""
