"""The MLC over HTTP: D-M1 to D-M12, D-Z3, every status of it, and nothing but Problem on nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import cbor2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdcpd.protocol.commit_log import CommitRecord, FenceRecord, encode_record
from sdcpd.protocol.limits import BODY_BYTES_MAX
from sdcpd.protocol.problems import Forbidden, Problem, to_json
from sdcpd.transport.http import Request, Response
from tests.kit.tier_contract import Clock
from tiers.api import Key, LogStore, Tier
from tiers.build import open_logs
from tiers.host import HostTier
from tiers.lmdb_log import LmdbLogStore
from tiers.log_resource import GROUP_BYTES_MAX, LOG_BYTES_MAX
from tiers.resource import MlcResource

SCOPE = "AAECAwQFBgcICQoLDA0ODw"
OBJECT = f"/mlc/objects/{SCOPE}/q_rows/1"
LOGS = "/mlc/logs"
LOG = f"{LOGS}/{SCOPE}"
OTHER = f"{LOGS}/AAAAAAAAAAAAAAAAAAAAAA"
SEQ = "application/cbor-seq"
OBJECT_BYTES_MAX = 20_000


def commit(epoch: int, round_number: int = 1) -> bytes:
    return encode_record(
        CommitRecord(epoch=epoch, round=round_number, emitted=(7,), committed=1, digest=bytes(32))
    )


def fence(epoch: int) -> bytes:
    return encode_record(FenceRecord(epoch=epoch))


class Mlc:
    """The resource with its errors turned into answers, as a role's shell does."""

    def __init__(self, objects: Tier, logs: LogStore | None) -> None:
        self.asked: list[tuple[str, bool]] = []
        self.refuse: tuple[str, bool] | None = None
        self.refuse_fences = False
        self.resource = MlcResource(
            base_path="/mlc/",
            objects=objects,
            logs=logs,
            authorize=self.authorize,
            object_bytes_max=OBJECT_BYTES_MAX,
            authorize_fence=self.authorize_fence,
        )

    def authorize(self, request: Request, kind: str, write: bool) -> None:
        self.asked.append((kind, write))
        if self.refuse == (kind, write):
            raise Forbidden("not for this role")

    def authorize_fence(self, request: Request) -> None:
        if self.refuse_fences:
            raise Forbidden("fences are the router's")

    async def __call__(
        self, method: str, path: str, body: bytes = b"", **fields: str | int
    ) -> Response:
        headers = tuple((name.replace("_", "-"), str(value)) for name, value in fields.items())
        try:
            return await self.resource.handle(Request(method, path, "", headers, body))
        except Problem as problem:
            return Response(problem.status, tuple(problem.headers.items()), to_json(problem))

    async def status(self, method: str, path: str, body: bytes = b"", **fields: str | int) -> int:
        return (await self(method, path, body, **fields)).status

    async def tag(self, path: str) -> str:
        return etag_of(await self("HEAD", path))


def etag_of(response: Response) -> str:
    etag = response.header("etag")
    assert etag is not None and etag.startswith('"'), "strong"
    return etag


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def logs(tmp_path: Path) -> AsyncIterator[LmdbLogStore]:
    store = open_logs(tmp_path / "logs", 1 << 20)
    yield store
    await store.aclose()


@pytest.fixture
def mlc(logs: LmdbLogStore, clock: Clock) -> Mlc:
    return Mlc(HostTier(64 * 1024, clock=clock), logs)


# Objects.


class Forgetful(HostTier):
    """Loses what is to be leased again, as one whose lease has just ended is lost."""

    async def renew(self, key: Key, lease_s: float) -> bool:
        await self.delete(key)
        return False


async def test_dm10_what_went_while_it_was_put_again_is_stored_with_its_lease() -> None:
    tier = Forgetful(64 * 1024)
    mlc = Mlc(tier, None)
    assert await mlc.status("PUT", OBJECT, b"rows") == 201
    assert await mlc.status("PUT", OBJECT, b"rows", sdcp_lease=60_000) == 204
    assert (await mlc("GET", OBJECT)).body == b"rows"
    assert tier.stats().leased_bytes > 0


