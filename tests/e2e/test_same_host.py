"""A real daemon and other processes of this host: objects through shared memory, and kill -9."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sdcpd.admin_client import ask
from sdcpd.dev.plan import DevOptions, make_plan
from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import TransportError
from sdcpd.transport.local_client import LocalClient
from sdcpd.transport.tls import TlsIdentity
from tests.kit.by_hand import START_S, Sdcpd, wait_until
from tests.kit.by_hand_site import Site, make_site
from tests.kit.dev import PAIR
from tests.kit.same_host import Recording, turns

ROWS = os.urandom(1 << 20) * 4


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A router alone, which has a cache like all roles."""
    site = make_site(tmp_path_factory.mktemp("host"))
    log = ["[log]", 'level = "debug"']
    config = site.config("router", *site.section("router", "router"), *log)
    router = site.start("router-r0", config)
    try:
        router.wait_notified("READY=1")
        yield site
    finally:
        router.kill()


def identity_files(site: Site) -> tuple[Path, Path, Path]:
    cert = site.pki / "drafter.d0.crt"
    return site.pki / "ca.crt", cert, cert.with_suffix(".key")


@pytest.fixture
async def client(site: Site) -> AsyncIterator[tuple[LocalClient, Recording]]:
    ca, cert, key = identity_files(site)
    http = Recording(HttpClient(TlsIdentity(ca=ca, cert=cert, key=key)))
    client = LocalClient(http)
    await client.request("OPTIONS", f"{site.base('router')}objects/scope/q_rows.a")
    http.passed.clear()
    yield client, http
    await client.aclose()
    await http.aclose()


def metric(socket: Path, name: str) -> float:
    """What a daemon counts."""
    done = subprocess.run(
        ["curl", "-sf", "--unix-socket", str(socket), "http://admin/metrics"],
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    return sum(float(found) for found in re.findall(rf"(?m)^{name}{{.*}} (\S+)$", done.stdout))


async def test_four_mib_there_and_back_through_memory(
    site: Site, client: tuple[LocalClient, Recording]
) -> None:
    local, over_tls = client
    uri = f"{site.base('router')}objects/scope/q_rows.a"
    put = await local.request("PUT", uri, headers=(("if-none-match", "*"),), body=ROWS)
    got = await local.request("GET", uri)
    assert (put.status, got.status) == (201, 200) and got.body == ROWS
    assert not over_tls.passed and local.exchanges == 2
    log = site.running["router-r0"].log
    assert f"q_rows.a over shared memory: 201, {len(ROWS)} octets in" in log
    assert f"q_rows.a over shared memory: 200, 0 octets in, {len(ROWS)} out" in log
    assert metric(site.router_socket, "sdcp_local_requests_total") == 2
    refused = await local.request("PUT", uri.replace("q_rows", "target_kv"), body=ROWS)
    assert refused.status == 403 and local.exchanges == 3
    socket = site.directory / "router.r0.objects.sock"
    assert socket.is_socket() and socket.stat().st_mode & 0o777 == 0o600


async def test_a_client_that_is_killed_leaves_nothing_behind(
    site: Site, client: tuple[LocalClient, Recording]
) -> None:
    local, _ = client
    uri = f"{site.base('router')}objects/scope/q_rows.b"
    assert (await local.request("PUT", uri, body=ROWS)).status == 201
    process = site.running["router-r0"].process
    descriptors = Path(f"/proc/{process.pid}/fd")

    def shared() -> int:
        """How many regions the daemon has mapped."""
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        return maps.count("memfd:sdcpd-exchange")

    before = len(list(descriptors.iterdir())), shared()
    module = ["-m", "tests.kit.same_host_client", site.base("router")]
    with subprocess.Popen(
        [sys.executable, *module, *map(str, identity_files(site))],
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        lines = [await asyncio.to_thread(other.stdout.readline) for _ in range(10)]
        assert set(lines) == {"201 local\n"}
        other.kill()
    wait_until(
        lambda: (len(list(descriptors.iterdir())), shared()) == before, "all of it is given back"
    )
    assert process.poll() is None
    assert (await local.request("GET", uri)).body == ROWS


async def test_a_server_that_is_killed_is_an_error_and_no_hang(
    site: Site, client: tuple[LocalClient, Recording]
) -> None:
    """The last test of the module: it takes the server away."""
    local, _ = client
    base = site.base("router")

    async def write(worker: int) -> TransportError:
        number = 0
        while True:
            number += 1
            uri = f"{base}objects/scope/q_rows.{worker}.{number}"
            try:
                await local.request("PUT", uri, body=ROWS, timeout_s=5.0)
            except TransportError as error:
                return error

    workers = [asyncio.create_task(write(worker)) for worker in range(3)]
    done = local.exchanges + 10
    while local.exchanges < done:
        await turns()
    site.running["router-r0"].process.kill()
    errors = await asyncio.wait_for(asyncio.gather(*workers), 20)
    assert all(error.reason for error in errors)
    with pytest.raises(TransportError):
        await local.request("PUT", f"{base}objects/scope/q_rows.c", body=ROWS, timeout_s=5.0)
    assert not local.is_near(base), "nobody listens there"


@pytest.mark.slow
def test_drafters_write_rows_of_rule_2_through_memory(tmp_path: Path) -> None:
    """The bundled pair in processes of its own, as `sdcpd dev` starts them."""
    options = DevOptions(drafters=(str(PAIR / "drafter"),), port=None)
    sockets = tmp_path / "run"
    sockets.mkdir()
    plans = make_plan(options, tmp_path, sockets)
    running: list[Sdcpd] = []
    try:
        for plan in plans:
            text = plan.config.read_text()
            peers = f'[[peers]]\nbase_uri = "{plans[-1].base_uri}"\ntrusted = true\n'
            text = text.replace("[router]\n", '[router]\nsampling_rule = "rejection"\nm_max = 16\n')
            text = text.replace("[drafter]\n", "[drafter]\nm = 12\ntop_k = 4096\n")
            plan.config.write_text(text + peers)
            running.append(Sdcpd(tmp_path, f"{plan.role}-{plan.name}", config=plan.config))
        for process in running:
            process.wait_notified("READY=1")
        router, verifier = plans[0].admin, plans[1].admin
        wait_until(lambda: len(ask(router, "GET", "/status")["instances"]) == 2, "both report")
        body = {"prompt": "Once upon a time", "max_tokens": 48, "temperature": 1.0, "seed": 3}
        answer = ask(router, "POST", "/generate", body, timeout_s=START_S)
        assert len(answer["tokens"]) == 48 and answer["rounds"] > 0
        assert metric(verifier, "sdcp_local_requests_total") > 0
    finally:
        for process in reversed(running):
            process.stop()
