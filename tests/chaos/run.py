"""One run: a cluster, its clients, a plan of faults, and what it came to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx2 as httpx

from sdcpd.dev.plan import PAIR
from sdcpd.engine.tokenizer import TextModel
from tests.chaos.checks import check_logs, left_behind
from tests.chaos.client import Client
from tests.chaos.cluster import Cluster
from tests.chaos.plan import Fault, make_plan
from tests.chaos.report import Report, count_faults, gaps_by_fault
from tests.chaos.texts import make_texts, undisturbed

CLIENTS = 16
Say = Callable[[str], None]


async def run(
    directory: Path,
    *,
    seed: int,
    seconds: float,
    clients: int = CLIENTS,
    etcd: Sequence[str] = (),
    transport: str = "auto",
    say: Say = lambda _: None,
) -> Report:
    """Play the plan of `seed` for so long; `directory` is empty and keeps the logs."""
    report = Report(seed, seconds)
    text = TextModel.load(PAIR / "target")
    texts = make_texts(seed)
    async with Cluster(directory, etcd=etcd, transport=transport) as cluster:
        known = await undisturbed(cluster.router, texts)
        plan = make_plan(seed, seconds)
        say(f"ready; {len(plan)} faults to come")
        limits = httpx.Limits(max_connections=4 * clients)
        async with httpx.AsyncClient(base_url=cluster.api, limits=limits) as http:
            all_clients = [Client(i, http, texts, known, seed=seed) for i in range(clients)]
            await _stream_under(cluster, plan, all_clients, seconds=seconds, say=say)
        say("all texts have ended")
        _count(report, cluster, all_clients)
        report.wrong += await left_behind(cluster)
        streams = [stream for one in all_clients for stream in one.streams]
        logs = await check_logs(cluster, streams, known, text)
        report.wrong += logs.wrong
        report.tokens_checked, report.failovers = logs.tokens, logs.failovers
        say("all logs are read")
        report.wrong += await cluster.stop()
    return report


async def _stream_under(
    cluster: Cluster, plan: Sequence[Fault], clients: Sequence[Client], *, seconds: float, say: Say
) -> None:
    """All clients stream while the plan is played, and end the texts that they have begun."""
    until = time.monotonic() + seconds
    async with asyncio.TaskGroup() as running:
        for one in clients:
            running.create_task(one.run(lambda: time.monotonic() < until))
        await cluster.play(plan, say=say)


def _count(report: Report, cluster: Cluster, clients: Sequence[Client]) -> None:
    """What clients have seen."""
    streams = [stream for one in clients for stream in one.streams]
    report.faults = count_faults(cluster.injected)
    report.texts = len(streams)
    report.whole = sum(stream.whole for stream in streams)
    report.reconnects = sum(stream.reconnects for stream in streams)
    report.refused = sum(one.refused for one in clients)
    bases = {name: cluster.base(name) for name in cluster.processes}
    report.gaps = gaps_by_fault(cluster.injected, streams, bases)
    report.wrong = [one for client in clients for one in client.wrong]
