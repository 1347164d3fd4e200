"""What a round costs beside the models: `python -m tests.bench.rounds [--sessions 1,16,64]`.

A router, a verifier and a drafter, each a daemon of its own, over HTTP/2 with mutual TLS and with a
durable commit log (on tmpfs, so that the disk is nobody's excuse), but with engines that take no
time: every proposal of 4 tokens is accepted, so that a round is all that is left.  A round is from
one proposal of a session to its next, at the drafter.  Aimed at: p50 of at most 1.2 ms with one
session, and 1,500 rounds a second in all with 64.

With --stages the time of the CPU is told by stage, sampled in runs of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdcpd.admin_client import AdminRefused, AdminUnreachable, ask
from sdcpd.dev.plan import free_ports
from tests.kit.by_hand import sdcpctl, tls_lines, wait_until
from tests.kit.dev import PAIR

ROOT = Path(__file__).parents[2]
ROLES = {"router": "r0", "verifier": "v0", "drafter": "d0"}
WARM_S = 2.0
TOKENS = 5_000_000  # more than any run writes: texts are cut by the end of their cluster
FUNCTIONS = 30  # that cost the most are told
P50_MS, ROUNDS_PER_S = 1.2, 1500.0


@dataclass
class Running:
    """The three processes."""

    folder: Path
    file: Path
    environment: dict[str, str]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, role: str) -> None:
        """Start one, which may have been killed before."""
        command = [sys.executable, "-m", "tests.bench.rounds_served", str(self.out(role))]
        command += ["--role", f"{role}-{ROLES[role]}", "-c", str(self.file)]
        self.processes[role] = subprocess.Popen(
            [*command, "--log-level", "warning"], cwd=ROOT, env=self.environment
        )

    def kill(self, role: str) -> None:
        """SIGKILL: it has no say in it."""
        self.processes[role].kill()
        self.processes[role].wait()

    def signal(self, number: signal.Signals) -> None:
        for process in self.processes.values():
            process.send_signal(number)

    def out(self, role: str) -> Path:
        return self.folder / f"{role}.json"

    @property
    def admin(self) -> Path:
        return self.folder / "router.sock"

    def measured(self, seconds: float) -> dict[str, dict[str, Any]]:
        """What each process noted in so many seconds."""
        for role in ROLES:
            self.out(role).unlink(missing_ok=True)  # of an earlier measurement
        self.signal(signal.SIGUSR1)
        time.sleep(seconds)  # the time of the measurement
        self.signal(signal.SIGUSR2)
        wait_until(lambda: all(self.out(role).exists() for role in ROLES), "all have written")
        return {role: json.loads(self.out(role).read_text()) for role in ROLES}


def model_without_end(folder: Path) -> Path:
    """The bundled target's tokenizer, with a context that no run fills."""
    made = folder / "model"
    made.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (made / name).symlink_to(PAIR / "target" / name)
    config = json.loads((PAIR / "target" / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 30}))
    return made


def configured(folder: Path, logs: Path) -> Path:
    """One file for all three."""
    ports = dict(zip(ROLES, free_ports(3), strict=True))
    bases = {role: f"https://127.0.0.1:{port}/" for role, port in ports.items()}
    names = [f"{role}/{name}={bases[role]}" for role, name in ROLES.items()]
    made = sdcpctl("certs", "init", "--trust-domain", "bench", *names, cwd=folder)
    assert made.returncode == 0, made.stderr
    model = model_without_end(folder)
    lines = [
        *tls_lines(made.stdout),
        *("[admin]", f'socket = "{folder}/{{role}}.sock"'),
        *("[mlc]", f'log_path = "{logs}"', 'log_size = "8GiB"', "local = false"),
    ]
    for role, port in ports.items():
        lines += [f"[{role}]", f'listen = "127.0.0.1:{port}"', f'base_uri = "{bases[role]}"']
        if role == "router":
            lines.append(f'model = "{model}"')
        else:
            lines.append(f'router = "{bases["router"]}"')
    lines += ["m = 4", "predraft = false", "[drafter.model]", f'path = "{model}"']
    lines += ["[verifier.model]", f'path = "{model}"']
    text = "\n".join(lines).replace(
        "[drafter]",
        'round_rate = "1000000/s"\nmax_sessions = 1000\nenforcing_logs = true\n[drafter]',
    )
    file = folder / "sdcpd.toml"
    file.write_text(text + "\n")
    return file


