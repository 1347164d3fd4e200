"""A cluster whose router keeps its commit logs in etcd (D-Z8)."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sdcpd.admin_client import AdminRefused, AdminUnreachable, ask
from sdcpd.dev.plan import free_ports
from tests.kit.by_hand import Sdcpd, wait_until
from tests.kit.by_hand_site import Site, make_site, running_site
from tests.kit.etcd import EtcdCluster, running_etcd
from tiers.build import etcd_settings, open_etcd_logs

pytest.importorskip("aetcd", reason="the extra etcd is not installed")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with running_etcd(tmp_path / "etcd") as cluster:
        yield cluster


@pytest.fixture(params=["auto", pytest.param("h3", marks=pytest.mark.slow)])
def site(request: pytest.FixtureRequest, tmp_path: Path, etcd: EtcdCluster) -> Iterator[Site]:
    """Its processes say nothing but what sdcpd says (see `Site.stop`): gRPC is silent."""
    lines = mlc_lines(*etcd.endpoints)
    with running_site(tmp_path, transport=request.param, router_mlc=lines) as site:
        yield site


def mlc_lines(*endpoints: str) -> list[str]:
    named = ", ".join(f'"{one}"' for one in endpoints)
    return ['commit_log = "etcd"', f"etcd.endpoints = [{named}]", 'etcd.prefix = "by/hand"']


@pytest.mark.slow
async def test_a_router_serves_its_logs_from_etcd(site: Site, etcd: EtcdCluster) -> None:
    body = {"prompt": "once upon a time ", "max_tokens": 24}
    generated = ask(site.router_socket, "POST", "/generate", body)
    assert generated["rounds"] > 0
    committed = await site.committed(generated["session"])
    assert committed
    named = etcd_settings(endpoints=etcd.endpoints, prefix="by/hand", timeout_s=5.0)
    logs = await open_etcd_logs(named)
    head = await logs.head(generated["session"])
    assert head is not None and head.highest_epoch == 1
    await logs.aclose()


def at_another_machine(site: Site, etcd: EtcdCluster) -> Path:
    """The configuration of the same router with a disk, sockets and ports of its own."""
    lines = site.section("router", "router")
    lines[1] = f'listen = "127.0.0.1:{site.ports["free"]}"'  # reached by the same name elsewhere
    config = site.config("elsewhere", *lines, mlc=mlc_lines(*etcd.endpoints))
    config.write_text(config.read_text().replace("{instance}.sock", "elsewhere.sock"))
    return config


@pytest.mark.slow
def test_a_router_goes_on_at_another_machine(site: Site, etcd: EtcdCluster) -> None:
    """D-F5, D-Z8: kill -9 in the middle of a text, and its disk is gone as well."""
    router = site.running["router-r0"]
    body = {"prompt": "once upon a time ", "max_tokens": 230, "temperature": 0}
    wanted = ask(site.router_socket, "POST", "/generate", body)["tokens"]
    with closing(http.client.HTTPConnection("127.0.0.1", site.ports["api"], timeout=30)) as client:
        headers = {"content-type": "application/json"}
        client.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), headers)
        assert client.getresponse().readline().startswith(b"data:")
        (session,) = ask(site.router_socket, "GET", "/status")["sessions"]
        router.kill()
    kept = site.directory / "router.logs"
    assert not list(kept.rglob("*.mdb")), "nothing is kept here that would be missed"
    shutil.rmtree(kept)
    site.start("router-r0", router.config, refuse_executable_memory=True)
    again = site.running["router-r0"]
    again.wait_notified("READY=1")
    assert "1 sessions taken up again after a restart" in again.log
    wait_until(
        lambda: not ask(site.router_socket, "GET", "/status")["sessions"], "the session ends"
    )
    assert asyncio.run(site.committed(session["session"])) == tuple(wanted)


@pytest.mark.slow
def test_of_two_routers_of_one_name_the_older_ends(site: Site, etcd: EtcdCluster) -> None:
    """D-F5: on one machine the second is refused; elsewhere it is the router from then on."""
    router = site.running["router-r0"]
    twice = Sdcpd(site.directory, "router-r0", config=twin(router.config))
    assert twice.end() == 78 and "is in use by another sdcpd" in twice.log
    other = Sdcpd(site.directory, "router-r0", config=at_another_machine(site, etcd))
    site.running["elsewhere"] = other  # to be ended whatever happens here
    other.wait_notified("READY=1")
    with pytest.raises((AdminRefused, AdminUnreachable)):  # it ends at once
        ask(site.router_socket, "POST", "/generate", {"prompt": "once", "max_tokens": 4})
    assert router.end() == 78
    *_, line = router.log.splitlines()
    assert " E sdcpd: router r0: its records in etcd are another's now: process " in line
    assert line.endswith("let one of the two run, or give each a name of its own")
    assert site.running.pop("elsewhere").stop() == 0, other.log
    site.start("router-r0", router.config).wait_notified("READY=1")


def twin(config: Path) -> Path:
    """The same file under another name, for a log of its own."""
    return Path(shutil.copy(config, config.with_name("twin.toml")))


def test_a_router_does_not_start_without_etcd(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    (port,) = free_ports(1)
    config = site.config(
        "router", *site.section("router", "router"), mlc=mlc_lines(f"127.0.0.1:{port}")
    )
    process = Sdcpd(site.directory, "router-r0", config=config)
    assert process.end() == 1, process.log
    *_, line = process.log.splitlines()
    assert line.endswith(
        f" E sdcpd: router r0: the commit logs cannot be kept: etcd at 127.0.0.1:{port} does not"
        " answer: nobody listens there: start etcd, or correct [mlc.etcd] endpoints"
    )
