"""What a wall clock that jumps changes, and what it does not: real processes, real certificates.

Leases, ttls and timers go by monotonic time.  Certificates go by the wall clock, and are looked at
when a connection is opened.
"""

from __future__ import annotations

import http.client
import json
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sdcpd.admin_client import ask
from tests.kit.by_hand import sdcpctl, wait_until
from tests.kit.by_hand_site import Site, running_site
from tests.kit.wall_clock import WallClock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
BODY = {"prompt": "once upon a time ", "max_tokens": 230, "temperature": 0, "ignore_eos": True}


def streamed_over(site: Site, clock: WallClock, days: float) -> tuple[str, dict[str, Any]]:
    """The text of a stream in whose middle the clock jumps, and its session before the jump."""
    with closing(http.client.HTTPConnection("127.0.0.1", site.ports["api"], timeout=60)) as client:
        headers = {"content-type": "application/json"}
        client.request("POST", "/v1/completions", json.dumps(BODY | {"stream": True}), headers)
        response = client.getresponse()
        text, session = "", {}
        while (line := response.readline()).strip() != b"data: [DONE]":
            assert line, f"the stream broke after {text!r}"
            if not line.startswith(b"data: "):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            assert "error" not in chunk, chunk
            text += chunk["choices"][0]["text"]
            if text and not session:
                (session,) = ask(site.router_socket, "GET", "/status")["sessions"]
                clock.set(days)
    return text, session


@pytest.mark.parametrize("days", [30, -30])
def test_a_jump_disturbs_no_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    """D-R1: no ttl, lease or timer goes by the wall clock, and open connections stay."""
    clock = WallClock(tmp_path, monkeypatch)
    with running_site(tmp_path, transport="auto") as site:
        wanted = ask(site.router_socket, "POST", "/generate", BODY)["text"]
        text, session = streamed_over(site, clock, days)
        assert text == wanted
        assert session["epoch"] == 1
        again, session = streamed_over(site, clock, 0)
        assert again == wanted and session["epoch"] == 1
        assert list(site.states().values()) == ["ready"] * 2
        for process in site.running.values():
            assert "no status within its ttl" not in process.log


def test_certificates_that_expire_under_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D-H8: what is connected goes on; who connects anew is refused until certificates are new."""
    clock = WallClock(tmp_path, monkeypatch)
    with running_site(tmp_path, transport="auto") as site:
        wanted = ask(site.router_socket, "POST", "/generate", BODY)["text"]
        text, _ = streamed_over(site, clock, 100)  # they are valid for 90 days
        assert text == wanted, "the session goes on over the connections that it has"

        drafter = site.running["drafter-d0"]
        drafter.kill()
        refused = type(drafter)(site.directory, "drafter-d0", config=drafter.config)
        assert refused.end() == 78
        assert "expired" in refused.log and "sdcpctl certs issue" in refused.log

        for role, name in (("router", "r0"), ("verifier", "v0"), ("drafter", "d0")):
            issued = sdcpctl(
                "certs", "issue", f"{role}/{name}={site.base(role)}", cwd=site.directory
            )
            assert issued.returncode == 0, issued.stderr
        for process in (site.running["router-r0"], site.running["verifier-v0"]):
            process.process.send_signal(signal.SIGHUP)
            process.wait_notified("READY=1", count=2)
            assert "certificates reloaded" in process.log
        site.start("drafter-d0", drafter.config).wait_notified("READY=1")
        wait_until(lambda: list(site.states().values()) == ["ready"] * 2, "all are here again")
        assert ask(site.router_socket, "POST", "/generate", BODY)["text"] == wanted
