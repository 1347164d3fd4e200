"""Commit logs in etcd, where they differ from those on a disk: several routers, lost answers.

What both stores have in common is in test_log_store.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest

from sdcpd.protocol.commit_log import CommitRecord, FenceRecord, encode_record
from tests.kit.etcd import EtcdCluster, revision_of
from tests.kit.relay import Relay
from tiers.api import (
    Corrupt,
    Fenced,
    LogAppend,
    LogError,
    LogStore,
    Mismatch,
    NotExtending,
    StaleEpoch,
    StoreFailed,
    StoreFull,
)

pytest.importorskip("aetcd", reason="the extra etcd is not installed")

from aetcd.rpc import rpc_pb2 as pb

from tests.kit.etcd_client import ScriptedClient, scripted_store
from tiers.etcd_client import EtcdSettings
from tiers.etcd_errors import NoSpace
from tiers.etcd_log import EtcdLogStore
from tiers.etcd_reader import FIRST_PAGE_ROWS
from tiers.etcd_requests import GROUP_MAX, ROW_BYTES_MAX, Keys

LOG = "AAECAwQFBgcICQoLDA0ODw"
Scripted = tuple[EtcdLogStore, ScriptedClient]


def commit(epoch: int, round_number: int = 1) -> bytes:
    return encode_record(
        CommitRecord(epoch=epoch, round=round_number, emitted=(7, 8), committed=2, digest=bytes(32))
    )


def fence(epoch: int) -> bytes:
    return encode_record(FenceRecord(epoch=epoch))


@pytest.fixture
def site(etcd: EtcdCluster) -> EtcdSettings:
    """A prefix of the test's own."""
    return EtcdSettings(endpoints=etcd.endpoints, prefix=f"t/{uuid4().hex}", timeout_s=5.0)


@pytest.fixture
async def routers(site: EtcdSettings) -> AsyncIterator[tuple[EtcdLogStore, EtcdLogStore]]:
    """The stores of two routers that share their logs."""
    first, second = await EtcdLogStore.open(site), await EtcdLogStore.open(site)
    yield first, second
    await first.aclose()
    await second.aclose()


@pytest.fixture
async def scripted(site: EtcdSettings) -> AsyncIterator[Scripted]:
    store, client = scripted_store(site)
    yield store, client
    await store.aclose()


async def created(logs: LogStore, data: bytes, log_id: str = LOG) -> str:
    return await logs.append(log_id, data, offset=None, if_match=None, create=True)


async def data_of(logs: LogStore, log_id: str = LOG) -> bytes:
    content = await logs.read(log_id)
    assert content is not None
    return content.data


# ---- several routers


async def test_d_z8_routers_share_logs(routers: tuple[EtcdLogStore, EtcdLogStore]) -> None:
    """A tag from one holds at the other, which remembers an older state of the log."""
    one, two = routers
    first = await created(one, commit(1))
    second = await two.append(LOG, commit(1, 2), offset=None, if_match=first)
    with pytest.raises(Mismatch) as caught:
        await one.append(LOG, commit(1, 3), offset=None, if_match=first)
    assert caught.value.etag == second
    third = await one.append(LOG, commit(1, 3), offset=len(commit(1)) * 2, if_match=second)
    content = await two.read(LOG)
    assert content is not None and content.etag == third
    assert content.data == commit(1) + commit(1, 2) + commit(1, 3)


async def test_r_6_8_6_a_fence_at_one_router_stops_writers_at_the_other(
    routers: tuple[EtcdLogStore, EtcdLogStore],
) -> None:
    """Fenced comes before the tag: who has lost authority is told so, whatever it has read."""
    one, two = routers
    old = await created(one, commit(1))
    new = await two.append(LOG, fence(2), offset=None, if_match=old)
    for tag in (old, new):
        with pytest.raises(Fenced) as caught:
            await one.append(LOG, commit(1, 2), offset=None, if_match=tag)
        assert caught.value.highest_epoch == 2
    with pytest.raises(Fenced):
        await one.append(LOG, commit(1, 2), offset=None, if_match=None, create=True)
    with pytest.raises(Fenced):
        await one.put(LOG, commit(1) + commit(1, 2), if_match=old, if_none_match=False)
    with pytest.raises(Mismatch):
        await one.append(LOG, commit(2, 2), offset=None, if_match=old)
    with pytest.raises(StaleEpoch):
        await one.append(LOG, fence(2), offset=None, if_match=new)
    assert await data_of(one) == commit(1) + fence(2)


