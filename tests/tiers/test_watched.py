"""Whether a router's stores work: told as they are used, and tried while they do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import lmdb
import pytest

from sdcpd.protocol.commit_log import CommitRecord, FenceRecord, encode_record
from tests.kit.full_logs import BIG, filled
from tests.kit.records import MemoryRecords
from tiers.api import Corrupt, LogAppend, Mismatch, StoreFailed, StoreFull, TierError
from tiers.build import open_logs
from tiers.lmdb_log import LmdbLogStore
from tiers.watched import WatchedLogs, WatchedRecords


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LmdbLogStore]:
    made = open_logs(tmp_path, 300_000)
    yield made
    await made.aclose()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is told; "" is that all is well."""
    monkeypatch.setattr("tiers.watched.TRY_S", 0.01)
    return []


def watching(store: LmdbLogStore, told: list[str]) -> WatchedLogs:
    return WatchedLogs(store, failed=told.append, worked=lambda: told.append(""))


@asynccontextmanager
async def running(watched: WatchedLogs | WatchedRecords) -> AsyncIterator[None]:
    task = asyncio.ensure_future(watched.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def round_of(tokens: int) -> bytes:
    emitted = tuple(range(tokens))
    return encode_record(
        CommitRecord(epoch=1, round=1, emitted=emitted, committed=tokens, digest=bytes(32))
    )


async def test_a_store_without_room_is_told_until_it_has_some(
    store: LmdbLogStore, told: list[str]
) -> None:
    """Though nobody writes any more; what is tried leaves nothing behind."""
    logs = watching(store, told)
    await filled(store)
    with pytest.raises(StoreFull):
        await logs.append("a", round_of(3), offset=None, if_match=None, create=True)
    assert told == ["the commit logs have no room for another record"]
    await logs.head(BIG)
    async with running(logs):
        await until(lambda: len(told) > 2)
        assert "" not in told, "what is read says nothing of room"
        await store.delete(BIG)
        await until(lambda: told[-1] == "")
        count = len(told)
        await logs.append("a", round_of(3), offset=None, if_match=None, create=True)
        assert len(told) == count, "well is told once"
    assert [one.log_id for one in await store.entries(count_max=10)] == ["a"]


async def test_it_is_tried_with_as_much_as_had_no_room(
    store: LmdbLogStore, told: list[str]
) -> None:
    logs, long = watching(store, told), round_of(4000)
    tag = await logs.append("small", encode_record(FenceRecord(epoch=1)), offset=None, if_match=None, create=True)  # fmt: skip
    number = 0
    with pytest.raises(StoreFull):
        while True:
            number += 1
            await logs.append(f"l{number}", long, offset=None, if_match=None, create=True)
    told.clear()
    async with running(logs):
        await until(lambda: len(told) > 1)
        assert "" not in told
    await logs.append("small", encode_record(FenceRecord(epoch=2)), offset=None, if_match=tag)


async def test_a_group_tells_of_each(store: LmdbLogStore, told: list[str]) -> None:
    logs = watching(store, told)
    await filled(store)
    item = LogAppend(log_id="a", record_bytes=round_of(2), create=True)
    (outcome,) = await logs.append_many([item])
    assert isinstance(outcome, StoreFull) and len(told) == 1
    await store.delete(BIG)
    (outcome,) = await logs.append_many([item])
    assert isinstance(outcome, str) and told[1:] == [""]


async def test_refusals_and_one_damaged_log_are_no_trouble_of_the_store(
    store: LmdbLogStore, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = watching(store, told)
    with pytest.raises(Mismatch):
        await logs.append("a", round_of(3), offset=None, if_match='"x"')

    def damaged(_: str) -> None:
        raise Corrupt("the log is damaged")

    monkeypatch.setattr(store._rows, "read", damaged)
    with pytest.raises(Corrupt):
        await logs.read("a")
    assert told == []


async def test_a_store_that_cannot_be_read_is_told_until_it_can(
    store: LmdbLogStore, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = watching(store, told)

    def broken(_: str) -> None:
        raise lmdb.DiskError("Input/output error")

    async with running(logs):
        with monkeypatch.context() as patch:
            patch.setattr(store._rows, "head", broken)
            with pytest.raises(StoreFailed):
                await logs.head("a")
            await until(lambda: len(told) > 1)
            assert set(told) == {"the log cannot be read: Input/output error"}
        await until(lambda: told[-1] == "")


async def test_records_that_cannot_be_kept_are_told_until_they_can(told: list[str]) -> None:
    """With neither a session begun nor anything left behind."""
    kept = MemoryRecords()
    records = WatchedRecords(kept, failed=told.append, worked=lambda: told.append(""))
    kept.failing = True
    async with running(records):
        with pytest.raises(TierError):
            await records.put(b"a", b"x")
        await until(lambda: len(told) > 2)
        assert set(told) == {"the disk is full"}
        kept.failing = False
        await until(lambda: told[-1] == "")
    await records.put(b"a", b"x")
    assert kept.content == {b"a": b"x"} == records.all()
    kept.content[b"left"] = b""
    assert records.all() == {b"a": b"x"}, "a try that was cut off is no session"
    del kept.content[b"left"]
    assert await records.keys_of_all() == {b"a"}
