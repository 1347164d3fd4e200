"""The tier in an S3 bucket, against a real server: what it keeps, shares, and does without."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from sdcpd.config import parse_config
from sdcpd.settings import tier_specs
from tests.kit.tier_contract import SIZE_BYTES, Checked, Clock, contract, entry
from tiers.api import Entry, Key, TierError, TierFull
from tiers.build import build_objects
from tiers.host import OBJECT_BYTES, HostTier
from tiers.lmdb_tier import LmdbTier
from tiers.stack import TierStack

obstore = pytest.importorskip("obstore", reason="obstore is not installed")

from tests.kit.s3 import (  # noqa: E402
    BINARY,
    BUCKET,
    KEY_ID,
    SECRET,
    S3Process,
    answering,
    relay_to,
    store_at,
)
from tiers.s3_format import path_of  # noqa: E402
from tiers.s3_open import open_s3  # noqa: E402
from tiers.s3_place import S3Place  # noqa: E402
from tiers.s3_probe import probe  # noqa: E402
from tiers.s3_server import S3Server  # noqa: E402
from tiers.s3_tier import S3Tier  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BINARY is None, reason="no S3 server is installed"),
]

LARGE = 64 << 10
A, B, C, D = (Key("s", name) for name in "ABCD")
numbers = count()
running: list[S3Process] = []


@pytest.fixture(scope="module", autouse=True)
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Process]:
    """One server for all tests here; each has a prefix of its own."""
    server = S3Process(tmp_path_factory.mktemp("s3"))
    try:
        server.start()
        running.append(server)
        yield server
    finally:
        running.clear()
        server.kill()


@pytest.fixture
def prefix() -> str:
    return f"test/{next(numbers)}"


@pytest.fixture
def clock() -> Clock:
    return Clock()


def tier_at(
    endpoint: str, prefix: str, clock: Clock, *, objects: int = 100, least: int = LARGE
) -> S3Tier:
    """A tier with room for that many objects of 64 KiB."""
    server = S3Server(store_at(endpoint), where="the bucket", clock=clock)
    size_bytes = objects * (LARGE + 256)
    return S3Tier(server, size_bytes, prefix=prefix, object_bytes_min=least, clock=clock)


def open_s3_tier(path: Path, clock: Clock) -> Checked:
    server = S3Server(running[0].store(), where="the bucket", clock=clock)
    prefix = f"contract/{next(numbers)}"
    return S3Tier(server, SIZE_BYTES, prefix=prefix, object_bytes_min=0, clock=clock)


def open_stack_with_s3(path: Path, clock: Clock) -> Checked:
    lower = open_s3_tier(path, clock)
    return TierStack([HostTier(SIZE_BYTES // 2, clock=clock), lower], demote_bytes_max=20000)


TestS3 = contract(open_s3_tier, examples=12)
TestStackWithS3 = contract(open_stack_with_s3, examples=12)


async def test_another_instance_finds_what_was_put_and_what_is_said_of_it(
    process: S3Process, prefix: str, clock: Clock
) -> None:
    """A restart is another instance too: nothing of the tier is in the process."""
    one, other = (tier_at(process.endpoint, prefix, clock) for _ in range(2))
    coded = Entry(b"\x01" * LARGE, '"tag-1"', "application/cbor", "zstd")
    await one.put(A, coded, lease_s=0)
    assert await other.get(A) == coded and await other.holds(A)
    assert not await other.renew(A, 5), "what is another's can't be promised"
    assert await one.renew(A, 5)
    assert other.stats().objects == 0 and other.stats().hits == 1
    await other.delete(A)
    assert await one.get(A) is None


@pytest.mark.parametrize("name", ["q/0", "..", ".hidden", "a b=c%", "ü" * 255, "x" * 255, "_"])
async def test_any_name_can_be_kept(
    process: S3Process, prefix: str, clock: Clock, name: str
) -> None:
    tier = tier_at(process.endpoint, prefix, clock)
    key = Key(".kv", name)
    await tier.put(key, entry(1, LARGE), lease_s=0)
    assert await tier.get(key) == entry(1, LARGE) and await tier.holds(key)
    await tier.delete(key)
    assert not await tier.holds(key)


def _flipped(stored: bytes) -> bytes:
    return stored[:-1] + bytes([stored[-1] ^ 1])


@pytest.mark.parametrize(
    "damage",
    [
        _flipped,
        lambda stored: stored[:-1],
        lambda stored: stored[:20],
        lambda stored: b"",
        lambda stored: stored + b"\0",
        lambda stored: b"X" + stored[1:],
        lambda stored: stored[:36] + b"}" + stored[37:],
    ],
    ids=["bit", "short", "in-head", "empty", "longer", "magic", "json"],
)
async def test_what_is_damaged_is_a_miss_that_is_counted_and_deleted(
    process: S3Process, prefix: str, clock: Clock, damage: object
) -> None:
    assert callable(damage)
    tier, store = tier_at(process.endpoint, prefix, clock), process.store()
    await tier.put(A, entry(1, LARGE), lease_s=0)
    path = path_of(prefix, A)
    stored = bytes(await (await obstore.get_async(store, path)).bytes_async())
    await obstore.put_async(store, path, damage(stored))
    assert await tier.holds(A) == (damage is _flipped), "the head does not tell of the octets"
    assert await tier.get(A) is None
    assert (tier.stats().corrupt, tier.stats().objects, tier.stats().failures) == (1, 0, 0)
    with pytest.raises(FileNotFoundError):
        await obstore.head_async(store, path)
    await tier.put(A, entry(1, LARGE), lease_s=0)
    assert await tier.get(A) == entry(1, LARGE)


async def test_what_is_said_of_the_octets_is_under_the_checksum_too(
    process: S3Process, prefix: str, clock: Clock
) -> None:
    tier, store = tier_at(process.endpoint, prefix, clock), process.store()
    await tier.put(A, entry(1, LARGE), lease_s=0)
    path = path_of(prefix, A)
    stored = bytes(await (await obstore.get_async(store, path)).bytes_async())
    changed = stored.replace(b"application/octet", b"application/other", 1)
    assert changed != stored
    await obstore.put_async(store, path, changed)
    assert await tier.get(A) is None and tier.stats().corrupt == 1


async def test_another_keys_octets_are_no_hit(
    process: S3Process, prefix: str, clock: Clock
) -> None:
    tier, store = tier_at(process.endpoint, prefix, clock), process.store()
    await tier.put(A, entry(1, LARGE), lease_s=0)
    await obstore.copy_async(store, path_of(prefix, A), path_of(prefix, B))
    assert not await tier.holds(B)
    assert await tier.get(B) is None
    assert tier.stats().corrupt == 1
    assert await tier.get(A) == entry(1, LARGE)


async def test_it_takes_only_what_is_worth_a_request(
    process: S3Process, prefix: str, clock: Clock
) -> None:
    tier = tier_at(process.endpoint, prefix, clock)
    rows = Key("s", "q_rows.session.random")
    for key, size, lease_s in ((A, LARGE - 1, 0), (A, LARGE, 5), (rows, LARGE, 0)):
        with pytest.raises(TierFull):
            await tier.put(key, entry(1, size), lease_s=lease_s)
    assert await tier.get(A) is None


async def test_room_is_made_of_its_own_and_what_is_anothers_stays(
    process: S3Process, prefix: str, clock: Clock
) -> None:
    other = tier_at(process.endpoint, prefix, clock)
    await other.put(D, entry(4, LARGE), lease_s=0)
    tier = tier_at(process.endpoint, prefix, clock, objects=2)
    for fill, key in enumerate((A, B)):
        await tier.put(key, entry(fill, LARGE), lease_s=0)
    assert await tier.renew(A, 5)
    await tier.put(C, entry(3, LARGE), lease_s=0)
    assert [await other.holds(key) for key in (A, B, C, D)] == [True, False, True, True]
    assert (tier.stats().evicted, tier.stats().objects) == (1, 2)
    tier.check()


async def test_concurrent_users_see_one_version_or_none(
    process: S3Process, prefix: str, clock: Clock
) -> None:
    tier = tier_at(process.endpoint, prefix, clock, objects=5)
    keys = [Key("s", str(number)) for number in range(8)]

    async def user(number: int) -> None:
        for step in range(12):
            key = keys[(number + step) % 8]
            if step % 5 == number % 5:
                await tier.delete(key)
            elif step % 3 == 0:
                await tier.put(key, entry(int(key.name), LARGE), lease_s=0)
            assert await tier.get(key) in (None, entry(int(key.name), LARGE))

    await asyncio.gather(*map(user, range(8)))
    tier.check()
    listed = await obstore.list(process.store(), prefix=prefix).collect_async()
    assert len(listed) == tier.stats().objects, "nothing is left that is not on the books"
    assert (tier.stats().failures, tier.stats().corrupt) == (0, 0)


async def test_a_bucket_that_has_gone_is_a_failure(process: S3Process, clock: Clock) -> None:
    server = S3Server(
        store_at(process.endpoint, bucket="not-there"), where="the bucket", clock=clock
    )
    tier = S3Tier(server, 1 << 20, prefix="", clock=clock)
    assert await tier.get(A) is None
    with pytest.raises(TierFull):
        await tier.put(A, entry(1, LARGE), lease_s=0)
    assert tier.stats().failures == 1 and tier.stats().objects == 0


async def test_what_host_evicts_is_found_by_another_instance(
    process: S3Process, prefix: str, clock: Clock
) -> None:
    def stack() -> TierStack:
        host = HostTier(LARGE + OBJECT_BYTES, clock=clock)
        return TierStack([host, tier_at(process.endpoint, prefix, clock)])

    one, other = stack(), stack()
    await one.put(A, entry(1, LARGE), lease_s=0)
    await one.put(B, entry(2, LARGE), lease_s=0)
    await one.settled()
    assert await other.get(A) == entry(1, LARGE)
    assert await other.get(A) == entry(1, LARGE)
    assert [part.hits for part in other.stats().parts] == [1, 1], "copied up by the first hit"
    await other.put(C, entry(3, 1000), lease_s=0)
    await other.put(D, entry(4, LARGE), lease_s=0)
    await other.settled()
    assert other.stats().dropped == 0, "what is not taken is not handed down"
    await one.aclose()
    await other.aclose()


async def test_below_a_disk_it_gets_what_the_disk_gets(
    process: S3Process, prefix: str, clock: Clock, tmp_path: Path
) -> None:
    host = HostTier(LARGE + OBJECT_BYTES, clock=clock)
    lowest = tier_at(process.endpoint, prefix, clock)
    disk = LmdbTier(tmp_path / "objects", 1 << 20, clock=clock)
    stack = TierStack([host, disk, lowest])
    await stack.put(A, entry(1, LARGE), lease_s=0)
    await stack.put(B, entry(2, LARGE), lease_s=0)
    await stack.settled()
    assert await disk.holds(A) and await lowest.holds(A)
    await stack.aclose()


async def test_a_put_above_asks_the_server_nothing_and_hides_what_it_replaces(
    process: S3Process, prefix: str, clock: Clock
) -> None:
    async with relay_to(process.port) as relay:
        lower = tier_at(relay.endpoint, prefix, clock)
        other = tier_at(process.endpoint, prefix, clock)
        await other.put(A, entry(1, LARGE), lease_s=0)
        stack = TierStack([HostTier(2 * (LARGE + OBJECT_BYTES), clock=clock), lower])
        relay.flowing.clear()
        rows = Key("s", "q_rows.session.random")
        async with asyncio.timeout(1):
            await stack.put(A, entry(2, LARGE), lease_s=0)
            await stack.put(rows, entry(3, LARGE), lease_s=5)
            await stack.delete(rows)
            assert await stack.get(rows) is None
        relay.flowing.set()
        assert await lower.get(A) is None, "an old version"
        assert await other.get(A) == entry(1, LARGE), "is left to who put it"
        await stack.aclose()


async def test_its_own_old_version_is_deleted_and_the_same_one_stays(
    process: S3Process, prefix: str, clock: Clock
) -> None:
    lower = tier_at(process.endpoint, prefix, clock)
    other = tier_at(process.endpoint, prefix, clock)
    stack = TierStack([HostTier(LARGE + OBJECT_BYTES, clock=clock), lower])
    await lower.put(A, entry(1, LARGE), lease_s=0)
    await stack.put(A, entry(1, LARGE), lease_s=0)
    assert await other.holds(A)
    await stack.put(A, entry(2, LARGE), lease_s=0)
    assert not await other.holds(A) and lower.stats().objects == 0
    await stack.put(B, entry(3, LARGE), lease_s=0)
    await stack.settled()
    assert await other.get(A) == entry(2, LARGE)
    await stack.aclose()


async def test_a_server_that_is_slow_is_a_miss_in_time_and_then_left_alone(
    process: S3Process, prefix: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiers.s3_server.ANSWER_S", 0.2)
    async with relay_to(process.port) as relay:
        tier = tier_at(relay.endpoint, prefix, clock)
        await tier.put(A, entry(1, LARGE), lease_s=0)
        relay.flowing.clear()
        started = time.monotonic()
        for _ in range(20):
            assert await tier.get(A) is None
        assert 0.6 <= time.monotonic() - started < 2.0
        assert tier.stats().failures == 3, "then no call waits for it"
        relay.flowing.set()
        assert await tier.get(A) is None
        clock.now += 1
        assert await tier.get(A) == entry(1, LARGE)
        assert tier.stats().misses == 21


async def test_a_server_that_is_gone_is_counted_and_raises_nothing(
    prefix: str, clock: Clock
) -> None:
    async with answering("503 Slow Down") as endpoint:
        tier = tier_at(endpoint, prefix, clock)
        assert await tier.get(A) is None
        assert not await tier.holds(A)
        await tier.delete(A)
        assert tier.stats().failures == 3
        with pytest.raises(TierFull, match="left alone"):
            await tier.put(A, entry(1, LARGE), lease_s=0)
        clock.now += 1
        with pytest.raises(TierFull, match="could not be written"):
            await tier.put(A, entry(1, LARGE), lease_s=0)
        clock.now += 1
        assert await tier.get(A) is None
        assert tier.stats().failures == 4, "the second pause is longer"
        tier.check()


async def test_what_was_deleted_while_the_server_was_away_is_not_seen_again(
    process: S3Process, prefix: str, clock: Clock
) -> None:
    async with relay_to(process.port) as relay:
        tier = tier_at(relay.endpoint, prefix, clock)
        other = tier_at(process.endpoint, prefix, clock)
        await tier.put(A, entry(1, LARGE), lease_s=0)
        relay.cut = True
        await tier.delete(A)
        relay.cut = False
        assert tier.stats().failures == 1
        assert await tier.get(A) is None
        assert await other.holds(A)
        await tier.put(B, entry(2, LARGE), lease_s=0)
        assert not await other.holds(A), "the deletion that was owed"
        tier.check()


@pytest.mark.slow
async def test_a_killed_server_is_missed_quickly_and_found_again_after_its_restart(
    process: S3Process, prefix: str, clock: Clock
) -> None:
    tier = tier_at(process.endpoint, prefix, clock)
    await tier.put(A, entry(1, LARGE), lease_s=0)
    process.kill()
    started = time.monotonic()
    for _ in range(50):
        assert await tier.get(A) is None
    assert time.monotonic() - started < 1.0
    assert tier.stats().failures == 3
    await asyncio.to_thread(process.start)
    clock.now += 1
    assert await tier.get(A) == entry(1, LARGE), "a restart keeps objects"


def place(process: S3Process, prefix: str, folder: Path, **changes: object) -> S3Place:
    files = {}
    for name, text in (("access_key_id", KEY_ID), ("secret_access_key", SECRET)):
        files[name] = folder / name
        files[name].write_text(text + "\n")
        files[name].chmod(0o640)
    found = S3Place(
        bucket=BUCKET,
        prefix=prefix,
        endpoint=process.endpoint,
        region="us-east-1",
        access_key_id_file=files["access_key_id"],
        secret_access_key_file=files["secret_access_key"],
    )
    return replace(found, **changes)  # type: ignore[arg-type]


async def test_the_start_probes_and_leaves_nothing_behind(
    process: S3Process, prefix: str, clock: Clock, tmp_path: Path
) -> None:
    tier = await open_s3(place(process, prefix, tmp_path), 1 << 20, clock=clock)
    await tier.put(A, entry(1, LARGE), lease_s=0)
    assert await tier.get(A) == entry(1, LARGE)
    listed = await obstore.list(process.store(), prefix=prefix).collect_async()
    assert [found["path"] for found in listed] == [path_of(prefix, A)]


async def test_a_stack_is_opened_as_it_is_configured(
    process: S3Process, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiers.s3_probe.RACERS", 2)  # this server takes seconds for more
    at = place(process, prefix, tmp_path)
    config = parse_config(
        '[mlc]\ntiers = [{ kind = "host", size = "64KiB" }, { kind = "s3", size = "1GiB",'
        f' bucket = "{at.bucket}", prefix = "{prefix}", endpoint = "{at.endpoint}",'
        f' region = "{at.region}", access_key_id_file = "{at.access_key_id_file}",'
        f' secret_access_key_file = "{at.secret_access_key_file}" }}]',
        name="test",
    )
    stack = await build_objects(tier_specs(config, Path))
    await stack.put(A, entry(1, LARGE), lease_s=0)
    assert [part.objects for part in stack.stats().parts] == [0, 1], "too large for the first"
    await stack.aclose()
    stack = await build_objects(tier_specs(config, Path))
    assert await stack.get(A) == entry(1, LARGE)
    await stack.aclose()


async def test_a_server_that_lets_all_win_is_refused() -> None:
    async with answering("200 OK") as endpoint:
        with pytest.raises(TierError, match="16 were granted instead of one") as caught:
            await probe(store_at(endpoint), prefix="p", where=f"the bucket b at {endpoint}")
    assert endpoint in str(caught.value) and "\n" not in str(caught.value)


async def test_a_server_that_fails_is_refused() -> None:
    async with answering("500 Internal Server Error") as endpoint:
        with pytest.raises(TierError, match="answered 500"):
            await probe(store_at(endpoint), prefix="p", where="the bucket b")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"bucket": "not-there"}, "denied|no such bucket"),
        ({"endpoint": "http://127.0.0.1:1"}, "can't be reached"),
        ({"access_key_id_file": "wrong"}, "access key is not known"),
        ({"secret_access_key_file": "wrong"}, "secret key is another"),
        ({"secret_access_key_file": "open"}, "read by everybody"),
        ({"secret_access_key_file": "empty"}, "holds no key"),
        ({"secret_access_key_file": "missing"}, "cannot be read"),
        ({"secret_access_key_file": None}, "there is no key for it"),
    ],
)
async def test_what_is_wrong_with_a_bucket_is_said_in_one_sentence(
    process: S3Process,
    prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    text: str,
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    for name, content, mode in (
        ("wrong", "WRONG", 0o600),
        ("open", "X", 0o644),
        ("empty", "", 0o600),
    ):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(mode)
    files = {
        name: tmp_path / value if name.endswith("_file") and isinstance(value, str) else value
        for name, value in changes.items()
    }
    with pytest.raises(TierError, match=text) as caught:
        await open_s3(place(process, prefix, tmp_path, **files), 1 << 20)
    said = str(caught.value)
    assert "\n" not in said and SECRET not in said and "WRONG" not in said
