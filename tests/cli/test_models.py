"""sdcpctl models: digests as contracts and the configuration have them, and what is not whole."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cli.__main__ import main
from cli.models import models_of

PAIR = Path(__file__).parents[2] / "sdcpd" / "dev" / "pair"


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing that happens to run on this machine is asked."""
    for name in ("SDCPCTL_ENDPOINT", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-contexts"))


def models(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["models", *map(str, arguments)])


def sha256(path: Path) -> str:
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def test_the_digests_are_those_of_contracts() -> None:
    """D-C9: of one file its SHA-256."""
    target = PAIR / "target"
    found = json.loads(models("hash", target, "-o", "json").stdout)
    assert found == {
        "schema": "sdcpctl/v1",
        "weights": sha256(target / "model.safetensors"),
        "tokenizer": sha256(target / "tokenizer.json"),
    }


def test_a_whole_directory_is_told_to_be_one() -> None:
    wanted = sha256(PAIR / "target" / "model.safetensors")
    done = models("verify", PAIR / "target", "--digest", wanted)
    assert done.exit_code == 0, done.output
    assert done.stdout.count("ok  ") == 3 and wanted in done.stdout
    assert "not compared with a cluster" in done.stdout
    other = models("verify", PAIR / "target", "--digest", f"sha256:{'0' * 64}")
    assert other.exit_code == 1 and "is another model than" in other.stderr


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PAIR / "target", tmp_path / "target"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda d: cut(d / "model.safetensors"), "octets and should have"),
        (lambda d: (d / "model.safetensors").write_bytes(b"no"), "is no safetensors file"),
        (lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 99), "is no safetensors file"),
        (lambda d: (d / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda d: (d / "config.json").write_text("{}"), "architecture"),
    ],
    ids=["cut short", "no header", "huge header", "no weights", "no tokenizer", "no architecture"],
)
def test_what_is_wrong_is_told(broken: Path, break_it: object, said: str) -> None:
    assert callable(break_it)
    break_it(broken)
    done = models("verify", broken)
    assert done.exit_code == 1 and said in done.stderr, done.output
    if said != "architecture":  # which is of no matter to a digest
        hashed = models("hash", broken)
        assert hashed.exit_code == 1 and said in hashed.stderr and hashed.stdout == ""


def test_models_are_told_by_who_has_them() -> None:
    answer = {
        "instances": [
            {"role": role, "instance": name, "model": digest}
            for role, name, digest in (
                ("drafter", "d0.1", "sha256:bb"),
                ("verifier", "v0.1", "sha256:aa"),
                ("verifier", "v1.1", "sha256:aa"),
                ("drafter", "d1.1", None),
            )
        ]
    }
    assert [(one["digest"], one["names"]) for one in models_of(answer)] == [
        ("sha256:aa", "v0.1, v1.1"),
        ("sha256:bb", "d0.1"),
        (None, "d1.1"),
    ]
