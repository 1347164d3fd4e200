"""`Content-Encoding: zstd` of objects, both ways (D-Z4)."""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.roles.objects import CODED_OCTETS_MIN, ObjectGone, Objects, ObjectTooLarge
from sdcpd.transport.http import Peer, Request, Response
from sdcpd.transport.loopback import LoopbackClient
from tests.tiers.test_mlc_resource import Mlc, etag_of
from tiers.api import Key, Tier, entry_of
from tiers.coding import BadCoding, DecodedTooLarge, decode, encode
from tiers.host import OBJECT_BYTES, HostTier
from tiers.lmdb_tier import LmdbTier

PATH = "/mlc/objects/c2NvcGU/rows"
VOCAB = 1500


def rows(count: int = 3) -> bytes:
    """Rows of a truncated distribution: a few tokens, and zeros."""
    one = bytearray(4 * VOCAB)
    for token in range(0, VOCAB, 500):
        struct.pack_into("<f", one, 4 * token, 0.1)
    return bytes(one) * count


ROWS = rows()
CODED = encode(ROWS)
assert CODED is not None and len(CODED) < len(ROWS) / 50


@pytest.fixture
def tier() -> HostTier:
    return HostTier(256 * 1024)


@pytest.fixture
def mlc(tier: HostTier) -> Mlc:
    return Mlc(tier, None)


@given(st.binary(max_size=2000), st.integers(0, 50))
def test_what_is_coded_comes_back(data: bytes, times: int) -> None:
    whole = data * times
    coded = encode(whole)
    assert coded is None or (
        decode(coded, bytes_max=len(whole)) == whole and len(coded) < len(whole)
    )


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda tail: CODED[:90] + tail))
def test_nonsense_is_told_and_allocates_no_more_than_allowed(octets: bytes) -> None:
    try:
        assert len(decode(octets, bytes_max=1000)) <= 1000
    except (BadCoding, DecodedTooLarge):
        return


@pytest.mark.parametrize("announced", [True, False])
def test_a_bomb_is_refused_by_its_size(announced: bool) -> None:
    coder = zstandard.ZstdCompressor(level=1, write_content_size=announced)
    bomb = coder.compress(bytes(64 << 20))
    assert len(bomb) < 10_000
    with pytest.raises(DecodedTooLarge):
        decode(bomb, bytes_max=(64 << 20) - 1)
    assert len(decode(bomb, bytes_max=64 << 20)) == 64 << 20
    with pytest.raises(BadCoding):
        decode(bomb[:-5], bytes_max=64 << 20)
    with pytest.raises(BadCoding, match="unused data"):
        decode(bomb + b"x", bytes_max=64 << 20)


def test_a_frame_may_not_ask_for_a_large_window() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    coder = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    with pytest.raises(BadCoding, match="too much memory"):
        decode(coder.compress(bytes(1000)) + coder.flush(), bytes_max=1000)


def test_what_does_not_shrink_is_not_coded() -> None:
    assert encode(os.urandom(1 << 20)) is None and encode(b"") is None


async def test_it_rests_coded_and_each_gets_what_it_understands(mlc: Mlc, tier: HostTier) -> None:
    put = await mlc("PUT", PATH, CODED, content_encoding="zstd")
    assert put.status == 201
    assert tier.stats().used_bytes == len(CODED) + OBJECT_BYTES
    dense = await mlc("GET", PATH)
    assert (dense.status, dense.body, dense.header("content-encoding")) == (200, ROWS, None)
    assert etag_of(dense) == etag_of(put) == entry_of(ROWS, media_type="x/y").etag
    coded = await mlc("GET", PATH, accept_encoding="gzip, zstd;q=0.5")
    assert (coded.body, coded.header("content-encoding")) == (CODED, "zstd")
    assert etag_of(coded) != etag_of(dense) and coded.header("vary") == "accept-encoding"
    for refusing in ("zstd;q=0", "zstd;q=0.000, *", "gzip", "identity", ""):
        assert (await mlc("GET", PATH, accept_encoding=refusing)).body == ROWS
    assert (await mlc("GET", PATH, accept_encoding="*")).body == CODED
    head = await mlc("HEAD", PATH, accept_encoding="zstd")
    assert head.header("content-length") == str(len(CODED))


async def test_a_range_is_one_of_the_object(mlc: Mlc) -> None:
    await mlc("PUT", PATH, CODED, content_encoding="zstd")
    part = await mlc("GET", PATH, accept_encoding="zstd", range="bytes=1996-2003")
    assert (part.status, part.body) == (206, ROWS[1996:2004])
    assert part.header("content-range") == f"bytes 1996-2003/{len(ROWS)}"


async def test_conditions_know_both_tags(mlc: Mlc) -> None:
    dense = etag_of(await mlc("PUT", PATH, CODED, content_encoding="zstd"))
    coded = etag_of(await mlc("GET", PATH, accept_encoding="zstd"))
    assert await mlc.status("GET", PATH, accept_encoding="zstd", if_none_match=coded) == 304
    assert await mlc.status("GET", PATH, accept_encoding="zstd", if_none_match=dense) == 200
    assert await mlc.status("GET", PATH, if_none_match=dense) == 304
    for method in ("GET", "HEAD"):
        for accepted in ("zstd", "identity"):
            for tag, status in ((dense, 200), (coded, 200), ('"x"', 412), (f"W/{dense}", 412)):
                fields = {"accept_encoding": accepted, "if_match": tag}
                assert await mlc.status(method, PATH, **fields) == status
    assert await mlc.status("PUT", PATH, ROWS, if_match=coded) == 204
    assert await mlc.status("DELETE", PATH, if_match=coded) == 204


