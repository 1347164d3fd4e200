"""`python -m tests.chaos.soak`: constant load without faults, and whether anything grows.

Looked at after a warm-up and at the end: resident memory, open files, tasks of the event loop and
the room that logs and records take on the disk, of every process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx2 as httpx

from sdcpd.admin_client import fetch
from tests.chaos.client import Client
from tests.chaos.cluster import Cluster
from tests.chaos.instances import Process
from tests.chaos.texts import make_texts, undisturbed

SAMPLE_S = 5.0
PAUSE_S = 0.5  # between two texts of a client, so that the load is the same whatever else runs
SMALL = {"cache": "8MiB", "kv_memory": "32MiB", "ttl": "10s"}
"""Caches that are full before anybody looks, and nobody who is slow is taken for dead."""
RETENTION = "1min"  # so that logs are deleted as fast as they come, which is seen in minutes
WARM_UP = 0.25  # share of the run that is not looked at
WINDOW = 0.15  # share of the run at the beginning and at the end whose medians are compared
SLACK = {"rss_mib": (1.05, 8.0), "files": (1.0, 4.0), "tasks": (1.0, 16.0), "disk_mib": (1.1, 4.0)}
"""What may be more at the end: a factor, and a number beside it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment."""

    at_s: float
    rss_mib: float
    files: int
    tasks: int
    disk_mib: float


@dataclass
class Soak:
    """What a soak came to."""

    seconds: float
    texts: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    growth: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    """Medians after the warm-up and at the end, by process and quantity."""

    @property
    def lines(self) -> list[str]:
        """For people."""
        lines = [f"{self.seconds:.0f} s, {self.texts} texts, {self.tokens} tokens"]
        lines.append(f"{'':10}" + "".join(f"{name:>20}" for name in SLACK))
        for process, found in sorted(self.growth.items()):
            cells = [f"{found[name][0]:.1f} -> {found[name][1]:.1f}" for name in SLACK]
            lines.append(f"{process:10}" + "".join(f"{cell:>20}" for cell in cells))
        return [*lines, *(f"WRONG: {one}" for one in self.wrong)]


async def soak(directory: Path, *, seconds: float, clients: int, seed: int) -> Soak:
    """Keep `clients` streaming for so long."""
    found = Soak(seconds)
    texts = make_texts(seed)
    samples: dict[str, list[Sample]] = {}
    async with Cluster(directory, log_retention=RETENTION, **SMALL) as cluster:
        known = await undisturbed(cluster.router, texts)
        limits = httpx.Limits(max_connections=4 * clients)
        async with httpx.AsyncClient(base_url=cluster.api, limits=limits) as http:
            all_clients = [
                Client(i, http, texts, known, seed=seed, pause_s=PAUSE_S) for i in range(clients)
            ]
            begin = time.monotonic()
            running = [
                asyncio.ensure_future(one.run(lambda: time.monotonic() < begin + seconds))
                for one in all_clients
            ]
            while time.monotonic() < begin + seconds:
                for name, process in cluster.processes.items():
                    sample = await asyncio.to_thread(_sample, process, time.monotonic() - begin)
                    samples.setdefault(name, []).append(sample)
                for client in all_clients:  # what they have seen is checked and counted
                    found.texts += len(client.streams)
                    found.tokens += sum(one.text.max_tokens for one in client.streams)
                    client.streams.clear()
                await asyncio.sleep(SAMPLE_S)
            await asyncio.gather(*running)
        found.wrong = [one for client in all_clients for one in client.wrong]
        found.wrong += await cluster.stop()
    for name, taken in samples.items():
        found.growth[name] = _growth(taken, seconds)
    found.wrong += list(_grown(found.growth))
    return found


def _sample(process: Process, at_s: float) -> Sample:
    pid = process.pid
    assert pid is not None, f"{process.name} runs"
    status = Path(f"/proc/{pid}/status").read_text()
    (rss,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    metrics = fetch(process.socket_path, "/metrics")
    (tasks,) = (one for one in metrics.splitlines() if one.startswith("sdcp_tasks{"))
    return Sample(
        at_s,
        int(rss.split()[1]) / 1024,
        len(os.listdir(f"/proc/{pid}/fd")),
        int(float(tasks.split()[-1])),
        _disk(process.log_path.with_name(f"{process.name}.logs")),
    )


def _disk(folder: Path) -> float:
    """MiB that files take, holes not counted."""
    if not folder.exists():
        return 0.0
    return sum(one.stat().st_blocks * 512 for one in folder.rglob("*") if one.is_file()) / (1 << 20)


def _growth(samples: Sequence[Sample], seconds: float) -> dict[str, tuple[float, float]]:
    early = [one for one in samples if 0 <= one.at_s - WARM_UP * seconds <= WINDOW * seconds]
    late = [one for one in samples if one.at_s >= (1 - WINDOW) * seconds]
    return {
        name: (
            statistics.median(getattr(one, name) for one in early),
            statistics.median(getattr(one, name) for one in late),
        )
        for name in SLACK
    }


def _grown(growth: dict[str, dict[str, tuple[float, float]]]) -> Sequence[str]:
    return [
        f"{process}: {name} grew from {early:.1f} to {late:.1f}"
        for process, found in growth.items()
        for name, (early, late) in found.items()
        if late > early * SLACK[name][0] + SLACK[name][1]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30 * 60.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, help="a file for the report as JSON")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        found = asyncio.run(
            soak(folder, seconds=options.seconds, clients=options.clients, seed=options.seed)
        )
    print("\n".join(found.lines))
    if options.report is not None:
        options.report.write_text(json.dumps(asdict(found), indent=1) + "\n")
    raise SystemExit(1 if found.wrong else 0)


if __name__ == "__main__":
    main()
