"""Answers as a table for people, or as JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from cli.text import echo, table

SCHEMA = "sdcpctl/v1"
output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "wide", "json", "jsonl"]),
    default="table",
    show_default=True,
    help="json and jsonl have a stable form, named by the key `schema`, which each line has",
)


def show_list(
    items: Sequence[dict[str, Any]],
    columns: Sequence[tuple[str, str]],
    *,
    name: str,
    output: str,
    wide: Sequence[tuple[str, str]] = (),
    none: str = "none",
) -> None:
    """Print items: as a table of `columns` (header, key), with those of `wide` where asked for."""
    if output == "json":
        echo(json.dumps({"schema": SCHEMA, name: list(items)}, indent=2, ensure_ascii=False))
    elif output == "jsonl":
        for one in items:
            echo(json.dumps({"schema": SCHEMA, **one}, ensure_ascii=False))
    elif not items:
        echo(none)
    else:
        shown = [*columns, *(wide if output == "wide" else ())]
        rows = [[cell(one.get(key)) for _, key in shown] for one in items]
        numbers = [
            at
            for at, (_, key) in enumerate(shown)
            if all(isinstance(one.get(key), int | float | None) for one in items)
        ]
        echo("\n".join(table([[header for header, _ in shown], *rows], right=numbers)))


def show_one(answer: dict[str, Any], *, output: str) -> None:
    """Print one thing: a line a member, or JSON."""
    if show_json(answer, output=output):
        return
    rows = [(key.replace("_", " "), cell(value)) for key, value in answer.items()]
    echo("\n".join(table(row for row in rows if row[0] != "schema")))


def show_json(answer: dict[str, Any], *, output: str) -> bool:
    """Print one thing as JSON, if that is asked for; returns whether it is."""
    if output not in ("json", "jsonl"):
        return False
    indent = 2 if output == "json" else None
    echo(json.dumps({"schema": SCHEMA, **answer}, indent=indent, ensure_ascii=False))
    return True


def cell(value: Any) -> str:
    """One value as people read it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