async def test_d_m7_etcd_itself_compares_the_fence(scripted: Scripted) -> None:
    """With the head unchanged, the fence alone refuses what is below it."""
    logs, client = scripted
    tag = await created(logs, commit(1))
    keys = Keys(client._prefix.decode(), LOG)
    raised = pb.RequestOp(request_put=pb.PutRequest(key=keys.fence, value=(5).to_bytes(8, "big")))
    await client.txn(pb.TxnRequest(success=[raised]))
    for octets, error in ((commit(4), Fenced), (fence(5), StaleEpoch)):
        with pytest.raises(error) as caught:
            await logs.append(LOG, octets, offset=None, if_match=tag)
        assert caught.value.highest_epoch == 5
    head = await logs.head(LOG)
    assert head is not None and (head.etag, head.highest_epoch) == (tag, 5)
    await logs.append(LOG, commit(5), offset=None, if_match=tag)
    assert await data_of(logs) == commit(1) + commit(5)


async def test_one_racer_of_two_routers_wins(routers: tuple[EtcdLogStore, EtcdLogStore]) -> None:
    tag: str | None = None
    for _ in range(5):
        outcomes = await asyncio.gather(
            *(
                router.append(LOG, commit(1, n), offset=None, if_match=tag, create=tag is None)
                for n in range(8)
                for router in routers
            ),
            return_exceptions=True,
        )
        (tag,) = [outcome for outcome in outcomes if isinstance(outcome, str)]
        assert sum(isinstance(outcome, Mismatch) for outcome in outcomes) == 15
    head = await routers[0].head(LOG)
    assert head is not None and head.size_bytes == 5 * len(commit(1))


# ---- groups


async def test_d_z3_what_waits_shares_transactions(site: EtcdSettings) -> None:
    logs = await EtcdLogStore.open(site)
    names = [f"log-{number}" for number in range(GROUP_MAX * 2)]
    before = await revision_of(logs)
    tags = await asyncio.gather(*(created(logs, commit(1), name) for name in names))
    assert await revision_of(logs) - before <= 4
    items = [
        LogAppend(log_id=name, record_bytes=commit(1, 2), if_match=tag)
        for name, tag in zip(names, tags, strict=True)
    ]
    outcomes = await logs.append_many(items)
    assert all(isinstance(outcome, str) for outcome in outcomes)
    assert await data_of(logs, names[-1]) == commit(1) + commit(1, 2)
    await logs.aclose()


