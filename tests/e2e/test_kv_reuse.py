"""A later text with the same beginning starts from KV that is kept, at verifier and drafter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sdcpd.admin_client import ask
from tests.kit.by_hand import wait_until
from tests.kit.by_hand_site import Site, make_site
from tests.kit.dev import PAIR

pytest.importorskip("obstore", reason="the extra s3 is not installed")

from tests.kit.s3 import BINARY, BUCKET, KEY_ID, SECRET, S3Process

ROLES = ("verifier", "drafter")
# Some 140 tokens of the pair: two whole blocks.
PROMPT = "".join(
    f"The {animal} lived by the {place} and was very {kind}. "
    for animal, place, kind in [
        ("fox", "river", "small"),
        ("owl", "mountain", "old"),
        ("bear", "village", "hungry"),
        ("mouse", "garden", "quick"),
        ("horse", "road", "proud"),
        ("dragon", "teacup", "tiny"),
        ("whale", "harbour", "lonely"),
        ("crow", "tower", "clever"),
        ("snail", "wall", "slow"),
        ("cat", "window", "sleepy"),
        ("goose", "pond", "loud"),
    ]
)
# Memory for one block or two, so that what is not being used lies in the tier below.
MEMORY = {"verifier": "512KiB", "drafter": "160KiB"}


def tiers(role: str, below: str) -> list[str]:
    return [f'tiers = [{{ kind = "host", size = "{MEMORY[role]}" }}, {{ {below} }}]']


def start(site: Site, role: str, *mlc: str) -> None:
    lines = site.section(role, role)
    if role == "drafter":
        lines[-1] = 'kind = "model"'
        lines += ["m = 4", "[drafter.model]", f'path = "{PAIR / "drafter"}"', "threads = 1"]
        lines.append('dtype = "float32"')  # blocks that are worth a request to a bucket
    site.start(f"{role}-{role[0]}0", site.config(role, *lines, mlc=mlc))


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3Process]:
    if BINARY is None:
        pytest.skip("no S3 server is installed")
    (tmp_path / "s3").mkdir()
    server = S3Process(tmp_path / "s3")
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextmanager
def cluster(directory: Path) -> Iterator[Site]:
    """A router that runs; all that was started must have ended in order at the end."""
    site = make_site(directory)
    site.model = PAIR / "target"
    try:
        site.start("router-r0", site.config("router", *site.section("router", "router")))
        yield site
        site.stop()
    finally:
        for process in site.running.values():
            process.process.kill()
            process.process.wait()


def ready(site: Site) -> None:
    for process in site.running.values():
        process.wait_notified("READY=1")
    for role in ROLES:  # before, the router knows only those that were killed
        process = site.running[f"{role}-{role[0]}0"]
        wait_until(lambda log=process: "takes our status" in log.log, "both report")  # type: ignore[misc]
    wait_until(lambda: list(site.states().values()) == ["ready"] * 2, "both are ready")


def text(site: Site, prompt: str) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 40}
    return ask(site.router_socket, "POST", "/generate", body, timeout_s=60)


def counts(site: Site, role: str) -> dict[str, int]:
    answer = ask(site.directory / f"{role}-{role[0]}0.sock", "GET", "/status")
    return dict(answer["counts"])


def reused(site: Site) -> list[int]:
    return [counts(site, role).get("kv_tokens_reused", 0) for role in ROLES]


def check_after_a_kill(site: Site, below: dict[str, str]) -> None:
    """Same ids, as many rounds, as many tokens accepted: a hit changes nothing but the time."""
    for role in ROLES:
        start(site, role, *tiers(role, below[role]))
    ready(site)
    first = text(site, PROMPT)
    accepted = counts(site, "drafter")["accepted"]
    assert reused(site) == [0, 0] and accepted > 0
    for other in "ABC":  # what these leave pushes the first out of memory
        text(site, other + PROMPT)
    for role in ROLES:
        site.running[f"{role}-{role[0]}0"].kill()
        start(site, role, *tiers(role, below[role]))
    ready(site)
    second = text(site, PROMPT)
    assert second["tokens"] == first["tokens"] and second["rounds"] == first["rounds"]
    assert counts(site, "drafter")["accepted"] == accepted
    assert reused(site) == [128, 128]


@pytest.mark.slow
def test_from_the_disk(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        paths = {role: tmp_path / f"{role}.objects" for role in ROLES}
        check_after_a_kill(
            site,
            {role: f'kind = "lmdb", size = "64MiB", path = "{paths[role]}"' for role in ROLES},
        )


@pytest.mark.slow
def test_from_another_instance(tmp_path: Path) -> None:
    """Each as its certificate lets it (D-M11): the router's cache holds KV of both."""
    with cluster(tmp_path) as site:
        below = f'kind = "remote", base = "{site.base("router")}"'
        check_after_a_kill(site, dict.fromkeys(ROLES, below))


@pytest.mark.slow
def test_from_a_bucket(tmp_path: Path, s3: S3Process) -> None:
    below = (
        f'kind = "s3", size = "64MiB", bucket = "{BUCKET}", endpoint = "{s3.endpoint}",'
        f' access_key_id_file = "{written(tmp_path / "id", KEY_ID)}",'
        f' secret_access_key_file = "{written(tmp_path / "secret", SECRET)}", prefix = "{{0}}"'
    )
    with cluster(tmp_path) as site:
        check_after_a_kill(site, {role: below.format(role) for role in ROLES})


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path
