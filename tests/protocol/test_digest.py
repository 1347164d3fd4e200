"""The committed-prefix digest chain: Section 4.2."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.protocol.digest import PrefixChain, extend, kv_prefix_hash, prefix_digest0
from sdcpd.protocol.problems import Unprocessable

VECTORS = json.loads((Path(__file__).parents[1] / "vectors.json").read_text())
CHAINS = VECTORS["prefix_chains"]
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=12)


@pytest.mark.parametrize("entry", CHAINS, ids=[entry["name"] for entry in CHAINS])
def test_prefix_chains(entry: dict[str, Any]) -> None:
    """R-4.2-1: d[0] to d[n] of the vectors."""
    digest0 = prefix_digest0(bytes.fromhex(entry["contract_digest"]), entry["prompt"])
    chain = PrefixChain(digest0, entry["committed"])
    assert chain.committed == len(entry["committed"])
    for length, expected in enumerate(entry["d"]):
        digest = chain.at(length)
        assert digest is not None and digest.hex() == expected
        assert extend(digest0, entry["committed"][:length]).hex() == expected
    assert chain.digest.hex() == entry["d"][-1]


def test_appendix_a_round_extends_the_chain() -> None:
    appendix = VECTORS["appendix_a"]
    chain = PrefixChain(bytes.fromhex(appendix["d"][0]), appendix["committed"])
    example = appendix["example_round"]
    chain.append(example["emitted"])
    found = [chain.at(length) for length in (3, 4, 5)]
    assert [digest and digest.hex() for digest in found] == example["derived_d3_d4_d5"]
    assert chain.committed == example["committed"]


@given(tokens, st.data())
def test_appending_in_any_pieces_gives_one_chain(output: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(output)))
    whole = PrefixChain(bytes(32), output)
    pieces = PrefixChain(bytes(32), output[:cut])
    assert pieces.append(output[cut:]) == whole.digest == extend(bytes(32), output)
    assert [whole.at(k) for k in range(len(output) + 1)] == [
        pieces.at(k) for k in range(len(output) + 1)
    ]


def test_lengths_never_committed_have_no_digest() -> None:
    chain = PrefixChain(bytes(32), [1, 2])
    assert chain.at(3) is None
    assert chain.at(-1) is None
    assert chain.at(2**64 - 1) is None


def test_de6_tokens_above_32_bits_are_refused_and_change_nothing() -> None:
    with pytest.raises(Unprocessable):
        prefix_digest0(bytes(32), [1, 2**32])
    chain = PrefixChain(bytes(32), [1])
    before = chain.digest
    with pytest.raises(Unprocessable):
        chain.append([2, 2**32])
    assert (chain.committed, chain.digest) == (1, before)


def test_the_prefix_hash_of_kv_objects() -> None:
    """D-M4: SHA-256 over the domain and the uint32 of each token, whatever the contract."""
    assert kv_prefix_hash(()) == sha256(b"SDCP-KV-1\x00").digest()
    wanted = sha256(b"SDCP-KV-1\x00" + b"\0\0\1\2" + b"\xff\xff\xff\xff").digest()
    assert kv_prefix_hash((258, 2**32 - 1)) == wanted
    with pytest.raises(Unprocessable):
        kv_prefix_hash((1, 2**32))
