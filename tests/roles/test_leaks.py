"""After thousands of sessions that were cancelled anywhere, all is as before them.

The real roles with real storage: logs and records of the router, and the rows of rule 2 and kept KV
of the verifiers, in LMDB.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sdcpd.protocol.messages import Sampling
from sdcpd.protocol.uris import session_path_id
from sdcpd.protocol.verifier_state import VerifierSettings
from sdcpd.roles import router as router_role
from sdcpd.roles import verifier as verifier_role
from sdcpd.roles.generation import GenerationError, GenerationRequest
from sdcpd.roles.log_retention import LogRetention
from tests.kit.cluster import ROUTER, Cluster
from tests.kit.records import MemoryRecords
from tests.kit.tier_contract import Clock
from tiers.build import open_logs
from tiers.host import HostTier
from tiers.lmdb_log import LmdbLogStore
from tiers.lmdb_records import LmdbRecords
from tiers.lmdb_tier import LmdbTier
from tiers.resource import MlcResource

SESSIONS, AT_ONCE = 2000, 40
LENGTH = 16
QUIET_S = 20.0
TIER_BYTES = 1 << 20
THREADS_MAX = 30  # of pools, which start them as they are needed and keep them


@dataclass
class Rig:
    """A cluster, and whatever of it could be left over."""

    cluster: Cluster
    logs: LmdbLogStore
    records: LmdbRecords
    tiers: list[HostTier | LmdbTier]
    """The router's, then the verifiers'."""
    clock: Clock
    retention: LogRetention
    ended: dict[str, int] = field(default_factory=dict)
    leased_bytes_max: int = 0

    def held(self) -> dict[str, Any]:
        """What is in use now; its keys are what a person would ask about."""
        cluster = self.cluster
        environments = [self.logs._env, self.records._env]
        environments += [t._objects._env for t in self.tiers if isinstance(t, LmdbTier)]
        verifiers, drafters = cluster.verifiers.values(), cluster.drafters.values()
        board = cluster.router.board
        return {
            "tasks": len(asyncio.all_tasks()),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "readers of LMDB": sum(map(readers, environments)),
            "leased bytes": [tier.stats().leased_bytes for tier in self.tiers],
            "sessions at the router": len(cluster.router.sessions),
            "records": self.records._env.stat()["entries"],
            "sessions on accounts": sum(one.sessions for one in board.all()),
            "sessions served": sum(len(one._serving) for one in verifiers),
            "sessions opening": sum(one._opening for one in verifiers),
            "requests that wait": sum(len(s._answers) for one in verifiers for s in one.sessions),
            "prefixes in engines": sum(len(one._engine._prefixes) for one in verifiers),  # type: ignore[attr-defined]
            "sessions drafted for": sum(len(one.sessions) for one in drafters),
        }

    async def quiet(self, wanted: dict[str, Any]) -> None:
        """Wait until no more is held than that."""
        end_s = asyncio.get_running_loop().time() + QUIET_S
        while (held := self.held()) != wanted:
            left = {what: (n, wanted[what]) for what, n in held.items() if n != wanted[what]}
            assert asyncio.get_running_loop().time() < end_s, f"left over (now, before): {left}"
            await asyncio.sleep(0.01)

    async def texts(self, count: int, seed: random.Random) -> None:
        """So many texts, some at once, each cancelled wherever the seed says."""
        numbers = iter([seed.random() for _ in range(count)])

        async def some() -> None:
            for number in numbers:
                how = await self._text(random.Random(number))
                self.ended[how] = self.ended.get(how, 0) + 1
                leased_bytes = sum(tier.stats().leased_bytes for tier in self.tiers)
                self.leased_bytes_max = max(self.leased_bytes_max, leased_bytes)

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))

    async def _text(self, seed: random.Random) -> str:
        prompt = tuple(seed.randrange(30) for _ in range(seed.choice((1, 5, 70))))
        sampling = Sampling(temperature_milli=900, seed=seed.randrange(1 << 32))
        request = GenerationRequest(prompt, LENGTH, (), sampling)
        if seed.random() < 0.2:
            return await self._given_up(request, seed)
        try:
            reader = await self.cluster.router.generate(request)
            count, until = 0, seed.randrange(LENGTH * 5 // 4)
            async for part in reader:
                count += len(part.tokens)
                if count >= until:
                    await reader.cancel()
                    return "cancelled after some tokens"
        except GenerationError as error:
            return f"failed: {error}"
        return "finished"

    async def _given_up(self, request: GenerationRequest, seed: random.Random) -> str:
        """Its client goes away while it is opened, or after a few steps of the event loop."""

        async def read() -> None:
            reader = await self.cluster.router.generate(request)
            try:
                async for _ in reader:
                    pass
            finally:
                await reader.cancel()

        task = asyncio.ensure_future(read())
        for _ in range(seed.randrange(200)):
            await asyncio.sleep(0)
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        return (
            "given up"
            if outcome is None or isinstance(outcome, asyncio.CancelledError)
            else repr(outcome)
        )

    async def forgotten(self) -> Counter[str]:
        """Python's objects by type when what is kept for a while has been forgotten as well."""
        client = self.cluster.client("router", "r0", ROUTER)
        path = f"sessions/{session_path_id(bytes(16))}/output?from=0"
        for base, verifier in self.cluster.verifiers.items():
            async with asyncio.timeout(QUIET_S):
                while verifier.sessions:  # any request has it look what is old enough
                    assert (await client.request("GET", base + path)).status == 404
                    await asyncio.sleep(0.01)
            verifier._engine.scored.clear()  # type: ignore[attr-defined]
        for tier in self.tiers:
            tier.check()
            assert tier.stats().used_bytes <= TIER_BYTES
            for key in list(tier._ledger._accounts):  # what a cache keeps is not left over
                await tier.delete(key)
            assert (tier.stats().objects, tier.stats().used_bytes) == (0, 0)
        gc.collect()
        return Counter(type(one).__qualname__ for one in gc.get_objects())

    async def swept(self) -> int:
        """The last page of the log file, once all logs of ended sessions are deleted."""
        await self.retention.sweep()
        self.clock.now += self.retention.retention_s
        await self.retention.sweep()
        assert not await self.logs.entries(count_max=9)
        return int(self.logs._env.info()["last_pgno"])


