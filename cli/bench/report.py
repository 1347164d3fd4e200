"""A run as a table for people, as JSON for scripts, and the verdicts that end it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import click

from cli.bench.told import ROUND_PARTS, sentence
from cli.output import SCHEMA
from cli.text import echo, table

WAYS = (("speculation", "on"), ("self_decode", "off"))
COLOURS = {"helps": "green", "hurts": "red"}


def show(told: dict[str, Any], *, output: str) -> None:
    """Print a run as it was told."""
    if output == "json":
        echo(json.dumps(told, indent=2, ensure_ascii=False))
    elif output == "jsonl":
        for point in told["points"]:
            echo(json.dumps({"schema": SCHEMA, **point}, ensure_ascii=False))
    else:
        echo("\n".join(lines(told, wide=output == "wide")))


def lines(told: dict[str, Any], *, wide: bool) -> Iterator[str]:
    """What people read."""
    yield _head(told)
    if not told["complete"]:
        yield click.style(f"incomplete: {told['stopped']}", fg="yellow")
    if told["points"]:
        yield from ("", *_loads(told["points"], wide=wide))
        yield from ("", *_rounds(told["points"], wide=wide), "")
    yield from (f"missing: {one}" for one in told["missing"])
    yield from told["notes"]
    for one in told["failures"]:
        said = f": {one['said']}" if one["said"] else ""
        yield click.style(f"failed: {one['count']} x {one['kind']}{said}", fg="red")
    for point in told["points"]:
        if point["verdict"] is not None:
            yield click.style(sentence(point), fg=COLOURS.get(point["verdict"]))
    if not told["points"]:
        yield "nothing was measured"


def _head(told: dict[str, Any]) -> str:
    length = f"{told['duration_s']:g} s" if told["duration_s"] else f"{told['requests']} texts"
    ways = "with speculation and without, in turns" if told["baseline"] else "with speculation"
    return (
        f"{told['api']}   model {told['model']}   seed {told['seed']}\n"
        f"{told['loop']} loop   {told['max_tokens']} tokens a text   temperature"
        f" {told['temperature']:g}   {told['repeats']} x {length} {ways}"
    )


def _loads(points: Sequence[dict[str, Any]], *, wide: bool) -> list[str]:
    times = {"first_token_ms": "TTFT ms", "per_token_ms": "TOKEN ms", "text_ms": "TEXT ms"}
    keys = list(times) if wide else ["first_token_ms", "per_token_ms"]
    header = ["LOAD", "SPECULATION", "TOK/S", "LEAST", "MOST", "TEXTS", "FAILED"]
    header += [one for key in keys for one in (f"{times[key]} p50", "p95", "p99")]
    rows = []
    for point in points:
        for way, name in WAYS:
            if (found := point[way]) is None:
                continue
            rate = found["tokens_per_s"] or {}
            row = [point["name"], name, *(figure(rate.get(k)) for k in ("median", "least", "most"))]
            row += [str(found["texts"]), str(found["failed"])]
            row += [figure(found[key][p]) for key in keys for p in ("p50", "p95", "p99")]
            rows.append(row)
    return table([header, *rows], right=range(2, len(header)))


def _rounds(points: Sequence[dict[str, Any]], *, wide: bool) -> list[str]:
    parts = ROUND_PARTS if wide else ROUND_PARTS[:4]
    header = ["ROUNDS AT", "TOKENS/PASS", "M", "ACCEPTED"]
    header += [f"{'TARGET PASS' if one == 'target' else one.upper()} ms" for one in parts]
    rows = []
    for point in points:
        found = point["rounds"]
        keys = ("tokens_per_pass", "m", "accepted", *(f"{one}_ms" for one in parts))
        rows.append([point["name"], *(figure(found[key]) for key in keys)])
    return table([header, *rows], right=range(1, len(header)))


def figure(value: float | None) -> str:
    """A number with three digits that say something, or more before the point."""
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}"
