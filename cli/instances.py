"""`sdcpctl instances`: the verifiers and drafters of a router."""

from __future__ import annotations

import time
from pathlib import Path

import click

from cli.asking import ask_instance, ask_router, endpoint_option
from cli.errors import EXIT_NOT_FOUND, CtlError
from cli.output import output_option, show_list, show_one
from cli.text import echo

COLUMNS = (
    ("INSTANCE", "instance"),
    ("ROLE", "role"),
    ("STATE", "state"),
    ("LOAD", "load"),
    ("QUEUE", "queue"),
    ("ACCEPT", "accept"),
    ("SESS", "sessions"),
    ("SEEN", "seen_s"),
)
WIDE = (("BASE URI", "base_uri"), ("ENGINE", "engine"))
POLL_S = 0.5


@click.group()
def instances() -> None:
    """List instances; take them out of service and back."""


@instances.command("list")
@endpoint_option
@output_option
def list_(endpoint: Path | None, output: str) -> None:
    """List the verifiers and drafters that the router knows."""
    found = ask_router(endpoint)["instances"]
    show_list(found, COLUMNS, name="instances", output=output, wide=WIDE, none="no instance yet")


@instances.command()
@click.argument("name")
@endpoint_option
@output_option
def show(name: str, endpoint: Path | None, output: str) -> None:
    """Show one instance, by its name or the beginning of it."""
    found = ask_router(endpoint)["instances"]
    mine = [one for one in found if name in (one["instance"], one["instance"].split(".")[0])]
    if not mine:
        known = ", ".join(one["instance"] for one in found) or "none"
        raise CtlError(f"no instance {name}; there are: {known}", status=EXIT_NOT_FOUND)
    show_one(mine[0], output=output)


@instances.command()
@click.argument("name")
@click.option("--move", is_flag=True, help="have a verifier's sessions go on elsewhere at once")
@click.option("--wait", is_flag=True, help="return when no session is left there")
@endpoint_option
def drain(name: str, *, move: bool, wait: bool, endpoint: Path | None) -> None:
    """Give an instance no more sessions, so that it can be stopped without anybody noticing.

    A drafter's sessions get another at once. A verifier's go on there to their end, or elsewhere
    with --move: the text is the same. It stays drained over a restart, until: undrain.
    """
    body = {"instance": name, "on": True, "move": move}
    answer = ask_instance(endpoint, "POST", "/instances/drain", body)
    while wait and answer["sessions"]:
        time.sleep(POLL_S)  # between two looks
        answer = ask_instance(endpoint, "POST", "/instances/drain", body | {"move": False})
    moving = f", {answer['moving']} sent elsewhere" if answer["moving"] else ""
    echo(f"{answer['instance']} is draining; sessions left there: {answer['sessions']}{moving}")


@instances.command()
@click.argument("name")
@endpoint_option
def undrain(name: str, endpoint: Path | None) -> None:
    """Give a drained instance sessions again."""
    answer = ask_instance(endpoint, "POST", "/instances/drain", {"instance": name, "on": False})
    echo(f"{answer['instance']} gets sessions again")
