"""The LMDB tier: what a restart keeps, what a power loss does not, damage, and a full map."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import lmdb
import pytest

from tests.kit.tier_contract import entry
from tiers.api import Key, TierError, TierFull
from tiers.lmdb_objects import Remove, Store, Tick
from tiers.lmdb_tier import LmdbTier

A, B = Key("s", "kv/a"), Key("s", "kv/b")
BUDGET = 1 << 20


def opened(path: Path, *, boot: str = "this boot", size_bytes: int = BUDGET) -> LmdbTier:
    return LmdbTier(path, size_bytes, boot=boot)


async def filled(path: Path, *, boot: str = "this boot") -> LmdbTier:
    tier = opened(path, boot=boot)
    await tier.put(A, entry(1, 100_000), lease_s=0)
    await tier.put(B, entry(2, 10), lease_s=60)
    return tier


async def test_a_clean_restart_keeps_objects_but_no_leases(tmp_path: Path) -> None:
    await (await filled(tmp_path)).aclose()
    tier = opened(tmp_path, boot="another boot")
    assert await tier.get(A) == entry(1, 100_000)
    assert await tier.get(B) == entry(2, 10)
    assert tier.stats().leased_bytes == 0
    tier.check()
    await tier.aclose()


WRITE_AND_DIE = """
import asyncio, os, sys
from pathlib import Path
from tests.kit.tier_contract import entry
from tests.tiers.test_lmdb_tier import filled
async def main():
    await filled(Path(sys.argv[1]))
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""


@pytest.mark.parametrize(("boot", "kept"), [("this boot", True), ("another boot", False)])
async def test_a_killed_process_loses_nothing_a_power_loss_everything(
    tmp_path: Path, boot: str, kept: bool
) -> None:
    root = Path(__file__).parents[2]
    dead = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", WRITE_AND_DIE, str(tmp_path)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=False,
    )
    assert dead.returncode == -9
    tier = opened(tmp_path, boot=boot)
    assert (await tier.get(A) is not None) is kept
    tier.check()
    await tier.aclose()


@pytest.mark.parametrize(
    ("table", "where"),
    [("head", 0), ("head", 9), ("head", 20), ("head", -1), ("data", 0), ("data", -1)],
)
async def test_damaged_or_torn_values_are_counted_misses(
    tmp_path: Path, table: str, where: int
) -> None:
    await (await filled(tmp_path)).aclose()
    _damage(tmp_path, table, lambda octets: _flipped(octets, where))
    tier = opened(tmp_path)
    assert await tier.get(A) is None
    assert await tier.get(B) == entry(2, 10)
    # A size that can't be was seen when the file was opened, all else on reading.
    assert (tier.stats().corrupt, tier.stats().objects) == (0 if where == 9 else 1, 1)
    await tier.put(A, entry(3, 5), lease_s=0)
    assert await tier.get(A) == entry(3, 5)
    await tier.aclose()


async def test_an_object_that_lies_under_anothers_name_is_a_miss(tmp_path: Path) -> None:
    await (await filled(tmp_path)).aclose()
    with lmdb.open(str(tmp_path), max_dbs=2, map_size=2 * BUDGET) as env:
        for table in (env.open_db(b"head"), env.open_db(b"data")):
            with env.begin(write=True, db=table) as txn:
                octets = txn.get(f"{A.scope}\0{A.name}".encode())
                txn.put(f"{B.scope}\0{B.name}".encode(), octets)
    tier = opened(tmp_path)
    assert await tier.get(B) is None and tier.stats().corrupt == 1
    assert await tier.get(A) == entry(1, 100_000)
    await tier.aclose()


async def test_a_short_value_is_a_miss(tmp_path: Path) -> None:
    await (await filled(tmp_path)).aclose()
    _damage(tmp_path, "data", lambda octets: octets[:-1])
    tier = opened(tmp_path)
    assert await tier.get(A) is None
    assert tier.stats().corrupt == 1
    await tier.aclose()


async def test_a_file_that_is_no_database_is_started_anew(tmp_path: Path) -> None:
    await (await filled(tmp_path)).aclose()
    (tmp_path / "data.mdb").write_bytes(b"\xff" * 8192)
    tier = opened(tmp_path)
    assert tier.stats().objects == 0
    await tier.put(A, entry(1, 10), lease_s=0)
    await tier.aclose()


@pytest.mark.parametrize("pages", [2, 5, 12, 20])
async def test_a_file_that_lost_its_end_is_started_anew(tmp_path: Path, pages: int) -> None:
    """Reading behind its end would be a signal that kills the process."""
    await (await filled(tmp_path)).aclose()
    os.truncate(tmp_path / "data.mdb", pages * 4096)
    tier = opened(tmp_path)
    assert await tier.get(A) is None and tier.stats().objects == 0
    await tier.put(A, entry(1, 100_000), lease_s=0)
    assert await tier.get(A) == entry(1, 100_000)
    await tier.aclose()


async def test_a_smaller_budget_keeps_the_newest(tmp_path: Path) -> None:
    await (await filled(tmp_path)).aclose()
    tier = opened(tmp_path, size_bytes=64 * 1024)
    assert await tier.get(A) is None
    assert await tier.get(B) == entry(2, 10)
    tier.check()
    await tier.aclose()


