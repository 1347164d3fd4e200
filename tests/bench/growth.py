"""What grows how with the work: `python -m tests.bench.growth [--only contexts,idle,logs,start]`.

contexts: first token, tokens a second and memory by the length of the context, with `sdcpd dev`.
idle: memory, CPU and others' rounds by the number of sessions in which nothing goes on.
logs: appends, reading and taking up again by the number of records of a commit log.
start: seconds from exec to READY by the size of the model.

Prints a table a part; `-o FILE` writes all figures as JSON, and `--page docs/growth.md` the page,
from what was measured now or, with `--from FILE...`, from such files.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench import growth_contexts, growth_idle, growth_logs, growth_start
from tests.bench.growth_page import machine, page, text_table


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of growth: how it is measured and told."""

    title: str
    about: str
    measure: Callable[[], Any]
    tables: tuple[Callable[[Any], list[list[str]]], ...]
    sentences: Callable[[Any], list[str]]


PARTS = {
    "contexts": Part(
        "Contexts",
        "`sdcpd dev` with the bundled target, told that its context is 16k, in binary32; prompts "
        "of tokens drawn at random, each asked once, and 64 tokens after each; medians of "
        f"{growth_contexts.REPEATS} texts with speculation and as many without. What is written "
        "after such prompts is arbitrary, so that the n-gram drafter is seldom right and mostly shows "
        "what it costs. Attention reads all that stands before a token: a token costs more by what "
        "stands before it, and a prompt up to the square of its length.",
        growth_contexts.measure,
        (growth_contexts.table,),
        growth_contexts.sentences,
    ),
    "idle": Part(
        "Idle sessions",
        "Router, verifier and drafter, each a process of its own, with engines that take no time "
        "and hold no keys and values; the drafter never proposes for the idle sessions, whose "
        "clients wait at the API. Then one more session is busy, with five tokens a round.",
        growth_idle.measure,
        (growth_idle.table,),
        growth_idle.sentences,
    ),
    "logs": Part(
        "Commit logs",
        "First the LMDB store alone, on a disk, records of five tokens one by one (median of the "
        f"last {growth_logs.SAMPLES}). Then one session through real processes with engines that "
        "take no time, its log on a file system in memory: router and verifier are killed, and "
        "started again, at each length. The time until it goes on counts from the new process's "
        "exec, and includes that process's start and, for the verifier, the router's wait "
        "until it takes the old one for lost.",
        growth_logs.measure,
        (growth_logs.table, growth_logs.session_table),
        growth_logs.sentences,
    ),
    "start": Part(
        "Cold start",
        "`sdcpd --role verifier` with weights in bfloat16 (the bundled pair's target, and random "
        "ones), from exec to READY=1. The files were in the page cache; what is hashed at "
        "the first start is remembered at the second.",
        growth_start.measure,
        (growth_start.table,),
        growth_start.sentences,
    ),
}


def measured(names: list[str]) -> dict[str, Any]:
    """Figures of these parts, each printed as it is there."""
    found: dict[str, Any] = {"machine": machine(), "load": {}, "parts": {}}
    for name in names:
        before = os.getloadavg()[0]
        found["parts"][name] = PARTS[name].measure()
        found["load"][name] = [before, os.getloadavg()[0]]
        show(name, found["parts"][name])
    return found


def show(name: str, found: Any) -> None:
    """A part, for people."""
    part = PARTS[name]
    print(f"\n{part.title}")
    for table in part.tables:
        print("\n".join(text_table(table(found))))
    for sentence in part.sentences(found):
        print(f"- {sentence}", flush=True)


def together(files: list[Path]) -> dict[str, Any]:
    """Figures of several runs as those of one; of a part that is in two, the later file's.

    Whoever has put a file together from several runs says so in its `note`, and the page does.
    """
    runs = [json.loads(file.read_text()) for file in files]
    found: dict[str, Any] = {"machine": runs[-1]["machine"], "load": {}, "parts": {}}
    for run in runs:
        found["load"] |= run["load"]
        found["parts"] |= run["parts"]
    found["note"] = " ".join(run["note"] for run in runs if "note" in run)
    return found


def as_page(found: dict[str, Any]) -> str:
    """docs/growth.md"""
    sections = []
    for name, part in PARTS.items():
        if (figures := found["parts"].get(name)) is not None:
            tables = [table(figures) for table in part.tables]
            sections.append((part.title, part.about, tables, part.sentences(figures)))
    return page(sections, found["machine"], found["load"], note=found.get("note", ""))


def main() -> None:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument(
        "--from", dest="given", type=Path, nargs="+", help="JSON of earlier runs; none is measured"
    )
    parser.add_argument("-o", "--output", type=Path, help="a file for all figures as JSON")
    parser.add_argument("--page", type=Path, help="the page to write")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"--only: no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    found = together(options.given) if options.given else measured(names)
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    if options.page:
        options.page.write_text(as_page(found))


if __name__ == "__main__":
    main()
