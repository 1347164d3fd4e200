"""Ten thousand sessions that wait: what they cost, and that a text beside them is written.

Real roles with a router's records; each session waits for a drafter, and its client for output.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sdcpd.admin import RouterAdmin
from sdcpd.dev.plan import PAIR
from sdcpd.engine.tokenizer import TextModel
from sdcpd.protocol.messages import Sampling
from sdcpd.protocol.verifier_state import VerifierSettings
from sdcpd.roles.generation import GenerationRequest
from tests.kit.cluster import Cluster
from tiers.lmdb_records import LmdbRecords

IDLE = 10_000
AT_ONCE = 50
KIB_MAX = 64  # of memory a session, at router and verifier and for its client together
GREEDY = Sampling(temperature_milli=0)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)  # kept by pytest, and told for each session
    yield
    logging.disable(logging.NOTSET)


def resident_kib() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_ten_thousand_idle_sessions(tmp_path: Path) -> None:
    records = LmdbRecords(tmp_path / "sessions", map_bytes=256 << 20, setting="x")
    cluster = Cluster(records=records, status_ttl_s=30.0)
    cluster.add_router(sessions_max=2 * IDLE)
    cluster.add_verifier("idle", machine=VerifierSettings(None, None), max_sessions=2 * IDLE)
    await cluster.ready()
    before_kib = resident_kib()
    waiting = iter(range(IDLE))

    async def open_some() -> list[asyncio.Task[None]]:
        readers = []
        for number in waiting:
            prompt = (1, 2, number % 30)
            reader = await cluster.router.generate(GenerationRequest(prompt, 64, (), GREEDY))
            readers.append(asyncio.create_task(anext_of(aiter(reader))))
        return readers

    some = await asyncio.gather(*(open_some() for _ in range(AT_ONCE)))
    readers = [one for part in some for one in part]
    assert len(readers) == len(cluster.router.sessions) == IDLE
    each_kib = (resident_kib() - before_kib) / IDLE
    assert each_kib < KIB_MAX, f"{each_kib:.1f} KiB a session"

    # Whoever comes now is served as ever, and whoever asks is told.
    busy = cluster.add_verifier("busy", machine=VerifierSettings(0.01, 1.0))
    await cluster.ready()
    assert len(await cluster.text(count=40)) == 40
    assert busy.counts["opened"] == 1, "the least loaded verifier is chosen"
    text = TextModel.load(PAIR / "target")
    status = await RouterAdmin("r0", cluster.router, text).status({})
    assert len(status["sessions"]) >= IDLE

    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    await cluster.aclose()
    await records.aclose()


async def anext_of(parts: object) -> None:
    await anext(parts)  # type: ignore[call-overload]
