"""A router that is killed under load loses no record that it acknowledged (R-6.8, Section 6.9)."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

import pytest

from sdcpd.protocol.commit_log import CommitRecord, decode_log, encode_record
from tiers.build import open_logs

LOGS = 8
ACKS_MAX = 400
ROOT = Path(__file__).parents[2]

WRITER = """
import asyncio, sys
from pathlib import Path
from tests.tiers.test_log_crash import load
asyncio.run(load(Path(sys.argv[1]), int(sys.argv[2])))
"""


async def load(path: Path, run: int) -> None:
    """Append to several logs without end, telling each acknowledged record on standard output."""
    store = open_logs(path, 64 << 20)

    async def session(number: int) -> None:
        log_id = f"{run}-{number}"
        tag: str | None = None
        for index in range(100_000):
            record = CommitRecord(
                epoch=1, round=index, emitted=(index,), committed=index, digest=bytes(32)
            )
            tag = await store.append(
                log_id, encode_record(record), offset=None, if_match=tag, create=tag is None
            )
            os.write(1, f"{number} {index}\n".encode())  # one write: a kill leaves no half line

    await asyncio.gather(*map(session, range(LOGS)))


async def killed_under_load(path: Path, run: int, *, acks: int) -> dict[int, int]:
    """Run a writer, kill it after so many acknowledgements; returns the last round of each log."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        WRITER,
        str(path),
        str(run),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    acknowledged: dict[int, int] = {}
    seen = 0
    async for line in process.stdout:
        number, index = map(int, line.split())
        acknowledged[number] = index
        seen += 1
        if seen == acks:
            process.kill()
    assert await process.wait() == -9
    return acknowledged


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.slow)])
async def test_a_kill_loses_no_acknowledged_record(tmp_path: Path, kills: int) -> None:
    """At any point: after as many acknowledgements as the seed says, the first among them."""
    seed = random.Random(kills)
    for run in range(kills):
        acks = seed.randint(1, ACKS_MAX)
        acknowledged = await killed_under_load(tmp_path, run, acks=acks)
        assert sum(last + 1 for last in acknowledged.values()) >= acks
        store = open_logs(tmp_path, 64 << 20)
        for number, last in acknowledged.items():
            content = await store.read(f"{run}-{number}")
            assert content is not None
            rounds = [
                record.round
                for record in decode_log(content.data)
                if isinstance(record, CommitRecord)
            ]
            assert rounds == list(range(len(rounds))), "no gap, nothing twice"
            assert last < len(rounds) <= last + 2, "all that was told, and at most one more"
        await store.aclose()
