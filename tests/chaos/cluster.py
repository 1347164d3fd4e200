"""A whole cluster with a relay before each instance: what a plan of faults is played on."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from certs.authority import create_authority, issue
from sdcpd.dev.plan import PAIR, free_ports
from tests.chaos.datagrams import DatagramRelay
from tests.chaos.instances import Process
from tests.chaos.plan import BREAK, CUT, FREEZE, KILL, Fault
from tests.chaos.relay import Gate, Links, Relay

DOMAIN = "chaos.sdcp"
ROUTER = "r0"
KNOWN_S = 60.0
ASK_S = 0.3  # of a router that may be frozen: faults are to come when the plan says


class Cluster:
    """A context: processes, relays and everything on disk exist inside it."""

    def __init__(
        self,
        directory: Path,
        *,
        verifiers: int = 3,
        drafters: int = 3,
        etcd: Sequence[str] = (),
        log_retention: str = "1h",
        programs: Mapping[str, Sequence[str]] | None = None,
        transport: str = "auto",
        ttl: str = "1s",
        cache: str = "64MiB",
        kv_memory: str = "256MiB",
    ) -> None:
        """`etcd`: endpoints, where logs and records are to be; then each router finds a new disk.

        `programs`: what other than `sdcpd` an instance is, by its name.
        """
        self.directory = directory
        names = [ROUTER, *(f"v{i}" for i in range(verifiers)), *(f"d{i}" for i in range(drafters))]
        ports = free_ports(2 * len(names) + 1)
        self.api_port = ports.pop()
        self.links = Links()
        self._etcd, self._log_retention = tuple(etcd), log_retention
        self._outside = dict(zip(names, ports[: len(names)], strict=True))
        self._inside = dict(zip(names, ports[len(names) :], strict=True))
        self._programs, self._transport = dict(programs or {}), transport
        self._ttl, self._cache, self._kv_memory = ttl, cache, kv_memory
        self.processes: dict[str, Process] = {}
        self._stack = AsyncExitStack()
        self._seen: dict[str, dict[str, Any]] = {}
        self.injected: list[tuple[float, float, Fault, dict[str, dict[str, Any]]]] = []
        """Begin and end of each fault (monotonic), and the sessions there were, by their ids."""

    def base(self, name: str) -> str:
        """The base URI, which leads to the relay."""
        return f"https://127.0.0.1:{self._outside[name]}/"

    @property
    def api(self) -> str:
        """Where clients come."""
        return f"http://127.0.0.1:{self.api_port}"

    @property
    def router(self) -> Process:
        """Its process."""
        return self.processes[ROUTER]

    @property
    def pki(self) -> Path:
        """The folder of certificates."""
        return self.directory / "pki"

    # ---- start and stop

    async def __aenter__(self) -> Cluster:
        create_authority(self.pki, trust_domain=DOMAIN)
        for name in self._outside:
            role = _role(name)
            issue(self.pki, role=role, name=name, base_uri=self.base(name), sans=("localhost",))
            config = self.directory / f"{name}.toml"
            config.write_text("\n".join(self._config(name, role)) + "\n")
            self.processes[name] = Process(
                name,
                role,
                directory=self.directory,
                config=config,
                program=self._programs.get(name, ("sdcpd",)),
            )
            gate = Gate(name, self._outside[name], self._inside[name], self.links, self._pids)
            for relay in (Relay(gate), DatagramRelay(gate)):
                await relay.start()
                self._stack.push_async_callback(relay.aclose)
        try:
            for process in self.processes.values():
                process.start()
            await asyncio.gather(*(process.ready() for process in self.processes.values()))
            await self.all_known()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._end()

    async def _end(self) -> None:
        for process in self.processes.values():
            process.kill()
        await self._stack.aclose()

    def _pids(self) -> dict[str, int]:
        return {name: one.pid for name, one in self.processes.items() if one.pid is not None}

    def _config(self, name: str, role: str) -> list[str]:
        lines = [
            "[node]",
            f'trust_domain = "{DOMAIN}"',
            "[transport]",
            f'prefer = "{self._transport}"',
            "[tls]",
            f'ca = "{self.pki}/ca.crt"',
            f'cert = "{self.pki}/{role}.{name}.crt"',
            f'key = "{self.pki}/{role}.{name}.key"',
            "[admin]",
            f'socket = "{self.directory}/{{instance}}.sock"',
            "[mlc]",
            "local = false",  # what passes through shared memory passes no relay
            f"bases = {json.dumps([self.base(one) for one in self._outside if one != name])}",
            'tiers = [{ kind = "host", size = "64MiB" }]',
            f'log_path = "{self.directory}/{name}.logs"',
            'log_size = "256MiB"',
            f'log_retention = "{self._log_retention}"',
        ]
        if self._etcd and role == "router":
            lines += ['commit_log = "etcd"', f"etcd.endpoints = {json.dumps(list(self._etcd))}"]
        lines += [
            f"[{role}]",
            f'listen = "127.0.0.1:{self._inside[name]}"',
            f'base_uri = "{self.base(name)}"',
        ]
        return [*lines, *getattr(self, f"_{role}_lines")(name)]

    def _router_lines(self, name: str) -> list[str]:
        api = ["[api]", f'listen = "127.0.0.1:{self.api_port}"', 'sse_ping = "1s"']
        trusted = [
            line
            for one in self._outside
            if one.startswith("d")
            for line in ("[[peers]]", f'base_uri = "{self.base(one)}"', "trusted = true")
        ]
        return [f'model = "{PAIR / "target"}"', 'failover_after = "1s"', *api, *trusted]

    def _verifier_lines(self, name: str) -> list[str]:
        model = [
            "[verifier.model]",
            f'path = "{PAIR / "target"}"',
            f'kv_memory = "{self._kv_memory}"',
        ]
        return [*self._peer_lines(), "enforcing_logs = true", *model, *_COMPUTE]

    def _drafter_lines(self, name: str) -> list[str]:
        lines = [*self._peer_lines(), 'status_interval = "300ms"']
        if name in self._programs:
            return [*lines, 'kind = "ngram"', "m = 16"]
        if name != "d0":
            return [*lines, 'kind = "ngram"']
        model = [
            "[drafter.model]",
            f'path = "{PAIR / "drafter"}"',
            f'kv_memory = "{self._kv_memory}"',
        ]
        return [*lines, *model, *_COMPUTE]

    def _peer_lines(self) -> list[str]:
        return [f'router = "{self.base(ROUTER)}"', f'status_ttl = "{self._ttl}"']

    async def all_known(self) -> None:
        """Wait until the router has fresh reports of all that report; raises TimeoutError."""
        wanted = len(self.processes) - 1
        async with asyncio.timeout(KNOWN_S):
            while True:
                status = await self.router.ask("GET", "/status")
                instances = status["instances"] if status else []
                if sum(one["state"] == "ready" for one in instances) == wanted:
                    return
                await asyncio.sleep(0.1)

    # ---- faults

    async def play(self, plan: Sequence[Fault], *, say: Callable[[str], None]) -> None:
        """Inject what the plan says when it says so, and undo it; all is well at the end."""
        begin = time.monotonic()
        async with asyncio.TaskGroup() as faults:
            for fault in plan:
                await asyncio.sleep(max(0.0, begin + fault.at_s - time.monotonic()))
                if any(self.processes[name].is_down for name in fault.targets):
                    say(f"{fault}: not done, since it is not back from the last")
                    continue
                say(str(fault))
                faults.create_task(self._inject(fault))
        await self.all_known()

    async def _inject(self, fault: Fault) -> None:
        sessions = await self.sessions()
        begin = time.monotonic()
        self._do(fault)
        await asyncio.sleep(fault.lasts_s)
        self._undo(fault)
        self.injected.append((begin, time.monotonic(), fault, sessions))
        if fault.kind == KILL:
            one = self.processes[fault.targets[0]]
            await one.ready()
            one.is_down = False

    async def stop(self) -> list[str]:
        """End all in order, the router last; what did not end in order is wrong."""
        wrong = []
        others = [one for one in self.processes.values() if one is not self.router]
        codes = [*await asyncio.gather(*(one.stop() for one in others)), await self.router.stop()]
        for process, code in zip([*others, self.router], codes, strict=True):
            if code != 0:
                wrong.append(f"{process.name} ended with {code}: {process.last_words}")
            if "Traceback" in process.log:
                wrong.append(f"{process.name} has said a traceback: {process.log_path}")
        return wrong

    async def sessions(self) -> dict[str, dict[str, Any]]:
        """The router's open sessions, by their ids, as last seen where it does not answer now."""
        status = await self.router.ask("GET", "/status", timeout_s=ASK_S)
        if status is not None:
            self._seen = {one["session"]: one for one in status["sessions"]}
        return self._seen

    def _do(self, fault: Fault) -> None:
        one = self.processes[fault.targets[0]]
        if fault.kind == KILL:
            one.is_down = True
            one.kill()
        elif fault.kind == FREEZE:
            one.freeze()
        elif fault.kind == CUT:
            self.links.cut(*fault.targets)
        elif fault.kind == BREAK:
            self.links.break_off(*fault.targets)

    def _undo(self, fault: Fault) -> None:
        one = self.processes[fault.targets[0]]
        if fault.kind == KILL:
            if one.name == ROUTER and self._etcd:
                self._new_disk()
            one.start()
        elif fault.kind == FREEZE:
            one.thaw()
        else:
            self.links.heal(*fault.targets)

    def _new_disk(self) -> None:
        """The router comes up at another machine, as far as it can tell."""
        path = self.directory / f"{ROUTER}.logs"
        path.rename(path.with_name(f"{path.name}.{self.router.lives}"))


_COMPUTE = ('dtype = "float32"', "threads = 1")


def _role(name: str) -> str:
    return {"r": "router", "v": "verifier", "d": "drafter"}[name[0]]
