"""A cluster put up by hand: a folder with a model, certificates, files, and the processes of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sdcpd.admin_client import ask
from sdcpd.dev.plan import free_ports
from sdcpd.protocol.commit_log import decode_log, read_log
from sdcpd.transport.client import HttpClient
from sdcpd.transport.tls import TlsIdentity
from tests.kit.by_hand import Sdcpd, sdcpctl, tls_lines, wait_until, write_config, write_model

LINE = re.compile(r"\d\d:\d\d:\d\d\.\d{3} [DIWE] sdcpd[.a-z0-9_]*: \S")


@dataclass
class Site:
    """What is there, and what runs of it."""

    directory: Path
    model: Path
    ports: dict[str, int]
    tls: list[str] = field(default_factory=list)
    running: dict[str, Sdcpd] = field(default_factory=dict)

    def base(self, role: str) -> str:
        return f"https://127.0.0.1:{self.ports[role]}/"

    @staticmethod
    def over(transport: str, tls: list[str]) -> list[str]:
        """The same lines with the version that a process calls with."""
        return [*tls, "[transport]", f'prefer = "{transport}"']

    @property
    def pki(self) -> Path:
        return self.directory / "sdcpd-pki"

    @property
    def router_socket(self) -> Path:
        return self.directory / "router-r0.sock"

    def section(self, role: str, port: str) -> list[str]:
        lines = [f"[{role}]", f'listen = "127.0.0.1:{self.ports[port]}"']
        lines.append(f'base_uri = "{self.base(port)}"')
        if role == "router":
            return [*lines, f'model = "{self.model}"']
        lines.append(f'router = "{self.base("router")}"')
        if role == "verifier":
            lines += ["enforcing_logs = true", "[verifier.model]", f'path = "{self.model}"']
            return [*lines, 'dtype = "float32"', "threads = 1"]
        return [*lines, 'kind = "ngram"']

    def config(
        self, name: str, *sections: str, tls: list[str] | None = None, mlc: Sequence[str] = ()
    ) -> Path:
        admin = ["[admin]", f'socket = "{self.directory}/{{instance}}.sock"']
        mlc = ["[mlc]", f'log_path = "{self.directory}/{name}.logs"', 'log_size = "64MiB"', *mlc]
        return write_config(
            self.directory / f"{name}.toml", [*(tls or self.tls), *admin, *mlc, *sections]
        )

    def start(self, role: str, config: Path, **options: bool) -> Sdcpd:
        self.running[role] = Sdcpd(self.directory, role, config=config, **options)
        return self.running[role]

    def states(self) -> dict[str, str]:
        """State of each instance in the router's eyes, by base URI."""
        answer = ask(self.router_socket, "GET", "/status")
        return {one["base_uri"]: one["state"] for one in answer["instances"]}

    async def committed(self, session: str) -> tuple[int, ...]:
        """What the session's commit log holds, read as a verifier reads it."""
        crt = self.pki / "verifier.v0.crt"
        client = HttpClient(
            TlsIdentity(ca=self.pki / "ca.crt", cert=crt, key=crt.with_suffix(".key"))
        )
        response = await client.request("GET", f"{self.base('router')}logs/{session}")
        await client.aclose()
        return read_log(decode_log(response.body)).tokens

    def stop(self) -> None:
        """The router last; each process must end in order, with lines in its log and nothing else."""
        for role in sorted(self.running, key=lambda one: one.startswith("router")):
            process = self.running[role]
            assert process.stop() == 0, process.log
            assert process.notified[-1] == "STOPPING=1"
            for line in process.log.splitlines():
                assert LINE.match(line), line


def make_site(directory: Path, *, transport: str = "auto") -> Site:
    """The folder, nothing of it running yet; `transport` is what its processes call with."""
    names = ("router", "verifier", "drafter", "d1", "foreign", "api", "free")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    site = Site(directory, write_model(directory / "target"), ports)
    made = sdcpctl(
        *("certs", "init", "--trust-domain", "by.hand"),
        f"router/r0={site.base('router')}",
        f"verifier/v0={site.base('verifier')}",
        f"drafter/d0={site.base('drafter')}",
        cwd=directory,
    )
    assert made.returncode == 0, made.stderr
    site.tls = site.over(transport, tls_lines(made.stdout))
    return site


@contextmanager
def running_site(
    directory: Path, *, transport: str, router_mlc: Sequence[str] = ()
) -> Iterator[Site]:
    """A router, a verifier and a drafter, ready; all must have ended in order at the end."""
    site = make_site(directory, transport=transport)
    api = ["[api]", f'listen = "127.0.0.1:{site.ports["api"]}"']
    router = site.config("router", *site.section("router", "router"), *api, mlc=router_mlc)
    verifier = site.config("verifier", *site.section("verifier", "verifier"))
    drafter = site.config("drafter", *site.section("drafter", "drafter"))
    try:
        site.start("router-r0", router, refuse_executable_memory=True)
        site.start("verifier-v0", verifier)
        site.start("drafter-d0", drafter)
        for process in site.running.values():
            process.wait_notified("READY=1")
        wait_until(lambda: list(site.states().values()) == ["ready"] * 2, "both report")
        yield site
        site.stop()
    finally:
        for process in site.running.values():
            process.process.kill()
            process.process.wait()
