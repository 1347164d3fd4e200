"""What the processes of a cluster hold, and how much of it is what their caches are there for."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

from sdcpd.admin_client import fetch
from tests.kit.dev import Dev

SAMPLE_S = 2.0
WINDOW = 5  # samples whose least is taken, so that one text more or less does not count
GROWTH_MAX = (1.05, 8.0)
"""What `own` may be more at the end than after the warm-up, beside what caches have taken."""
METRIC = re.compile(
    r"^(sdcp_kv_capacity_tokens|sdcp_kv_used_tokens|sdcp_cache_bytes)\{.*\} (\S+)$", re.M
)
KV_ROOM = re.compile(r"keys and values: (\d+) MiB")
Sample = dict[str, float]


class Memory:
    """Samples all processes in a thread, while somebody else makes them work.

    `resident` is all that a process has in memory, `own` that without pages of files.  `cached` is
    what it says of its caches, which fill up to their bounds and are no growth: keys and values of
    earlier texts, of which blocks count in full that are written in part, and objects.
    """

    def __init__(self, cluster: Dev, *, warm_up: float) -> None:
        """`warm_up` is the share of the run after which memory is looked at."""
        self._warm_up = warm_up
        (self._kv_mib, *_) = map(float, KV_ROOM.findall(cluster.banner))
        self._instances = cluster.state["instances"]
        self.samples: dict[str, list[Sample]] = {one["name"]: [] for one in self._instances}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            for instance in self._instances:
                self.samples[instance["name"]].append(self._sample(instance))

    def _sample(self, instance: dict[str, Any]) -> Sample:
        status = Path(f"/proc/{instance['pid']}/status").read_text()
        resident, own = (
            int(re.findall(rf"^{name}:\s+(\d+) kB", status, re.M)[0]) / 1024
            for name in ("VmRSS", "RssAnon")
        )
        found: dict[str, float] = {}
        for name, value in METRIC.findall(fetch(Path(instance["admin"]), "/metrics")):
            found[name] = found.get(name, 0.0) + float(value)
        cached = found.get("sdcp_cache_bytes", 0.0) / (1 << 20)
        if capacity := found.get("sdcp_kv_capacity_tokens"):
            cached += self._kv_mib * found["sdcp_kv_used_tokens"] / capacity
        return {"resident": resident, "own": own, "cached": cached}

    def growth(self) -> dict[str, dict[str, list[float]]]:
        """By process and kind of memory: MiB after the warm-up, and at the end."""
        return {name: _of(taken, self._warm_up) for name, taken in self.samples.items() if taken}

    def failed(self) -> list[str]:
        """Processes that have grown by more than what their caches keep."""
        factor, more = GROWTH_MAX
        failed = []
        for name, kinds in self.growth().items():
            (early, late), (before, after) = kinds["own"], kinds["cached"]
            if late > early * factor + more + max(0.0, after - before):
                failed.append(f"{name} grew from {early:.1f} to {late:.1f} MiB")
        return failed


def _of(taken: list[Sample], warm_up: float) -> dict[str, list[float]]:
    start = min(int(warm_up * len(taken)), max(0, len(taken) - WINDOW))
    early, late = taken[start : start + WINDOW], taken[-WINDOW:]
    return {
        kind: [min(one[kind] for one in early), min(one[kind] for one in late)] for kind in taken[0]
    }


def lines(growth: dict[str, dict[str, list[float]]]) -> list[str]:
    """For people."""
    kinds = list(next(iter(growth.values()), {}))
    made = [f"{'MiB':8}" + "".join(f"{kind:>20}" for kind in kinds)]
    for name, found in growth.items():
        cells = (f"{early:.1f} -> {late:.1f}" for early, late in found.values())
        made.append(f"{name:8}" + "".join(f"{cell:>20}" for cell in cells))
    return made