@contextmanager
def running(*, stages: bool = False, **variables: str) -> Iterator[Running]:
    """The three daemons, until the end of the block; `variables` are of their environment."""
    shared = Path("/dev/shm")
    logs_in = str(shared) if shared.is_dir() else None
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir=logs_in) as logs,
    ):
        file = configured(Path(folder), Path(logs) / "logs")
        variables |= {"STAGES": "1"} if stages else {}
        made = Running(Path(folder), file, os.environ | variables)
        try:
            for role in ROLES:
                made.start(role)
            wait_until(lambda: _states(made.admin) == ["ready"] * 2, "both have reported")
            yield made
        finally:
            for process in reversed(made.processes.values()):
                process.terminate()
            for process in made.processes.values():
                process.wait(30)


def _states(socket: Path) -> list[str]:
    try:
        return [one["state"] for one in ask(socket, "GET", "/status")["instances"]]
    except (AdminRefused, AdminUnreachable):
        return []


def begin(socket: Path, number: int) -> None:
    """A text that goes on until its cluster ends."""
    body = {"prompt": f"{number}: the sea", "max_tokens": TOKENS, "ignore_eos": True}
    try:
        ask(socket, "POST", "/generate", body, timeout_s=600)
    except (AdminRefused, AdminUnreachable):
        return  # the end of its cluster is the end of the text


def measure(sessions: int, seconds: float, *, stages: bool = False) -> dict[str, Any]:
    """Figures of so many sessions at the same time."""
    with running(stages=stages) as cluster:
        texts = [threading.Thread(target=begin, args=(cluster.admin, n)) for n in range(sessions)]
        for one in texts:
            one.start()
        wait_until(lambda: _open(cluster.admin) == sessions, "all texts are being written")
        time.sleep(WARM_S)  # caches and estimates settle
        told = cluster.measured(seconds)
    for one in texts:
        one.join(60)
    rounds = sorted(told["drafter"]["rounds"])
    assert rounds, "no round was made"
    return {
        "sessions": sessions,
        "rounds_per_s": len(rounds) / told["drafter"]["seconds"],
        "p50_ms": 1000 * statistics.median(rounds),
        "p99_ms": 1000 * rounds[min(len(rounds) - 1, len(rounds) * 99 // 100)],
        "cpu_us": {role: 1e6 * one["cpu_s"] / len(rounds) for role, one in told.items()},
        "stages_us": _shares(told, len(rounds), "stages") if stages else {},
        "functions_us": _shares(told, len(rounds), "functions") if stages else {},
    }


def _open(socket: Path) -> int:
    return len(ask(socket, "GET", "/status")["sessions"])


def _shares(told: dict[str, dict[str, Any]], rounds: int, kind: str) -> dict[str, float]:
    """Microseconds of CPU a round, by stage or function, over all processes."""
    total: Counter[str] = Counter()
    for one in told.values():
        samples = sum(one[kind].values())
        for name, count in one[kind].items():
            total[name] += 1e6 * one["cpu_s"] * count / samples / rounds
    return dict(total.most_common())


def show(figures: Sequence[dict[str, Any]]) -> None:
    """A table for people."""
    print(f"{'sessions':>8} {'rounds/s':>9} {'p50 ms':>7} {'p99 ms':>7}   CPU us a round")
    for one in figures:
        cpu = "  ".join(f"{role} {us:.0f}" for role, us in one["cpu_us"].items())
        print(
            f"{one['sessions']:8} {one['rounds_per_s']:9.0f} {one['p50_ms']:7.2f}"
            f" {one['p99_ms']:7.2f}   {cpu}"
        )
        for stage, us in one["stages_us"].items():
            print(f"{'':20}{stage:12} {us:7.0f} us")
        for function, us in list(one["functions_us"].items())[:FUNCTIONS]:
            print(f"{'':20}{us:7.0f} us  {function}")


def main() -> None:
    """Parse the command line, measure, print; exit code 1 if an aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sessions", default="1,16,64")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    counts = [int(one) for one in options.sessions.split(",")]
    figures = [measure(count, options.seconds, stages=options.stages) for count in counts]
    show(figures)
    if options.output:
        options.output.write_text(json.dumps(figures, indent=2) + "\n")
    missed = [
        one
        for one in figures
        if (one["sessions"] == 1 and one["p50_ms"] > P50_MS)
        or (one["sessions"] == 64 and one["rounds_per_s"] < ROUNDS_PER_S)
    ]
    sys.exit(1 if missed and not options.stages else 0)


if __name__ == "__main__":
    main()
