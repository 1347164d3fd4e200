"""KV objects (D-M4): what goes in comes out, what is used changes nothing, the rest is ignored."""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import cbor2
import pytest
import torch

from sdcpd.engine.api import EngineError, Prefix
from sdcpd.engine.kv_object import (
    KvKind,
    KvRows,
    decode_kv,
    encode_kv,
)
from tests.kit.spied_target import PROMPT, Spied

TOKENS = (5, 6, 7, 8, 9)
KIND = KvKind(b"m" * 32, "cpu;float32", 2, 3, 4, torch.float32)
WHOLE = 4 * 2 * 2 * 3 * 4 * len(TOKENS)  # octets of the rows


def rows_of(kind: KvKind, positions: int) -> KvRows:
    """Rows of which no two elements are equal."""
    shape = (kind.layers, kind.heads, positions, kind.head_dim)
    count = kind.layers * kind.heads * positions * kind.head_dim
    keys = torch.arange(count).reshape(shape).to(kind.dtype)
    return KvRows(keys, -1 - keys)


def object_of(
    *, without: str = "", body: bytes | None = None, head: bytes | None = None, **header: Any
) -> bytes:
    """A good object of TOKENS by hand, but for what is said."""
    prefix = hashlib.sha256(b"SDCP-KV-1\0" + struct.pack(">5I", *TOKENS)).digest()
    members: dict[str, Any] = {
        "format": "sdcp-kv-1",
        "model": b"m" * 32,
        "prefix": prefix,
        "tokens": 5,
        "layers": 2,
        "heads": 3,
        "head_dim": 4,
        "dtype": "float32",
        "engine": "cpu;float32",
        **header,
    }
    members.pop(without, None)
    body = bytes(WHOLE) if body is None else body
    head = b"\x59" + struct.pack(">H", len(body)) if head is None else head
    return bytes(cbor2.dumps(members)) + head + body


def decoded(octets: bytes, tokens: Sequence[int] = TOKENS) -> KvRows | None:
    return decode_kv(octets, kind=KIND, tokens=tokens)


# ---- the format


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip(dtype: torch.dtype) -> None:
    """Bit for bit, in every type; for a longer prefix as well."""
    kind = replace(KIND, dtype=dtype)
    rows = rows_of(kind, 5)
    octets = encode_kv(kind, TOKENS, rows)
    for tokens in (TOKENS, (*TOKENS, 1, 2)):
        found = decode_kv(octets, kind=kind, tokens=tokens)
        assert found is not None and found.positions == 5 and found.keys.dtype == dtype
        assert torch.equal(found.keys, rows.keys) and torch.equal(found.values, rows.values)


def test_the_octets_are_those_of_the_format() -> None:
    """D-M4: a header map, then for each layer K then V as [head][position][dim], little-endian."""
    octets = encode_kv(KIND, TOKENS, rows_of(KIND, 5))
    header = cbor2.loads(octets)
    assert cbor2.dumps(header, canonical=True) == octets[: len(cbor2.dumps(header))]
    assert header == cbor2.loads(object_of(body=b"", head=b""))
    body = cbor2.loads(octets[len(cbor2.dumps(header)) :])
    expected = b"".join(
        struct.pack("<f", number if kind == "k" else -1 - number)
        for layer in range(2)
        for kind in "kv"
        for number in range(layer * 60, layer * 60 + 60)
    )
    assert body == expected and len(body) == KIND.octets(5)


def test_an_object_made_elsewhere_is_read() -> None:
    """Any valid encoding of the same, members that nobody knows included."""
    for octets in (
        object_of(),
        object_of(more="x"),
        object_of(head=b"\x5a" + struct.pack(">I", WHOLE)),
        object_of(head=b"\x5b" + struct.pack(">Q", WHOLE)),
    ):
        found = decoded(octets)
        assert found is not None and found.positions == 5


def test_a_short_octet_string() -> None:
    """Its length may stand in the head itself, or in one octet."""
    kind = replace(KIND, layers=1, heads=1, head_dim=1)
    for count, head in ((2, b"\x50"), (5, b"\x58\x28")):
        shape = {"layers": 1, "heads": 1, "head_dim": 1, "tokens": count}
        prefix = hashlib.sha256(b"SDCP-KV-1\0" + struct.pack(f">{count}I", *TOKENS[:count]))
        octets = object_of(body=bytes(8 * count), head=head, prefix=prefix.digest(), **shape)
        found = decode_kv(octets, kind=kind, tokens=TOKENS)
        assert found is not None and found.positions == count


