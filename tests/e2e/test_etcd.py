"""A cluster whose router keeps its commit logs in etcd (D-Z8)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sdcpd.admin_client import ask
from sdcpd.dev.plan import free_ports
from tests.kit.by_hand import Sdcpd
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
