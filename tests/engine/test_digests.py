"""Digests of large files: hashed once, and never taken for those of another file (D-C9)."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from sdcpd.engine import digests
from sdcpd.engine.digests import cache_file, file_digest


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "REMEMBERED_BYTES_MIN", 10)
    monkeypatch.setattr(digests, "PIECE_BYTES", 7)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were really read."""
    seen: list[Path] = []
    real = digests._hashed
    monkeypatch.setattr(
        digests, "_hashed", lambda path, *rest: (seen.append(path), real(path, *rest))[1]
    )
    return seen


def test_a_file_is_hashed_once(tmp_path: Path, hashed: list[Path]) -> None:
    memory, file = tmp_path / "deep" / "digests.json", tmp_path / "weights"
    file.write_bytes(b"0123456789 and more")
    wanted = hashlib.sha256(file.read_bytes()).digest()
    assert [file_digest(file, remembered=memory) for _ in range(3)] == [wanted] * 3
    assert hashed == [file]
    assert memory.parent.stat().st_mode & 0o777 == 0o700


def test_a_file_that_changed_is_hashed_again(tmp_path: Path, hashed: list[Path]) -> None:
    memory, file = tmp_path / "digests.json", tmp_path / "weights"
    file.write_bytes(b"a" * 20)
    first = file_digest(file, remembered=memory)
    file.write_bytes(b"b" * 20)
    os.utime(file, ns=(0, 1))
    second = file_digest(file, remembered=memory)
    assert second == hashlib.sha256(b"b" * 20).digest() != first
    new = tmp_path / "new"
    new.write_bytes(b"c" * 20)
    os.utime(new, ns=(0, 1))
    new.rename(file)  # of the same size and time, and another file
    assert file_digest(file, remembered=memory) == hashlib.sha256(b"c" * 20).digest()
    assert len(hashed) == 3


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 1}', "nonsense"])
def test_a_memory_that_is_damaged_is_made_anew(
    tmp_path: Path, hashed: list[Path], text: str
) -> None:
    memory, file = tmp_path / "digests.json", tmp_path / "weights"
    file.write_bytes(b"a" * 20)
    memory.write_text(text)
    wanted = hashlib.sha256(b"a" * 20).digest()
    assert [file_digest(file, remembered=memory) for _ in range(2)] == [wanted] * 2
    assert len(hashed) == 1


def test_an_entry_that_is_no_digest_is_not_believed(tmp_path: Path) -> None:
    memory, file = tmp_path / "digests.json", tmp_path / "weights"
    file.write_bytes(b"a" * 20)
    wanted = file_digest(file, remembered=memory)
    entries = json.loads(memory.read_text())
    for bad in ("", "zz" * 32, "00" * 31, None, 5):
        spoilt = {key: [*entry[:-1], bad] for key, entry in entries.items()}
        memory.write_text(json.dumps(spoilt))
        assert file_digest(file, remembered=memory) == wanted


def test_a_memory_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    file = tmp_path / "weights"
    file.write_bytes(b"a" * 20)
    memory = tmp_path / "file" / "digests.json"
    assert file_digest(file, remembered=memory) == hashlib.sha256(b"a" * 20).digest()


def test_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "REPORT_EVERY_S", 0.0)
    file = tmp_path / "weights"
    file.write_bytes(b"a" * 20)
    told: list[str] = []
    file_digest(file, report=told.append)
    assert [line.split(" %")[0] for line in told] == [
        f"hashing weights: {share}" for share in (35, 70, 100)
    ]


def test_where_it_is(tmp_path: Path) -> None:
    assert cache_file({"CACHE_DIRECTORY": "/var/cache/sdcpd/v0:/x"}) == Path(
        "/var/cache/sdcpd/v0/digests.json"
    )
    assert cache_file({"XDG_CACHE_HOME": "/c"}) == Path("/c/sdcpd/digests.json")
    for environment in ({}, {"XDG_CACHE_HOME": "relative"}):
        assert cache_file(environment) == Path.home() / ".cache/sdcpd/digests.json"
