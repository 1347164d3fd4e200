"""Commit logs are deleted a while after their sessions have ended, and never before (D-F5)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest

from sdcpd.admin_logs import LogsAdmin, LogsRefused
from sdcpd.protocol.commit_log import CommitRecord, FenceRecord, encode_record
from sdcpd.protocol.messages import Sampling
from sdcpd.protocol.uris import session_path_id
from sdcpd.protocol.verifier_state import VerifierSettings
from sdcpd.roles import log_retention
from sdcpd.roles.base import Listener
from sdcpd.roles.commit_log import CommitLog, Outcome
from sdcpd.roles.generation import GenerationRequest
from sdcpd.roles.log_retention import PAGE, LogRetention, even_clock
from sdcpd.transport.loopback import LoopbackClient
from tests.kit.cluster import PEERS, ROUTER, Cluster, peer
from tests.kit.etcd import EtcdCluster
from tests.kit.records import MemoryRecords
from tests.kit.tier_contract import Clock
from tiers.api import LogStore, TierError
from tiers.build import etcd_settings, open_etcd_logs, open_logs
from tiers.host import HostTier
from tiers.lmdb_records import LmdbRecords
from tiers.resource import MlcResource

HOUR_S = 3600.0
A, B, C = (session_path_id(bytes([n]) * 16) for n in (1, 2, 3))


def commit(round_number: int, epoch: int = 1) -> bytes:
    return encode_record(
        CommitRecord(epoch=epoch, round=round_number, emitted=(7,), committed=1, digest=bytes(32))
    )


@pytest.fixture(params=["lmdb", "etcd"])
async def logs(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LogStore]:
    store: LogStore
    if request.param == "etcd":
        etcd: EtcdCluster = request.getfixturevalue("etcd")
        site = etcd_settings(endpoints=etcd.endpoints, prefix=f"t/{uuid4().hex}", timeout_s=5.0)
        store = await open_etcd_logs(site)
    else:
        store = open_logs(tmp_path / "logs", 1 << 20)
    yield store
    await store.aclose()


def mlc_of(logs: LogStore) -> MlcResource:
    """The logs over HTTP, for whoever asks."""
    return MlcResource(
        base_path="",
        objects=HostTier(1 << 20),
        logs=logs,
        authorize=lambda *_: None,
        object_bytes_max=1 << 20,
    )


@dataclass
class Site:
    """A log store, what survives a router, and which sessions are open."""

    logs: LogStore
    clock: Clock = field(default_factory=Clock)
    notes: MemoryRecords = field(default_factory=MemoryRecords)
    open: set[str] = field(default_factory=set)

    async def open_logs(self) -> set[str]:
        return set(self.open)

    def router(self) -> LogRetention:
        """One that has just started."""
        return LogRetention(
            self.logs,
            self.notes,
            open_logs=self.open_logs,
            retention_s=HOUR_S,
            clock=self.clock,
        )

    async def append(self, log_id: str, number: int, tag: str | None = None) -> str:
        record = commit(number)
        return await self.logs.append(log_id, record, offset=None, if_match=tag, create=tag is None)

    async def names(self) -> set[str]:
        return {entry.log_id for entry in await self.logs.entries(count_max=1000)}


@pytest.fixture
def site(logs: LogStore) -> Site:
    return Site(logs)


async def test_a_log_goes_when_its_session_has_ended_for_the_retention(site: Site) -> None:
    router = site.router()
    site.open = {A, B}
    for name in (A, B):
        await site.append(name, 1)
    site.clock.now += 100 * HOUR_S
    assert await router.sweep() == 0
    site.open = {B}
    for _ in range(9):
        assert await router.sweep() == 0
        site.clock.now += HOUR_S / 9 - 1
    assert await site.names() == {A, B}
    site.clock.now += 20
    assert await router.sweep() == 1
    assert await site.names() == {B} and site.notes.content == {}


async def test_a_router_that_dies_in_between_deletes_it_after_its_restart(site: Site) -> None:
    await site.append(A, 1)
    await site.router().sweep()  # the one that dies
    site.clock.now += HOUR_S + 1
    assert await site.router().sweep() == 1
    assert await site.names() == set()
    await site.append(B, 1)
    router = site.router()
    await router.sweep()
    await site.logs.delete(B)  # another router was here, or this one died before its note went
    await router.sweep()
    assert site.notes.content == {}


async def test_a_log_that_is_written_to_stays(site: Site) -> None:
    """Even where nobody knows its session: its writer has not been fenced."""
    tag, router = await site.append(A, 1), site.router()
    for number in range(2, 6):
        await router.sweep()
        site.clock.now += HOUR_S - 1
        tag = await site.append(A, number, tag)
    await router.sweep()
    site.clock.now += HOUR_S
    assert await router.sweep() == 1


async def test_a_record_that_comes_while_it_is_deleted_saves_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag, router = await site.append(A, 1), site.router()
    await router.sweep()
    site.clock.now += HOUR_S

    async def open_logs() -> set[str]:
        await site.append(A, 2, tag)  # after the listing
        return set()

    monkeypatch.setattr(router, "_open_logs", open_logs)
    assert await router.sweep() == 0
    assert await site.names() == {A}


async def test_jumps_of_the_clock_delete_no_log_of_an_open_session(site: Site) -> None:
    """Set forward: ended logs may go early. Set back: they stay a retention longer at most."""
    site.open = {A}
    await site.append(A, 1)
    await site.append(B, 1)
    await site.router().sweep()
    site.clock.now -= 1000 * HOUR_S
    again = site.router()
    assert await again.sweep() == 0
    site.clock.now += HOUR_S - 1
    assert await again.sweep() == 0
    site.clock.now += 2
    assert await again.sweep() == 1
    site.clock.now += 1e9
    assert await site.router().sweep() == 0
    assert await site.names() == {A}


async def test_many_logs_are_swept_in_parts(site: Site) -> None:
    names = [f"log-{number}" for number in range(PAGE + 44)]
    for start in range(0, len(names), 100):
        await asyncio.gather(*(site.append(name, 1) for name in names[start : start + 100]))
    site.open = set(names[::2])
    router = site.router()
    await router.sweep()
    site.clock.now += HOUR_S
    assert await router.sweep() == len(names) // 2
    assert await site.names() == site.open


async def test_notes_that_are_none_end_no_start(site: Site) -> None:
    """A damaged one, or another program's: its log is kept for a whole retention again."""
    await site.append(A, 1)
    await site.router().sweep()
    site.clock.now += 2 * HOUR_S
    site.notes.content[A.encode()] = b"short"
    site.notes.content[b"\x8a\xff"] = site.notes.content[b"other"] = b"x" * 40
    site.notes.content[b"text"] = bytes(8) + b"\xff"
    router = site.router()
    assert await router.sweep() == 0 and await site.names() == {A}
    site.clock.now += 2 * HOUR_S
    assert await router.sweep() == 1 and await site.names() == set()