async def test_groups_are_bounded_by_octets(site: EtcdSettings) -> None:
    """Eight appends of most of a request's size each take several requests."""
    logs = await EtcdLogStore.open(site)
    octets = commit(1) * (ROW_BYTES_MAX // len(commit(1)) - 1)
    await asyncio.gather(*(created(logs, octets, f"log-{number}") for number in range(8)))
    assert [await data_of(logs, f"log-{n}") == octets for n in range(8)] == [True] * 8
    await logs.aclose()


async def test_what_comes_twice_for_a_log_keeps_its_order(site: EtcdSettings) -> None:
    logs = await EtcdLogStore.open(site)
    outcomes = await asyncio.gather(
        created(logs, commit(1)),
        logs.delete(LOG),
        created(logs, commit(2)),
        created(logs, commit(3)),
        return_exceptions=True,
    )
    assert isinstance(outcomes[0], str) and isinstance(outcomes[2], str)
    assert isinstance(outcomes[3], Mismatch) and outcomes[3].etag == outcomes[2]
    assert await data_of(logs) == commit(2)
    await logs.aclose()


# ---- lost answers


@pytest.mark.parametrize(
    "steps",
    [
        ("done_and_lost",),
        ("lost",),
        ("lost", "lost", "lost"),
        ("lost", "done_and_lost"),
        ("late", "behind_the_late"),
        ("late", "lost", "behind_the_late"),
    ],
    ids="-".join,
)
@pytest.mark.parametrize("create", [False, True])
async def test_a_lost_answer_is_found_out(
    scripted: Scripted, steps: tuple[str, ...], create: bool
) -> None:
    """Whatever became of the first request, the record is there once."""
    logs, client = scripted
    tag = None if create else await created(logs, commit(1))
    client.script = [getattr(client, step) for step in steps]
    new = await logs.append(LOG, commit(1, 2), offset=None, if_match=tag, create=create)
    assert not client.script
    content = await logs.read(LOG)
    assert content is not None and content.etag == new
    assert content.data == (b"" if create else commit(1)) + commit(1, 2)
    await logs.append(LOG, commit(1, 3), offset=None, if_match=new)


@pytest.mark.parametrize(("between", "error"), [(commit(1, 9), Mismatch), (fence(2), Fenced)])
@pytest.mark.parametrize("step", ["lost", "late"])
async def test_after_a_lost_answer_another_writer_may_have_won(
    scripted: Scripted, site: EtcdSettings, step: str, between: bytes, error: type[LogError]
) -> None:
    logs, client = scripted
    other = await EtcdLogStore.open(site)
    tag = await created(logs, commit(1))

    async def overtaken(request: object) -> object:
        await other.append(LOG, between, offset=None, if_match=tag)
        return await getattr(client, step)(request)

    client.script = [overtaken]
    with pytest.raises(error):
        await logs.append(LOG, commit(1, 2), offset=None, if_match=tag)
    for held in client.held:
        await client.txn(held)
    assert await data_of(other) == commit(1) + between
    await other.aclose()


@pytest.mark.parametrize("step", ["lost", "late", "done_and_lost"])
async def test_dm9_of_two_equal_fences_one_is_refused_though_an_answer_was_lost(
    scripted: Scripted, site: EtcdSettings, step: str
) -> None:
    """Their octets are the same, so octets alone don't tell whose is in the log."""
    logs, client = scripted
    other = await EtcdLogStore.open(site)
    tag = await created(logs, commit(1))
    others: list[str | LogError] = []

    async def race(request: object) -> object:
        try:
            return await getattr(client, step)(request)
        finally:
            fenced = LogAppend(log_id=LOG, record_bytes=fence(2), if_match=tag)
            others.extend(await other.append_many([fenced]))

    client.script = [race]
    outcomes = await logs.append_many([LogAppend(log_id=LOG, record_bytes=fence(2), if_match=tag)])
    won = [isinstance(outcome, str) for outcome in (outcomes[0], others[0])]
    assert won == ([True, False] if step == "done_and_lost" else [False, True])
    assert await data_of(logs) == commit(1) + fence(2)
    await other.aclose()


async def test_a_record_that_others_followed_was_written(
    scripted: Scripted, site: EtcdSettings
) -> None:
    """Done, the answer lost, and the log longer by another's record: told as done, by its octets."""
    logs, client = scripted
    other = await EtcdLogStore.open(site)
    tag = await created(logs, commit(1))

    async def followed(request: object) -> object:
        await client.through(request)
        head = await other.head(LOG)
        assert head is not None
        await other.append(LOG, commit(1, 3), offset=None, if_match=head.etag)
        return await client.lost(request)

    client.script = [followed]
    mine = await logs.append(LOG, commit(1, 2), offset=None, if_match=tag)
    with pytest.raises(Mismatch):
        await logs.append(LOG, commit(1, 4), offset=None, if_match=mine)
    assert await data_of(logs) == commit(1) + commit(1, 2) + commit(1, 3)
    await other.aclose()


async def test_in_a_group_each_finds_out_for_itself(scripted: Scripted) -> None:
    logs, client = scripted
    names = [f"log-{number}" for number in range(6)]
    tags = [await created(logs, fence(2), name) for name in names]
    client.script = [client.done_and_lost]
    octets = [commit(2), commit(1), commit(2), b"\xff", commit(2), fence(3)]
    outcomes = await logs.append_many(
        [
            LogAppend(log_id=name, record_bytes=new, if_match='"old"' if number == 2 else tag)
            for number, (name, tag, new) in enumerate(zip(names, tags, octets, strict=True))
        ]
    )
    kinds = [type(outcome).__name__ for outcome in outcomes]
    assert kinds == ["str", "Fenced", "Mismatch", "BadRecords", "str", "str"]
    taken = [await data_of(logs, name) for name in names]
    assert taken == [fence(2) + new if n in (0, 4, 5) else fence(2) for n, new in enumerate(octets)]


@pytest.mark.slow
async def test_what_cannot_be_found_out_fails_in_bounded_time(etcd: EtcdCluster) -> None:
    settings = EtcdSettings(endpoints=etcd.endpoints, prefix=f"t/{uuid4().hex}", timeout_s=0.1)
    logs, client = scripted_store(settings)
    tag = await created(logs, commit(1))
    client.script = [client.lost] * 1000
    begun = time.monotonic()
    with pytest.raises(StoreFailed, match="the request was lost"):
        await logs.append(LOG, commit(1, 2), offset=None, if_match=tag)
    assert time.monotonic() - begun < 5
    client.script = [client.lost] * 1000
    many = (logs.append(LOG, commit(1, 2), offset=None, if_match=tag) for _ in range(20))
    outcomes = await asyncio.gather(*many, return_exceptions=True)
    assert all(isinstance(outcome, StoreFailed) for outcome in outcomes)
    assert time.monotonic() - begun < 5, "those behind them don't wait each for the one before"
    client.script = []
    await logs.append(LOG, commit(1, 2), offset=None, if_match=tag)
    await logs.aclose()


@pytest.mark.parametrize("done", [True, False])
async def test_a_full_database_is_told_only_where_nothing_was_written(
    scripted: Scripted, done: bool
) -> None:
    """etcd refuses the write that reaches its quota, and has done it."""
    logs, client = scripted
    tag = await created(logs, commit(1))

    async def full(request: object) -> object:
        if done:
            await client.through(request)
        raise NoSpace("full")

    client.script = [full]
    write = logs.append(LOG, commit(1, 2), offset=None, if_match=tag)
    if done:
        await write
    else:
        with pytest.raises(StoreFull):
            await write
    assert await data_of(logs) == commit(1) + (commit(1, 2) if done else b"")


async def test_a_connection_that_breaks_before_the_answer(etcd: EtcdCluster) -> None:
    relay = Relay(etcd.members[0].port)
    await relay.start()
    logs = await EtcdLogStore.open(
        EtcdSettings(endpoints=(relay.address,), prefix=f"t/{uuid4().hex}", timeout_s=5.0)
    )
    tag = await created(logs, commit(1))
    for number in range(2, 6):
        relay.lose_answers()
        tag = await logs.append(LOG, commit(1, number), offset=None, if_match=tag)
        assert relay.lost == number - 1
    assert await data_of(logs) == b"".join(commit(1, number) for number in range(1, 6))
    await logs.aclose()
    await relay.aclose()


# ---- long logs


async def test_long_logs_are_read_in_pages(scripted: Scripted) -> None:
    logs, client = scripted
    tag, count = await created(logs, commit(1)), FIRST_PAGE_ROWS + 50
    for number in range(2, count + 1):
        tag = await logs.append(LOG, commit(1, number), offset=None, if_match=tag)
    pages = 0

    async def appended() -> None:
        nonlocal pages
        pages += 1
        await logs.append(LOG, commit(1, 9), offset=None, if_match=tag)

    client.before_page = appended
    content = await logs.read(LOG)
    assert content is not None and pages == 1
    assert (content.data, content.etag) == (
        b"".join(commit(1, number) for number in range(1, count + 1)),
        tag,
    ), "as it was when the first page was read"

    async def compacted() -> None:
        now = await revision_of(logs)
        await client._endpoints[0].stub().Compact(pb.CompactionRequest(revision=now))

    await logs.append(LOG, commit(1, 10), offset=None, if_match=(await logs.head(LOG)).etag)  # type: ignore[union-attr]
    client.before_page = compacted
    await data_of(logs)


LONG = commit(1) * (3 * ROW_BYTES_MAX // len(commit(1)))


@pytest.mark.parametrize("old", [b"", commit(1)])
async def test_large_content_appears_at_once(scripted: Scripted, old: bytes) -> None:
    logs, client = scripted
    tag = await created(logs, old) if old else None
    seen = []

    async def looked_at(request: object) -> object:
        answer = await client.through(request)
        content = await logs.read(LOG)
        seen.append(content and content.data)
        return answer

    client.script = [looked_at, client.lost, looked_at, client.done_and_lost, client.done_and_lost]
    tag = await logs.put(LOG, old + LONG, if_match=tag, if_none_match=tag is None)
    assert not client.script and set(seen) <= {old or None}
    content = await logs.read(LOG)
    assert content is not None and (content.data == old + LONG, content.etag) == (True, tag)
    await logs.append(LOG, commit(1), offset=len(old + LONG), if_match=tag)
    assert await data_of(logs) == old + LONG + commit(1)


@pytest.mark.parametrize("at", [1, 2])
async def test_a_record_that_comes_during_a_large_put_wins(
    scripted: Scripted, site: EtcdSettings, at: int
) -> None:
    logs, client = scripted
    other = await EtcdLogStore.open(site)
    tag = await created(logs, commit(1))

    async def overtaken(request: object) -> object:
        await other.append(LOG, fence(2), offset=None, if_match=tag)
        return await client.through(request)

    client.script = [client.through] * at + [overtaken]
    with pytest.raises((StoreFailed, Fenced)):
        await logs.put(LOG, commit(1) + LONG, if_match=tag, if_none_match=False)
    assert await data_of(other) == commit(1) + fence(2)
    await other.delete(LOG)
    assert await logs.read(LOG) is None
    await other.aclose()


async def test_of_two_large_puts_at_once_one_is_there(
    routers: tuple[EtcdLogStore, EtcdLogStore],
) -> None:
    contents = [commit(1, 1) + LONG, commit(1, 2) + LONG]
    outcomes = await asyncio.gather(
        *(
            router.put(LOG, data, if_match=None, if_none_match=True)
            for router, data in zip(routers, contents, strict=True)
        ),
        return_exceptions=True,
    )
    winners = [n for n, outcome in enumerate(outcomes) if isinstance(outcome, str)]
    assert len(winners) == 1
    assert isinstance(outcomes[1 - winners[0]], (Mismatch, StoreFailed))
    assert await data_of(routers[0]) == contents[winners[0]]


async def test_a_large_put_is_refused_before_it_is_sent(scripted: Scripted) -> None:
    logs, client = scripted
    tag = await created(logs, commit(1) + fence(2))
    for data, error in (
        (commit(1) + fence(2) + LONG, Fenced),
        (LONG, NotExtending),
    ):
        with pytest.raises(error):
            await logs.put(LOG, data, if_match=tag, if_none_match=False)
    with pytest.raises(Mismatch):
        await logs.put(LOG, commit(3) + LONG + commit(4), if_match='"x"', if_none_match=False)
    keys = Keys(client._prefix.decode(), LOG)
    found = await client.range(pb.RangeRequest(key=keys.all, range_end=keys.rows_end))
    assert {bytes(one.key) for one in found.kvs} == {keys.head, keys.fence, keys.row(0)}


@pytest.mark.parametrize(
    ("key", "value"),
    [("head", b"\x55"), ("fence", b"\x55"), ("row", b"\x55"), ("row", None)],
)
async def test_d_m6_a_damaged_log_is_told_and_never_overwritten(
    scripted: Scripted, key: str, value: bytes | None
) -> None:
    logs, client = scripted
    tag = await created(logs, commit(1) + commit(1, 2))
    await created(logs, commit(1), "other")
    keys = Keys(client._prefix.decode(), LOG)
    name = keys.row(0) if key == "row" else getattr(keys, key)
    op = (
        pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=name))
        if value is None
        else pb.RequestOp(request_put=pb.PutRequest(key=name, value=value))
    )
    await client.txn(pb.TxnRequest(success=[op]))
    with pytest.raises(Corrupt):
        await logs.read(LOG)
    with pytest.raises(Corrupt):
        await logs.put(LOG, commit(1) * 3, if_match=tag, if_none_match=False)
    if key != "row":
        with pytest.raises(Corrupt):
            await logs.append(LOG, commit(1), offset=None, if_match=tag)
    assert await data_of(logs, "other") == commit(1)
    named = {entry.log_id: entry.etag for entry in await logs.entries(count_max=9)}
    assert named["other"] and (named[LOG] is None or key in ("row", "fence"))
