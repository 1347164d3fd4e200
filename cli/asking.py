"""Asking an instance by its admin socket: the option that names it, and what is said on failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cli.endpoint import Endpoint, default_endpoint
from cli.errors import EXIT_UNREACHABLE, CtlError

endpoint_option = click.option(
    "--endpoint",
    type=Endpoint(),
    envvar="SDCPCTL_ENDPOINT",
    metavar="unix:PATH",
    help="admin socket to ask; default: the running `sdcpd dev`, else this host's router "
    "[env: SDCPCTL_ENDPOINT]",
)


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

    `named`: whether a refusal tells who has refused.
    """
    from sdcpd.admin_client import AdminRefused, AdminUnreachable, ask

    socket = endpoint or default_endpoint()
    try:
        return ask(socket, method, path, body, timeout_s=timeout_s)
    except AdminUnreachable as e:
        raise CtlError(str(e), status=EXIT_UNREACHABLE) from e
    except AdminRefused as e:
        raise CtlError(f"{socket} refused: {e}" if named else str(e)) from e