async def test_a_damaged_key_is_no_log_and_ends_no_sweep(tmp_path: Path) -> None:
    store = open_logs(tmp_path / "logs", 1 << 20)
    site = Site(store)
    await site.append(A, 1)
    await site.append(C, 1)
    with store._env.begin(write=True, db=store._rows._heads) as txn:
        txn.put(b"B" * 10 + b"\xc2" + b"B" * 11, bytes(40))
        txn.put(b"\xff", b"")
    assert await site.names() == {A, C}
    router = site.router()
    await router.sweep()
    site.clock.now += 2 * HOUR_S
    assert await router.sweep() == 2
    await store.aclose()


async def test_what_cannot_be_noted_is_not_deleted(site: Site) -> None:
    await site.append(A, 1)
    site.notes.failing = True
    router = site.router()
    for _ in range(3):
        with pytest.raises(TierError, match="full"):
            await router.sweep()
        site.clock.now += HOUR_S
    site.notes.failing = False
    assert await router.sweep() == 0


async def test_what_fails_is_told_and_done_later(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_retention, "SWEEP_S_MIN", 0.0)
    monkeypatch.setattr(log_retention, "SWEEPS", 1e9)
    await site.append(A, 1)
    site.notes.failing = True
    running = asyncio.ensure_future(site.router().run())
    async with asyncio.timeout(10):
        while not caplog.messages:
            await asyncio.sleep(0)
        assert caplog.messages[0] == "old commit logs are deleted later: the disk is full"
        site.notes.failing = False
        while not site.notes.content:
            await asyncio.sleep(0)
        site.clock.now += HOUR_S
        while await site.names():
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])


