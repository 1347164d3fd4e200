"""The listener for monitoring, and the page about what it tells."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdcpd.config import ConfigError, parse_config
from sdcpd.dev.plan import free_ports
from sdcpd.metrics import MEDIA_TYPE, Metrics
from sdcpd.metrics.families import FAMILIES
from sdcpd.metrics.page import written
from sdcpd.metrics_server import STARTING, Monitoring, start_monitoring
from sdcpd.parts import Parts, StartError
from sdcpd.roles.health import Health, Level
from sdcpd.transport.http import Request
from tests.kit.cluster import cluster
from tests.kit.metrics import Scrape, metrics_of

DOCS = Path(__file__).parents[1] / "docs"


def configured(port: int) -> Parts:
    return Parts(parse_config(f'[metrics]\nlisten = "127.0.0.1:{port}"\n', name="test"))


async def get(port: int, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """Status, fields and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    lines = head.decode().split("\r\n")
    fields = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:])}
    return int(lines[0].split()[1]), fields, body


async def test_all_roles_of_a_process_are_one_text() -> None:
    port = free_ports(1)[0]
    parts = configured(port)
    async with cluster(noise=0.2) as made, parts.stack:
        await start_monitoring(parts, started=lambda: True)
        await made.text()
        assert (await get(port, "/metrics"))[2] == b""  # of a process that has not begun
        parts.metrics += metrics_of(made)
        status, fields, body = await get(port, "/metrics")
        assert (status, fields["content-type"]) == (200, MEDIA_TYPE)
        seen = Scrape.of(body)
        for role in ("verifier", "drafter"):
            assert seen("sdcp_rounds_total", role=role) > 0
        assert seen("sdcp_build_info") == 3
        status, fields, body = await get(port, "/metrics", "HEAD")
        assert (status, body) == (200, b"") and int(fields["content-length"]) > 1000


async def test_what_else_it_answers() -> None:
    port = free_ports(1)[0]
    parts = configured(port)
    async with parts.stack:
        await start_monitoring(parts, started=lambda: True)
        assert (await get(port, "/health"))[0] == 200
        assert (await get(port, "/ready"))[0] == 200
        status, _, body = await get(port, "/v1/models")
        assert status == 404 and "/metrics, /health, /ready" in json.loads(body)["error"]
        status, fields, _ = await get(port, "/metrics", "DELETE")
        assert (status, fields["allow"]) == (405, "GET, HEAD")
    with pytest.raises(OSError):
        await get(port, "/health")


async def test_ready_says_why_not() -> None:
    healths: dict[str, Health] = {}
    begun = False
    monitoring = Monitoring([], healths, started=lambda: begun)

    async def ready() -> tuple[int, dict[str, Any]]:
        answer = await monitoring.handle(Request("GET", "/ready", ""))
        return answer.status, json.loads(answer.body)

    assert await ready() == (503, {"ready": False, "reasons": [STARTING], "degraded": []})
    begun = True
    healths["verifier v0"] = one = Health("verifier v0")
    one.note("disk", Level.UNREADY, "the disk is full")
    assert (await ready())[1]["reasons"] == ["the disk is full"]
    healths["drafter d0"] = Health("drafter d0")
    healths["drafter d0"].note("cache", Level.DEGRADED, "the cache fails")
    status, found = await ready()
    assert status == 503 and found["reasons"] == ["verifier v0: the disk is full"]
    assert found["degraded"] == ["drafter d0: the cache fails"]
    one.clear("disk")
    assert (await ready())[0] == 200


async def test_port_0_opens_nothing() -> None:
    parts = Parts(parse_config("", name="test"))
    async with parts.stack:
        await start_monitoring(parts, started=lambda: True)
        assert parts.config.metrics.listen == ("127.0.0.1", 0)
        assert len(parts.stack._exit_callbacks) == 0  # type: ignore[attr-defined]


async def test_a_port_that_is_taken_is_told() -> None:
    port = free_ports(1)[0]
    first, second = configured(port), configured(port)
    async with first.stack:
        await start_monitoring(first, started=lambda: True)
        with pytest.raises(StartError) as caught:
            await start_monitoring(second, started=lambda: True)
    assert caught.value.status == 1
    assert str(caught.value) == (
        f"metrics: cannot listen on 127.0.0.1:{port}: Address already in use; stop the other "
        "program or choose another [metrics] listen"
    )


def test_a_listener_that_is_none_is_told_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"test:2: metrics.listen = .*must be an address"):
        parse_config('[metrics]\nlisten = "9464"\n', name="test")


def test_the_last_reload_is_told() -> None:
    metrics = Metrics("router")
    for good in (True, False):
        metrics.reloaded = lambda good=good: good  # type: ignore[misc]
        assert Scrape.of(metrics.text())("sdcp_config_last_reload_successful") == float(good)


def test_the_page_is_what_the_code_says() -> None:
    page = (DOCS / "metrics.md").read_text("utf-8")
    assert page == written(page), "run: python -m sdcpd.metrics.page docs/metrics.md"
    for name in FAMILIES:
        assert page.count(f"\n| `{name}` |") == 1


def labels() -> Iterator[str]:
    for family in FAMILIES.values():
        yield from family.labels


def test_names_are_as_prometheus_wants_them() -> None:
    """Units at the end, in seconds, bytes and ratios; nothing that tells one client from another."""
    for name, family in FAMILIES.items():
        assert re.fullmatch(r"(sdcp_|vllm:spec_decode_)[a-z_]+[a-z]", name), name
        assert name.endswith("_total") == (family.kind == "counter"), name
        assert not re.search("_(ms|milliseconds|kib|mib|percent)(_|$)", name), name
        assert family.help.endswith("."), name
    assert not {"session", "client", "key", "prompt", "user"} & set(labels())