async def test_map_full_evicts_and_then_is_tier_full(tmp_path: Path) -> None:
    """A map smaller than the budget stands for free pages that don't lie together."""
    tier = LmdbTier(tmp_path, BUDGET, map_bytes=400_000)
    for number in range(12):
        await tier.put(Key("s", str(number)), entry(number, 100_000), lease_s=0)
    assert await tier.get(Key("s", "11")) == entry(11, 100_000)
    with pytest.raises(TierFull):
        await tier.put(A, entry(1, 500_000), lease_s=0)
    assert await tier.get(A) is None
    await tier.put(B, entry(2, 100_000), lease_s=0)
    assert await tier.get(B) == entry(2, 100_000)
    tier.check()
    assert tier.stats().failures == 0, "a full map is a normal state"
    await tier.aclose()


async def test_a_put_that_is_cancelled_and_finds_the_map_full_leaves_nothing(
    tmp_path: Path,
) -> None:
    """Its caller is away when it turns out that the file has no room for it."""
    tier = LmdbTier(tmp_path, BUDGET, map_bytes=400_000)
    await tier.put(A, entry(1, 100_000), lease_s=0)
    for key in (B, A):  # a new object, and one in another's place
        task = asyncio.create_task(tier.put(key, entry(2, 500_000), lease_s=0))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task, *tier._puts])
        assert task.cancelled()
        assert not await tier.holds(key) and await tier.get(key) is None
        tier.check()
    assert tier.stats().used_bytes == 0
    await tier.put(B, entry(3, 100_000), lease_s=0)
    assert await tier.get(B) == entry(3, 100_000)
    await tier.aclose()


async def test_a_put_that_is_cancelled_is_stored_before_the_tier_closes(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    task = asyncio.create_task(tier.put(A, entry(1, 100_000), lease_s=0))
    await asyncio.sleep(0)
    task.cancel()
    await tier.aclose()
    assert task.cancelled()
    tier = opened(tmp_path)
    assert await tier.get(A) == entry(1, 100_000)
    tier.check()
    await tier.aclose()


async def test_a_tier_that_closes_waits_for_puts_that_are_tried_again(tmp_path: Path) -> None:
    tier = LmdbTier(tmp_path, BUDGET, map_bytes=400_000)
    task = asyncio.create_task(tier.put(A, entry(1, 500_000), lease_s=0))
    await asyncio.sleep(0)
    task.cancel()
    (put,) = tier._puts
    await tier.aclose()
    assert put.done() and put.result() is False
    tier = opened(tmp_path)
    assert tier.stats().objects == 0
    tier.check()
    await tier.aclose()


async def test_what_the_file_has_lost_goes_from_the_books_with_the_next_read(
    tmp_path: Path,
) -> None:
    tier = await filled(tmp_path)
    tier._objects.perform([Remove(A)])
    assert await tier.holds(A) and await tier.get(A) is None
    assert not await tier.holds(A)
    assert (tier.stats().corrupt, tier.stats().objects) == (1, 1)
    tier.check()
    await tier.aclose()


async def test_a_read_before_the_object_is_written_leaves_it_on_the_books(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, may_write = opened(tmp_path), threading.Event()
    apply = tier._objects._apply

    def later(txn: lmdb.Transaction, op: Store | Remove | Tick) -> None:
        assert may_write.wait(5)
        apply(txn, op)

    monkeypatch.setattr(tier._objects, "_apply", later)
    task = asyncio.create_task(tier.put(A, entry(1, 100_000), lease_s=0))
    await asyncio.sleep(0)
    assert await tier.get(A) is None and await tier.holds(A)
    may_write.set()
    await task
    assert await tier.get(A) == entry(1, 100_000)
    tier.check()
    await tier.aclose()


async def test_a_deletion_for_which_the_file_was_too_full_is_done_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a restart would bring back what was deleted."""
    tier = await filled(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(tier._objects, "_apply", _too_full_to_remove)
        await tier.delete(A)
    tier.check()
    await tier.put(B, entry(3, 10), lease_s=0)
    await tier.aclose()
    tier = opened(tmp_path)
    assert await tier.get(A) is None and not await tier.holds(A)
    await tier.aclose()


def _too_full_to_remove(_: lmdb.Transaction, op: Store | Remove | Tick) -> None:
    raise lmdb.MapFullError(f"no page for {op}")


async def test_puts_at_once_are_all_stored(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    names = [Key("s", str(number)) for number in range(40)]
    await asyncio.gather(*(tier.put(key, entry(7, 1000), lease_s=1) for key in names))
    assert [key for key in names if await tier.get(key) is None] == []
    tier.check()
    await tier.aclose()


async def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    with pytest.raises(TierError, match=r"in use by another sdcpd: stop that one, or change"):
        opened(tmp_path)
    await tier.aclose()
    await opened(tmp_path).aclose()


def _flipped(octets: bytes, where: int) -> bytes:
    changed = bytearray(octets)
    changed[where] ^= 0x40
    return bytes(changed)


def _damage(path: Path, table: str, change: object) -> None:
    assert callable(change)
    with lmdb.open(str(path), max_dbs=2, map_size=2 * BUDGET) as env:
        database = env.open_db(table.encode())
        with env.begin(write=True, db=database) as txn:
            key = f"{A.scope}\0{A.name}".encode()
            octets = txn.get(key)
            assert octets is not None
            txn.put(key, change(bytes(octets)))