def test_time_goes_on_evenly_from_where_the_wall_clock_was(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = even_clock()
    begun = clock()
    assert abs(begun - time.time()) < 60
    monkeypatch.setattr(time, "time", lambda: begun + 1e9)
    assert begun <= clock() < begun + 60


async def test_a_verifier_that_lost_its_authority_commits_nothing_to_a_deleted_log(
    site: Site,
) -> None:
    """It takes what is gone for a fence. If it never wrote, what it makes goes again."""
    served = Listener(ROUTER, [], peers=PEERS, mlc=mlc_of(site.logs))
    client = LoopbackClient({ROUTER: served.handle}, peer("verifier", "v0"))
    stale, never_wrote = (
        CommitLog(client, f"{ROUTER}logs/{name}", enforcing=True) for name in (A, B)
    )
    first, second = (
        CommitRecord(epoch=1, round=n, emitted=(7,), committed=n, digest=bytes(32)) for n in (1, 2)
    )
    assert await stale.append(first) is Outcome.COMMITTED
    fence = encode_record(FenceRecord(epoch=2))
    head = await site.logs.head(A)
    assert head is not None
    await site.logs.append(A, fence, offset=None, if_match=head.etag)
    await site.logs.append(B, fence, offset=None, if_match=None, create=True)
    router = site.router()
    await router.sweep()
    site.clock.now += HOUR_S
    assert await router.sweep() == 2
    assert await stale.append(second) is Outcome.FENCED
    assert await site.names() == set()
    assert await never_wrote.append(first) is not Outcome.FENCED
    assert await site.names() == {B}
    await router.sweep()
    site.clock.now += HOUR_S
    assert await router.sweep() == 1


async def test_who_looks_for_a_deleted_log_is_told(site: Site) -> None:
    await site.append(A, 1)
    router = site.router()
    admin = LogsAdmin(site.logs, retention=router)
    await router.sweep()
    site.clock.now += HOUR_S
    await router.sweep()
    site.clock.now += 90
    with pytest.raises(
        LogsRefused, match=f"the log of {A} was deleted 1.5min ago, log_retention = 1h"
    ):
        await admin.show({"session": A})
    with pytest.raises(
        LogsRefused, match=r"another router's, or deleted, log_retention = 1h after"
    ):
        await admin.show({"session": B})


async def test_routers_that_die_and_come_back_keep_open_sessions_logs_only(
    logs: LogStore, tmp_path: Path
) -> None:
    """The real router on real storage: one session runs, one ends, the router is killed twice."""
    site = Site(logs)
    records = LmdbRecords(tmp_path / "sessions", map_bytes=1 << 20, setting="x")
    mlc = mlc_of(logs)
    cluster = Cluster(records=records, mlc=mlc)  # type: ignore[arg-type]
    cluster.add_router()
    cluster.add_verifier(machine=VerifierSettings(None, None), pass_time_s=0.004)
    cluster.add_drafter("d0")
    await cluster.ready()
    request = GenerationRequest((1, 2, 3), 200, (), Sampling(temperature_milli=0))
    reader = await cluster.router.generate(request)
    running = session_path_id(reader.session)
    await anext(aiter(reader))
    assert await cluster.text(count=8)
    while len(await records.keys_of_all()) > 1:
        assert cluster.router.sessions
    assert len(await site.names()) == 2
    for now in (HOUR_S / 2, HOUR_S, 1e9):
        cluster.kill(ROUTER)
        cluster.add_router()
        site.open_logs = cluster.router.open_logs  # type: ignore[method-assign]
        await site.router().sweep()
        site.clock.now += now
    assert await site.names() == {running}
    rest = cluster.router.reader(reader.session, reader.stats.committed)
    assert rest is not None
    tokens = [token async for part in rest for token in part.tokens]
    assert tokens == cluster.model.text((1, 2, 3), 200)[reader.stats.committed :]
    await cluster.aclose()
    await records.aclose()
