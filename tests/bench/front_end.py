"""What the front end bears and costs: `python -m tests.bench.front_end`.

load: clients that stream, each text another, against `sdcpd dev` with the bundled pair.  Claimed:
no error, no gap of over 2 s between two chunks of a stream, and no process that grows by more than
what its caches keep.

cost: CPU time of a front end alone at 500 tokens/s of 32 streams, by parts of one token and of
four, less that of consuming the same tokens with nothing in between.  Claimed: at most 15 % of one
core.

Exits with 1 if a claim fails; `-o FILE` writes all figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.bench import front_end_memory
from tests.bench.front_end_memory import Memory
from tests.kit.dev import dev, environment

GAP_MS_MAX = 2000.0
SMALL_TIERS = '[{ kind = "host", size = "8MiB" }]'
WARM_UP_S = 120.0  # in which keys and values of that many texts fill the engines' memory
CPU_PERCENT_MAX = 15.0
PARTS = (1, 4)


def load(clients: int, seconds: float, *, warm_up_s: float = 0.0) -> dict[str, Any]:
    """Stream from a real cluster, whose caches are small enough to be full after the warm-up."""
    words = ["--streams", str(clients), "--seconds", str(warm_up_s + seconds)]
    with (
        patch.dict(os.environ, {"SDCPD__MLC__TIERS": SMALL_TIERS}),
        tempfile.TemporaryDirectory() as scratch,
        dev(Path(scratch) / "state") as running,
        Memory(running, warm_up=warm_up_s / (warm_up_s + seconds)) as memory,
    ):
        found = json.loads(_module("front_end_client", running.api, *words).communicate()[0])
    found["clients"] = clients
    found["memory_mib"], found["samples_mib"] = memory.growth(), memory.samples
    found["failed"] = [f"error: {one}" for one in found["errors"]] + memory.failed()
    if found["gap_ms"]["max"] > GAP_MS_MAX:
        found["failed"].append(f"a stream stood still for {found['gap_ms']['max']:.0f} ms")
    return dict(found)


def cost(rate: float, streams: int, part: int, seconds: float, *, profile: bool) -> dict[str, Any]:
    """CPU time of a front end, and of the same without one."""
    words = ["--rate", str(rate), "--streams", str(streams), "--part", str(part)]
    words += ["--seconds", str(seconds)]
    bare = json.loads(_module("front_end_served", *words, "--bare").communicate()[0])
    more = ["--profile"] if profile else []
    with _module("front_end_served", *words, *more) as served:
        assert served.stdout is not None
        url = served.stdout.readline().strip()
        endless = ["--streams", str(streams), "--seconds", "0", "--max-tokens", "2000"]
        with _module("front_end_client", url, *endless) as client:
            whole = json.loads(served.stdout.readline())
            client.communicate()
    own = whole["cpu_percent"] - bare["cpu_percent"]
    found = {"part": part, "whole": whole, "bare": bare, "cpu_percent": own}
    found["us_per_token"] = 1e4 * own / whole["tokens_per_s"]
    found["failed"] = []
    if own > CPU_PERCENT_MAX and not profile:
        found["failed"] = [f"{own:.1f} % of a core by parts of {part}"]
    return found


def _module(name: str, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"tests.bench.{name}", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())


def load_lines(found: dict[str, Any]) -> list[str]:
    """For people."""
    lines = [
        f"{found['clients']} clients, {found['seconds']:.0f} s: {found['texts']} texts, "
        f"{found['tokens']} tokens, {found['tokens_per_s']:.0f} tokens/s, "
        f"{found['error_count']} errors",
        f"{'ms':24}{'p50':>10}{'p99':>10}{'max':>10}",
    ]
    names = {"gap_ms": "between two chunks", "first_ms": "to the first chunk"}
    for key, name in names.items():
        lines.append(f"{name:24}" + "".join(f"{value:10.0f}" for value in found[key].values()))
    return [*lines, *front_end_memory.lines(found["memory_mib"])]


def cost_lines(found: list[dict[str, Any]]) -> list[str]:
    """For people."""
    lines = [
        f"{'tokens a part':>14}{'tokens/s':>10}{'whole':>9}{'bare':>9}{'own':>9}{'us/token':>10}"
    ]
    for one in found:
        percents = (one["whole"]["cpu_percent"], one["bare"]["cpu_percent"], one["cpu_percent"])
        cells = "".join(f"{value:8.1f}%" for value in percents)
        rate = one["whole"]["tokens_per_s"]
        lines.append(f"{one['part']:14}{rate:10.0f}{cells}{one['us_per_token']:10.0f}")
        lines += one["whole"].get("profile", "").splitlines()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", "--clients", type=int, default=64)
    parser.add_argument("-s", "--seconds", type=float, default=120.0, help="of the load")
    parser.add_argument("--warm-up", type=float, default=WARM_UP_S, help="seconds before it")
    parser.add_argument("--only", choices=("load", "cost"))
    parser.add_argument("--rate", type=float, default=500.0, help="tokens a second of the cost")
    parser.add_argument("--streams", type=int, default=32, help="of the cost")
    parser.add_argument("--profile", action="store_true", help="of the cost; nothing is claimed")
    parser.add_argument("-o", "--out", type=Path, help="a file for all figures as JSON")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    failed: list[str] = []
    if options.only != "load":
        sizes = (options.rate, options.streams)
        found["cost"] = [cost(*sizes, part, 10.0, profile=options.profile) for part in PARTS]
        print("\n".join(cost_lines(found["cost"])), flush=True)
        failed += [one for row in found["cost"] for one in row["failed"]]
    if options.only != "cost":
        found["load"] = load(options.clients, options.seconds, warm_up_s=options.warm_up)
        print("\n".join(load_lines(found["load"])))
        failed += found["load"]["failed"]
    for one in failed:
        print(f"FAILED: {one}")
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
