"""`sdcpctl keys`: the API keys of a file that `[api] keys_file` names."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

import click

from cli.errors import EXIT_NOT_FOUND, CtlError
from cli.output import output_option, show_list
from cli.text import echo

PREFIX = "sk-sdcp-"
_LINE = re.compile(r".+?:sha256:[0-9a-fA-F]{64}")
FILE = Path("/etc/sdcpd/secrets/api-keys")
file_option = click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    default=FILE,
    show_default=True,
    help="the file that [api] keys_file names, which a running router reads again by itself;"
    " the unit passes the default one as a credential, which it reads when it starts",
)


@click.group()
def keys() -> None:
    """Make, list and revoke API keys. Only hashes are kept."""


@keys.command()
@click.argument("name")
@file_option
def add(name: str, path: Path) -> None:
    """Make a key for NAME and print it, once: nobody can read it again."""
    if ":" in name or not name or name != name.strip() or name.startswith("#"):
        raise click.UsageError(
            f'a name has no colon, no space around it and no "#" first: {name!r}'
        )
    if not name.isprintable():
        raise click.UsageError(f"a name is on one line: {name!r}")
    entries = _read(path, missing_ok=True)
    if any(known == name for known, _ in entries):
        raise CtlError(f"{path} has a key of {name}; revoke it first: sdcpctl keys revoke {name}")
    key = PREFIX + secrets.token_urlsafe(32)
    digest = hashlib.sha256(key.encode()).hexdigest()
    _write(path, [*entries, (name, f"{name}:sha256:{digest}")])
    echo(key)


@keys.command("list")
@file_option
@output_option
def list_(path: Path, output: str) -> None:
    """List the names of keys."""
    entries = _read(path)
    found = [
        {"name": name, "sha256": line.rpartition(":")[2][:12]}
        for name, line in entries
        if name and _LINE.fullmatch(line.strip())
    ]
    columns = (("NAME", "name"), ("SHA256", "sha256"))
    show_list(found, columns, name="keys", output=output, none=f"{path} has no key")
    wrong = [
        str(number)
        for number, (name, line) in enumerate(entries, 1)
        if not (_is_comment(line) or (name and _LINE.fullmatch(line.strip())))
    ]
    if wrong:
        raise CtlError(
            f"{path}: line {', '.join(wrong)}: not name:sha256:hex, so that a router refuses the"
            " whole file; correct it or take it out"
        )


@keys.command()
@click.argument("name")
@file_option
def revoke(name: str, path: Path) -> None:
    """Take a key away; who has it gets 401 once the router has read the file again."""
    entries = _read(path)
    kept = [entry for entry in entries if entry[0] != name]
    if len(kept) == len(entries):
        known = ", ".join(known for known, _ in entries if known) or "none"
        raise CtlError(f"{path} has no key of {name}; there are: {known}", status=EXIT_NOT_FOUND)
    _write(path, kept)
    echo(f"the key of {name} is revoked")


def _read(path: Path, *, missing_ok: bool = False) -> list[tuple[str, str]]:
    """(name, line) of each line, comments with an empty name."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except FileNotFoundError as e:
        if missing_ok:
            return []
        raise CtlError(f"{path} is not there; make a key with: sdcpctl keys add NAME") from e
    except (OSError, UnicodeDecodeError) as e:
        raise CtlError(f"{path} cannot be read: {e}") from e
    return [("" if _is_comment(line) else line.split(":")[0].strip(), line) for line in lines]


def _is_comment(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")


def _write(path: Path, entries: list[tuple[str, str]]) -> None:
    """Whole or not at all; readable by the owner and the group."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o640
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
            f.writelines(f"{line}\n" for _, line in entries)
        if path.exists():
            os.chown(temporary, path.stat().st_uid, path.stat().st_gid)
        temporary.chmod(mode)
        temporary.replace(path)
    except OSError as e:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise CtlError(f"{path} cannot be written: {e.strerror}; {_cure(path)}") from e


def _cure(path: Path) -> str:
    """What to do about a file that cannot be written."""
    if not path.parent.exists():
        return f"make its directory: sudo install -d -m 750 {path.parent}; or name another --file"
    return "do it as its owner (sudo), or name another --file"
