"""sdcpctl keys: what it writes is what the API reads."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cli.__main__ import main
from sdcpd.roles.api_access import Keys


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "api-keys"


def keys(file: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["keys", *arguments, "--file", str(file)])


def test_a_key_is_made_used_and_revoked(file: Path) -> None:
    """Only its hash is kept; comments and other keys stay."""
    file.write_text(f"# of the lab\nann:sha256:{hashlib.sha256(b'a').hexdigest()}\n")
    file.chmod(0o640)
    made = keys(file, "add", "bob").stdout.strip()
    assert made not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o640
    served = Keys(file)
    assert served.owner(f"Bearer {made}") == "bob"
    assert served.owner("Bearer a") == "ann"
    assert [line.split()[0] for line in keys(file, "list").stdout.splitlines()] == [
        *("NAME", "ann", "bob")
    ]
    assert keys(file, "revoke", "ann").exit_code == 0
    assert file.read_text().startswith("# of the lab\nbob:sha256:")
    assert keys(file, "add", "bob").exit_code == 1
    assert keys(file, "revoke", "ann").exit_code == 5
    assert [path.name for path in file.parent.iterdir()] == ["api-keys"]


@pytest.mark.parametrize("name", ["a:b", "", " ", "#x", " #x", " a", "a ", "a\nb"])
def test_names_that_the_file_could_not_hold(file: Path, name: str) -> None:
    assert keys(file, "add", name).exit_code == 2
    assert not file.exists()


def test_a_new_file_is_for_the_owner_and_the_group(file: Path) -> None:
    assert keys(file, "add", "bob").exit_code == 0
    assert file.stat().st_mode & 0o777 == 0o640
    assert keys(file / "x", "add", "bob").exit_code == 1
    assert keys(file.parent / "none", "list").exit_code == 1


def test_lines_that_are_none_are_told_with_their_numbers(tmp_path: Path) -> None:
    """The router refuses a file with such a line as a whole."""
    path = tmp_path / "keys"
    path.write_text(f"# mine\nbroken\na:sha256:{'0' * 64}\nb:sha256:12\n:sha256:{'0' * 64}\n")
    listed = keys(path, "list")
    assert listed.exit_code == 1
    assert "line 2, 4, 5: not name:sha256:hex" in listed.output
    assert "000000000000" in listed.output and "broken" not in listed.output


def test_a_directory_that_is_missing_is_told_with_its_cure(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["keys", "add", "bob", "--file", f"{tmp_path}/no/keys"])
    assert done.exit_code == 1 and done.stdout == ""
    assert f"make its directory: sudo install -d -m 750 {tmp_path}/no;" in done.stderr