async def test_nothing_is_served_beside_the_base(mlc: Mlc) -> None:
    """R-5.1-8: objects and logs lie below the base URI alone."""
    assert await mlc.status("PUT", OBJECT, b"rows", if_none_match="*") == 201
    assert await mlc.status("PUT", LOG, commit(1), content_type=SEQ, if_none_match="*") == 201
    for path in (OBJECT, LOG):
        below = path.removeprefix("/mlc")
        for wrong in (below, below[1:], f"/xxx{below}", f"/mlc{path}", f"/.well-known{below}"):
            assert await mlc.status("GET", wrong) == 404, wrong
        assert await mlc.status("GET", path) == 200


async def test_dm1_an_object_is_written_and_read(mlc: Mlc) -> None:
    made = await mlc("PUT", OBJECT, b"rows", content_type="application/cbor", if_none_match="*")
    assert (made.status, made.header("location")) == (201, OBJECT)
    got = await mlc("GET", OBJECT)
    assert (got.status, got.body, got.header("content-type")) == (200, b"rows", "application/cbor")
    assert got.header("etag") == etag_of(made) and got.header("accept-ranges") == "bytes"
    head = await mlc("HEAD", OBJECT)
    assert (head.status, head.body, head.header("content-length")) == (200, b"", "4")
    assert await mlc.status("GET", OBJECT + "0") == 404


async def test_dm4_objects_are_written_once(mlc: Mlc) -> None:
    etag = etag_of(await mlc("PUT", OBJECT, b"rows"))
    again = await mlc("PUT", OBJECT, b"rows")
    assert (again.status, etag_of(again)) == (204, etag)
    for refused in (
        await mlc("PUT", OBJECT, b"other"),
        await mlc("PUT", OBJECT, b"rows", if_none_match="*"),
        await mlc("PUT", OBJECT, b"rows", if_match='"x"'),
    ):
        assert (refused.status, etag_of(refused)) == (412, etag)
    assert await mlc.status("PUT", OBJECT, b"rows", if_match=etag) == 204
    assert await mlc.status("PUT", OBJECT + "0", b"rows", if_match=etag) == 412
    assert (await mlc("GET", OBJECT)).body == b"rows"


async def test_dm4_of_many_writers_of_a_name_one_wins(mlc: Mlc) -> None:
    answers = await asyncio.gather(*(mlc("PUT", OBJECT, bytes([n])) for n in range(16)))
    assert sorted(answer.status for answer in answers) == [201] + [412] * 15


async def test_dm10_leases_over_http(mlc: Mlc, clock: Clock) -> None:
    for number in range(3):
        lease = {"sdcp_lease": 5000} if number else {}
        path = f"{OBJECT}{number}"
        assert await mlc.status("PUT", path, bytes(20_000), **lease) == 201
    assert await mlc.status("PUT", OBJECT, bytes(20_000), sdcp_lease=1) == 201
    assert await mlc.status("GET", OBJECT + "0") == 404, "the only one without a lease"
    clock.now += 1
    assert await mlc.status("POST", OBJECT, sdcp_lease=5000) == 204
    full = await mlc("PUT", OBJECT + "9", bytes(20_000))
    assert (full.status, full.header("retry-after")) == (507, "1")
    assert await mlc.status("POST", OBJECT + "1", sdcp_lease=0) == 204
    assert await mlc.status("PUT", OBJECT + "9", bytes(20_000)) == 201
    assert await mlc.status("POST", OBJECT + "1", sdcp_lease=5000) == 404
    for wrong in ({}, {"sdcp_lease": "soon"}, {"sdcp_lease": "-1"}, {"sdcp_lease": 10**9}):
        assert await mlc.status("POST", OBJECT, **wrong) == 400
    assert await mlc.status("POST", OBJECT, b"x", sdcp_lease=1) == 400
    assert await mlc.status("PUT", OBJECT, b"x", sdcp_lease="1 s") == 400


