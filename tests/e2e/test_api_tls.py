"""A router whose API speaks HTTPS: a real process, clients that know the authority, new files."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sdcpd.admin_client import ask, fetch
from tests.kit.by_hand import sdcpctl, wait_until
from tests.kit.by_hand_site import Site, make_site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = make_site(tmp_path_factory.mktemp("tls"))
    for kind in ("crt", "key"):  # any authority's would do
        shutil.copy(made.pki / f"router.r0.{kind}", made.directory / f"api.{kind}")
    config = made.config("router", *made.section("router", "router"), *api_lines(made))
    made.start("router-r0", config).wait_notified("READY=1")
    yield made
    made.stop()


def api_lines(site: Site, **changes: str) -> list[str]:
    tls = {"cert": str(site.directory / "api.crt"), "key": str(site.directory / "api.key")}
    return [
        *("[api]", f'listen = "127.0.0.1:{site.ports["api"]}"', "[api.tls]"),
        *(f'{key} = "{value}"' for key, value in (tls | changes).items()),
    ]


def get(site: Site, path: str) -> tuple[int, bytes, int]:
    """Status and body, and the serial number of the certificate that was shown."""
    context = ssl.create_default_context(cafile=str(site.pki / "ca.crt"))
    client = http.client.HTTPSConnection(
        "127.0.0.1", site.ports["api"], context=context, timeout=10
    )
    try:
        client.request("GET", path)
        shown = client.sock.getpeercert()
        answer = client.getresponse()
        return answer.status, answer.read(), int(shown["serialNumber"], 16)
    finally:
        client.close()


def test_clients_and_operators_see_https(site: Site) -> None:
    status, body, _ = get(site, "/v1/models")
    assert status == 200 and json.loads(body)["object"] == "list"
    told = ask(site.router_socket, "GET", "/status")
    assert told["api"] == f"https://127.0.0.1:{site.ports['api']}/v1"
    assert "sdcp_tls_certificate_expiry_timestamp_seconds{" in fetch(site.router_socket, "/metrics")
    assert 'kind="api"' in fetch(site.router_socket, "/metrics")


def test_chat_reaches_it_with_the_authority_in_the_environment(
    site: Site,
) -> None:
    """The model here is none to chat with, and that is what the API says, over TLS."""
    api = f"https://127.0.0.1:{site.ports['api']}/v1"
    refused = sdcpctl("chat", "--api", api, "--once", "hello", cwd=site.directory)
    assert refused.returncode == 4 and "its certificate is not trusted" in refused.stderr
    known = {"SSL_CERT_FILE": str(site.pki / "ca.crt")}
    asked = sdcpctl("chat", "--api", api, "--once", "hello", environment=known)
    assert (asked.returncode, asked.stderr.count("has no chat template")) == (1, 1)


def test_a_new_certificate_is_shown_after_a_reload(site: Site) -> None:
    before = get(site, "/health")[2]
    address = f"router/r0={site.base('router')}"
    made = sdcpctl(
        "certs", "init", "--out", "new", "--trust-domain", "new", address, cwd=site.directory
    )
    assert made.returncode == 0, made.stderr
    with (site.pki / "ca.crt").open("a") as known:
        known.write((site.directory / "new" / "ca.crt").read_text())
    for kind in ("crt", "key"):
        shutil.copy(site.directory / "new" / f"router.r0.{kind}", site.directory / f"api.{kind}")
    site.running["router-r0"].process.send_signal(signal.SIGHUP)
    wait_until(lambda: get(site, "/health")[2] != before, "the new certificate is shown")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"key": ""}, "api.tls.key is missing; HTTPS needs both cert and key"),
        ({"cert": ""}, "api.tls.cert is missing; HTTPS needs both cert and key"),
        ({"cert": "/nowhere/api.crt"}, "[api.tls]: /nowhere/api.crt cannot be read"),
    ],
    ids=["no key", "no certificate", "no file"],
)
def test_what_is_wrong_is_told_before_a_start(
    site: Site, changes: dict[str, str], said: str
) -> None:
    lines = api_lines(site, **changes)
    config = site.config("wrong", *site.section("router", "router"), *lines)
    assert said in checked(config)


def checked(config: Path) -> str:
    """What `--check-config` says of a file that it refuses."""
    command = [sys.executable, "-m", "sdcpd", "--check-config", "--role", "router-r0"]
    done = subprocess.run(
        [*command, "-c", str(config)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 78 and "Traceback" not in done.stderr
    return done.stderr


def test_a_reload_tells_of_files_that_are_not_taken(site: Site) -> None:
    whole = (site.directory / "api.crt").read_bytes()
    (site.directory / "api.crt").write_text("no certificate")
    endpoint = ("--endpoint", f"unix:{site.router_socket}")
    told = sdcpctl("reload", *endpoint)
    assert told.returncode == 1 and "api.crt holds no certificate" in told.stderr
    assert "sdcp_config_last_reload_successful 0" in _reloaded(site)
    assert get(site, "/health")[0] == 200, "with the old one"
    (site.directory / "api.crt").write_bytes(whole)
    assert sdcpctl("reload", *endpoint).returncode == 0
    assert "sdcp_config_last_reload_successful 1" in _reloaded(site)


def _reloaded(site: Site) -> str:
    """The metric, without its labels."""
    return (
        re.sub(r"{[^}]*}", "", fetch(site.router_socket, "/metrics"))
        .replace("1.0", "1")
        .replace("0.0", "0")
    )