def readers(environment: Any) -> int:
    """Transactions that read now: a slot that was given back has a dash for its transaction."""
    lines = environment.readers().splitlines()[1:]
    return sum(line.split()[-1] != "-" for line in lines)


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    logging.disable(logging.WARNING)  # kept by pytest, and told for each session
    # What is remembered for late comers is soon as much as it will be.
    monkeypatch.setattr(router_role, "ENDED_MAX", 32)
    monkeypatch.setattr(verifier_role, "CLOSED_RETENTION_S", 0.5)
    monkeypatch.setattr(verifier_role, "TOMBSTONE_S", 0.5)
    monkeypatch.setattr(verifier_role, "SWEEP_S", 0.1)
    clock = Clock()
    logs = open_logs(tmp_path / "logs", 64 << 20)
    records = LmdbRecords(tmp_path / "sessions", map_bytes=16 << 20, setting="x")
    tiers: list[HostTier | LmdbTier] = [HostTier(TIER_BYTES, clock=clock)]
    # Nobody dies here, and on a busy machine a second may pass before a status is sent.
    cluster = Cluster(records=records, mlc=mlc_of(tiers[0], logs), status_ttl_s=10.0)  # type: ignore[arg-type]
    cluster.add_router(sampling_rule="rejection", trust_drafters=True)
    for name in ("v0", "v1"):
        tier = LmdbTier(tmp_path / name, TIER_BYTES, clock=clock)
        tiers.append(tier)
        cluster.add_verifier(
            name, mlc=mlc_of(tier), kv_tier=tier, machine=VerifierSettings(0.05, 1.0)
        )
    for name in ("d0", "d1"):
        cluster.add_drafter(name, noise=0.3, predraft=True)
    await cluster.ready()
    retention = LogRetention(
        logs,
        MemoryRecords(),
        open_logs=cluster.router.open_logs,
        retention_s=60.0,
        clock=clock,
    )
    yield Rig(cluster, logs, records, tiers, clock, retention)
    await cluster.aclose()
    for store in (logs, records, *tiers):
        await store.aclose()
    logging.disable(logging.NOTSET)


def mlc_of(objects: Any, logs: LmdbLogStore | None = None) -> MlcResource:
    return MlcResource(
        base_path="",
        objects=objects,
        logs=logs,
        authorize=lambda *_: None,
        object_bytes_max=1 << 20,
    )


@pytest.mark.slow
async def test_nothing_is_left_of_sessions_that_were_cancelled(rig: Rig) -> None:
    seed, idle = random.Random(2026), rig.held()
    pages, objects = [], []
    for _ in range(3):
        await rig.texts(SESSIONS // 3, seed)
        await rig.quiet(idle)
        pages.append(await rig.swept())
        objects.append(await rig.forgotten())
    assert set(rig.ended) == {"given up", "cancelled after some tokens", "finished"}
    assert min(rig.ended.values()) > SESSIONS // 20 and rig.leased_bytes_max > 0
    assert threading.active_count() < THREADS_MAX
    assert pages[2] < 1.2 * pages[1], f"pages of deleted logs are not used again: {pages}"
    # Before that, caches and pools fill.
    grown = objects[2].total() - objects[1].total()
    kinds = (objects[2] - objects[1]).most_common(9)
    assert grown < SESSIONS // 9, f"{grown} objects more of {SESSIONS // 3} sessions: {kinds}"