async def test_dm10_writing_the_same_again_renews(mlc: Mlc, clock: Clock) -> None:
    await mlc("PUT", OBJECT, bytes(20_000), sdcp_lease=1000)
    await mlc("PUT", OBJECT, bytes(20_000), sdcp_lease=9000)
    clock.now += 5
    for number in range(4):
        await mlc("PUT", f"{OBJECT}{number}", bytes(20_000))
    assert await mlc.status("GET", OBJECT) == 200


async def test_dm12_deleting_an_object_is_done_once_and_said_always(mlc: Mlc) -> None:
    etag = etag_of(await mlc("PUT", OBJECT, b"rows", sdcp_lease=9000))
    assert await mlc.status("DELETE", OBJECT, if_match='"x"') == 412
    assert await mlc.status("DELETE", OBJECT, if_match=etag) == 204
    assert await mlc.status("DELETE", OBJECT) == 204
    assert await mlc.status("GET", OBJECT) == 404
    assert await mlc.status("PUT", OBJECT, b"other") == 201


async def test_what_is_wrong_with_a_put(mlc: Mlc) -> None:
    large = bytes(OBJECT_BYTES_MAX + 1)
    assert await mlc.status("PUT", OBJECT, large) == 413
    assert await mlc.status("PUT", OBJECT, large[1:]) == 201
    coded = await mlc("PUT", OBJECT, b"x", content_encoding="br")
    taken = "sdcp-sparse-f32, zstd, identity"
    assert (coded.status, coded.header("accept-encoding")) == (415, taken)
    assert await mlc.status("PUT", OBJECT, b"x", content_range="bytes 0-0/*") == 400
    assert await mlc.status("PUT", OBJECT, b"x", content_type="rows") == 400
    assert await mlc.status("PUT", OBJECT, b"x", if_match="x") == 400


@pytest.mark.parametrize(
    ("wanted", "status", "body", "span"),
    [
        ("bytes=0-3", 206, b"0123", "bytes 0-3/10"),
        ("bytes=8-", 206, b"89", "bytes 8-9/10"),
        ("bytes=-3", 206, b"789", "bytes 7-9/10"),
        ("bytes=-30", 206, b"0123456789", "bytes 0-9/10"),
        ("bytes=4-400", 206, b"456789", "bytes 4-9/10"),
        ("bytes=10-", 416, None, "bytes */10"),
        ("bytes=-0", 416, None, "bytes */10"),
        ("bytes=3-2", 200, b"0123456789", None),
        ("bytes=-", 200, b"0123456789", None),
        ("bytes=0-1,3-4", 200, b"0123456789", None),
        ("rows=0-1", 200, b"0123456789", None),
    ],
)
async def test_ranges(mlc: Mlc, wanted: str, status: int, body: bytes | None, span: str) -> None:
    """RFC 9110 Section 14: one range; what is malformed or several is answered whole."""
    etag = etag_of(await mlc("PUT", OBJECT, b"0123456789"))
    answer = await mlc("GET", OBJECT, range=wanted)
    assert (answer.status, answer.header("content-range")) == (status, span)
    assert body is None or answer.body == body
    assert await mlc.status("GET", OBJECT, range=wanted, if_range=etag) == status
    assert await mlc.status("GET", OBJECT, range=wanted, if_range='"x"') == 200
    assert await mlc.status("HEAD", OBJECT, range=wanted) == 200


async def test_conditions_on_reading(mlc: Mlc) -> None:
    etag = etag_of(await mlc("PUT", OBJECT, b"rows"))
    same = await mlc("GET", OBJECT, if_none_match=f'"x", W/{etag}')
    assert (same.status, same.body, same.header("etag")) == (304, b"", etag)
    assert await mlc.status("HEAD", OBJECT, if_none_match="*") == 304
    assert await mlc.status("GET", OBJECT, if_none_match='"x"') == 200
    assert await mlc.status("GET", OBJECT, if_match=f'"x", {etag}') == 200
    assert await mlc.status("GET", OBJECT, if_match=f"W/{etag}") == 412


