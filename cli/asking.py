"""Asking an instance by its admin socket: the option that names it, and what is said on failure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.endpoint import Endpoint, default_endpoint
from cli.errors import EXIT_NOT_FOUND, EXIT_UNREACHABLE, CtlError
from cli.guard import ASKED
from cli.text import timeout_given_s

if TYPE_CHECKING:
    from sdcpd.admin_client import AdminRefused

METRICS_S = 10.0
_SESSION = re.compile(r"[A-Za-z0-9_-]{22}")
endpoint_option = click.option(
    "--endpoint",
    type=Endpoint(),
    envvar="SDCPCTL_ENDPOINT",
    metavar="unix:PATH",
    help="admin socket to ask; default: the running `sdcpd dev`, else this host's router "
    "[env: SDCPCTL_ENDPOINT]",
)

endpoints_option = click.option(
    "--endpoint",
    type=Endpoint(),
    multiple=True,
    envvar="SDCPCTL_ENDPOINT",
    metavar="unix:PATH",
    help="admin socket of a router, verifier or drafter; repeatable; default: all of the running "
    "`sdcpd dev`, else of this host [env: SDCPCTL_ENDPOINT]",
)


class OfSession(click.Command):
    """Takes ids that begin with a dash, which one in 64 does, for what they are."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's, with such ids behind the mark that ends the options."""
        ids = [one for one in args if one.startswith("-") and _SESSION.fullmatch(one)]
        if ids and "--" not in args:
            args = [*(one for one in args if one not in ids), "--", *ids]
        return super().parse_args(ctx, args)


def ask_instance(
    endpoint: Path | None,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    timeout_s: float = 30.0,
    named: bool = True,
) -> dict[str, Any]:
    """The answer of the instance that is meant; raises CtlError.

    `named`: whether a refusal tells who has refused.  --timeout goes before `timeout_s`.
    """
    from sdcpd.admin_client import AdminRefused, AdminUnreachable, ask

    socket = meant(endpoint)
    try:
        return ask(socket, method, path, body, timeout_s=timeout_given_s() or timeout_s)
    except AdminUnreachable as e:
        raise CtlError(str(e), status=EXIT_UNREACHABLE) from e
    except AdminRefused as e:
        raise _refused(socket, e, named=named) from e


def meant(endpoint: Path | None) -> Path:
    """The socket to ask, which is told where what it answers is not understood."""
    socket = endpoint or default_endpoint()
    if (this := click.get_current_context(silent=True)) is not None:
        this.meta[ASKED] = socket
    return socket


def _refused(socket: Path, error: AdminRefused, *, named: bool) -> CtlError:
    """What an instance would not do: it knows no such thing, is of another role, or says why."""
    if error.status == 404:
        return CtlError(str(error), status=EXIT_NOT_FOUND)
    if error.status == 405:
        return CtlError(f"the instance at {socket} does not do that; name a router's --endpoint")
    return CtlError(f"{socket} refused: {error}" if named else str(error))


def follow_instance(endpoint: Path | None, path: str, body: dict[str, Any]) -> Iterator[str]:
    """The lines of an answer as they come; raises CtlError."""
    from sdcpd.admin_client import AdminRefused, AdminUnreachable, follow

    socket = meant(endpoint)
    try:
        yield from follow(socket, path, body)
    except AdminUnreachable as e:
        raise CtlError(str(e), status=EXIT_UNREACHABLE) from e
    except AdminRefused as e:
        raise _refused(socket, e, named=False) from e


def metrics_of(endpoint: Path | None) -> str:
    """An instance's metrics, as Prometheus reads them; raises CtlError."""
    from sdcpd.admin_client import AdminRefused, AdminUnreachable, fetch

    socket = meant(endpoint)
    try:
        return fetch(socket, "/metrics", timeout_s=timeout_given_s() or METRICS_S)
    except AdminUnreachable as e:
        raise CtlError(str(e), status=EXIT_UNREACHABLE) from e
    except AdminRefused as e:
        raise CtlError(f"{socket} refused: {e}") from e


def ask_router(endpoint: Path | None) -> dict[str, Any]:
    """What a router says of its cluster; raises CtlError for another role's socket."""
    answer = ask_instance(endpoint, "GET", "/status")
    if answer["role"] != "router":
        raise CtlError(f"that is the {answer['role']} {answer['name']}; name a router's --endpoint")
    return answer
