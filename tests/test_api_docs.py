"""What docs/api.md says is there is there, and what is there it names."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from sdcpd.roles.api_bodies import ChatBody, CompletionBody, StreamOptions
from sdcpd.roles.api_unserved import HARMLESS
from tests.kit.api import Scripted, served
from tests.kit.dev import dev

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "api.md").read_text()
CODE = set(re.findall(r"`([^`]+)`", TEXT))
COMMANDS = re.findall(r"^    (curl .*)$", TEXT, re.MULTILINE)


def test_every_parameter_is_named() -> None:
    known = {*ChatBody.model_fields, *CompletionBody.model_fields, *HARMLESS}
    known |= {*StreamOptions.model_fields, "tools", "functions"}
    assert not known - CODE


def test_every_test_that_is_named_exists() -> None:
    tests = {name for name in CODE if re.fullmatch(r"test_\w+", name)}
    files = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    defined = {name for text in files for name in re.findall(r"def (test_\w+)", text)}
    assert len(tests) > 20
    assert not tests - defined


async def test_every_resource_is_named() -> None:
    async with served(Scripted()) as api:
        found = api.front_end._keyless | api.front_end._keyed
    paths = {path for path in found if not path.startswith("/page")}
    named = {part for name in CODE for part in re.findall(r"(?:GET|POST) (\S+)", name)}
    assert not paths - named


@pytest.mark.slow
def test_its_commands_work(tmp_path: Path) -> None:
    """Each as it stands there, but for the port; what comes is JSON and no error."""
    assert len(COMMANDS) > 6
    with dev(tmp_path / "state") as running:
        place = urlsplit(running.api).netloc
        for command in COMMANDS:
            arguments = [*shlex.split(command.replace("localhost:8000", place)), "-sS"]
            made = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=60)
            assert "error" not in json.loads(made.stdout), command
