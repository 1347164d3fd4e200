"""What `sdcpd dev` is going to run: instances, ports, certificates, configuration files."""

from __future__ import annotations

import json
import os
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from certs.authority import create_authority, issue

TRUST_DOMAIN = "dev.sdcp"
PAIR = Path(__file__).parent / "pair"
SOCKET_PATH_MAX = 100  # of 107 that a Unix socket's address holds


@dataclass(frozen=True, slots=True)
class DevOptions:
    """The command line of `sdcpd dev`; `port` None opens no API."""

    target: Path | None = None
    drafters: tuple[str, ...] = ()
    verifiers: int = 1
    port: int | None = 8000
    transport: str = "auto"
    keep: Path | None = None

    @property
    def target_path(self) -> Path:
        """The target's directory."""
        return (self.target or PAIR / "target").resolve()

    @property
    def drafter_kinds(self) -> tuple[str, ...]:
        """A directory or "ngram" for each drafter."""
        chosen = self.drafters
        if not chosen:
            chosen = ("ngram",) if self.target else (str(PAIR / "drafter"), "ngram")
        return tuple(kind for kind in chosen if kind != "none")


@dataclass(frozen=True, slots=True)
class OnceRequest:
    """What `--once` generates, and how it prints it."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int | None
    as_json: bool
    kill_verifier: bool = False
    """Whether it is written twice, and a verifier killed in the middle of the second time."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One process to start."""

    role: str
    name: str
    base_uri: str
    port: int
    metrics_port: int
    cert: Path
    key: Path
    config: Path
    admin: Path
    log: Path

    @property
    def label(self) -> str:
        """As the banner names it."""
        return f"{self.role} {self.name}"


def free_ports(count: int) -> list[int]:
    """Distinct loopback ports that nobody listens on at the moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def make_plan(options: DevOptions, directory: Path, sockets: Path) -> list[Planned]:
    """Create the authority, certificates and configuration files below `directory`."""
    kinds = options.drafter_kinds
    names = [("router", "r0")]
    names += [("verifier", f"v{i}") for i in range(options.verifiers)]
    names += [("drafter", f"d{i}") for i in range(len(kinds))]
    pki = directory / "pki"
    create_authority(pki, trust_domain=TRUST_DOMAIN)
    (directory / "config").mkdir()
    (directory / "log").mkdir()
    plans = []
    ports = free_ports(2 * len(names))
    both = zip(ports[::2], ports[1::2], strict=True)
    for (role, name), (port, metrics_port) in zip(names, both, strict=True):
        base_uri = f"https://127.0.0.1:{port}/"
        leaf = issue(pki, role=role, name=name, base_uri=base_uri, sans=("localhost",))
        plans.append(
            Planned(
                role,
                name,
                base_uri,
                port,
                metrics_port,
                leaf.crt_path,
                leaf.key_path,
                directory / "config" / f"{role}.{name}.toml",
                sockets / f"{role}.{name}.sock",
                directory / "log" / f"{role}.{name}.log",
            )
        )
    threads = _threads(options)
    for plan in plans:
        plan.config.write_text(_config(plan, plans, options, directory, threads))
    return plans


def _threads(options: DevOptions) -> int:
    """CPU threads of each process with a model.

    A drafter and its verifier take turns, so that each may have all cores; verifiers, who work at
    the same time, share them.  The bundled pair gains nothing from a second thread.
    """
    if options.target is None:
        return 1
    return max(1, len(os.sched_getaffinity(0)) // options.verifiers)


def _config(
    plan: Planned, plans: list[Planned], options: DevOptions, directory: Path, threads: int
) -> str:
    router = plans[0].base_uri
    bases = [p.base_uri for p in plans if p is not plan]
    lines = [
        "[node]",
        f"name = {_text(plan.name)}",
        f"trust_domain = {_text(TRUST_DOMAIN)}",
        "[transport]",
        f"prefer = {_text(options.transport)}",
        "[tls]",
        f"ca = {_text(directory / 'pki' / 'ca.crt')}",
        f"cert = {_text(plan.cert)}",
        f"key = {_text(plan.key)}",
        "[admin]",
        f"socket = {_text(plan.admin)}",
        "[metrics]",
        f'listen = "127.0.0.1:{plan.metrics_port}"',
        "[mlc]",
        f"bases = {json.dumps(bases)}",
        'tiers = [{ kind = "host", size = "256MiB" }]',
        f"log_path = {_text(directory / 'commit-logs')}",
        'log_size = "1GiB"',
        f"[{plan.role}]",
        f'listen = "127.0.0.1:{plan.port}"',
        f"base_uri = {_text(plan.base_uri)}",
    ]
    if plan.role == "router":
        lines += _router_lines(options)
    else:
        lines.append(f"router = {_text(router)}")
    if plan.role == "verifier":
        lines.append("enforcing_logs = true")
        lines += ["[verifier.model]", f"path = {_text(options.target_path)}"]
        lines += [f"threads = {threads}", *_as_bundled(options.target is None)]
    if plan.role == "drafter":
        kind = options.drafter_kinds[int(plan.name[1:])]
        if kind == "ngram":
            lines.append('kind = "ngram"')
        else:
            lines += ["[drafter.model]", f"path = {_text(Path(kind).resolve())}"]
            lines += [f"threads = {threads}", *_as_bundled(Path(kind).resolve().parent == PAIR)]
    return "\n".join(lines) + "\n"


def _router_lines(options: DevOptions) -> list[str]:
    lines = [f"model = {_text(options.target_path)}"]
    if options.port is not None:
        name = "tiny" if options.target is None else options.target_path.name
        lines += ["[api]", f'listen = "127.0.0.1:{options.port}"', f"model_name = {_text(name)}"]
        lines += ['cors_origins = ["http://localhost:3000", "http://127.0.0.1:3000"]']
    return lines


def _as_bundled(bundled: bool) -> list[str]:
    """The bundled pair is stored in bf16 and computed in binary32; its texts are small."""
    return ['dtype = "float32"', 'kv_memory = "128MiB"'] if bundled else []


def _text(value: object) -> str:
    return json.dumps(str(value))
