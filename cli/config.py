"""`sdcpctl config` and `sdcpctl reload`: the file, what it means, and what runs by it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.asking import ask_instance, endpoint_option
from cli.errors import CtlError
from cli.output import output_option, show_json, show_list
from cli.text import echo, table

if TYPE_CHECKING:
    from sdcpd.config import Config
    from sdcpd.config_sources import Sources

DIFFERENCES = (("KEY", "key"), ("RUNNING", "running"), ("FILE", "file"), ("NEEDS", "needs"))
FILE = Path("/etc/sdcpd/sdcpd.toml")
file_option = click.option(
    "-c", "--config", "path", type=click.Path(path_type=Path), default=FILE, show_default=True
)
set_option = click.option(
    "--set", "settings", multiple=True, metavar="SECTION.KEY=VALUE", help="as sdcpd --set"
)


@click.group()
def config() -> None:
    """Check and show the configuration."""


@config.command()
@file_option
@set_option
@output_option
def check(path: Path, settings: tuple[str, ...], output: str) -> None:
    """Tell every problem of a file; `sdcpd --check-config --role ROLE` looks at more."""
    try:
        _read(path, settings)
    except CtlError as e:
        *problems, _ = e.message.splitlines()
        show_json({"path": str(path), "ok": False, "problems": problems}, output=output)
        raise
    if not show_json({"path": str(path), "ok": True, "problems": []}, output=output):
        echo(f"{path}: ok")


@config.command()
@file_option
@set_option
@click.option("--origin", is_flag=True, help="show where each value is from")
@click.option("--changed", is_flag=True, help="only what is not the default")
@output_option
def show(
    path: Path, settings: tuple[str, ...], *, origin: bool, changed: bool, output: str
) -> None:
    """Show every key with its value, as a file would have it."""
    from sdcpd.reload import flat

    found, sources = _read(path, settings)
    rows = []
    for key, value in flat(found).items():
        where = sources.origin(tuple(key.split("."))) or "default"
        if not changed or where != "default":
            rows.append((key, json.dumps(value, ensure_ascii=False), where))
    if output in ("json", "jsonl"):
        values = [
            {"key": key, "value": json.loads(value), "origin": where} for key, value, where in rows
        ]
        show_list(values, (), name="values", output=output)
        return
    width = 3 if origin or output == "wide" else 2
    shown = [row[:width] for row in rows]
    header = ("KEY", "VALUE", "ORIGIN")[:width]
    echo("\n".join(table([header, *shown])))


@config.command()
def schema() -> None:
    """Print a JSON Schema of the file, which editors check it by."""
    from sdcpd.config import Config

    made = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "sdcpd.toml"}
    echo(json.dumps(Config.model_json_schema(mode="serialization") | made, indent=2))


@config.command()
@file_option
@set_option
@endpoint_option
@output_option
def diff(path: Path, settings: tuple[str, ...], endpoint: Path | None, output: str) -> None:
    """Compare a file with what a running instance goes by; exit 1 if they differ."""
    from sdcpd.reload import flat

    found, _ = _read(path, settings)
    answer = ask_instance(endpoint, "GET", "/config")
    running, wanted = answer["config"], flat(found)
    keys = [key for key in sorted(running.keys() | wanted) if running.get(key) != wanted.get(key)]
    differing = [
        {
            "key": key,
            "running": running.get(key),
            "file": wanted.get(key),
            "needs": "reload" if key in answer["reloadable"] else "restart",
        }
        for key in keys
    ]
    if output not in ("json", "jsonl"):  # else text is not told from a number
        differing = [
            one | {name: _text(one[name]) for name in ("running", "file")} for one in differing
        ]
    show_list(differing, DIFFERENCES, name="differences", output=output, none="no difference")
    if differing:
        raise SystemExit(1)


@click.command()
@endpoint_option
@output_option
def reload(endpoint: Path | None, output: str) -> None:
    """Have an instance read its configuration, certificates and keys again, and tell the outcome.

    Exit 1 if the file is wrong, in which case nothing changes.
    """
    answer = ask_instance(endpoint, "POST", "/reload")
    lines = [f"changed: {key}" for key in answer["changed"]]
    lines += [f"needs restart: {key}" for key in answer["needs_restart"]]
    shown = show_json(answer, output=output)
    if lines and not shown:
        echo("\n".join(lines))
    if answer["problems"]:
        problems = "\n".join(answer["problems"])
        raise CtlError(f"{problems}\nnot reloaded; the old configuration stays in use")
    if not lines and not shown:
        echo("nothing has changed in the file; certificates and keys were read again")


def _read(path: Path, settings: tuple[str, ...]) -> tuple[Config, Sources]:
    from sdcpd.config import ConfigError, config_of
    from sdcpd.config_sources import SourceError, read_sources

    try:
        sources = read_sources(path, environ=os.environ, settings=settings)
        return config_of(sources), sources
    except (ConfigError, SourceError) as e:
        count = len(e.problems)
        raise CtlError(f"{e}\n{count} problem{'s' if count > 1 else ''}") from e


def _text(value: Any) -> str:
    return "-" if value is None else json.dumps(value, ensure_ascii=False)
