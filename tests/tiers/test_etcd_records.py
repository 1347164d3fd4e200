"""A router's records in etcd: found again anywhere, written by one process only (D-F5, D-Z8)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from uuid import uuid4

import pytest

from sdcpd.dev.plan import free_ports
from tests.kit.etcd import EtcdCluster
from tiers.api import TierError, TierUnreachable

pytest.importorskip("aetcd", reason="the extra etcd is not installed")

from aetcd.rpc import rpc_pb2 as pb

from sdcpd.protocol.commit_log import FenceRecord, encode_record
from sdcpd.protocol.uris import session_path_id
from sdcpd.roles.log_retention import LogRetention
from tests.kit.etcd_client import ScriptedClient
from tests.kit.tier_contract import Clock
from tiers import etcd_owner
from tiers.build import open_etcd_logs, open_etcd_records
from tiers.etcd_client import EtcdSettings
from tiers.etcd_errors import NoSpace
from tiers.etcd_owner import EtcdOwner, OwnerLost
from tiers.etcd_records import EtcdRouterStore
from tiers.etcd_requests import ROW_BYTES_MAX, put

KEY, OTHER = bytes(range(16)), bytes(range(1, 17))
LARGE = b"".join(b"%07d," % n for n in range(ROW_BYTES_MAX * 3 // 8 + 5))
FENCE = encode_record(FenceRecord(epoch=1))


@pytest.fixture
def site(etcd: EtcdCluster) -> EtcdSettings:
    """A prefix of the test's own."""
    return EtcdSettings(endpoints=etcd.endpoints, prefix=f"t/{uuid4().hex}", timeout_s=5.0)


class Routers:
    """Starts routers, and keeps what they were told when they had to end."""

    def __init__(self, site: EtcdSettings, stack: AsyncExitStack) -> None:
        self._site, self._stack = site, stack
        self.lost: list[str] = []

    async def start(self, name: str = "r0") -> EtcdRouterStore:
        store = await open_etcd_records(self._site, name, on_lost=self.lost.append)
        self._stack.push_async_callback(store.aclose)
        return store

    async def scripted(self) -> tuple[EtcdRouterStore, ScriptedClient]:
        client = ScriptedClient(self._site)
        owner = EtcdOwner(client, self._site.prefix, "r0", on_lost=self.lost.append)
        store = EtcdRouterStore(client, owner, prefix=self._site.prefix, name="r0")
        await store.open()
        self._stack.push_async_callback(store.aclose)
        return store, client

    async def keys(self) -> set[str]:
        """What lies in etcd, without the prefix."""
        client = ScriptedClient(self._site)
        begin = f"{self._site.prefix}/".encode()
        found = await client.range(
            pb.RangeRequest(key=begin, range_end=begin[:-1] + b"0", keys_only=True)
        )
        await client.aclose()
        return {bytes(one.key)[len(begin) :].decode("latin-1") for one in found.kvs}


@pytest.fixture
async def routers(site: EtcdSettings) -> AsyncIterator[Routers]:
    async with AsyncExitStack() as stack:
        yield Routers(site, stack)


async def test_what_was_stored_is_found_by_the_next_process(routers: Routers) -> None:
    store = await routers.start()
    await asyncio.gather(*(store.sessions.put(bytes([i]) * 16, bytes(i)) for i in range(1, 40)))
    await store.sessions.put(bytes([1]) * 16, b"new")
    await store.sessions.delete(bytes([2]) * 16)
    await store.sessions.delete(b"never there")
    await store.ended.put(b"log", b"note")
    again = await routers.start()
    wanted = {bytes([1]) * 16: b"new", **{bytes([i]) * 16: bytes(i) for i in range(3, 40)}}
    assert again.sessions.all() == wanted and again.ended.all() == {b"log": b"note"}
    assert await again.sessions.keys_of_all() == set(wanted)
    await again.sessions.put(KEY, b"")
    await again.sessions.delete(bytes([3]) * 16)
    del wanted[bytes([3]) * 16]
    assert (await routers.start()).sessions.all() == {**wanted, KEY: b""}
    assert (await routers.start("r1")).sessions.all() == {}