WRONG: dict[str, Callable[[], bytes]] = {
    "format": lambda: object_of(format="sdcp-kv-2"),
    "model": lambda: object_of(model=b"n" * 32),
    "engine": lambda: object_of(engine="cuda;float32"),
    "prefix": lambda: object_of(prefix=bytes(32)),
    "fewer tokens": lambda: object_of(tokens=4),
    "more tokens": lambda: object_of(tokens=6),
    "no tokens": lambda: object_of(tokens=0),
    "negative": lambda: object_of(tokens=-5),
    "hostile tokens": lambda: object_of(tokens=2**64 - 1),
    "tokens as text": lambda: object_of(tokens="5"),
    "tokens as float": lambda: object_of(tokens=5.0),
    "layers": lambda: object_of(layers=3),
    "layers as float": lambda: object_of(layers=2.0),
    "heads": lambda: object_of(heads=4),
    "another shape of the same size": lambda: object_of(heads=4, head_dim=3),
    "head_dim": lambda: object_of(head_dim=5),
    "dtype": lambda: object_of(dtype="bfloat16"),
    "model as text": lambda: object_of(model="m" * 32),
    **{
        f"without {name}": lambda name=name: object_of(without=name)
        for name in cbor2.loads(object_of())
    },
    "empty": lambda: b"",
    "garbage": lambda: b"\xff" * 300,
    "no map": lambda: cbor2.dumps([1, 2]) + object_of(),
    "a key twice": lambda: b"\xaa\x65heads\x03" + object_of()[1:],
    "an endless header": lambda: b"\xa1" * 3000,
    "a header of many members": lambda: object_of(more="x" * 2000),
    "header alone": lambda: object_of(body=b"", head=b""),
    "text": lambda: object_of(head=b"\x79" + struct.pack(">H", WHOLE)),
    "chunks": lambda: object_of(head=b"\x5f"),
    "reserved head": lambda: object_of(head=b"\x5c"),
    "half a head": lambda: object_of(body=b"", head=b"\x5b\0\0"),
    "hostile length": lambda: object_of(head=b"\x5b" + b"\xff" * 8),
    "short length": lambda: object_of(head=b"\x59" + struct.pack(">H", WHOLE - 1)),
    "truncated": lambda: object_of()[:-1],
    "oversized": lambda: object_of() + b"\0",
    "both short": lambda: object_of(body=bytes(WHOLE - 4)),
    "both long": lambda: object_of(body=bytes(WHOLE + 4)),
}


