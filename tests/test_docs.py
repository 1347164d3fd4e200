"""The documentation: links lead somewhere, commands parse, keys exist, generated pages are fresh."""

from __future__ import annotations

import http.client
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import click
import pytest

from sdcpd.admin_client import ask
from sdcpd.config import ConfigError, parse_config
from sdcpd.dev.plan import free_ports
from tests.kit import pages, references
from tests.kit.by_hand import Sdcpd, sdcpctl, wait_until, write_model
from tests.kit.pages import PAGES, ROOT

QUICK = ROOT / "docs" / "quickstart.md"
each_page = pytest.mark.parametrize(
    "page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES]
)


def test_what_is_generated_is_fresh(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.kit.references", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT)
    for name in references.PAGES:
        made = (tmp_path / name).read_text("utf-8")
        stale = f"docs/{name} is out of date; run: make docs"
        assert (ROOT / "docs" / name).read_text("utf-8") == made, stale


def test_every_key_has_its_place_in_the_reference() -> None:
    """The example names every key (test_example.py), and the page every one of the example."""
    example = (ROOT / "sdcpd.toml.example").read_text("utf-8")
    page = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    for key in re.findall(r"(?m)^#([a-z_0-9]+) = ", example):
        assert re.search(rf"`{key}( =|`)", page), key


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in pages.links(page):
        assert (page.parent / target).exists(), target
    for name in pages.named_files(page):
        assert (page.parent / name).exists() or (ROOT / name).exists(), name


@each_page
def test_commands_parse(page: Path) -> None:
    for words in pages.command_lines(page):
        try:
            pages.parse(words)
        except click.UsageError as e:
            pytest.fail(f"{shlex.join(words)}: {e.format_message()}")


@pytest.mark.parametrize(
    "line", ["sdcpctl certs mint", "sdcpctl status --colour", "sdcpctl status x", "sdcpctl log -o"]
)
def test_a_command_that_is_wrong_is_found(line: str) -> None:
    with pytest.raises(click.UsageError):
        pages.parse(shlex.split(line))


def test_commands_and_files_are_found_in_the_pages() -> None:
    shown = [" ".join(words) for page in PAGES for words in pages.command_lines(page)]
    assert any(line.startswith("sdcpctl certs init") for line in shown)
    assert any(line.startswith("sdcpd dev --once") for line in shown)
    assert len(list(pages.files(QUICK))) == 4


@each_page
def test_keys_of_files_exist(page: Path) -> None:
    for text in pages.files(page):
        try:
            parse_config(text, name=page.name)
        except ConfigError as e:
            unknown = [one for one in e.problems if "unknown" in one or "not valid TOML" in one]
            assert not unknown, unknown


# ---- the quick start, on one machine


def three_hosts(directory: Path) -> Iterator[tuple[str, Path]]:
    """The page's certificates and files, with other addresses, ports and paths; roles and files."""
    names = ("router", "verifier", "drafter")
    ports = dict(zip((*names, "api"), free_ports(4), strict=True))
    model = write_model(directory / "model")
    replaced = {
        "10.0.0.5:7442": f"127.0.0.1:{ports['router']}",
        "gpu1.lab:7443": f"127.0.0.1:{ports['verifier']}",
        "gpu2.lab:7444": f"127.0.0.1:{ports['drafter']}",
        "127.0.0.1:8000": f"127.0.0.1:{ports['api']}",
        "/srv/models/target": str(model),
        "/srv/models/draft": str(model),
    }

    def here(text: str) -> str:
        for there, ours in replaced.items():
            text = text.replace(there, ours)
        return text

    lines = [words for words in pages.command_lines(QUICK) if words[1:3] == ["certs", "init"]]
    made = sdcpctl(*map(here, lines[0][1:]), cwd=directory)
    assert made.returncode == 0, made.stderr
    hosts = [text for text in pages.files(QUICK) if "[node]" in text]
    for role, text in zip(names, hosts, strict=True):
        host = directory / role
        (host / "conf.d").mkdir(parents=True)
        (host / "sdcpd.toml").write_text(here(text))
        place = {
            "tls.ca": directory / "pki/ca.crt",
            "tls.cert": directory / "pki/{role}.{name}.crt",
            "tls.key": directory / "pki/{role}.{name}.key",
            "admin.socket": host / "admin.sock",
            "mlc.log_path": host / "logs",
            f"{role}.listen": f"127.0.0.1:{ports[role]}",
        }
        more = "".join(f'{key} = "{value}"\n' for key, value in place.items())
        (host / "conf.d" / "50-here.toml").write_text(f'{more}mlc.log_size = "64MiB"\n')
        yield role, host / "sdcpd.toml"


@pytest.mark.slow
def test_the_quick_start_of_three_hosts(tmp_path: Path) -> None:
    running: list[Sdcpd] = []
    try:
        for role, config in three_hosts(tmp_path):
            looked = sdcpctl("doctor", "-c", config, "--role", role)
            assert "FAIL" not in re.sub(r"(?m)^cluster .*$", "", looked.stdout), looked.stdout
            running.append(Sdcpd(config.parent, role, config=config))
            if role == "router":  # what doctor looks at from the others
                running[0].wait_notified("READY=1")
        for process in running:
            process.wait_notified("READY=1")
        socket = tmp_path / "router" / "admin.sock"
        wait_until(
            lambda: (
                [one["state"] for one in ask(socket, "GET", "/status")["instances"]]
                == ["ready"] * 2
            ),
            "both report",
        )
        status = sdcpctl("status", "--endpoint", f"unix:{socket}")
        assert status.returncode == 0 and "verifier" in status.stdout, status.stderr
        api = ask(socket, "GET", "/status")["api"]
        answer = complete(api.rpartition(":")[2].partition("/")[0])
        assert answer["usage"]["completion_tokens"] > 0
    finally:
        codes = [process.stop() for process in reversed(running)]
    assert codes == [0, 0, 0]


def complete(port: str) -> dict[str, dict[str, int]]:
    """The page's last request."""
    (line,) = [one for one in QUICK.read_text().split("\n") if "The sea is" in one]
    body = shlex.split(line)[-1]
    with closing(http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)) as connection:
        connection.request("POST", "/v1/completions", body)
        response = connection.getresponse()
        answer = json.loads(response.read())
    assert response.status == 200, answer
    return dict(answer)
