"""The coding of sparse rows: bit for bit, bounded, and only for those that name it."""

from __future__ import annotations

import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.protocol.sparse import CODED_BYTES_MAX, BadSparse, SparseRows, SparseTooLarge, decode
from sdcpd.roles.objects import Objects
from sdcpd.transport.http import Request, Response
from sdcpd.transport.loopback import LoopbackClient
from tests.kit.cluster import peer
from tests.tiers.test_mlc_resource import OBJECT_BYTES_MAX, Mlc, etag_of
from tiers.coding import SPARSE, SPARSE_BYTES_MAX
from tiers.host import OBJECT_BYTES, HostTier

WIDTH = 1000
ROWS = SparseRows(
    WIDTH, 3, array("I", [0, 999, 1500, 2000, 2999]), array("f", [1.0, -0.0, 1e-45, 0.25, 0.75])
)
PATH = "/mlc/objects/AAECAwQFBgcICQoLDA0ODw/q_rows.x"
BASE = "https://cache.test/mlc/"


def by_hand(rows: SparseRows) -> bytes:
    octets = bytearray(4 * rows.width * rows.rows)
    for place, value in zip(rows.places, rows.values, strict=True):
        struct.pack_into("<f", octets, 4 * place, value)
    return bytes(octets)


@given(
    st.integers(1, 40),
    st.integers(1, 5),
    st.dictionaries(st.integers(0, 199), st.floats(width=32, allow_nan=False), max_size=30),
)
def test_every_value_comes_back_bit_for_bit(
    width: int, count: int, there: dict[int, float]
) -> None:
    kept = {p: v for p, v in sorted(there.items()) if p < width * count and v.hex() != "0x0.0p+0"}
    rows = SparseRows(width, count, array("I", kept), array("f", kept.values()))
    assert decode(rows.coded(), bytes_max=4 * width * count) == by_hand(rows)
    for less in range(count + 1):
        assert rows.first(less).dense() == by_hand(rows)[: 4 * width * less]


def test_the_layout_is_the_one_that_is_written_down() -> None:
    places = struct.pack("<5I", 0, 999, 1500, 2000, 2999)
    values = struct.pack("<5f", 1.0, -0.0, 1e-45, 0.25, 0.75)
    assert ROWS.coded() == struct.pack("<Q", 3000) + places + values


@pytest.mark.parametrize(
    "octets",
    [
        b"",
        bytes(7),
        struct.pack("<QI", 9, 1),
        struct.pack("<QIIff", 9, 2, 2, 1.0, 1.0),
        struct.pack("<QIIff", 9, 3, 2, 1.0, 1.0),
        struct.pack("<QIf", 9, 9, 1.0),
        struct.pack("<QIf", 9, 1, 0.0),
        struct.pack("<QIf", 0, 0, 1.0),
    ],
)
def test_nonsense_is_told(octets: bytes) -> None:
    with pytest.raises(BadSparse):
        decode(octets, bytes_max=1 << 20)


@given(st.binary(max_size=64))
def test_whatever_comes_no_more_is_allocated_than_allowed(octets: bytes) -> None:
    try:
        assert len(decode(octets, bytes_max=1000)) <= 1000
    except (BadSparse, SparseTooLarge):
        return


def test_a_count_beyond_the_limit_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(SparseTooLarge):
        decode(struct.pack("<Q", 1 << 60), bytes_max=1 << 30)


async def test_it_rests_coded_and_is_the_same_object_as_dense() -> None:
    tier = HostTier(64 * 1024)
    mlc = Mlc(tier, None)
    dense, coded = by_hand(ROWS), ROWS.coded()
    put = await mlc("PUT", PATH, coded, content_encoding=SPARSE)
    assert put.status == 201 and tier.stats().used_bytes == len(coded) + OBJECT_BYTES
    assert await mlc.status("PUT", PATH, dense) == 204
    assert await mlc.status("PUT", PATH, dense[:-1] + b"\1") == 412
    for accept in ("zstd", "*", "identity", "sdcp-sparse-f32;q=0"):
        got = await mlc("GET", PATH, accept_encoding=accept)
        assert (got.body, got.header("content-encoding")) == (dense, None)
        assert etag_of(got) == etag_of(put)
    got = await mlc("GET", PATH, accept_encoding="zstd, sdcp-sparse-f32")
    assert (got.body, got.header("content-encoding")) == (coded, SPARSE)
    part = await mlc("GET", PATH, accept_encoding=SPARSE, range="bytes=3996-4003")
    assert (part.status, part.body) == (206, dense[3996:4004])


@pytest.mark.parametrize(
    ("octets", "status"),
    [
        (b"short", 400),
        (struct.pack("<QIf", 9, 9, 1.0), 400),
        (struct.pack("<QIf", OBJECT_BYTES_MAX // 4 + 1, 1, 1.0), 413),
        (struct.pack("<QIf", SPARSE_BYTES_MAX, 1, 1.0), 413),
        (struct.pack("<QIf", 1 << 62, 1, 1.0), 413),
        (struct.pack("<Q", 1000) + bytes(CODED_BYTES_MAX), 413),
    ],
)
async def test_what_is_no_object_is_refused(octets: bytes, status: int) -> None:
    mlc = Mlc(HostTier(64 * 1024), None)
    assert await mlc.status("PUT", PATH, octets, content_encoding=SPARSE) == status


@pytest.mark.parametrize("offered", ["identity", "zstd", "sdcp-sparse-f32, zstd, identity", None])
async def test_rows_travel_as_the_cache_takes_them(offered: str | None) -> None:
    """One of another make knows neither coding, or no OPTIONS at all."""
    tier = HostTier(64 * 1024)
    mlc, seen = Mlc(tier, None), []

    async def handle(request: Request) -> Response:
        if request.method == "OPTIONS":
            fields = () if offered is None else (("accept-encoding", offered),)
            return Response(405 if offered is None else 204, fields)
        seen.append(request.header("content-encoding"))
        fields = {name.replace("-", "_"): value for name, value in request.headers}
        return await mlc(request.method, request.path, request.body, **fields)

    objects = Objects(
        LoopbackClient({BASE: handle}, peer("drafter", "d0")), bases=(BASE,), own=BASE
    )
    reference = await objects.write(bytes(16), None, "q_rows", ROWS)
    assert seen == [SPARSE if offered and SPARSE in offered else None]
    assert await objects.fetch(reference, scope=None, octets_max=12_000) == by_hand(ROWS)


async def test_rows_that_are_many_are_not_coded_so() -> None:
    many = SparseRows(200_000, 1, array("I", range(40_000)), array("f", [1.0] * 40_000))
    few = SparseRows(200_000, 1, array("I", range(30_000)), array("f", [1.0] * 30_000))
    assert few.is_small and not many.is_small


async def test_heads_and_conditions_decode_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a few octets stand for is made only for who gets it."""
    mlc = Mlc(HostTier(64 * 1024), None)
    put = await mlc("PUT", PATH, ROWS.coded(), content_encoding=SPARSE)

    async def refuse(*_: object, **__: object) -> bytes:
        raise AssertionError("decoded for nothing")

    monkeypatch.setattr("tiers.object_resource.decoded", refuse)
    head = await mlc("HEAD", PATH)
    assert (head.status, head.header("content-length"), head.body) == (200, "12000", b"")
    assert etag_of(head) == etag_of(put)
