"""sdcpctl top: rates and times from two looks at a router."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cli.top import TTFT, lines, read
from tests.kit.dev import dev

STATUS: dict[str, Any] = {
    "role": "router",
    "name": "r0",
    "ready": True,
    "reasons": [],
    "up_s": 61.0,
    "model": "tiny",
    "sessions": [{}, {}],
    "instances": [
        {
            "instance": "v0.abc",
            "role": "verifier",
            "state": "ready",
            "load": 62,
            "queue": 3,
            "accept": None,
            "sessions": 2,
        }
    ],
}
BEFORE = f"""\
# HELP x y
sdcp_api_completion_tokens_total{{role="router"}} 100.0
{TTFT}_bucket{{le="0.1",role="router"}} 5.0
{TTFT}_bucket{{le="0.5",role="router"}} 5.0
{TTFT}_bucket{{le="+Inf",role="router"}} 5.0
"""
AFTER = f"""\
sdcp_api_completion_tokens_total{{role="router"}} 350.0
sdcp_api_requests_total{{route="chat",code="200",role="router"}} 3.0
sdcp_api_requests_total{{route="a\\"}}b",code="400",role="router"}} 2.0
{TTFT}_bucket{{le="0.1",role="router"}} 15.0
{TTFT}_bucket{{le="0.5",role="router"}} 24.0
{TTFT}_bucket{{le="+Inf",role="router"}} 25.0
"""


def test_rates_and_quantiles_are_of_what_came_between() -> None:
    before, now = read(BEFORE, STATUS, at=10.0), read(AFTER, STATUS, at=12.0)
    assert now.rate("sdcp_api_completion_tokens_total", before) == 125
    assert now.rate("sdcp_api_requests_total", before) == 2.5
    assert now.quantile_ms(TTFT, 0.5, before) == 100
    assert now.quantile_ms(TTFT, 0.9, before) == 500
    assert now.quantile_ms(TTFT, 0.99, before) == float("inf")
    assert now.quantile_ms("none", 0.5, before) is None
    screen = "\n".join(lines(now, before, since=before))
    assert "2 sessions   125 tok/s" in screen
    assert "p95 <= 500 ms" in screen
    assert "v0.abc    verifier  ready  [######....]  62%" in screen


@pytest.mark.slow
def test_on_a_terminal_q_ends_it(tmp_path: Path) -> None:
    """Against real processes; the terminal is left as it was."""
    with dev(tmp_path / "state") as running:
        socket = f"unix:{running.instance('r0')['admin']}"
        command = [sys.executable, "-m", "cli", "top", "--endpoint", socket, "--interval", "0.2"]
        once = subprocess.run(
            [*command, "--once"], capture_output=True, text=True, check=True, timeout=30
        )
        assert "sdcp router r0   ready" in once.stdout
        master, slave = pty.openpty()
        shown = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave)
        seen, deadline = b"", time.monotonic() + 30
        while seen.count(b"tok/s") < 3:
            assert time.monotonic() < deadline, seen
            if select.select([master], [], [], 0.2)[0]:
                seen += os.read(master, 4096)
        os.write(master, b"q")
        assert shown.wait(10) == 0
        os.close(slave)
        os.close(master)
