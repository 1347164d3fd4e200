"""`sdcpctl context`: names for clusters, so that nobody types sockets and addresses again.

A context is what `--endpoint` and `--api` would say; an option that is given, and its
variable, go before it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from cli.api import BaseUrl
from cli.endpoint import Endpoint, Kept
from cli.errors import EXIT_NOT_FOUND, CtlError
from cli.output import output_option, show_list
from cli.text import echo

COLUMNS = (("NAME", "name"), ("CURRENT", "current"), ("ENDPOINT", "endpoint"), ("API", "api"))


@click.group()
def context() -> None:
    """Give clusters names: the socket and the API that commands ask."""


@context.command()
@click.argument("name")
@click.option("--endpoint", type=Endpoint(), help="admin socket of its router, unix:PATH")
@click.option("--api", type=BaseUrl(), help="base URL of its API, for chat and bench")
def add(name: str, endpoint: Path | None, api: str | None) -> None:
    """Keep a context, in the place of one of that name; the first one is used at once."""
    if not endpoint and not api:
        raise click.UsageError("a context needs --endpoint, --api, or both")
    if not name or name != name.strip() or not name.isprintable():
        raise click.UsageError(f"a name is printable, without space around it: {name!r}")
    kept = _read()
    given = {"endpoint": endpoint and f"unix:{endpoint.absolute()}", "api": api}
    kept["contexts"][name] = {key: value for key, value in given.items() if value}
    kept["current"] = kept["current"] or name
    _write(kept)
    used = "" if kept["current"] == name else f"; use it with: sdcpctl context use {name}"
    echo(f"context {name} is kept{used}")


@context.command()
@click.argument("name")
def use(name: str) -> None:
    """Have commands ask this cluster from now on."""
    kept = _read()
    _known(kept, name)
    _write(kept | {"current": name})
    echo(f"commands ask {name} now")


@context.command()
@click.argument("name")
def remove(name: str) -> None:
    """Forget a context."""
    kept = _read()
    _known(kept, name)
    del kept["contexts"][name]
    if kept["current"] == name:
        kept["current"] = ""
    _write(kept)
    echo(f"context {name} is forgotten")


@context.command("list")
@output_option
def list_(output: str) -> None:
    """List the contexts."""
    kept = _read()
    found = [
        {"name": name, "current": name == kept["current"], **what}
        for name, what in sorted(kept["contexts"].items())
    ]
    show_list(found, COLUMNS, name="contexts", output=output, none="no context is kept")


def defaults_of(name: str | None, command: click.Command) -> dict[str, Any]:
    """What a context says for the options of a command and those below it, as click takes it.

    Without a name the current one, if there is one.  Raises CtlError for a name that is none.
    """
    kept = _read() if name is not None or _path().exists() else None
    name = name or (kept["current"] if kept else "")
    if kept is None or not name:
        return {}
    values = {key: Kept.of(value, name) for key, value in _known(kept, name).items()}
    return _defaults(values, command)


def _defaults(values: dict[str, Kept], command: click.Command) -> dict[str, Any]:
    if command.name == "context":
        return {}  # there --endpoint is what is to be kept
    found: dict[str, Any] = {
        one.name: [values[one.name]] if one.multiple else values[one.name]
        for one in command.params
        if isinstance(one, click.Option) and one.name in values
    }
    for name, inner in getattr(command, "commands", {}).items():
        if below := _defaults(values, inner):
            found[name] = below
    return found


def _known(kept: dict[str, Any], name: str) -> dict[str, str]:
    if name not in kept["contexts"]:
        known = ", ".join(sorted(kept["contexts"])) or "none"
        raise CtlError(f"no context {name}; there are: {known}", status=EXIT_NOT_FOUND)
    found: dict[str, str] = kept["contexts"][name]
    return found


def _path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME")
    return Path(base or Path("~/.config").expanduser()) / "sdcpctl" / "contexts.json"


def _read() -> dict[str, Any]:
    path = _path()
    try:
        kept = json.loads(path.read_text("utf-8"))
        if not isinstance(kept["current"], str) or not all(
            isinstance(value, str) for one in kept["contexts"].values() for value in one.values()
        ):
            raise ValueError("its members are of other kinds")
    except FileNotFoundError:
        return {"current": "", "contexts": {}}
    except OSError as e:
        raise CtlError(f"{path} cannot be read: {e.strerror}") from e
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CtlError(f"{path} is not what sdcpctl wrote ({e}); move it away") from e
    return dict(kept)


def _write(kept: dict[str, Any]) -> None:
    """Whole or not at all."""
    path = _path()
    temporary = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", "utf-8")
        temporary.replace(path)
    except OSError as e:
        raise CtlError(f"{path} cannot be written: {e.strerror}") from e
