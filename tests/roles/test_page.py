"""The chat and status page at `/`, and the resource that its figures come from."""

from __future__ import annotations

import hashlib
import re
import tomllib
from fnmatch import fnmatch
from importlib.resources import files
from pathlib import Path

import pytest

import sdcpd
from sdcpd.roles.api_page import PATHS, POLICY
from sdcpd.roles.generation import Readiness
from tests.kit.api import NAME, Scripted, cluster_api, served, tokenizer

ROOT = Path(__file__).parents[2]
STATUS = "/v1/sdcp/status"
BYTES_MAX = 60 << 10
FOLDER = files("sdcpd.roles").joinpath("page")
FILES = {one.name: one.read_text("utf-8") for one in FOLDER.iterdir()}


def keys_file(folder: Path) -> Path:
    path = folder / "keys"
    path.write_text(f"ann:sha256:{hashlib.sha256(b'sesame').hexdigest()}\n")
    return path


async def test_the_page_is_small_and_whole() -> None:
    async with served(Scripted()) as api:
        octets = {path: (await api.raw("GET", path))[2] for path in PATHS}
    assert sum(map(len, octets.values())) < BYTES_MAX
    assert sorted(octets.values()) == sorted(text.encode() for text in FILES.values())
    linked = re.findall(r'(?:href|src)="(?!data:)([^"]+)"', FILES["index.html"])
    imported = re.findall(r'from "\./([^"]+)"', "".join(FILES.values()))
    assert {"/", *(f"/{name}" for name in (*linked, *imported))} == PATHS


def test_a_wheel_has_the_page() -> None:
    """Packages and their data are listed by hand."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    globs = setup["package-data"]["sdcpd.roles"]
    assert all(any(fnmatch(f"page/{name}", glob) for glob in globs) for name in FILES)


@pytest.mark.parametrize("name", sorted(FILES))
def test_nothing_of_it_is_elsewhere_or_inline(name: str) -> None:
    """What the policy would refuse, and text that would become HTML."""
    text = FILES[name]
    assert not re.search(r"(?:https?:)?//[\w.-]+\.\w", text)
    assert not re.search(r"\bon[a-z]+=|\bstyle=|javascript:|<script>|<style", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    if name.endswith(".js"):
        assert text.startswith('"use strict";\n')


@pytest.mark.parametrize("path", sorted(PATHS))
async def test_what_browsers_are_told(path: str) -> None:
    """Kept but asked for again; nothing runs that is not the page's."""
    async with served(Scripted()) as api:
        status, fields, body = await api.raw("GET", path)
        assert status == 200 and body
        assert fields["cache-control"] == "no-cache"
        assert fields["x-content-type-options"] == "nosniff"
        assert fields["content-security-policy"] == POLICY
        kind = {"/": "text/html", "/page.css": "text/css"}.get(path, "text/javascript")
        assert fields["content-type"] == f"{kind}; charset=utf-8"
        tag = fields["etag"]
        assert tag.startswith('"') and tag.endswith('"')

        status, head, body = await api.raw("HEAD", path)
        assert (status, body) == (200, b"")
        assert {**head, "date": ""} == {**fields, "date": ""}

        for known in (tag, f'"other", W/{tag}', "*"):
            status, kept, body = await api.raw("GET", path, headers=f"If-None-Match: {known}\r\n")
            assert (status, body) == (304, b"")
            assert kept["etag"] == tag and kept["content-security-policy"] == POLICY
        assert (await api.raw("GET", path, headers='If-None-Match: "other"\r\n'))[0] == 200
        assert (await api.raw("POST", path))[0] == 405


def test_the_policy_names_no_place_but_this_server() -> None:
    sources = [one.split()[1:] for one in POLICY.split("; ")]
    assert {word for words in sources for word in words} == {"'none'", "'self'", "data:"}
    assert POLICY.startswith("default-src 'none'; script-src 'self';")


async def test_the_page_needs_no_key_and_its_figures_do(tmp_path: Path) -> None:
    async with served(Scripted(), keys_file=keys_file(tmp_path)) as api:
        for path in PATHS:
            assert (await api.raw("GET", path))[0] == 200
        status, answer = await api.json("GET", STATUS)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        shown = "Authorization: Bearer sesame\r\n"
        assert (await api.json("GET", STATUS, headers=shown))[0] == 200


async def test_names_that_others_may_point_here_get_neither() -> None:
    """A page of another origin could read them otherwise (rebinding)."""
    async with served(Scripted()) as api:
        for path in (*PATHS, STATUS):
            status, answer = await api.json("GET", path, headers="Host: evil.example\r\n")
            assert (status, answer["error"]["code"]) == (403, "host_not_allowed")


async def test_the_status_of_a_cluster() -> None:
    """Any holder of a key may see it, so it says of no session and no place."""
    async with cluster_api(tokenizer().encode("ab").ids) as (api, cluster):
        body = {"prompt": [1], "max_tokens": 40, "temperature": 0}
        assert (await api.json("POST", "/v1/completions", body=body))[0] == 200
        status, octets = (await api.raw("GET", STATUS))[::2]
        assert status == 200
        _, found = await api.json("GET", STATUS)
        assert all(base.encode() not in octets for base in (*cluster.verifiers, *cluster.drafters))
    instances = {one["role"]: one for one in found.pop("instances")}
    assert found.pop("counts")["sessions"] == 1
    assert found == {
        "model": NAME,
        "version": sdcpd.__version__,
        "ready": True,
        "reason": "ready",
        "sessions": 0,
    }
    assert instances.keys() == {"verifier", "drafter"}
    for one in instances.values():
        members = "instance role state load queue accept sessions seen_s"
        assert one.keys() == set(members.split())
        assert one["state"] == "ready" and 0 <= one["load"] <= 100 and one["seen_s"] < 60


async def test_why_a_cluster_is_not_ready() -> None:
    generator = Scripted(ready=Readiness(False, "no verifier has reported"))
    async with served(generator) as api:
        status, found = await api.json("GET", STATUS)
    assert (status, found["ready"], found["reason"]) == (200, False, "no verifier has reported")
    assert (found["sessions"], found["instances"], found["counts"]) == (0, [], {})