async def test_the_object_is_what_is_decoded(mlc: Mlc) -> None:
    """Written dense or coded, it is the same object, and one with other octets is another."""
    assert await mlc.status("PUT", PATH, CODED, content_encoding="ZSTD") == 201
    assert await mlc.status("PUT", PATH, ROWS) == 204
    other = encode(ROWS[:-4] + b"\0\0\0\1")
    assert other is not None
    assert await mlc.status("PUT", PATH, other, content_encoding="zstd") == 412


async def test_what_does_not_shrink_rests_dense(mlc: Mlc, tier: HostTier) -> None:
    octets = os.urandom(3000)
    coded = zstandard.ZstdCompressor().compress(octets)
    assert await mlc.status("PUT", PATH, coded, content_encoding="zstd") == 201
    assert (await mlc("GET", PATH, accept_encoding="zstd")).body == octets
    assert tier.stats().used_bytes == 3000 + OBJECT_BYTES


async def test_what_cannot_be_decoded_or_is_too_much_is_refused(mlc: Mlc) -> None:
    assert await mlc.status("PUT", PATH, CODED[:-3], content_encoding="zstd") == 400
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    assert await mlc.status("PUT", PATH, bomb, content_encoding="zstd") == 413
    assert await mlc.status("GET", PATH) == 404
    offered = await mlc("OPTIONS", PATH)
    assert offered.header("accept-encoding") == "sdcp-sparse-f32, zstd, identity"


async def test_a_restart_keeps_the_coding(tmp_path: Path) -> None:
    key = Key("s", "rows")
    entry = replace(entry_of(ROWS, media_type="x/y"), data=CODED, coding="zstd")
    first = LmdbTier(tmp_path, 1 << 20)
    await first.put(key, entry, lease_s=0)
    await first.aclose()
    second = LmdbTier(tmp_path, 1 << 20)
    assert await second.get(key) == entry
    await second.aclose()


# The roles' side.


def reaching(handler: object, *, near: bool = False) -> Objects:
    peer = Peer("here", (), (), "", "")
    client = LoopbackClient({"https://mlc/": handler}, peer)  # type: ignore[dict-item]
    is_near = client.is_near if near else lambda _: False
    return Objects(client, bases=("https://mlc/",), own="https://mlc/", is_near=is_near)


class Recorded:
    """A cache behind a wire, and what passed over it."""

    def __init__(self, tier: Tier) -> None:
        self._mlc = Mlc(tier, None)
        self.requests: list[Request] = []

    async def __call__(self, request: Request) -> Response:
        self.requests.append(request)
        below = replace(request, path="/mlc" + request.path)
        return await self._mlc.resource.handle(below)


async def test_rows_are_leased_for_as_long_as_the_operator_says(tier: HostTier) -> None:
    """[mlc] lease (D-M10)."""
    cache = Recorded(tier)
    client = LoopbackClient({"https://mlc/": cache}, Peer("here", (), (), "", ""))
    objects = Objects(client, bases=("https://mlc/",), own="https://mlc/", lease_s=2.5)
    await objects.write(bytes(16), None, "q_rows", ROWS)
    (put,) = [one for one in cache.requests if one.method == "PUT"]
    assert put.header("sdcp-lease") == "2500" and objects.lease_ms == 2500


async def test_rows_travel_and_rest_coded(tier: HostTier) -> None:
    cache = Recorded(tier)
    objects = reaching(cache)
    for _ in range(2):
        reference = await objects.write(bytes(16), None, "q_rows", ROWS)
        assert await objects.fetch(reference, scope=None, octets_max=len(ROWS)) == ROWS
    assert [one.method for one in cache.requests].count("OPTIONS") == 1, "a cache is asked once"
    puts = [one for one in cache.requests if one.method == "PUT"]
    assert all(len(one.body) < len(ROWS) / 50 for one in puts)
    with pytest.raises(ObjectTooLarge):
        await objects.fetch(reference, scope=None, octets_max=len(ROWS) - 1)


async def test_what_is_small_or_near_travels_as_it_is(tier: HostTier) -> None:
    for objects_octets, near in ((bytes(CODED_OCTETS_MIN - 1), False), (ROWS, True)):
        cache = Recorded(tier)
        objects = reaching(cache, near=near)
        await objects.write(bytes(16), None, "q_rows", objects_octets)
        assert [len(one.body) for one in cache.requests] == [len(objects_octets)]


async def test_a_cache_that_does_not_offer_it_gets_dense_rows() -> None:
    seen: list[Request] = []

    async def other(request: Request) -> Response:
        seen.append(request)
        return Response(405 if request.method == "OPTIONS" else 201)

    await reaching(other).write(bytes(16), None, "q_rows", ROWS)
    assert [len(one.body) for one in seen] == [0, len(ROWS)]
    assert seen[-1].header("content-encoding") is None


@pytest.mark.parametrize("coding", ["zstd", "br"])
async def test_an_answer_that_cannot_be_decoded_is_no_object(coding: str) -> None:
    async def broken(_: Request) -> Response:
        return Response(200, (("content-encoding", coding),), b"junk")

    with pytest.raises(ObjectGone, match=r"decoded|content coding"):
        await reaching(broken).fetch("https://mlc/objects/s/n", scope=None, octets_max=99)
