"""The tier on disk and the commit logs: `python -m tests.bench.storage [--folder DIR]`.

Objects of 4 MiB against a copy of as much memory; 64 logs that append together against what the
disk allows, two flushes a transaction.  Measured in turns, in one run, on the disk of the folder.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import uvloop

from sdcpd.protocol.commit_log import CommitRecord, encode_record
from sdcpd.transport import tuning
from tiers.api import Entry, Key, entry_of
from tiers.build import open_logs
from tiers.lmdb_tier import LmdbTier

MIB = 1 << 20
SIZE = 4 * MIB
OBJECTS = 8
LOGS = 64


async def timed(call: Callable[[], Awaitable[object]]) -> float:
    """Seconds that a call took."""
    begin = time.perf_counter()
    await call()
    return time.perf_counter() - begin


def copies(rounds: int) -> float:
    """Median seconds of a copy of SIZE octets, between buffers that were touched before."""
    chooser = np.random.default_rng(0)
    sources = [chooser.integers(0, 256, SIZE, dtype=np.uint8) for _ in range(OBJECTS)]
    targets = [np.zeros(SIZE, dtype=np.uint8) for _ in range(OBJECTS)]
    times = []
    for turn in range(rounds):
        begin = time.perf_counter()
        np.copyto(targets[turn % OBJECTS], sources[turn % OBJECTS])
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


async def objects(folder: Path, rounds: int) -> dict[str, float]:
    """Median seconds of a put and a get of SIZE octets, once the pages are those of old objects."""
    tier = LmdbTier(folder / "objects", 2 * OBJECTS * SIZE)
    entries = [entry_of(os.urandom(SIZE), media_type="a/b") for _ in range(OBJECTS)]
    keys = [Key("s", str(number)) for number in range(OBJECTS)]

    async def put(key: Key, entry: Entry) -> None:
        await tier.put(key, entry, lease_s=0)

    puts, gets, memory = [], [], []
    for turn in range(rounds):
        at = turn % OBJECTS
        puts.append(await timed(lambda at=at: put(keys[at], entries[at])))  # type: ignore[misc]
        gets.append(await timed(lambda at=at: tier.get(keys[at])))  # type: ignore[misc]
        memory.append(copies(OBJECTS))
    await tier.aclose()
    warm = 4 * OBJECTS
    found = {"put": puts, "get": gets, "copy": memory}
    return {name: statistics.median(times[warm:]) for name, times in found.items()}


def flush_s(folder: Path, count: int) -> float:
    """Median seconds of a page written into a file that has it already, and flushed."""
    path = folder / "flushed"
    path.write_bytes(bytes(1 * MIB))
    file = os.open(path, os.O_RDWR)
    os.fsync(file)
    times = []
    for turn in range(count):
        begin = time.perf_counter()
        os.pwrite(file, os.urandom(4096), 4096 * (turn % 256))
        os.fdatasync(file)
        times.append(time.perf_counter() - begin)
    os.close(file)
    return statistics.median(times)


async def appends(folder: Path, rounds: int) -> float:
    """Records a second of LOGS logs, each of which waits for its last record."""
    store = open_logs(folder / "logs", 1 << 30)
    records = [
        encode_record(
            CommitRecord(
                epoch=1, round=n, emitted=(7, 8, 9), committed=3 * n, digest=os.urandom(32)
            )
        )
        for n in range(1, rounds + 1)
    ]

    async def write(name: str) -> None:
        etag = await store.append(name, records[0], offset=None, if_match=None, create=True)
        for record in records[1:]:
            etag = await store.append(name, record, offset=None, if_match=etag)

    begin = time.perf_counter()
    await asyncio.gather(*(write(f"{number:022d}") for number in range(LOGS)))
    spent = time.perf_counter() - begin
    await store.aclose()
    return LOGS * rounds / spent


async def measure(folder: Path, rounds: int) -> None:
    """Print the figures."""
    found = await objects(folder, 12 * OBJECTS)
    copy_s = found["copy"]
    print(f"4 MiB: a copy {1e6 * copy_s:.0f} us; LMDB, times that")
    for name in ("put", "get"):
        print(f"  {name}  {found[name] / copy_s:5.2f}   ({1e6 * found[name]:.0f} us)")
    before = flush_s(folder, 60)
    rate = await appends(folder, rounds)
    after = flush_s(folder, 60)
    allowed = LOGS / (before + after)
    print(f"{LOGS} logs: {rate:.0f} records/s; two flushes {1e3 * (before + after):.2f} ms allow")
    print(f"  {allowed:.0f}/s; that is {rate / allowed:.2f} of it")


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one")
    parser.add_argument("--rounds", type=int, default=200, help="records of each log")
    options = parser.parse_args()
    tuning.tune_process()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        uvloop.run(measure(Path(folder), options.rounds))


if __name__ == "__main__":
    main()
