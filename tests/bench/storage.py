"""The tier on disk and the commit logs: `python -m tests.bench.storage [--folder DIR]`.

Objects of 4 MiB against a copy of as much memory; 64 logs that append together against what the
disk allows, two flushes a transaction.  Measured in turns, in one run, on the disk of the folder.
With --flush-ms every flush takes so much longer (slow_flush.c, needs a C compiler), as on a disk
that really flushes: where a flush costs next to nothing, what is measured is Python.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import uvloop

from sdcpd.protocol.commit_log import CommitRecord, encode_record
from sdcpd.transport import tuning
from tests.bench.same_host import Step, medians
from tiers.api import Key, entry_of
from tiers.build import open_logs
from tiers.lmdb_tier import LmdbTier

MIB = 1 << 20
SIZE = 4 * MIB
OBJECTS = 8
LOGS = 64


async def objects(folder: Path, rounds: int) -> dict[str, float]:
    """Median seconds of a copy of SIZE octets, and of a put and a get on pages of old objects."""
    tier = LmdbTier(folder / "objects", 2 * OBJECTS * SIZE)
    entries = [entry_of(os.urandom(SIZE), media_type="a/b") for _ in range(OBJECTS)]
    sources = [np.frombuffer(entry.data, dtype=np.uint8) for entry in entries]
    targets = [np.zeros(SIZE, dtype=np.uint8) for _ in range(OBJECTS)]

    async def copy(number: int) -> None:
        np.copyto(targets[number], sources[number])

    async def put(number: int) -> None:
        await tier.put(Key("s", str(number)), entries[number], lease_s=0)

    async def get(number: int) -> None:
        assert await tier.get(Key("s", str(number))) is not None

    steps: dict[str, Step] = {"copy": copy, "put": put, "get": get}
    found = await medians(steps, rounds, OBJECTS)
    await tier.aclose()
    return found


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
    found = await objects(folder, 20 * OBJECTS)
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


def run_with_slow_flush(flush_ms: float) -> int:
    """Run this again on what looks like a slower disk."""
    source = Path(__file__).with_name("slow_flush.c")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "slow_flush.so"
        compiler = ["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"]
        subprocess.run(compiler, check=True)
        environment = {"LD_PRELOAD": str(library), "FLUSH_US": str(round(1000 * flush_ms))}
        command = [sys.executable, "-m", "tests.bench.storage", *sys.argv[1:]]
        return subprocess.run(command, env=os.environ | environment, check=False).returncode


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one")
    parser.add_argument("--rounds", type=int, default=200, help="records of each log")
    parser.add_argument("--flush-ms", type=float, help="how much longer a flush takes")
    options = parser.parse_args()
    if options.flush_ms and "FLUSH_US" not in os.environ:
        sys.exit(run_with_slow_flush(options.flush_ms))
    tuning.tune_process()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        uvloop.run(measure(Path(folder), options.rounds))


if __name__ == "__main__":
    main()