async def test_a_long_prompt_is_kept_whole_and_leaves_nothing_behind(routers: Routers) -> None:
    """etcd takes requests of 1.5 MiB: what is larger lies in parts."""
    store = await routers.start()
    for value in (LARGE, LARGE[1:], LARGE[:-9]):
        await store.sessions.put(KEY, value)
        assert (await routers.start()).sessions.all() == {KEY: value}
        store = await routers.start()
        assert (
            sum(key.startswith(".parts") for key in await routers.keys())
            == len(LARGE) // ROW_BYTES_MAX + 1
        )
    await store.sessions.put(KEY, b"small")
    await store.sessions.put(OTHER, LARGE)
    await store.sessions.delete(OTHER)
    assert (await routers.start()).sessions.all() == {KEY: b"small"}
    assert not any(key.startswith(".parts") for key in await routers.keys())


async def test_a_process_that_dies_while_it_writes_a_long_record(routers: Routers) -> None:
    store, client = await routers.scripted()
    await store.sessions.put(KEY, LARGE)

    async def died(_: object) -> object:
        raise asyncio.CancelledError

    client.script = [client.through, client.through, died]
    with pytest.raises(asyncio.CancelledError):
        await store.sessions.put(KEY, LARGE[1:])
    again = await routers.start()
    assert again.sessions.all() == {KEY: LARGE}
    parts = [key for key in await routers.keys() if key.startswith(".parts")]
    assert len(parts) == len(LARGE) // ROW_BYTES_MAX + 1


Write = Callable[[EtcdRouterStore], Awaitable[None]]
WRITES: list[Write] = [
    lambda store: store.sessions.put(KEY, b"of the old one"),
    lambda store: store.sessions.put(OTHER, LARGE),
    lambda store: store.sessions.delete(KEY),
    lambda store: store.ended.put(b"log", b"x"),
]


@pytest.mark.parametrize("write", WRITES)
async def test_of_two_processes_of_one_name_the_older_writes_no_more(
    routers: Routers, write: Write
) -> None:
    old = await routers.start()
    await old.sessions.put(KEY, b"1")
    new = await routers.start()
    assert new.sessions.all() == {KEY: b"1"}
    await new.sessions.put(KEY, b"2")
    keys = await routers.keys()
    for _ in range(2):
        with pytest.raises(OwnerLost, match=r"another's now: process \d+ at .* has started as the"):
            await write(old)
    assert len(routers.lost) == 1, "told once"
    assert await routers.keys() == keys
    await new.sessions.put(OTHER, b"3")
    assert (await routers.start()).sessions.all() == {KEY: b"2", OTHER: b"3"}


async def test_a_router_that_writes_nothing_notices_as_well(
    routers: Routers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_owner, "LOOK_S", 0.01)
    old = await routers.start()
    watch = asyncio.ensure_future(old.owner.watch())
    await routers.start("r1")
    await old.sessions.put(KEY, b"1")
    assert not watch.done() and not routers.lost
    await routers.start()
    async with asyncio.timeout(10):
        await watch
    assert len(routers.lost) == 1


async def test_answers_that_are_lost_and_requests_that_come_late(routers: Routers) -> None:
    """The last value that was acknowledged is what the next process finds."""
    store, client = await routers.scripted()
    put = store.sessions.put
    client.script = [client.done_and_lost, client.lost, client.done_and_lost]
    await put(KEY, b"1")
    await put(KEY, b"2")
    assert (await read_again(routers)) == {KEY: b"2"}
    store, client = await routers.scripted()
    put = store.sessions.put
    client.script = [client.late]
    await put(KEY, b"3")
    await put(KEY, b"4")
    (late,) = client.held
    assert not (await client.through(late)).succeeded
    assert (await read_again(routers)) == {KEY: b"4"}
    store, client = await routers.scripted()
    client.script = [client.done_and_lost]
    await store.sessions.delete(KEY)
    assert (await read_again(routers)) == {}


