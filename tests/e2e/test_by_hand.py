"""Three processes, three files, certificates from `sdcpctl`: the README's way, as a person goes it."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sdcpd.admin_client import ask
from sdcpd.dev.plan import free_ports
from sdcpd.protocol.commit_log import decode_log, read_log
from sdcpd.transport.client import HttpClient
from sdcpd.transport.tls import TlsIdentity
from tests.kit.by_hand import Sdcpd, sdcpctl, tls_lines, wait_until, write_config, write_model

LINE = re.compile(r"\d\d:\d\d:\d\d\.\d{3} [DIWE] sdcpd[.a-z0-9_]*: \S")
PROMPT = "once upon a time "
TOKENS = 24


@dataclass
class Site:
    """A folder with a model, certificates and files, and what runs from it."""

    directory: Path
    model: Path
    ports: dict[str, int]
    tls: list[str] = field(default_factory=list)
    running: dict[str, Sdcpd] = field(default_factory=dict)

    def base(self, role: str) -> str:
        return f"https://127.0.0.1:{self.ports[role]}/"

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

    def config(self, name: str, *sections: str, tls: list[str] | None = None) -> Path:
        admin = ["[admin]", f'socket = "{self.directory}/{{instance}}.sock"']
        mlc = ["[mlc]", f'log_path = "{self.directory}/{name}.logs"', 'log_size = "64MiB"']
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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("hand")
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
    site.tls = tls_lines(made.stdout)
    api = ["[api]", f'listen = "127.0.0.1:{ports["api"]}"']
    router = site.config("router", *site.section("router", "router"), *api)
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


def complete(port: int, prompt: str) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    headers = {"content-type": "application/json"}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
    assert response.status == 200, answer
    return dict(answer)


# ---- a cluster that runs


def test_status_shows_all_ready(site: Site) -> None:
    done = sdcpctl("status", "-o", "json", "--endpoint", f"unix:{site.router_socket}")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["schema"] == "sdcpctl/v1"
    assert answer["ready"] is True
    assert answer["api"] == f"http://127.0.0.1:{site.ports['api']}/v1"
    assert {(one["role"], one["state"]) for one in answer["instances"]} >= {
        ("verifier", "ready"),
        ("drafter", "ready"),
    }


def test_status_as_a_table_through_the_environment(site: Site) -> None:
    done = sdcpctl("status", environment={"SDCPCTL_ENDPOINT": f"unix:{site.router_socket}"})
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout, "colour belongs to a terminal"
    first, header, *rows = done.stdout.splitlines()
    assert re.match(r"Router r0  up \d+s   ready   API http://127.0.0.1:\d+/v1", first)
    assert header.split()[:3] == ["INSTANCE", "ROLE", "STATE"]
    assert rows[0].split()[1:3] == ["verifier", "ready"]
    for instance in ("verifier-v0", "drafter-d0"):
        own = sdcpctl("status", "--endpoint", f"unix:{site.directory}/{instance}.sock")
        assert own.returncode == 0, own.stderr
        assert own.stdout.lower().startswith(instance.replace("-", " ")[:-1])


def test_a_text_comes_back(site: Site) -> None:
    answer = complete(site.ports["api"], PROMPT)
    (choice,) = answer["choices"]
    assert answer["usage"]["completion_tokens"] == TOKENS or choice["finish_reason"] == "stop"
    body = {"prompt": PROMPT, "max_tokens": TOKENS}
    generated = ask(site.router_socket, "POST", "/generate", body)
    assert choice["text"] == generated["text"]
    assert generated["rounds"] > 0


def test_new_certificates_are_taken_at_a_reload(site: Site) -> None:
    drafter = site.running["drafter-d0"]
    old = (site.pki / "drafter.d0.crt").read_bytes()
    issued = sdcpctl("certs", "issue", f"drafter/d0={site.base('drafter')}", cwd=site.directory)
    assert issued.returncode == 0, issued.stderr
    assert (site.pki / "drafter.d0.crt").read_bytes() != old
    ready = sum(line == "READY=1" for line in drafter.notified)
    drafter.process.send_signal(signal.SIGHUP)
    drafter.wait_notified("READY=1", count=ready + 1)
    at = drafter.notified.index("RELOADING=1")
    assert drafter.notified[at + 1].startswith("MONOTONIC_USEC=")
    assert "certificates reloaded: spiffe://by.hand/sdcp/drafter/d0" in drafter.log
    assert site.states()[site.base("drafter")] == "ready"


def test_a_certificate_that_does_not_fit_is_not_taken(site: Site) -> None:
    drafter = site.running["drafter-d0"]
    crt = site.pki / "drafter.d0.crt"
    good = crt.read_bytes()
    crt.write_bytes((site.pki / "verifier.v0.crt").read_bytes())
    ready = sum(line == "READY=1" for line in drafter.notified)
    drafter.process.send_signal(signal.SIGHUP)
    drafter.wait_notified("READY=1", count=ready + 1)
    crt.write_bytes(good)
    assert "certificates not reloaded, the old ones stay in use" in drafter.log
    assert "is not the key of" in drafter.log


def test_a_killed_router_takes_its_sessions_up_again(site: Site) -> None:
    """R-6.9-18: kill -9 in the middle of a text; the text is in the log to its end."""
    router = site.running["router-r0"]
    body = {"prompt": PROMPT, "max_tokens": 230, "temperature": 0}
    wanted = ask(site.router_socket, "POST", "/generate", body)["tokens"]
    with closing(http.client.HTTPConnection("127.0.0.1", site.ports["api"], timeout=30)) as client:
        headers = {"content-type": "application/json"}
        stream = {"prompt": PROMPT, "max_tokens": 230, "temperature": 0, "stream": True}
        client.request("POST", "/v1/completions", json.dumps(stream), headers)
        response = client.getresponse()
        assert response.readline().startswith(b"data:")
        (session,) = ask(site.router_socket, "GET", "/status")["sessions"]
        router.kill()
    site.start("router-r0", router.config, refuse_executable_memory=True)
    again = site.running["router-r0"]
    again.wait_notified("READY=1")
    assert "1 sessions taken up again after a restart" in again.log

    wait_until(
        lambda: not ask(site.router_socket, "GET", "/status")["sessions"], "the session ends"
    )
    assert asyncio.run(site.committed(session["session"])) == tuple(wanted)
    wait_until(lambda: list(site.states().values()) == ["ready"] * 2, "both report again")


def test_a_stopped_drafter_is_gone(site: Site) -> None:
    issued = sdcpctl("certs", "issue", f"drafter/d1={site.base('d1')}", cwd=site.directory)
    assert issued.returncode == 0, issued.stderr
    drafter = Sdcpd(
        site.directory, "drafter-d1", config=site.config("d1", *site.section("drafter", "d1"))
    )
    drafter.wait_notified("READY=1")
    wait_until(lambda: site.states().get(site.base("d1")) == "ready", "d1 reports")
    drafter.process.send_signal(signal.SIGINT)
    drafter.wait_notified("STOPPING=1")
    assert drafter.stop() == 0, "a second signal cuts nothing short"
    assert drafter.notified[-1] == "STOPPING=1"
    assert site.states()[site.base("d1")] == "gone"
    table = sdcpctl("status", "--endpoint", f"unix:{site.router_socket}").stdout
    assert re.search(r"^d1\S+ +drafter +gone", table, re.MULTILINE)
    assert not (site.directory / "drafter-d1.sock").exists()


def test_a_verifier_of_a_foreign_authority(site: Site) -> None:
    """It trusts the router, but the router does not know its authority: both logs say so."""
    made = sdcpctl(
        *("certs", "init", "--trust-domain", "by.hand", "--out", "foreign"),
        f"verifier/v9={site.base('foreign')}",
        cwd=site.directory,
    )
    assert made.returncode == 0, made.stderr
    tls = tls_lines(made.stdout)
    ca = site.directory / "foreign" / "ca.crt"
    ca.write_bytes(ca.read_bytes() + (site.pki / "ca.crt").read_bytes())
    config = site.config("foreign", *site.section("verifier", "foreign"), tls=tls)
    verifier = Sdcpd(site.directory, "verifier-v9", config=config)
    router = site.running["router-r0"]
    try:
        verifier.wait_notified("READY=1")
        wait_until(lambda: "status not taken" in verifier.log, "the verifier is told")
        wait_until(lambda: "refused" in router.log, "the router tells why")
        assert site.base("foreign") not in site.states()
    finally:
        assert verifier.stop() == 0, verifier.log
    refusals = [one for one in router.log.splitlines() if " W " in one and "refused" in one]
    (refusal,) = {re.sub(r".* refused 127\.0\.0\.1:\d+: ", "", one) for one in refusals}
    assert 'certificate of verifier/v9 is signed by an unknown CA ("by.hand SDCP CA")' in refusal
    told = [line for line in verifier.log.splitlines() if " W " in line]
    assert len(told) == 1, told
    assert "does not know the CA of our certificate" in told[0]
    assert "sdcpctl certs issue" in told[0]


def test_three_roles_in_one_process_give_the_same_text(site: Site) -> None:
    directory = site.directory / "one"
    directory.mkdir()
    names = ("router", "verifier", "drafter")
    one = Site(directory, site.model, dict(zip(names, free_ports(3), strict=True)))
    specs = [f"{role}/n0={one.base(role)}" for role in names]
    made = sdcpctl("certs", "init", "--trust-domain", "by.hand", *specs, cwd=directory)
    assert made.returncode == 0, made.stderr
    one.tls = tls_lines(made.stdout)
    sections = [line for role in names for line in one.section(role, role)]
    config = one.config("all", "[node]", 'name = "n0"', *sections, tls=one.tls[2:])
    config.write_text(config.read_text().replace("[node]", "\n".join(one.tls[:2]), 1))
    process = Sdcpd(directory, *names, config=config)
    try:
        process.wait_notified("READY=1")
        router = directory / "router.sock"
        wait_until(
            lambda: len(ask(router, "GET", "/status")["instances"]) == 2, "both report inside"
        )
        body = {"prompt": PROMPT, "max_tokens": TOKENS}
        generated = ask(router, "POST", "/generate", body)
    finally:
        assert process.stop() == 0, process.log
    expected = ask(site.router_socket, "POST", "/generate", body)
    assert generated["tokens"] == expected["tokens"]
    assert not process.log.count(" W "), process.log


def test_a_cluster_that_calls_over_http_3_alone_gives_the_same_text(site: Site) -> None:
    """R-5.1-2, D-H8: processes of their own, QUIC between them, certificates on both sides."""
    directory = site.directory / "h3"
    directory.mkdir()
    names = ("router", "verifier", "drafter")
    quic = Site(directory, site.model, dict(zip(names, free_ports(3), strict=True)))
    specs = [f"{role}/q0={quic.base(role)}" for role in names]
    made = sdcpctl("certs", "init", "--trust-domain", "by.hand", *specs, cwd=directory)
    assert made.returncode == 0, made.stderr
    quic.tls = tls_lines(made.stdout)
    node = quic.tls.index("[node]")
    quic.tls[node + 1 : node + 1] = ['transport = "h3"']
    try:
        for role in names:
            quic.start(f"{role}-q0", quic.config(role, *quic.section(role, role)))
        for process in quic.running.values():
            process.wait_notified("READY=1")
        socket_path = directory / "router-q0.sock"
        wait_until(lambda: len(ask(socket_path, "GET", "/status")["instances"]) == 2, "both report")
        body = {"prompt": PROMPT, "max_tokens": TOKENS}
        generated = ask(socket_path, "POST", "/generate", body)
        assert generated["rounds"] > 0
        quic.stop()
    finally:
        for process in quic.running.values():
            process.process.kill()
            process.process.wait()
    assert generated["tokens"] == ask(site.router_socket, "POST", "/generate", body)["tokens"]


# ---- what does not start


def last_line(site: Site, *roles: str, config: Path, status: int) -> str:
    """The one line that tells why, after nothing but information."""
    process = Sdcpd(site.directory, *roles, config=config)
    assert process.end() == status, process.log
    *before, line = process.log.splitlines()
    assert not [one for one in before if " I " not in one], process.log
    assert LINE.match(line) and " E sdcpd: " in line
    return line.split(" E sdcpd: ")[1]


def free_router(site: Site, name: str, *more: str, tls: list[str] | None = None) -> Path:
    return site.config(name, *site.section("router", "free"), *more, tls=tls)


def test_a_missing_certificate(site: Site) -> None:
    said = last_line(site, "router-r7", config=free_router(site, "r7"), status=78)
    assert said.startswith(f"router r7: {site.pki}/router.r7.crt cannot be read")
    assert "put it there, or name another in [tls]" in said


def test_a_key_that_others_can_read(site: Site) -> None:
    pki = site.directory / "open"
    shutil.copytree(site.pki, pki)
    key = pki / "router.r0.key"
    key.chmod(0o644)
    tls = [line.replace(str(site.pki), str(pki)) for line in site.tls]
    said = last_line(site, "router-r0", config=free_router(site, "open", tls=tls), status=78)
    assert said == f"router r0: {key} is open to others (mode 0644); run: chmod 0640 {key}"


def test_the_certificate_of_another_role(site: Site) -> None:
    tls = [line.replace("{role}.{name}", "drafter.d0") for line in site.tls]
    said = last_line(site, "router-r0", config=free_router(site, "role", tls=tls), status=78)
    assert f"{site.pki}/drafter.d0.crt does not carry the role router" in said
    assert "sdcpctl certs issue" in said


def test_the_certificate_of_another_address(site: Site) -> None:
    said = last_line(site, "router-r0", config=free_router(site, "base"), status=78)
    assert f"not its base_uri {site.base('free')}" in said
    assert "sdcpctl certs issue" in said


def test_a_port_in_use(site: Site) -> None:
    config = site.config("port", *site.section("router", "router"))
    said = last_line(site, "router-r0", config=config, status=1)
    port = site.ports["router"]
    assert said.startswith(f"router r0: cannot listen on 127.0.0.1:{port}: Address already in use;")
    assert "[router] listen" in said


def test_a_model_directory_that_lacks_a_file(site: Site) -> None:
    model = site.directory / "no-weights"
    shutil.copytree(site.model, model)
    (model / "model.safetensors").unlink()
    text = (site.directory / "verifier.toml").read_text().replace(str(site.model), str(model))
    config = write_config(site.directory / "lacks.toml", [text])
    said = last_line(site, "verifier-v0", config=config, status=78)
    assert said.startswith(f"model directory {model}: model.safetensors is missing (the weights)")
    assert "expected a Hugging Face directory" in said


def test_an_architecture_that_is_not_supported(site: Site) -> None:
    model = write_model(site.directory / "odd", architecture="MambaForCausalLM")
    text = (site.directory / "verifier.toml").read_text().replace(str(site.model), str(model))
    config = write_config(site.directory / "odd.toml", [text])
    said = last_line(site, "verifier-v0", config=config, status=78)
    assert said.startswith(f"{model}/config.json: architecture MambaForCausalLM is not supported")
    assert "supported are LlamaForCausalLM" in said


def test_a_supervisor_that_does_not_listen_is_no_reason_to_fail(site: Site) -> None:
    """NOTIFY_SOCKET of nobody: a warning, and sdcpd runs."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        probe.bind(str(site.directory / "nobody.notify"))
    (site.directory / "nobody.notify").unlink()
    code = (
        "import os, sdcpd.service as s\n"
        f"os.environ['NOTIFY_SOCKET'] = {str(site.directory / 'nobody.notify')!r}\n"
        "s.set_up_logging('info')\n"
        "s.notify('READY=1')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert "systemd could not be told 'READY=1'" in done.stderr
