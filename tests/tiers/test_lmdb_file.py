"""Pages of an LMDB file that are not what they were: refused, and never a signal that kills."""

from __future__ import annotations

import asyncio
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest

from tests.kit.tier_contract import entry
from tests.tiers.test_log_torn import PAGE_BYTES, Disk, said_clearly, used_store
from tiers.api import Key, TierError
from tiers.lmdb_file import FileDamaged, check_file
from tiers.lmdb_records import LmdbRecords
from tiers.lmdb_tier import LmdbTier

ROOT = Path(__file__).parents[2]
HEAD = struct.Struct("<Q2xHHH")
BRANCH, LEAF, OVERFLOW = 1, 2, 4


def zeroed(whole: bytes) -> Iterator[bytes]:
    """The file with one page that is zeros, and with nothing but zeros from a page on."""
    for start in range(0, len(whole), PAGE_BYTES):
        end = start + PAGE_BYTES
        yield whole[:start] + bytes(PAGE_BYTES) + whole[end:]
        yield whole[:start] + bytes(len(whole) - start)


async def open_all_damaged(folder: Path) -> None:
    """In a process of its own, which a page that LMDB does not expect would end."""
    disk = Disk(folder)
    whole, known, refused = disk.octets, await disk.read(), 0
    for octets in zeroed(whole):
        disk.hold(octets)
        try:
            assert await disk.read() == known
        except TierError as error:
            refused += 1
            said_clearly(str(error), folder)
            assert disk.octets == octets, "left as it was"
    assert refused > len(whole) // PAGE_BYTES
    disk.hold(whole)
    assert await disk.read() == known


async def test_zeros_in_place_of_pages_are_refused_or_lack_nothing(tmp_path: Path) -> None:
    await (await used_store(tmp_path)).aclose()
    code = f"open_all_damaged(Path({str(tmp_path)!r}))"
    start = f"import asyncio; from {__name__} import *; asyncio.run({code})"
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", start],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def filled(folder: Path) -> bytearray:
    """A file with pages of all kinds, some of them free, and its octets."""
    with lmdb.open(str(folder), map_size=1 << 24, max_dbs=2) as env:
        tree = env.open_db(b"tree")
        for count in (400, 300):
            with env.begin(write=True, db=tree) as txn:
                for number in range(count):
                    txn.put(b"%06d" % number, bytes(100 if number % 50 else 20_000))
    check_file(folder, used=True)
    return bytearray((folder / "data.mdb").read_bytes())


def page_of(octets: bytearray, flags: int, *, used: Callable[[int], bool]) -> int:
    """The number of a page of that kind that is in use."""
    return next(
        number
        for number in range(2, len(octets) // PAGE_BYTES)
        if HEAD.unpack_from(octets, number * PAGE_BYTES)[:2] == (number, flags) and used(number)
    )


FLAWS: dict[str, tuple[int, str, int]] = {
    # Of which kind of page, what is written, and where in it.
    "another page's number": (LEAF, "<Q", 0),
    "no kind": (LEAF, "<H", 10),
    "no free room": (LEAF, "<H", 12),
    "a branch with one key": (BRANCH, "<H", 12),
    "a node outside": (LEAF, "<H", 16),
    "a branch's number": (BRANCH, "<Q", 0),
    "a big value's kind": (OVERFLOW, "<H", 10),
    "a big value's length": (OVERFLOW, "<I", 12),
}
VALUES = {"a branch with one key": 18, "a node outside": 4095, "a big value's length": 1 << 20}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_page_that_is_not_what_it_should_be_is_found(tmp_path: Path, flaw: str) -> None:
    kind, form, at = FLAWS[flaw]
    whole = filled(tmp_path)
    file = tmp_path / "data.mdb"

    def is_used(number: int) -> bool:
        octets = bytearray(whole)
        octets[number * PAGE_BYTES : (number + 1) * PAGE_BYTES] = bytes(PAGE_BYTES)
        file.write_bytes(octets)
        try:
            check_file(tmp_path, used=True)
        except FileDamaged:
            return True
        return False

    number = page_of(whole, kind, used=is_used)
    struct.pack_into(form, whole, number * PAGE_BYTES + at, VALUES.get(flaw, 0))
    file.write_bytes(whole)
    with pytest.raises(FileDamaged):
        check_file(tmp_path, used=True)


def test_a_page_that_is_free_and_in_use_is_found(tmp_path: Path) -> None:
    """LMDB would write over it with the next commits."""
    whole = filled(tmp_path)
    file = tmp_path / "data.mdb"
    newest = max((0, 1), key=lambda page: struct.unpack_from("<Q", whole, page * 4096 + 144)[0])
    (free_root,) = struct.unpack_from("<Q", whole, newest * PAGE_BYTES + 80)
    (tree_root,) = struct.unpack_from("<Q", whole, newest * PAGE_BYTES + 128)
    start = free_root * PAGE_BYTES
    (node,) = struct.unpack_from("<H", whole, start + 16)
    first_free = start + node + 8 + 8 + 8
    assert struct.unpack_from("<Q", whole, first_free)[0] != tree_root
    struct.pack_into("<Q", whole, first_free, tree_root)
    file.write_bytes(whole)
    with pytest.raises(FileDamaged, match=f"page {tree_root} is free and in use"):
        check_file(tmp_path, used=True)


def test_whatever_lmdb_writes_is_in_order(tmp_path: Path) -> None:
    seed = random.Random(11)
    with lmdb.open(str(tmp_path), map_size=1 << 26, max_dbs=2, sync=False) as env:
        trees = [env.open_db(name) for name in (b"a", b"b")]
        for _ in range(150):
            grows = seed.random()
            with env.begin(write=True) as txn:
                for _ in range(seed.choice((1, 10, 200))):
                    key = b"%0*d" % (seed.choice((6, 300)), seed.randrange(1000))
                    if seed.random() < grows:
                        size = seed.choice((0, 100, 1500, 2100, 30_000))
                        txn.put(key, bytes(size), db=seed.choice(trees))
                    else:
                        txn.delete(key, db=seed.choice(trees))
            check_file(tmp_path, used=True)


async def test_damaged_records_are_refused(tmp_path: Path) -> None:
    records = LmdbRecords(tmp_path, map_bytes=1 << 22, setting="[mlc] log_path")
    for number in range(60):
        await records.put(b"%d" % number, bytes(500))
    await records.aclose()
    file = tmp_path / "data.mdb"
    file.write_bytes(file.read_bytes()[: 2 * PAGE_BYTES] + bytes(file.stat().st_size - 8192))
    with pytest.raises(TierError) as caught:
        LmdbRecords(tmp_path, map_bytes=1 << 22, setting="[mlc] log_path")
    said_clearly(str(caught.value), tmp_path)


async def test_a_damaged_cache_is_begun_anew(tmp_path: Path) -> None:
    key = Key("s", "kv/a")

    def opened() -> LmdbTier:
        return LmdbTier(tmp_path, 1 << 20, boot="this boot")

    tier = opened()
    await tier.put(key, entry(1, 100_000), lease_s=0)
    await tier.aclose()
    file = tmp_path / "data.mdb"
    file.write_bytes(file.read_bytes()[: 2 * PAGE_BYTES] + bytes(file.stat().st_size - 8192))
    tier = opened()
    assert tier.stats().objects == 0
    await tier.put(key, entry(2, 100_000), lease_s=0)
    assert await tier.get(key) == entry(2, 100_000)
    await tier.aclose()