async def read_again(routers: Routers) -> dict[bytes, bytes]:
    return dict((await routers.start()).sessions.all())


async def test_a_write_that_is_given_up_is_told_and_the_next_one_holds(
    routers: Routers, site: EtcdSettings
) -> None:
    store, client = await routers.scripted()
    client._timeout_s = 0.02
    client.script = [client.late] * 1000
    with pytest.raises(TierError, match="cannot be written: no answer in time"):
        await store.sessions.put(KEY, b"given up")
    client._timeout_s = 5.0
    client.held = client.held[:1]
    client.script = [client.behind_the_late]
    await store.sessions.put(KEY, b"next")
    assert await read_again(routers) == {KEY: b"next"}


async def test_an_etcd_that_is_not_there_may_be_there_later() -> None:
    (port,) = free_ports(1)
    nowhere = EtcdSettings(endpoints=(f"127.0.0.1:{port}",), prefix="t", timeout_s=0.05)
    with pytest.raises(TierUnreachable, match=r"records cannot be kept: etcd at .* nobody listens"):
        await open_etcd_records(nowhere, "r0", on_lost=pytest.fail)


@pytest.mark.parametrize("value", [b"", b"\x01short", b"\x02other", b"\x01" + bytes(28)])
async def test_keys_that_nobody_here_wrote_keep_no_router_from_starting(
    routers: Routers, value: bytes
) -> None:
    """What cannot be decoded is told by who decodes records, session by session."""
    store, client = await routers.scripted()
    await store.sessions.put(KEY, b"good")
    prefix = client._prefix.decode()
    for name in (
        ".sessions/r0/A",
        ".sessions/r0/!",
        ".parts/sessions/r0/x",
        ".parts/sessions/r0/x/y",
    ):
        await client.txn(pb.TxnRequest(success=[put(f"{prefix}/{name}".encode(), value)]))
    found = (await routers.start()).sessions.all()
    assert found[KEY] == b"good" and len(found) == 3
    assert KEY in await store.sessions.keys_of_all()


async def test_a_full_etcd_refuses_and_lets_delete(routers: Routers) -> None:
    store, client = await routers.scripted()
    await store.sessions.put(KEY, b"1")

    async def full(request: object) -> object:
        raise NoSpace("full")

    client.script = [full, full]
    for value in (b"2", LARGE):
        with pytest.raises(TierError, match="cannot be written: full"):
            await store.sessions.put(KEY, value)
    client.script = []
    await store.sessions.delete(KEY)
    assert await read_again(routers) == {}


async def test_logs_of_other_routers_open_sessions_stay(
    routers: Routers, site: EtcdSettings
) -> None:
    """Even of one that is dead: started again, it goes on with them."""
    logs = await open_etcd_logs(site)
    mine, theirs = await routers.start("r0"), await routers.start("r1")
    for key in (KEY, OTHER):
        await logs.append(session_path_id(key), FENCE, offset=None, if_match=None, create=True)
    await theirs.sessions.put(OTHER, LARGE)

    async def open_logs() -> set[str]:
        return {session_path_id(key) for key in await mine.sessions.keys_of_all()}

    clock = Clock()
    sweeper = LogRetention(logs, mine.ended, open_logs=open_logs, retention_s=60, clock=clock)
    await sweeper.sweep()
    await theirs.aclose()
    clock.now += 1e9
    assert await sweeper.sweep() == 1
    named = partial(logs.entries, count_max=9)
    assert [one.log_id for one in await named()] == [session_path_id(OTHER)]
    await (await routers.start("r1")).sessions.delete(OTHER)
    await sweeper.sweep()
    clock.now += 60
    assert await sweeper.sweep() == 1 and not await named()
    await logs.aclose()
