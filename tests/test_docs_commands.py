"""Every command that the documentation shows is run, on a cluster with the pages' names.

What stands for a reader's own (paths, sockets, names) is replaced; a command line that is new in a
page and can't be run so fails here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from tests.kit import pages
from tests.kit.dev import PAIR, Dev, dev

MODULES = {"sdcpctl": "cli", "sdcpd": "sdcpd"}
BARE = (["sdcpctl", "keys", "add"],)  # named in a sentence, without its argument
PROMPT = "The ocean"
CONFIG = """
[node]
name = "r0"
trust_domain = "lab.example"
[tls]
ca = "{pki}/ca.crt"
cert = "{pki}/{{role}}.{{name}}.crt"
key = "{pki}/{{role}}.{{name}}.key"
[router]
base_uri = "https://10.0.0.5:7442/"
[verifier]
base_uri = "https://gpu1.lab:7443/"
router = "https://10.0.0.5:7442/"
[verifier.model]
path = "{target}"
"""


@dataclass
class Reader:
    """A person at a host of the cluster who types what the pages show."""

    home: Path
    cluster: Dev
    session: str

    @property
    def socket(self) -> str:
        return str(self.cluster.instance("r0")["admin"])

    def here(self, words: list[str]) -> list[str]:
        """The same command with this reader's own paths and names, and an end where it has none."""
        ours = {
            "unix:/run/sdcpd/router/admin.sock": f"unix:{self.socket}",
            "/srv/models/target": str(PAIR / "target"),
            "SESSION": self.session,
            "NAME": "alice",
            "SCOPE": "AAAAAAAAAAAAAAAAAAAAAA",
        }
        program, *rest = [ours.get(word, word) for word in words]
        if "DIR" in rest:
            rest[rest.index("DIR")] = str(PAIR / "target")
        rest = [str(PAIR / "drafter") if word == "DIR" else word for word in rest]
        return [program, *rest, *self.more(words)]

    def more(self, words: list[str]) -> list[str]:
        """What ends a command that would go on, or names a file that is not in /etc here."""
        config = ["-c", f"{self.home}/sdcpd.toml"]
        match words[:3]:
            case ["sdcpd", "dev", *_] if "--once" not in words:
                return ["--once"]
            case ["sdcpd", *_] if "dev" not in words:
                return [*config, *([] if "--check-config" in words else ["--check-config"])]
            case ["sdcpctl", "chat", *_]:
                return ["--once", PROMPT, "--max-tokens", "4", "--api", self.cluster.api]
            case ["sdcpctl", "bench", *_]:
                load = ["--rate", "4/s"] if "--rate" in words else ["--concurrency", "1"]
                return [*load, "--duration", "1s", "--repeats", "1", "--url", self.cluster.api]
            case ["sdcpctl", "keys", _]:
                return ["--file", f"{self.home}/api-keys"]
            case ["sdcpctl", "doctor" | "bugreport", *_]:
                return config
            case ["sdcpctl", "config", "show" | "diff"]:
                return config
            case ["sdcpctl", "cache", "gc", *_]:
                return ["--yes"]
            case ["sdcpctl", "verify-exact", _, *_]:
                return ["--m-max", "2", "--tokens", "8"]
        return []

    def type(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        program, *arguments = self.here(words)
        return subprocess.run(
            [sys.executable, "-m", MODULES[program], *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            cwd=self.home,
            env=os.environ | self.places() | {"PYTHONPATH": str(pages.ROOT)},
        )

    def places(self) -> dict[str, str]:
        return {
            "XDG_RUNTIME_DIR": f"{self.home}/run",
            "XDG_CONFIG_HOME": f"{self.home}/config",
            "OMP_WAIT_POLICY": "PASSIVE",
        }


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    home = tmp_path_factory.mktemp("reader")
    (home / "run" / "sdcpd").mkdir(parents=True)
    with dev(home / "dev", "--verifiers", "2") as cluster:
        (home / "run" / "sdcpd" / "dev.json").symlink_to(home / "dev" / "dev.json")
        text = CONFIG.format(pki=home / "pki", target=PAIR / "target")
        (home / "sdcpd.toml").write_text(text)
        (home / "questions.txt").write_text("".join(f"{n} {PROMPT}\n" for n in range(500)))
        (home / "key").write_text("none\n")
        yield Reader(home, cluster, cluster.generate(PROMPT, 8)["session"])


def shown() -> list[list[str]]:
    """Each command once, in the order of the pages; certificates are made before they are used."""
    found: list[list[str]] = []
    for page in pages.PAGES:
        found += [one for one in pages.command_lines(page) if one not in (*found, *BARE)]
    return sorted(found, key=lambda words: words[1:3] != ["certs", "init"])


def is_group(words: list[str]) -> bool:
    """Whether a page only speaks of a command that needs more, such as `sdcpctl keys`."""
    command: click.Command = pages.PROGRAMS[words[0]]
    for word in words[1:]:
        command = getattr(command, "commands", {}).get(word, command)
    return hasattr(command, "commands") or words == ["sdcpctl", "verify-exact"]


ACCEPTED = {
    ("sdcpctl", "doctor"): {0, 1},  # the hosts of the pages do not answer
    ("sdcpctl", "config", "diff"): {0, 1},  # 1: they differ, which they do
    ("sdcpctl", "certs", "init"): {0, 1},  # 1: the first page has made this authority
    ("sdcpd", "--role"): {0, 78},  # 78: certificates are those of the other pages
}


@pytest.mark.slow
def test_every_command_of_the_pages_runs(reader: Reader) -> None:
    lines = [words for words in shown() if not is_group(words)]
    assert len(lines) > 30, "they are found"
    failed = []
    for words in lines:
        done = reader.type(words)
        accepted = {0}
        for begin, codes in ACCEPTED.items():
            if tuple(words[: len(begin)]) == begin:
                accepted = codes
        if done.returncode not in accepted or "Traceback" in done.stderr:
            failed.append(f"{' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}")
    assert not failed, "\n".join(failed)
