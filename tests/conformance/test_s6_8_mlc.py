"""Section 6.8 at the MLC: the real log resource over its real store, and a verifier that uses it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from sdcpd.protocol.commit_log import CommitRecord, FenceRecord, Record, decode_log, encode_record
from sdcpd.protocol.problems import Problem
from sdcpd.roles.base import problem_response
from sdcpd.transport.http import Request, Response
from tests.kit.answers import output_of, refused, verdict_of
from tests.kit.tier_contract import Clock
from tests.kit.verifier_wire import Wire
from tiers.build import open_logs
from tiers.host import HostTier
from tiers.resource import MlcResource

MakeWire = Callable[..., Wire]


def commit(epoch: int, round_: int, emitted: tuple[int, ...] = (7,)) -> CommitRecord:
    return CommitRecord(epoch=epoch, round=round_, emitted=emitted, committed=9, digest=bytes(32))


class RealLog:
    """One log of the real MLC, written to as a peer does."""

    def __init__(self, wire: Wire, resource: MlcResource) -> None:
        self.wire, self._resource = wire, resource
        self.path = f"logs/{wire.log_name}"
        self.before: Callable[[Request], None] = lambda _: None

    async def handle(self, request: Request) -> Response:
        """As the router's listener: errors become problem documents."""
        self.before(request)
        try:
            return await self._resource.handle(request)
        except Problem as problem:
            return problem_response(problem)

    async def get(self) -> Response:
        return await self.handle(Request("GET", f"/{self.path}", ""))

    async def records(self) -> list[Record]:
        return decode_log((await self.get()).body)

    async def put(self, record: Record, *, tag: str | None = None) -> int:
        """Append with the present tag, or with another one; the status of the answer."""
        read = await self.get()
        known = read.body if read.status == 200 else b""
        headers: tuple[tuple[str, str], ...] = (("content-type", "application/cbor-seq"),)
        if read.status == 200:
            headers += (("if-match", tag or read.header("etag") or ""),)
        else:
            headers += (("if-none-match", "*"),)
        request = Request("PUT", f"/{self.path}", "", headers, known + encode_record(record))
        return (await self.handle(request)).status


@pytest.fixture
async def log(make_wire: MakeWire, tmp_path: Path) -> AsyncIterator[RealLog]:
    """The real log resource behind a wire's router."""
    wire = make_wire()
    store = open_logs(tmp_path / "logs", 1 << 20)
    resource = MlcResource(
        base_path="/",
        objects=HostTier(1 << 20, clock=Clock()),
        logs=store,
        authorize=lambda request, kind, write: None,
        object_bytes_max=1 << 20,
        authorize_fence=lambda request: None,
    )
    made = RealLog(wire, resource)
    wire.network["https://r0.test/"] = made.handle
    yield made
    await store.aclose()


async def test_an_old_tag_fails(log: RealLog) -> None:
    """R-6.8-2: 412, and the content is what it was."""
    assert await log.put(commit(1, 1)) == 201
    old = (await log.get()).header("etag")
    assert await log.put(commit(1, 2)) == 204
    before = (await log.get()).body
    assert await log.put(commit(1, 3), tag=old) == 412
    assert (await log.get()).body == before


@pytest.mark.parametrize("fence", [FenceRecord(epoch=2), commit(2, 2)], ids=["fence", "commit"])
async def test_after_a_fence_lower_epochs_fail(log: RealLog, fence: Record) -> None:
    """R-6.8-6: with the right tag, and whatever raised the epoch; its own epoch goes on."""
    await log.put(commit(1, 1))
    assert await log.put(fence) == 204
    before = (await log.get()).body
    assert await log.put(commit(1, 2)) == 409
    assert await log.put(FenceRecord(epoch=1)) == 409
    assert (await log.get()).body == before
    assert await log.put(commit(2, 3)) == 204


async def test_equal_fences_are_refused(log: RealLog) -> None:
    """R-6.8-11: of two fences of one epoch the second fails; a higher one does not."""
    assert await log.put(FenceRecord(epoch=2)) == 201
    assert await log.put(FenceRecord(epoch=2)) == 409
    assert await log.put(FenceRecord(epoch=3)) == 204
    assert [record.epoch for record in await log.records()] == [2, 3]


async def test_existing_records_are_never_altered(log: RealLog) -> None:
    """R-6.8-10: content that does not begin with the old one is refused."""
    await log.put(commit(1, 1))
    read = await log.get()
    headers = (("content-type", "application/cbor-seq"), ("if-match", read.header("etag") or ""))
    other = encode_record(commit(1, 1, (8,))) + encode_record(commit(1, 2))
    answer = await log.handle(Request("PUT", f"/{log.path}", "", headers, other))
    assert answer.status == 409 and (await log.get()).body == read.body


async def test_a_verifier_and_its_log(log: RealLog) -> None:
    """R-6.8-1, R-6.8-4, R-6.3-33: rounds in order, until a fence; then nothing more is written."""
    wire = log.wire
    await wire.ready()
    found = [verdict_of(await wire.propose(wire.good(2))) for _ in range(4)]
    records = await log.records()
    assert [(r.round, r.emitted) for r in records if isinstance(r, CommitRecord)] == [
        (v.round, v.emitted) for v in found
    ]
    assert len(output_of(await wire.output()).tokens) == 12
    assert await log.put(FenceRecord(epoch=2)) == 204
    refused(await wire.propose(wire.good(2)), 409, "sdcp-stale-epoch")
    refused(await wire.output(), 409, "sdcp-stale-epoch")
    assert await log.records() == [*records, FenceRecord(epoch=2)]
