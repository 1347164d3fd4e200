"""Records by key: durable when acknowledged, found again by the next process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiers.api import TierError
from tiers.lmdb_records import LmdbRecords

ROOT = Path(__file__).parents[2]
WRITER = """
import asyncio, os, sys
from pathlib import Path
from tiers.lmdb_records import LmdbRecords

async def main():
    records = LmdbRecords(Path(sys.argv[1]), map_bytes=1 << 22, setting="x")
    for number in range(50):
        await asyncio.gather(*(records.put(b"%d-%d" % (number, i), b"v" * 100) for i in range(4)))
        await records.delete(b"%d-0" % number)
    print("done", flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


def opened(path: Path, map_bytes: int = 1 << 20) -> LmdbRecords:
    return LmdbRecords(path / "records", map_bytes=map_bytes, setting="[mlc] log_path")


async def test_what_was_stored_is_found_again(tmp_path: Path) -> None:
    records = opened(tmp_path)
    await asyncio.gather(*(records.put(bytes([i]), bytes(i)) for i in range(1, 20)))
    await records.put(b"\x01", b"new")
    await records.delete(b"\x02")
    await records.delete(b"never there")
    await records.aclose()
    again = opened(tmp_path)
    assert again.all() == {b"\x01": b"new", **{bytes([i]): bytes(i) for i in range(3, 20)}}
    await again.aclose()


def test_acknowledged_records_survive_kill_9(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path / "records")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr
    records = opened(tmp_path, 1 << 22)
    wanted = {b"%d-%d" % (number, i) for number in range(50) for i in range(1, 4)}
    assert set(records.all()) == wanted
    records.close()


async def test_a_full_store_says_so_and_keeps_what_it_has(tmp_path: Path) -> None:
    records = opened(tmp_path, 128 << 10)
    await records.put(b"kept", b"x")
    outcomes = await asyncio.gather(
        *(records.put(b"%d" % i, bytes(60_000)) for i in range(4)), return_exceptions=True
    )
    assert any(isinstance(outcome, TierError) for outcome in outcomes)
    stored = {b"%d" % i for i, outcome in enumerate(outcomes) if outcome is None}
    assert set(records.all()) == {b"kept"} | stored
    await records.delete(b"kept")
    await records.aclose()


async def test_one_owner_at_a_time_and_none_after_closing(tmp_path: Path) -> None:
    records = opened(tmp_path)
    with pytest.raises(TierError, match="in use by another"):
        opened(tmp_path)
    await records.aclose()
    with pytest.raises(TierError, match="closed"):
        await records.put(b"k", b"v")


async def test_keys_that_lmdb_does_not_take(tmp_path: Path) -> None:
    records = opened(tmp_path)
    for key in (b"", bytes(512)):
        with pytest.raises(ValueError, match="octets"):
            await records.put(key, b"v")
    await records.aclose()