@pytest.mark.parametrize("wrong", list(WRONG))
def test_whatever_is_wrong_is_ignored(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    """R-6.1-5, D-O10: no error, no rows, and one line that says why."""
    with caplog.at_level(logging.INFO, "sdcpd.engine"):
        assert decoded(WRONG[wrong]()) is None
    (record,) = caplog.records
    assert record.levelno == logging.INFO and "not used" in record.message


def test_of_another_prefix() -> None:
    """Neither other tokens, nor a prefix that is shorter than what the object covers."""
    assert decoded(object_of()) is not None
    for tokens in ((5, 6, 7, 8, 10), TOKENS[:4], (), (4, *TOKENS)):
        assert decoded(object_of(), tokens) is None


# ---- the engine


async def opened(spied: Spied, session: bytes, kv: bytes | None, tokens: list[int]) -> int:
    """Open a session; returns how many tokens were fed to the model for it."""
    before = spied.fed
    prefix = Prefix(tokens, len(tokens), len(PROMPT))
    await spied.target.prepare(session, 1, prefix, kv=kv)
    return spied.fed - before


@pytest.mark.parametrize(("covered", "computed"), [(90, 0), (89, 0), (88, 1), (17, 72), (1, 88)])
async def test_what_is_loaded_is_what_would_be_computed(
    spied: Spied, caplog: pytest.LogCaptureFixture, covered: int, computed: int
) -> None:
    """R-6.1-5, R-6.3-39: only the rest is computed, and every score is the same, bit for bit."""
    assert await opened(spied, b"a", None, PROMPT) == len(PROMPT) - 1
    first = await spied.round(b"a", PROMPT, 11, 12, 13)
    kv = await spied.target.export(b"a", 1, covered)
    assert kv is not None and 0 < len(kv) - spied.target.kv_octets(covered) < 1024
    with caplog.at_level(logging.INFO, "sdcpd.engine"):
        assert await opened(spied, b"b", kv, PROMPT) == computed
    assert caplog.messages == [f"KV of {covered} positions loaded"]
    longer = [*PROMPT, first[1]]
    for tokens, proposed in ((PROMPT, (11, 12, 13)), (longer, ()), (longer, (5, 6))):
        accepted, additional, scores = await spied.round(b"a", tokens, *proposed)
        again = await spied.round(b"b", tokens, *proposed)
        assert again[:2] == (accepted, additional) and torch.equal(again[2], scores)
    assert await spied.target.export(b"b", 1, covered) == kv


async def test_a_resumed_session_computes_what_was_committed(spied: Spied) -> None:
    """R-6.9-6: the prompt's KV is loaded, that of the output computed."""
    tokens = [*PROMPT, *range(20, 45)]
    await opened(spied, b"a", None, PROMPT)
    wanted = await spied.round(b"a", tokens, 3, 4)
    kv = await spied.target.export(b"a", 1, len(PROMPT))
    assert await opened(spied, b"b", kv, tokens) == 24
    found = await spied.round(b"b", tokens, 3, 4)
    assert found[:2] == wanted[:2] and torch.equal(found[2], wanted[2])


async def test_what_does_not_fit_is_computed(spied: Spied) -> None:
    """D-O10: KV of another prompt, or nothing of the kind, leaves no trace."""
    other = [*PROMPT[:-3], 1, 1, 1]
    await opened(spied, b"a", None, PROMPT)
    wanted = await spied.round(b"a", PROMPT, 3, 4)
    await opened(spied, b"o", None, other)
    await spied.round(b"o", other)
    for number, kv in enumerate((await spied.target.export(b"o", 1, 90), b"", b"\xff" * 999)):
        session = b"b%d" % number
        assert await opened(spied, session, kv, PROMPT) == len(PROMPT) - 1
        found = await spied.round(session, PROMPT, 3, 4)
        assert found[:2] == wanted[:2] and torch.equal(found[2], wanted[2])


async def test_kv_never_takes_a_session_back(spied: Spied) -> None:
    """An object that covers less than what is known already is not loaded."""
    await opened(spied, b"a", None, PROMPT)
    kv = await spied.target.export(b"a", 1, 10)
    assert await opened(spied, b"a", kv, PROMPT) == 0


async def test_only_what_is_there_is_exported(spied: Spied) -> None:
    """Neither of unknown sessions, nor more tokens than were fed; and nothing is left behind."""
    await opened(spied, b"a", None, PROMPT)
    assert await spied.target.export(b"a", 1, 89) is not None
    for session, epoch, tokens in ((b"a", 1, 90), (b"a", 1, 0), (b"a", 2, 5), (b"z", 1, 5)):
        assert await spied.target.export(session, epoch, tokens) is None
    assert spied.target.worker._memory.sessions() == [(b"a", 1)]
    spied.target.forget(b"a", 1)
    assert await spied.target.export(b"a", 1, 5) is None


async def test_an_exported_object_is_a_copy(spied: Spied) -> None:
    """What is published does not change with the session that goes on meanwhile."""
    await opened(spied, b"a", None, PROMPT)
    kv = await spied.target.export(b"a", 1, 80)
    rows = await spied.target.worker.read((b"a", 1), lambda known: known.rows(80))
    before = [part.clone() for part in rows]
    await spied.round(b"a", [*PROMPT[:70], *[1] * 20])
    assert all(torch.equal(part, then) for part, then in zip(rows, before, strict=True))
    changed = await spied.target.export(b"a", 1, 80)
    assert kv != changed
    await spied.round(b"a", PROMPT)
    assert await spied.target.export(b"a", 1, 80) == kv


async def test_a_failing_read_is_an_engine_error(spied: Spied) -> None:
    """As for passes: the thread goes on, and a stopped engine says so."""

    def broken(_: object) -> None:
        raise ValueError("out of memory")

    await opened(spied, b"a", None, PROMPT)
    with pytest.raises(EngineError, match="out of memory"):
        await spied.target.worker.read((b"a", 1), broken)
    assert await spied.target.export(b"a", 1, 5) is not None
    await spied.target.aclose()
    with pytest.raises(EngineError, match="stopping"):
        await spied.target.export(b"a", 1, 5)