@pytest.mark.parametrize(
    "path",
    [
        "/mlc",
        "/mlc/",
        "/mlc/objects",
        "/mlc/objects/",
        f"/mlc/objects/{SCOPE}",
        f"/mlc/objects/{SCOPE}/",
        f"/mlc/objects/{SCOPE}/a/",
        f"/mlc/objects/{SCOPE}//a",
        f"/mlc/objects/{SCOPE}/../a",
        f"/mlc/objects/{SCOPE}/a/.",
        f"/mlc/objects/{SCOPE}/a%2fb",
        f"/mlc/objects/{SCOPE}/%2E%2E/b",
        f"/mlc/objects/{SCOPE}/a\\b",
        f"/mlc/objects/{SCOPE}/ä",
        f"/mlc/objects/{SCOPE}/{'n' * 256}",
        "/mlc/objects/s%41/a",
        "/other/objects/s/a",
        "/mlc/logs/",
        f"{LOG}=",
        f"{LOG}/x",
        "/mlc/logs/AAECAwQFBgcICQoLDA0ODx",
        "/mlc/objectsx/s/a",
    ],
)
async def test_dm2_dm3_paths_that_name_nothing(mlc: Mlc, path: str) -> None:
    for method in ("GET", "PUT", "POST"):
        assert await mlc.status(method, path) == 404
    assert not mlc.asked


async def test_dh4_methods_and_options(mlc: Mlc) -> None:
    for path, allow in (
        (OBJECT, "GET, HEAD, PUT, POST, DELETE, OPTIONS"),
        (LOG, "GET, HEAD, PUT, OPTIONS"),
        (LOGS, "POST, OPTIONS"),
    ):
        options = await mlc("OPTIONS", path)
        assert (options.status, options.header("allow")) == (204, allow)
        refused = await mlc("PATCH", path)
        assert (refused.status, refused.header("allow")) == (405, allow)
    assert await mlc.status("DELETE", LOG) == 405
    assert await mlc.status("POST", LOG) == 405
    assert await mlc.status("GET", LOGS) == 405


@pytest.mark.parametrize(
    ("refused", "requests"),
    [
        (("object", False), [("GET", OBJECT), ("HEAD", OBJECT)]),
        (("object", True), [("PUT", OBJECT), ("POST", OBJECT), ("DELETE", OBJECT)]),
        (("log", False), [("GET", LOG), ("HEAD", LOG)]),
        (("log", True), [("PUT", LOG), ("POST", LOGS)]),
    ],
)
async def test_dm11_access_is_asked_for_before_all_else(
    mlc: Mlc, refused: tuple[str, bool], requests: list[tuple[str, str]]
) -> None:
    mlc.refuse = refused
    for method, path in requests:
        assert await mlc.status(method, path, b"\xff") == 403
    mlc.refuse = None
    for method, path in requests:
        assert await mlc.status(method, path, b"\xff") != 403


async def test_dm3_only_routers_serve_logs(clock: Clock) -> None:
    mlc = Mlc(HostTier(64 * 1024, clock=clock), None)
    assert await mlc.status("PUT", LOG, commit(1), if_none_match="*") == 404
    assert await mlc.status("POST", LOGS, cbor2.dumps([])) == 404
    assert mlc.resource.body_bytes_max("PUT", LOG) == BODY_BYTES_MAX


def test_body_limits_are_known_before_the_body(mlc: Mlc) -> None:
    limits = {
        ("PUT", OBJECT): OBJECT_BYTES_MAX,
        ("POST", OBJECT): BODY_BYTES_MAX,
        ("PUT", LOG): LOG_BYTES_MAX,
        ("POST", LOGS): GROUP_BYTES_MAX,
        ("PUT", "/elsewhere"): BODY_BYTES_MAX,
    }
    assert {key: mlc.resource.body_bytes_max(*key) for key in limits} == limits


# Logs.


async def create(mlc: Mlc, data: bytes, path: str = LOG) -> str:
    made = await mlc("PUT", path, data, content_type=SEQ, if_none_match="*")
    assert made.status == 201
    return etag_of(made)


