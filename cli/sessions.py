"""`sdcpctl sessions`: texts being generated, as their router sees them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from cli.asking import OfSession, ask_instance, ask_router, endpoint_option, follow_instance
from cli.errors import CtlError
from cli.output import output_option, show_json, show_list, show_one
from cli.text import echo

COLUMNS = (
    ("SESSION", "session"),
    ("PHASE", "phase"),
    ("EPOCH", "epoch"),
    ("COMMITTED", "committed"),
    ("VERIFIER", "verifier"),
    ("DRAFTER", "drafter"),
)
_PLAIN = {"\n": "↵", "\r": "", "\t": "→"}


@click.group()
def sessions() -> None:
    """List, follow and end sessions."""


@sessions.command("list")
@click.option("--state", help="only sessions in this phase, such as running or waiting")
@endpoint_option
@output_option
def list_(state: str | None, endpoint: Path | None, output: str) -> None:
    """List the open sessions."""
    from sdcpd.protocol.router import Phase

    phases = [one.value for one in Phase if one is not Phase.CLOSED]
    if state is not None and state not in phases:
        raise click.UsageError(f"--state {state}: a session is one of {', '.join(phases)}")
    found = ask_router(endpoint)["sessions"]
    chosen = [one for one in found if state in (None, one["phase"])]
    show_list(chosen, COLUMNS, name="sessions", output=output, none="no open session")


@sessions.command(cls=OfSession)
@click.argument("session")
@endpoint_option
@output_option
def show(session: str, endpoint: Path | None, output: str) -> None:
    """Show one session, open or ended lately; "last" is the one that began or ended last."""
    show_one(ask_instance(endpoint, "POST", "/sessions/show", {"session": session}), output=output)


@sessions.command(cls=OfSession)
@click.argument("session")
@endpoint_option
def cancel(session: str, endpoint: Path | None) -> None:
    """End a session early; its client gets an error."""
    answer = ask_instance(endpoint, "POST", "/sessions/cancel", {"session": session})
    echo(f"session {answer['session']} ends after {answer['committed']} tokens")


@sessions.command(cls=OfSession)
@click.argument("session", default="last")
@endpoint_option
@click.option("-o", "--output", type=click.Choice(["strip", "jsonl"]), default="strip")
def watch(session: str, endpoint: Path | None, output: str) -> None:
    """Follow a session: each round in brackets, with what was accepted, rejected and added.

    Without SESSION the one that began or ended last.
    """
    lines = follow_instance(endpoint, "/sessions/watch", {"session": session})
    count = passes = unknown = 0
    for line in lines:
        value = json.loads(line)
        if show_json(value, output=output):
            continue
        count += value.get("tokens", 0)
        known = [one for one in value.get("rounds", ()) if not _is_unknown(one)]
        passes += len(known)
        unknown += len(value.get("rounds", ())) - len(known)
        echo("".join(map(strip, value.get("rounds", ()))), nl=False)
        if "end" in value:
            told = f", {count / passes:.1f} per pass of the target" if passes else ""
            if unknown:
                told = "; how those of an earlier verifier were made is not known any more"
            echo(f"{value['rest']}\n{count} tokens{told}")
            if value["end"] != "finished":
                raise CtlError(value["end"])


def strip(one: dict[str, Any]) -> str:
    """A round as a piece of the strip: [accepted ~rejected~] own; self-decoded in parentheses.

    Text of which nobody knows the rounds stands as it is.
    """
    if _is_unknown(one):
        return _shown(one["own"])
    if one["self_decoded"]:
        return click.style(f"({_shown(one['own'])})", fg="bright_black")
    rejected = click.style(f"~{_shown(one['rejected'])}~", fg="red") if one["rejected"] else ""
    accepted = click.style(_shown(one["accepted"]), fg="green")
    return f"[{accepted}{rejected}]{click.style(_shown(one['own']), fg='blue', bold=True)}"


def _is_unknown(one: dict[str, Any]) -> bool:
    """Whether no verifier that is there has made it: there was another before a failover."""
    return not one.get("known", True)


def _shown(text: str) -> str:
    """On one line, and without what a model might tell a terminal to do."""
    for character, shown in _PLAIN.items():
        text = text.replace(character, shown)
    return "".join(c if c.isprintable() else "�" for c in text)
