"""What does not start: one line that tells what is wrong, with what, and what to do."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit.by_hand import Sdcpd, write_model
from tests.kit.by_hand_site import LINE, Site, make_site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return make_site(tmp_path_factory.mktemp("refused"))


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


def free_verifier(site: Site, name: str, model: Path) -> Path:
    other = replace(site, model=model)
    return other.config(name, *other.section("verifier", "verifier"))


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
    port = site.ports["router"]
    with socket.create_server(("127.0.0.1", port)):
        said = last_line(site, "router-r0", config=config, status=1)
    assert said.startswith(f"router r0: cannot listen on 127.0.0.1:{port}: Address already in use;")
    assert "[router] listen" in said


def test_a_model_directory_that_lacks_a_file(site: Site) -> None:
    model = site.directory / "no-weights"
    shutil.copytree(site.model, model)
    (model / "model.safetensors").unlink()
    config = free_verifier(site, "lacks", model)
    said = last_line(site, "verifier-v0", config=config, status=78)
    assert said.startswith(f"model directory {model}: model.safetensors is missing (the weights)")
    assert "expected a Hugging Face directory" in said


def test_an_architecture_that_is_not_supported(site: Site) -> None:
    model = write_model(site.directory / "odd", architecture="MambaForCausalLM")
    config = free_verifier(site, "odd", model)
    said = last_line(site, "verifier-v0", config=config, status=78)
    assert said.startswith(f"{model}/config.json: architecture MambaForCausalLM is not supported")
    assert "supported are Gemma3ForCausalLM, LlamaForCausalLM" in said


def test_a_supervisor_that_does_not_listen_is_no_reason_to_fail(site: Site) -> None:
    """NOTIFY_SOCKET of nobody: a warning, and sdcpd runs."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        probe.bind(str(site.directory / "nobody.notify"))
    (site.directory / "nobody.notify").unlink()
    code = (
        "import os, sdcpd.logs as logs, sdcpd.service as s\n"
        f"os.environ['NOTIFY_SOCKET'] = {str(site.directory / 'nobody.notify')!r}\n"
        "logs.set_up_logging('info')\n"
        "s.notify('READY=1')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert "systemd could not be told 'READY=1'" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("wait_s", [0.5, 1.0, 1.5, 2.0, 2.5])
def test_a_stop_while_a_model_loads_is_a_stop(site: Site, wait_s: float) -> None:
    """The thread that loads is inside torch, and nothing can end it: the process must, in order."""
    config = site.config("early", *site.section("verifier", "verifier"))
    process = Sdcpd(site.directory, "verifier-v0", config=config)
    time.sleep(wait_s)  # some moment of the start
    process.process.terminate()
    assert process.end() in (0, -signal.SIGTERM), process.log  # before anything listens to signals
    assert "Aborted" not in process.log


def test_a_revocation_list_that_is_not_there(site: Site) -> None:
    config = free_router(
        site, "crl", tls=[*site.tls[:3], 'crl = "/nowhere/revoked.crl"', *site.tls[3:]]
    )
    said = last_line(site, "router-r0", config=config, status=78)
    assert "/nowhere/revoked.crl cannot be read: No such file or directory" in said