async def test_dm6_a_log_over_plain_http(mlc: Mlc) -> None:
    assert await mlc.status("GET", LOG) == await mlc.status("HEAD", LOG) == 404
    etag = await create(mlc, commit(1))
    both = commit(1) + commit(1, 2)
    put = await mlc("PUT", LOG, both, content_type=SEQ, if_match=etag)
    assert (put.status, put.header("sdcp-append")) == (204, "2")
    got, head = await mlc("GET", LOG), await mlc("HEAD", LOG)
    assert (got.status, got.body, got.header("content-type")) == (200, both, SEQ)
    for answer in (got, head):
        assert answer.header("accept-ranges") == "bytes" and answer.header("sdcp-append") == "2"
        assert etag_of(answer) == etag_of(put)
    assert (head.body, head.header("content-length")) == (b"", str(len(both)))
    tail = await mlc("GET", LOG, range=f"bytes={len(commit(1))}-")
    assert (tail.status, tail.body) == (206, commit(1, 2))
    assert await mlc.status("HEAD", LOG, if_none_match=etag_of(put)) == 304


async def test_dm7_428_without_a_precondition_that_says_what_was_read(mlc: Mlc) -> None:
    etag = await create(mlc, commit(1))
    for fields in ({}, {"if_match": "*"}, {"if_none_match": '"x"'}):
        assert await mlc.status("PUT", LOG, commit(1), **fields) == 428
    assert await mlc.status("PUT", LOG, commit(1), if_match=etag, if_none_match="*") == 412


async def test_dm7_412_409_400_on_logs(mlc: Mlc) -> None:
    etag = await create(mlc, fence(2))
    stale = await mlc("PUT", LOG, fence(2) + commit(2), if_match='"0-0"')
    assert (stale.status, etag_of(stale)) == (412, etag), "the current tag is told"
    again = await mlc("PUT", LOG, fence(2), if_none_match="*")
    assert (again.status, etag_of(again)) == (412, etag)
    missing = await mlc("PUT", OTHER, commit(1), if_match=etag)
    assert (missing.status, missing.header("etag")) == (412, None)
    for body, status in (
        (commit(2), 409),
        (fence(2) + commit(1), 409),
        (fence(2) + fence(2), 409),
        (fence(2) + b"\xff", 400),
        (fence(2) + commit(2)[:-1], 400),
    ):
        assert await mlc.status("PUT", LOG, body, content_type=SEQ, if_match=etag) == status
    assert await mlc.status("PUT", LOG, fence(2), content_type="text/plain", if_match=etag) == 415
    assert await mlc.status("PUT", LOG, fence(2), content_encoding="gzip", if_match=etag) == 415
    assert await mlc.tag(LOG) == etag
    several = f'"x", {etag}'
    assert await mlc.status("PUT", LOG, fence(2) + fence(3), if_match=several) == 204
    assert await mlc.status("PUT", LOG, fence(2) + fence(4), if_match=several) == 412


async def test_logs_too_large_or_full(mlc: Mlc) -> None:
    assert await mlc.status("PUT", LOG, bytes(LOG_BYTES_MAX + 1), if_none_match="*") == 413
    full = await mlc("PUT", LOG, commit(1) * 20_000, if_none_match="*")
    assert (full.status, full.header("retry-after")) == (507, "1")
    assert await mlc.status("GET", LOG) == 404


async def test_a_store_that_fails_is_503(mlc: Mlc, logs: LmdbLogStore) -> None:
    logs._env.close()
    failed = await mlc("PUT", LOG, commit(1), if_none_match="*")
    assert (failed.status, failed.header("retry-after")) == (503, "1")
    assert await mlc.status("GET", LOG) == 503


