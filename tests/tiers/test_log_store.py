"""The log store: Section 6.8, D-M5 to D-M9, R-6.8-2, R-6.8-6, R-6.8-11."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from uuid import uuid4

import lmdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdcpd.protocol.commit_log import (
    CommitRecord,
    FenceRecord,
    Record,
    decode_log,
    encode_record,
    read_log,
)
from tests.kit.etcd import EtcdCluster, revision_of
from tiers.api import (
    BadRecords,
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
    TierError,
)
from tiers.build import etcd_settings, open_etcd_logs, open_logs
from tiers.lmdb_log import LmdbLogStore

LOG = "AAECAwQFBgcICQoLDA0ODw"
CASES = json.loads((Path(__file__).parents[1] / "vectors.json").read_text())["commit_log"]["cases"]


def commit(epoch: int, round_number: int = 1) -> bytes:
    return encode_record(
        CommitRecord(epoch=epoch, round=round_number, emitted=(7, 8), committed=2, digest=bytes(32))
    )


def fence(epoch: int) -> bytes:
    return encode_record(FenceRecord(epoch=epoch))


OpenLogs = Callable[[], Awaitable[LogStore]]
"""Opens the same logs again, once those before are closed."""


@pytest.fixture(params=["lmdb", "etcd"])
def open_again(request: pytest.FixtureRequest, tmp_path: Path) -> OpenLogs:
    """Every store is held to the same contract."""
    if request.param == "etcd":
        etcd: EtcdCluster = request.getfixturevalue("etcd")
        site = etcd_settings(endpoints=etcd.endpoints, prefix=f"t/{uuid4().hex}", timeout_s=5.0)
        return partial(open_etcd_logs, site)

    async def opened() -> LogStore:
        return open_logs(tmp_path / "logs", 1 << 20)

    return opened


@pytest.fixture
async def logs(open_again: OpenLogs) -> AsyncIterator[LogStore]:
    store = await open_again()
    yield store
    await store.aclose()


@pytest.fixture
async def lmdb_logs(tmp_path: Path) -> AsyncIterator[LmdbLogStore]:
    store = open_logs(tmp_path / "logs", 1 << 20)
    yield store
    await store.aclose()


async def transactions(logs: LogStore) -> int:
    """How many have been written so far."""
    if isinstance(logs, LmdbLogStore):
        return int(logs._env.info()["last_txnid"])
    return await revision_of(logs)


async def created(logs: LogStore, data: bytes, log_id: str = LOG) -> str:
    return await logs.put(log_id, data, if_match=None, if_none_match=True)


async def test_dm6_whole_puts_extend_and_read_back(logs: LogStore) -> None:
    assert await logs.read(LOG) is None and await logs.head(LOG) is None
    first = await created(logs, commit(1))
    second = await logs.put(LOG, commit(1) + commit(1, 2), if_match=first, if_none_match=False)
    assert first != second
    content, head = await logs.read(LOG), await logs.head(LOG)
    assert content is not None and head is not None
    assert (content.data, content.etag) == (commit(1) + commit(1, 2), second)
    assert (head.etag, head.size_bytes, head.highest_epoch) == (second, len(content.data), 1)
    same = await logs.put(LOG, content.data, if_match=second, if_none_match=False)
    assert same == second


async def test_r_6_8_2_an_old_tag_fails_and_changes_nothing(logs: LogStore) -> None:
    first = await created(logs, commit(1))
    second = await logs.append(LOG, commit(1, 2), offset=None, if_match=first)
    for refused in (
        logs.append(LOG, commit(1, 3), offset=None, if_match=first),
        logs.put(LOG, commit(1) + commit(1, 3), if_match=first, if_none_match=False),
        created(logs, commit(1)),
        logs.append(LOG, commit(1, 3), offset=None, if_match=None, create=True),
    ):
        with pytest.raises(Mismatch) as caught:
            await refused
        assert caught.value.etag == second
    content = await logs.read(LOG)
    assert content is not None and content.data == commit(1) + commit(1, 2)


async def test_dm7_the_missing_log_matches_no_tag(logs: LogStore) -> None:
    with pytest.raises(Mismatch) as caught:
        await logs.append(LOG, commit(1), offset=None, if_match='"0-0"')
    assert caught.value.etag is None and await logs.read(LOG) is None


@pytest.mark.parametrize("new", [b"", commit(1, 2), commit(2) + commit(1), commit(1)[:-1]])
async def test_dm7_new_content_extends_the_old(logs: LogStore, new: bytes) -> None:
    tag = await created(logs, commit(1))
    with pytest.raises(NotExtending):
        await logs.put(LOG, new, if_match=tag, if_none_match=False)


@pytest.mark.parametrize("offset", [0, 1, len(commit(1)) - 1, len(commit(1)) + 1, 2**63])
async def test_dz3_an_append_starts_at_the_end(logs: LogStore, offset: int) -> None:
    tag = await created(logs, commit(1))
    with pytest.raises(NotExtending):
        await logs.append(LOG, commit(1, 2), offset=offset, if_match=tag)
    await logs.append(LOG, commit(1, 2), offset=len(commit(1)), if_match=tag)


@pytest.mark.parametrize("octets", [b"\xff", b"\xa0", commit(1)[:-1], commit(1) + b"\x01"])
async def test_dm6_what_is_no_record_is_refused(logs: LogStore, octets: bytes) -> None:
    tag = await created(logs, commit(1))
    for refused in (
        logs.append(LOG, octets, offset=None, if_match=tag),
        logs.put(LOG, commit(1) + octets, if_match=tag, if_none_match=False),
    ):
        with pytest.raises(BadRecords):
            await refused


FENCE_MATRIX = [
    # highest epoch in the log is 3
    ([commit(3)], None),
    ([commit(4)], None),
    ([fence(4)], None),
    ([fence(4), commit(4)], None),
    ([commit(2)], Fenced),
    ([commit(0)], Fenced),
    ([fence(3)], StaleEpoch),
    ([fence(2)], StaleEpoch),
    ([fence(4), commit(3)], Fenced),
    ([commit(4), fence(4)], StaleEpoch),
    ([fence(4), fence(4)], StaleEpoch),
    ([commit(2**64 - 1)], None),
    ([fence(2**64 - 1), fence(2**64 - 1)], StaleEpoch),
]


@pytest.mark.parametrize("way", ["append", "put"])
@pytest.mark.parametrize("before", [[commit(3)], [commit(1), fence(3)], [fence(3), commit(3)]])
async def test_r_6_8_6_r_6_8_11_fence_matrix(logs: LogStore, before: list[bytes], way: str) -> None:
    """D-M7, D-M9: with the right tag, a lower epoch and an equal fence are refused."""
    old = b"".join(before)
    for number, (new, error) in enumerate(FENCE_MATRIX):
        name, octets = f"log-{number}", b"".join(new)
        tag = await created(logs, old, name)
        write = (
            logs.append(name, octets, offset=len(old), if_match=tag)
            if way == "append"
            else logs.put(name, old + octets, if_match=tag, if_none_match=False)
        )
        if error is None:
            await write
        else:
            with pytest.raises(error) as caught:
                await write
            assert caught.type is error and caught.value.highest_epoch >= 3
        content = await logs.read(name)
        assert content is not None and content.data == (old + octets if error is None else old)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
async def test_dm8_vectors_are_taken_up_to_their_first_void_record(
    logs: LogStore, case: dict[str, str]
) -> None:
    """What an enforcing store takes is what a reader counts: no record in it is void."""
    tag: str | None = None
    taken: list[Record] = []
    for record in decode_log(bytes.fromhex(case["object"])):
        octets = encode_record(record)
        try:
            tag = await logs.append(LOG, octets, offset=None, if_match=tag, create=tag is None)
        except StaleEpoch:
            continue
        taken.append(record)
    content = await logs.read(LOG)
    stored = decode_log(content.data) if content else []
    assert stored == taken
    counted = read_log(decode_log(bytes.fromhex(case["object"])))
    assert read_log(stored).commits == counted.commits
    assert read_log(stored).highest_epoch == counted.highest_epoch


async def test_group_commit_of_64_has_64_outcomes(logs: LogStore) -> None:
    """Refused and accepted appends share a transaction and nothing else."""
    names = [f"log-{number}" for number in range(64)]
    tags = [await created(logs, fence(2), name) for name in names]

    def item(number: int) -> LogAppend:
        kind = number % 4
        octets = (commit(2), commit(1), commit(3), b"\xff")[kind]
        tag = '"stale"' if kind == 2 else tags[number]
        return LogAppend(log_id=names[number], record_bytes=octets, if_match=tag)

    async def one(number: int) -> str | LogError:
        item_ = item(number)
        try:
            return await logs.append(
                item_.log_id, item_.record_bytes, offset=None, if_match=item_.if_match
            )
        except LogError as error:
            return error

    before = await transactions(logs)
    alone = await asyncio.gather(*(one(number) for number in range(32)))
    group = await logs.append_many([item(number) for number in range(32, 64)])
    assert await transactions(logs) - before <= 6, "appends that wait share a flush"
    for number, outcome in enumerate([*alone, *group]):
        expected = (str, Fenced, Mismatch, BadRecords)[number % 4]
        assert type(outcome) is expected
        content = await logs.read(names[number])
        assert content is not None
        assert content.data == fence(2) + (commit(2) if number % 4 == 0 else b"")
        assert (content.etag == outcome) is (number % 4 == 0)


async def test_one_racer_of_sixteen_wins(logs: LogStore) -> None:
    async def race(tag: str | None, number: int) -> bool:
        try:
            await logs.append(LOG, commit(1, number), offset=None, if_match=tag, create=tag is None)
        except Mismatch:
            return False
        return True

    assert sum(await asyncio.gather(*(race(None, n) for n in range(16)))) == 1
    head = await logs.head(LOG)
    assert head is not None
    assert sum(await asyncio.gather(*(race(head.etag, n) for n in range(16)))) == 1
    content = await logs.read(LOG)
    assert content is not None and len(decode_log(content.data)) == 2


async def test_of_two_routers_one_fences(logs: LogStore) -> None:
    """D-M9: equal epochs, one of them with a fresh tag; the second is refused both ways."""
    tag = await created(logs, commit(1))
    outcomes = await asyncio.gather(
        *(logs.append(LOG, fence(2), offset=None, if_match=tag) for _ in range(2)),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [str, Mismatch]
    winner = outcomes[0]
    assert isinstance(winner, str)
    with pytest.raises(StaleEpoch):
        await logs.append(LOG, fence(2), offset=None, if_match=winner)


async def test_a_restart_keeps_logs_tags_and_fences(open_again: OpenLogs) -> None:
    logs = await open_again()
    tag = await created(logs, commit(1) + fence(5))
    await logs.aclose()
    logs = await open_again()
    with pytest.raises(Fenced):
        await logs.append(LOG, commit(4), offset=None, if_match=tag)
    await logs.append(LOG, commit(5, 2), offset=None, if_match=tag)
    await logs.delete(LOG)
    await logs.delete(LOG)
    assert await logs.read(LOG) is None
    await logs.aclose()


async def test_logs_do_not_mix(logs: LogStore) -> None:
    for name in ("a", "a-", "a0", "A", "aa"):
        await created(logs, commit(1, ord(name[-1])), name)
    await logs.delete("a")
    for name in ("a-", "a0", "A", "aa"):
        content = await logs.read(name)
        assert content is not None and content.data == commit(1, ord(name[-1]))


async def test_logs_are_listed_in_parts(logs: LogStore) -> None:
    """Each once, with its tag, whatever its name and however long it is."""
    names = ["a", "a-", "a0", "A", "aa", "-", "--", "_", "0", "z" * 64, LOG]
    items = [LogAppend(log_id=name, record_bytes=commit(1), create=True) for name in names]
    tags = dict(zip(names, await logs.append_many(items), strict=True))
    for number in range(2, 5):
        tags["a"] = await logs.append("a", commit(1, number), offset=None, if_match=tags["a"])  # type: ignore[arg-type]
    for count_max in (1, 4, 100):
        after, found = "", []
        while page := await logs.entries(after=after, count_max=count_max):
            assert len(page) <= count_max
            found += page
            after = page[-1].log_id
        assert sorted((one.log_id, one.etag) for one in found) == sorted(tags.items())


async def test_a_log_is_deleted_only_as_it_was_seen(logs: LogStore) -> None:
    first = await created(logs, commit(1))
    second = await logs.append(LOG, commit(1, 2), offset=None, if_match=first)
    with pytest.raises(Mismatch) as caught:
        await logs.delete(LOG, if_match=first)
    assert caught.value.etag == second and await logs.read(LOG) is not None
    await logs.delete(LOG, if_match=second)
    assert await logs.read(LOG) is None and not await logs.entries(count_max=9)
    with pytest.raises(Mismatch) as caught:
        await logs.delete(LOG, if_match=second)
    assert caught.value.etag is None
    assert await created(logs, commit(1)) == first


async def test_a_full_map_refuses_and_keeps_what_it_has(tmp_path: Path) -> None:
    """Logs are never evicted; others in the same group still get what room there is."""
    logs = open_logs(tmp_path, 128 * 1024)
    tag = await created(logs, commit(1))
    kept = 1
    with pytest.raises(StoreFull):
        while True:
            tag = await logs.append(LOG, commit(1, kept) * 40, offset=None, if_match=tag)
            kept += 40
    large = LogAppend(log_id="large", record_bytes=commit(1) * 2000, create=True)
    small = LogAppend(log_id=LOG, record_bytes=fence(2), if_match='"old"')
    outcomes = await logs.append_many([large, small])
    assert [type(outcome) for outcome in outcomes] == [StoreFull, Mismatch]
    content = await logs.read(LOG)
    assert content is not None and content.etag == tag and len(decode_log(content.data)) == kept
    await logs.delete(LOG)
    await created(logs, commit(1))
    await logs.aclose()


@pytest.mark.parametrize("table", ["head", "records"])
async def test_dm6_a_damaged_log_is_told_and_never_overwritten(tmp_path: Path, table: str) -> None:
    logs = open_logs(tmp_path, 1 << 20)
    tag = await created(logs, commit(1) + commit(1, 2))
    await created(logs, commit(1), "other")
    await logs.aclose()
    with lmdb.open(str(tmp_path), max_dbs=2, map_size=1 << 20) as env:
        database = env.open_db(table.encode())
        with env.begin(write=True, db=database) as txn:
            key = LOG.encode() + (b"" if table == "head" else b"\0" + bytes(8))
            octets = txn.get(key)
            assert octets is not None
            txn.put(key, bytes(octets)[:-1] + b"\x55")
    logs = open_logs(tmp_path, 1 << 20)
    with pytest.raises(Corrupt):
        await logs.read(LOG)
    with pytest.raises((Corrupt, Mismatch)):
        await logs.put(LOG, commit(1) * 3, if_match=tag, if_none_match=False)
    assert await logs.read("other") is not None
    with pytest.raises((Corrupt, Mismatch)):
        await logs.delete(LOG, if_match=tag if table == "head" else '"of another"')
    assert {entry.log_id for entry in await logs.entries(count_max=9)} == {LOG, "other"}
    await logs.aclose()


async def test_a_failed_flush_stops_the_store(lmdb_logs: LmdbLogStore) -> None:
    """After it nothing is known of what the disk holds, so nothing more is promised."""
    tag = await created(lmdb_logs, commit(1))
    lmdb_logs._env.close()  # the nearest thing to a disk that goes away
    with pytest.raises(StoreFailed):
        await lmdb_logs.append(LOG, commit(1, 2), offset=None, if_match=tag)
    with pytest.raises(StoreFailed, match="disk of the commit logs failed"):
        await lmdb_logs.append(LOG, commit(1, 2), offset=None, if_match=tag)
    with pytest.raises(StoreFailed, match="cannot be read"):
        await lmdb_logs.read(LOG)


async def test_misuse_is_told_before_anything_is_written(logs: LogStore) -> None:
    twice = LogAppend(log_id=LOG, record_bytes=commit(1), create=True)
    with pytest.raises(ValueError, match="named twice"):
        await logs.append_many([twice, twice])
    with pytest.raises(ValueError, match="exactly one"):
        await logs.append(LOG, commit(1), offset=0, if_match=None)
    with pytest.raises(ValueError, match="log id"):
        await logs.read("../x")
    assert await logs.append_many([]) == []
    assert await logs.head(LOG) is None


async def test_a_caller_that_goes_away_disturbs_nobody(logs: LogStore) -> None:
    """D-H15, D-P16: its append may be written; those that share its group are told as ever."""
    gone = asyncio.ensure_future(created(logs, commit(1)))
    stays = asyncio.ensure_future(created(logs, commit(1), "other"))
    await asyncio.sleep(0)
    gone.cancel()
    await stays
    assert gone.cancelled()
    assert await logs.read("other") is not None
    await logs.delete(LOG)
    await created(logs, commit(1))


async def test_closing_waits_for_what_was_accepted(open_again: OpenLogs) -> None:
    logs = await open_again()
    writes = [asyncio.ensure_future(created(logs, commit(1), f"log-{n}")) for n in range(200)]
    await asyncio.sleep(0)
    await logs.aclose()
    tags = await asyncio.gather(*writes)
    logs = await open_again()
    heads = [await logs.head(f"log-{n}") for n in range(200)]
    assert [head and head.etag for head in heads] == tags
    await logs.aclose()


async def test_after_closing_the_store_says_so(open_again: OpenLogs) -> None:
    logs = await open_again()
    await logs.aclose()
    with pytest.raises(StoreFailed, match="closed"):
        await created(logs, commit(1))


def test_a_place_that_cannot_be_written_is_named() -> None:
    with pytest.raises(TierError, match=r"/proc/none cannot be written .* change \[mlc\]"):
        open_logs(Path("/proc/none"), 1 << 20)


records = st.builds(FenceRecord, epoch=st.integers(0, 4)) | st.builds(
    CommitRecord,
    epoch=st.integers(0, 4),
    round=st.integers(0, 9),
    emitted=st.just((1,)),
    committed=st.just(1),
    digest=st.just(bytes(32)),
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.lists(records, min_size=1, max_size=3), max_size=8))
def test_dm7_the_store_agrees_with_a_plain_model(
    open_again: OpenLogs, appends: list[list[Record]]
) -> None:
    async def play() -> None:
        logs = await open_again()
        await logs.delete(LOG)
        model: list[Record] = []
        tag: str | None = None
        for group in appends:
            octets = b"".join(map(encode_record, group))
            try:
                tag = await logs.append(LOG, octets, offset=None, if_match=tag, create=tag is None)
            except StaleEpoch:
                assert not takes(model, group)
            else:
                assert takes(model, group)
                model += group
            content = await logs.read(LOG)
            assert (decode_log(content.data) if content else []) == model
        await logs.aclose()

    asyncio.run(play())


def takes(old: list[Record], new: list[Record]) -> bool:
    seen = [record.epoch for record in old]
    for record in new:
        highest = max(seen, default=0)
        if record.epoch < highest or (isinstance(record, FenceRecord) and record.epoch == highest):
            return False
        seen.append(record.epoch)
    return True
