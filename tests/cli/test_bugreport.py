"""sdcpctl bugreport: what is in it, and that no secret is."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.kit.by_hand import sdcpctl

SECRET = "hunter2hunter2"


@pytest.mark.slow
def test_it_has_what_a_report_needs_and_no_secret(tmp_path: Path) -> None:
    """Nothing runs here: what can't be had is told in its place, and that is no failure."""
    (tmp_path / "keys").write_text(f"bob:sha256:{'ab' * 32}\n# {SECRET}\n")
    (tmp_path / "keys").chmod(0o640)
    config = tmp_path / "sdcpd.toml"
    config.write_text(
        '[router]\nbase_uri = "https://127.0.0.1:7442/"\nmodel = "/none"\n'
        f'[api]\nkeys_file = "{tmp_path}/keys"\n'
    )
    out = tmp_path / "report.tar.gz"
    at = ("--endpoint", f"unix:{tmp_path}/a.sock", "-c", config)
    made = sdcpctl("bugreport", *at, "--out", out)
    assert made.returncode == 0, made.stderr
    with tarfile.open(out) as archive:
        archive.extractall(tmp_path / "opened", filter="data")
    files = [path for path in (tmp_path / "opened").rglob("*.*") if path.is_file()]
    found = {path.name: path.read_text() for path in files}
    assert {
        "versions.txt",
        "doctor.txt",
        "config.txt",
        "status.json",
        "metrics.txt",
    } <= found.keys()
    assert "sdcpd 0.1.0" in found["versions.txt"]
    assert "router.base_uri" in found["config.txt"] and "exit code 1" in found["doctor.txt"]
    assert "there is no admin socket" in found["status.json"] + found["metrics.txt"]
    assert not [name for name, text in found.items() if SECRET in text or "ab" * 32 in text]
    again = sdcpctl("bugreport", *at, "--out", out)
    assert again.returncode == 1 and "is there already" in again.stderr
