"""`sdcpctl log`: a session's commit log, as its router keeps it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from cli.asking import OfSession, ask_instance, endpoint_option
from cli.errors import EXIT_NOT_FOUND, CtlError
from cli.output import output_option, show_json, show_list
from cli.text import echo, table

HEADER = ("#", "KIND", "EPOCH", "ROUND", "EMITTED", "COMMITTED", "DIGEST")
RIGHT = (0, 2, 3, 4, 5)
DIGEST_SHOWN = 16  # characters

_ABSENT = re.compile(r"there is no log of |the log of \S+ was deleted |\".*\" is no session id")
"""How a router begins that has no such log; it answers all that it refuses with one status."""


@click.group()
def log() -> None:
    """Look at, check and fence the commit log of a session."""


@log.command(cls=OfSession)
@click.argument("session")
@click.option("--tokens", is_flag=True, help="show the token ids too")
@endpoint_option
@output_option
def show(session: str, tokens: bool, endpoint: Path | None, output: str) -> None:
    """Show the records of a log, in order."""
    answer = _ask(endpoint, "show", {"session": session, "tokens": tokens})
    if output == "jsonl":
        of = {"session": answer["session"]}
        show_list([of | one for one in answer["records"]], (), name="records", output=output)
        return
    if show_json(answer, output=output):
        return
    rows = [_row(number, one) for number, one in enumerate(answer["records"])]
    echo("\n".join([_summary(answer), *table([HEADER, *rows], right=RIGHT)]))
    if tokens:
        for number, one in enumerate(answer["records"]):
            if one["kind"] == "commit":
                echo(f"{number}: {' '.join(map(str, one['tokens']))}")


@log.command(cls=OfSession)
@click.argument("session")
@endpoint_option
@output_option
def verify(session: str, endpoint: Path | None, output: str) -> None:
    """Check that a log holds together; exit code 1 if it does not."""
    answer = _ask(endpoint, "verify", {"session": session})
    faults = answer["faults"]
    if not show_json(answer, output=output):
        marked = [f"{click.style('!', fg='red')} {fault}" for fault in faults]
        echo("\n".join(marked) if faults else f"{_summary(answer)}: holds together")
    if faults:
        raise CtlError(f"the log of {session} has {len(faults)} faults; it was not changed")


@log.command(cls=OfSession)
@click.argument("session")
@click.option("--yes", is_flag=True, help="do not ask")
@endpoint_option
@output_option
def fence(session: str, yes: bool, endpoint: Path | None, output: str) -> None:
    """End the authority of whoever writes a log: nothing more is committed under its epoch.

    A session that runs notices with its next round: its client gets what is committed, and then an
    error. It goes on nowhere else.
    """
    if not yes:
        click.confirm(
            f"Fence the log of {session}? A session that runs is ended: its client gets what is"
            " committed, and then an error.",
            abort=True,
        )
    answer = _ask(endpoint, "fence", {"session": session})
    said = f"fenced at epoch {answer['epoch']}: nothing is committed under a lower one any more"
    if not show_json(answer, output=output):
        echo(said)


def _ask(endpoint: Path | None, what: str, body: dict[str, Any]) -> dict[str, Any]:
    try:
        return ask_instance(endpoint, "POST", f"/logs/{what}", body, named=False)
    except CtlError as e:
        if _ABSENT.match(e.message):
            raise CtlError(e.message, status=EXIT_NOT_FOUND) from e
        raise


def _summary(answer: dict[str, Any]) -> str:
    return (
        f"{answer['session']}  epoch {answer['epoch']}  round {answer['round']}  "
        f"{answer['committed']} tokens committed  {answer['records_count']} records"
    )


def _row(number: int, record: dict[str, Any]) -> tuple[str, ...]:
    names = ("epoch", "round", "emitted", "committed")
    cells = [str(record.get(name, "")) for name in names]
    return (str(number), record["kind"], *cells, record.get("digest", "")[:DIGEST_SHOWN])