async def test_dz3_append_in_place(mlc: Mlc) -> None:
    etag = await create(mlc, commit(1))
    size, new = len(commit(1)), commit(1, 2) + commit(1, 3)
    span = f"bytes {size}-{size + len(new) - 1}/*"
    put = await mlc("PUT", LOG, new, content_type=SEQ, content_range=span, if_match=etag)
    assert put.status == 204 and etag_of(put) == await mlc.tag(LOG) != etag
    assert (await mlc("GET", LOG)).body == commit(1) + new
    assert await mlc.status("PUT", LOG, new, content_range=span, if_match=etag) == 412
    stale = f"bytes 0-{len(new) - 1}/*"
    now = etag_of(put)
    assert await mlc.status("PUT", LOG, new, content_range=stale, if_match=now) == 409
    assert await mlc.status("PUT", LOG, new, content_range=span) == 428
    for wrong in (f"bytes {size}-{size}/*", "bytes */9", "rows 1-2/*", span[:-1] + "900", ""):
        assert await mlc.status("PUT", LOG, new, content_range=wrong, if_match=now) == 400
    first = f"bytes 0-{size - 1}/*"
    made = await mlc("PUT", OTHER, commit(1), content_range=first, if_none_match="*")
    assert made.status == 201


async def test_dm11_fences_are_the_routers(mlc: Mlc) -> None:
    etag = await create(mlc, commit(1) + fence(2))
    mlc.refuse_fences = True
    size, new = len(commit(1) + fence(2)), fence(3)
    span = f"bytes {size}-{size + len(new) - 1}/*"
    group = cbor2.dumps([{"log": SCOPE, "etag": etag, "record": {"epoch": 3}}])
    whole = commit(1) + fence(2) + commit(2)
    assert await mlc.status("PUT", LOG, new, content_range=span, if_match=etag) == 403
    assert await mlc.status("PUT", LOG, whole + fence(3), if_match=etag) == 403
    assert await mlc.status("POST", LOGS, group) == 403
    assert await mlc.status("PUT", LOG, whole, if_match=etag) == 204, "old fences are no new ones"


def group_item(path: str, etag: str, record: bytes) -> dict[str, Any]:
    return {"log": path.rpartition("/")[2], "etag": etag, "record": cbor2.loads(record)}


async def post(mlc: Mlc, items: object) -> list[dict[str, Any]]:
    answer = await mlc("POST", LOGS, cbor2.dumps(items), content_type="application/cbor")
    assert answer.status == 200
    outcomes: list[dict[str, Any]] = cbor2.loads(answer.body)
    return outcomes


async def test_dz3_group_append(mlc: Mlc) -> None:
    paths = [f"{LOGS}/{'A' * 20}{letter}A" for letter in "ABCDE"]
    tags = [await create(mlc, fence(2), path) for path in paths[:4]]
    records = [commit(2), commit(1), commit(2), fence(3)]
    items = [group_item(*parts) for parts in zip(paths, tags, records, strict=False)]
    items[2]["etag"] = '"stale"'
    items[3]["etag"] = items[3]["etag"].strip('"')
    items += [group_item(paths[4], tags[0], commit(1)), group_item("nowhere", "x", commit(1))]
    items.append({"log": SCOPE, "etag": "x", "record": {"round": 1}, "more": None})
    outcomes = await post(mlc, items)
    assert [outcome["status"] for outcome in outcomes] == [204, 409, 412, 204, 412, 404, 400]
    assert outcomes[2]["etag"] == tags[2]
    assert "etag" not in outcomes[1] and "etag" not in outcomes[4]
    for index in (0, 3):
        assert outcomes[index]["etag"] == await mlc.tag(paths[index])
        assert (await mlc("GET", paths[index])).body == fence(2) + records[index]
    assert await post(mlc, []) == []


