"""Three processes, three files, certificates from `sdcpctl`: the README's way, as a person goes it.

Once with what is the default between them, which is HTTP/2, and once over HTTP/3 alone (R-5.1-2, D-H8).
"""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from sdcpd.admin_client import ask
from sdcpd.dev.plan import free_ports
from tests.kit.by_hand import Sdcpd, sdcpctl, tls_lines, wait_until
from tests.kit.by_hand_site import Site, running_site

PROMPT = "once upon a time "
TOKENS = 24


@pytest.fixture(scope="module", params=["auto", pytest.param("h3", marks=pytest.mark.slow)])
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("hand")
    with running_site(directory, transport=request.param) as site:
        yield site


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
    assert all(80 < one["certificate_left_s"] / 86400 <= 90 for one in answer["instances"])


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


def test_a_start_tells_systemd_what_it_does(site: Site) -> None:
    """And that it may go on, each time that it has got on: a large model takes longer."""
    told = site.running["verifier-v0"].notified
    ready = told.index("READY=1")
    assert told[0] == "STATUS=starting verifier v0"
    assert told[ready - 1] == "STATUS=serving as verifier v0"
    steps = [line.removeprefix("STATUS=") for line in told[: ready - 1] if "STATUS=" in line]
    assert any(step.startswith("weights ") for step in steps)
    assert any(step.startswith("self-check ") for step in steps)
    for at, line in enumerate(told[: ready - 1]):
        if line.startswith("STATUS="):
            assert told[at + 1] == "EXTEND_TIMEOUT_USEC=600000000"


def test_a_text_comes_back(site: Site) -> None:
    """R-5.1-2: over HTTP/2, and over HTTP/3 alone; certificates on both sides."""
    answer = complete(site.ports["api"], PROMPT)
    (choice,) = answer["choices"]
    assert answer["usage"]["completion_tokens"] == TOKENS or choice["finish_reason"] == "stop"
    body = {"prompt": PROMPT, "max_tokens": TOKENS}
    generated = ask(site.router_socket, "POST", "/generate", body)
    assert choice["text"] == generated["text"]
    assert generated["rounds"] > 0


def test_a_sessions_log_is_looked_at_checked_and_fenced(site: Site) -> None:
    """Section 6.8 by the operator's command, against a router that runs."""
    place = ("--endpoint", f"unix:{site.router_socket}")
    made = ask(site.router_socket, "POST", "/generate", {"prompt": PROMPT, "max_tokens": TOKENS})
    session = made["session"]
    shown = sdcpctl("log", "show", session, *place)
    assert shown.returncode == 0, shown.stderr
    assert f"{len(made['tokens'])} tokens committed" in shown.stdout and "commit" in shown.stdout
    whole = sdcpctl("log", "show", session, "--tokens", "-o", "json", *place)
    records = json.loads(whole.stdout)["records"]
    assert [token for one in records for token in one["tokens"]] == made["tokens"]
    checked = sdcpctl("log", "verify", session, *place)
    assert checked.returncode == 0 and "holds together" in checked.stdout, checked.stderr
    fenced = sdcpctl("log", "fence", session, "--yes", *place)
    assert fenced.returncode == 0 and "fenced at epoch 2" in fenced.stdout, fenced.stderr
    unknown = sdcpctl("log", "show", "A" * 22, *place)
    assert unknown.returncode == 5 and "there is no log of" in unknown.stderr


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


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream, up to [DONE] or to where it breaks."""
    assert response.status == 200, response.read()
    try:
        for line in iter(response.readline, b"data: [DONE]\n"):
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))
            elif not line:
                return
    except (http.client.HTTPException, OSError):
        return


def come_back(port: int, session: str, from_: int) -> list[dict[str, Any]]:
    """What a client that lost its stream gets by its session."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as client:
        client.request("GET", f"/v1/sdcp/sessions/{session}/output?from={from_}")
        return list(events(client.getresponse()))


def tokens_of(parts: list[dict[str, Any]]) -> list[int]:
    return [token for part in parts for token in part["tokens"]]


def text_of(parts: list[dict[str, Any]]) -> str:
    return "".join(part["text"] for part in parts)


@pytest.mark.slow
def test_a_killed_router_takes_its_sessions_up_again(site: Site) -> None:
    """R-6.9-18, D-G1: kill -9 in the middle of a text; its client reads on by its session."""
    router, port = site.running["router-r0"], site.ports["api"]
    body = {"prompt": PROMPT, "max_tokens": 230, "temperature": 0}
    whole = ask(site.router_socket, "POST", "/generate", body)
    wanted = whole["tokens"]
    with (
        closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as client,
        closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as other,
    ):
        headers = {"content-type": "application/json"}
        client.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), headers)
        response = client.getresponse()
        first = events(response)
        seen = next(first)["choices"][0]["text"]
        session = str(response.getheader("x-request-id"))
        other.request("GET", f"/v1/sdcp/sessions/{session}/output")
        had = [next(events(other.getresponse()))]
        (open_session,) = ask(site.router_socket, "GET", "/status")["sessions"]
        assert open_session["session"] == session
        router.kill()
        seen += "".join(part["choices"][0]["text"] for part in first)
    assert 0 < len(had[0]["tokens"]) < len(wanted)
    site.start("router-r0", router.config, refuse_executable_memory=True)
    again = site.running["router-r0"]
    again.wait_notified("READY=1")
    assert "1 sessions taken up again after a restart" in again.log

    rest = come_back(port, session, len(had[0]["tokens"]))
    assert tokens_of(had) + tokens_of(rest) == wanted
    assert text_of(had) + text_of(rest) == whole["text"]
    assert rest[-1]["finish_reason"] == "length"
    wait_until(
        lambda: not ask(site.router_socket, "GET", "/status")["sessions"], "the session ends"
    )
    assert asyncio.run(site.committed(session)) == tuple(wanted)
    again_all = come_back(port, f"cmpl-{session}", 0)  # of a client that has text alone
    assert text_of(again_all) == whole["text"] and whole["text"].startswith(seen)
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("site", ["auto"], indirect=True)
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
