"""What sessions cost that are open while nothing goes on in them: memory, CPU, others' rounds."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sdcpd.admin_client import ask
from sdcpd.dev.plan import free_ports
from tests.bench.growth_figures import described, slope
from tests.bench.rounds import Running, begin, running
from tests.kit.by_hand import wait_until

SESSIONS = (1, 10, 100, 1000)
PROCESSES = ("router", "verifier", "drafter")
TEXTS = 5
WARM_S = 2.0
OPEN_S = 240.0
QUIET = {
    "SDCPD__VERIFIER__SELF_DECODE_AFTER": "never",
    "SDCPD__VERIFIER__DRAFTER_SILENCE": "never",
    "SDCPD__VERIFIER__MAX_SESSIONS": "2000",
    "SDCPD__API__MODEL_NAME": "tiny",
    "SDCPD__API__MAX_QUEUE": "2000",
    "SDCPD__ROUTER__PROGRESS": "1h",
    "SDCPD__ROUTER__SWITCH_GRACE": "never",
}
"""With which nobody helps a session along whose drafter is silent."""


def resident_kib(pid: int) -> int:
    """What a process has in memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    (found,) = re.findall(r"^VmRSS:\s+(\d+) kB", status, re.M)
    return int(found)


def cpu_s(pid: int) -> float:
    """What a process has taken so far, of user and system time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def asked(port: int, prompt: str) -> socket.socket:
    """A client of the API that waits for a text and reads nothing of it."""
    wanted = {"model": "tiny", "prompt": prompt, "max_tokens": 64, "stream": True}
    body = json.dumps(wanted).encode()
    made = socket.create_connection(("127.0.0.1", port))
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json"
    made.sendall(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    return made


def with_drafter(cluster: Running) -> int:
    """How many sessions wait for a drafter's proposal; the API's own first text has none."""
    sessions = ask(cluster.admin, "GET", "/status", timeout_s=30.0)["sessions"]
    return sum(one["phase"] == "running" and one["drafter"] is not None for one in sessions)


def one_text(cluster: Running) -> float:
    """Seconds of a short text: it opens, drafts and ends beside all others."""
    wanted = {"prompt": "short", "max_tokens": 50, "ignore_eos": True}
    begun = time.monotonic()
    ask(cluster.admin, "POST", "/generate", wanted, timeout_s=60.0)
    return time.monotonic() - begun


def one_number(count: int, seconds: float) -> dict[str, Any]:
    """Figures of so many idle sessions, and of a busy one beside them."""
    (port,) = free_ports(1)
    api = {"SDCPD__API__LISTEN": f"127.0.0.1:{port}"}
    with running(IDLE=str(count), **QUIET, **api) as cluster, ExitStack() as open_:
        pids = {role: cluster.processes[role].pid for role in PROCESSES}
        before = {role: resident_kib(pid) for role, pid in pids.items()}
        begun = time.monotonic()
        for number in range(count):
            open_.enter_context(asked(port, f"{number}: the sea"))
        wait_until(lambda: with_drafter(cluster) == count, "all sessions idle", timeout_s=OPEN_S)
        opened_s = time.monotonic() - begun
        time.sleep(WARM_S)  # what opening has left to do
        after = {role: resident_kib(pid) for role, pid in pids.items()}
        used = {role: cpu_s(pid) for role, pid in pids.items()}
        time.sleep(seconds)  # the time of the measurement
        percent = {role: 100 * (cpu_s(pid) - used[role]) / seconds for role, pid in pids.items()}
        busy = threading.Thread(target=begin, args=(cluster.admin, count))
        busy.start()
        wait_until(lambda: with_drafter(cluster) == count + 1, "the busy one runs")
        time.sleep(WARM_S)
        rounds = sorted(cluster.measured(min(seconds, 5.0))["drafter"]["rounds"])
        text_s = [one_text(cluster) for _ in range(TEXTS)]
    busy.join()
    return {
        "sessions": count,
        "opened_s": opened_s,
        "grown_kib": {role: after[role] - before[role] for role in PROCESSES},
        "idle_cpu_percent": percent,
        "text_s": statistics.median(text_s),
        "round_p50_ms": 1000 * statistics.median(rounds),
        "round_p99_ms": 1000 * rounds[len(rounds) * 99 // 100],
    }


def measure(sessions: Sequence[int] = SESSIONS, seconds: float = 10.0) -> list[dict[str, Any]]:
    """One row a number of sessions, each with a cluster of its own."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection a session
    return [one_number(count, seconds) for count in (0, *sessions)]


def table(found: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Cells by row, the head first."""
    rows = [["idle sessions", "opened in s"]]
    rows[0] += [f"{role} MiB more" for role in PROCESSES]
    rows[0] += [f"{role} CPU %" for role in PROCESSES]
    rows[0] += ["busy round p50 ms", "p99 ms", "text of 50 tokens s"]
    for one in found:
        row = [f"{one['sessions']}", f"{one['opened_s']:.1f}"]
        row += [f"{one['grown_kib'][role] / 1024:.1f}" for role in PROCESSES]
        row += [f"{one['idle_cpu_percent'][role]:.1f}" for role in PROCESSES]
        row += [f"{one['round_p50_ms']:.2f}", f"{one['round_p99_ms']:.2f}"]
        rows.append([*row, f"{one['text_s']:.3f}"])
    return rows


def sentences(found: Sequence[dict[str, Any]]) -> list[str]:
    """What grows how with idle sessions."""
    counts = [one["sessions"] for one in found]
    kib = {role: slope(counts, [one["grown_kib"][role] for one in found]) for role in PROCESSES}
    cpu = {
        role: slope(counts, [one["idle_cpu_percent"][role] for one in found]) for role in PROCESSES
    }
    some = found[1:]  # beside none, nothing is idle
    numbers = [one["sessions"] for one in some]
    opening = [one["opened_s"] for one in some]
    rounds = [one["round_p50_ms"] for one in found]
    most = max(PROCESSES, key=lambda role: found[-1]["idle_cpu_percent"][role])
    return [
        "An idle session takes "
        + ", ".join(f"{kib[role]:.1f} KiB at the {role}" for role in PROCESSES)
        + f" (least squares over {counts[0]} to {counts[-1]} sessions).",
        f"At idle, {counts[-1]} sessions cost {found[-1]['idle_cpu_percent'][most]:.1f} % of a core "
        f"at most, at the {most}, against {found[0]['idle_cpu_percent'][most]:.1f} % without any: "
        f"{1000 * cpu[most]:.2f} % a thousand sessions.",
        "The p50 of a busy session's round beside idle ones "
        f"{described(counts, rounds, 'ms', 'session')}.",
        "A short text beside them and the busy one "
        f"{described(counts, [one['text_s'] for one in found], 's', 'session')}.",
        f"The time to open all {described(numbers, opening, 's', 'session')}.",
    ]