async def test_dz3_the_record_is_stored_as_it_was_sent(mlc: Mlc) -> None:
    etag = await create(mlc, commit(1))
    odd = bytes.fromhex("bf") + cbor2.dumps("note") + cbor2.dumps(1.5) + cbor2.dumps("epoch")
    odd += bytes.fromhex("1801ff")
    body = bytes.fromhex("9fbf") + cbor2.dumps("record") + odd + cbor2.dumps("etag")
    body += cbor2.dumps(etag) + cbor2.dumps("log") + cbor2.dumps(SCOPE) + bytes.fromhex("ffff")
    answer = await mlc("POST", LOGS, body.replace(bytes.fromhex("1801"), bytes.fromhex("1802")))
    assert cbor2.loads(answer.body)[0]["status"] == 204
    stored = odd.replace(bytes.fromhex("1801"), bytes.fromhex("1802"))
    assert (await mlc("GET", LOG)).body == commit(1) + stored


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"\x9f",
        b"\x9c",
        b"\x9b\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x81\xbf",
        cbor2.dumps({}),
        cbor2.dumps([1]),
        cbor2.dumps([]) + b"\x00",
        cbor2.dumps([{"log": SCOPE, "etag": "x"}]),
        cbor2.dumps([{"log": 5, "etag": "x", "record": {}}]),
        cbor2.dumps([{"log": SCOPE, "etag": "x", "record": []}]),
        cbor2.dumps([{"log": SCOPE, "etag": "x", "record": {"epoch": 1}}] * 2),
        bytes.fromhex("81a2") + (cbor2.dumps("log") + cbor2.dumps(SCOPE)) * 2,
        cbor2.dumps([{"log": str(n), "etag": "x", "record": {"epoch": 1}} for n in range(1025)]),
    ],
)
async def test_dz3_a_group_that_is_none(mlc: Mlc, body: bytes) -> None:
    assert await mlc.status("POST", LOGS, body, content_type="application/cbor") == 400


async def test_dz3_group_bounds(mlc: Mlc) -> None:
    assert await mlc.status("POST", LOGS, bytes(GROUP_BYTES_MAX + 1)) == 413
    assert await mlc.status("POST", LOGS, cbor2.dumps([]), content_type=SEQ) == 415


async def test_dm12_no_problem_tells_what_was_written(mlc: Mlc) -> None:
    secret = encode_record(
        CommitRecord(epoch=1, round=1, emitted=(424242,), committed=1, digest=bytes(32))
    )
    etag = await create(mlc, fence(2))
    for body in (fence(2) + secret, secret, fence(2) + secret[:-1]):
        answer = await mlc("PUT", LOG, body, if_match=etag)
        assert answer.status in (400, 409) and b"424242" not in answer.body


# Nonsense.

SEGMENTS = st.sampled_from(
    ["objects", "logs", SCOPE, "a", "..", "%2e", "", "{scope}", "n" * 300, "\u2028", "x y"]
)
PATHS = st.lists(SEGMENTS, max_size=5).map(lambda parts: "/".join(["/mlc", *parts])) | st.text(
    max_size=20
)
NAMES = st.sampled_from(
    [
        "if-match",
        "If-None-Match",
        "range",
        "if-range",
        "content-range",
        "content-type",
        "content-encoding",
        "accept-encoding",
        "sdcp-lease",
        "content-length",
    ]
)
VALUES = st.text(max_size=20) | st.sampled_from(
    [
        *("*", '"a"', 'W/"a", "b"', '"a",', ", ,", '"' * 200),
        *("bytes=0-", "bytes=99999999999999999999-", "bytes 0-0/*", "bytes \u0661-\u0662/*"),
        *("zstd", "zstd;q=0", "*", "identity"),
        *("0", "\u0661", "9" * 30, SEQ, "application/cbor"),
    ]
)
BODIES = st.binary(max_size=40) | st.sampled_from([b"", commit(1), fence(1), cbor2.dumps([])])
GROUPS = st.recursive(
    st.none() | st.integers() | st.text(max_size=4) | st.binary(max_size=4) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["log", "etag", "record", "epoch"]), inner, max_size=4)
    ),
    max_leaves=12,
).map(cbor2.dumps)


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    method=st.sampled_from(["GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS", "TRACE", ""]),
    path=PATHS | st.sampled_from([OBJECT, LOG, LOGS]),
    headers=st.lists(st.tuples(NAMES, VALUES), max_size=4).map(tuple),
    body=BODIES | GROUPS,
)
async def test_nonsense_gets_an_answer_or_a_problem(
    mlc: Mlc, method: str, path: str, headers: tuple[tuple[str, str], ...], body: bytes
) -> None:
    try:
        response = await mlc.resource.handle(Request(method, path, "", headers, body))
    except Problem as problem:
        assert 400 <= problem.status < 508 and problem.status not in (500, 503)
    else:
        assert response.status in (200, 201, 204, 206, 304)
