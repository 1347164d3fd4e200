"""`sdcpctl version`: of this program, and of the instance that it would ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import sdcpd
from cli.asking import ask_instance, endpoint_option
from cli.errors import CtlError
from cli.output import output_option, show_one
from cli.text import remark


@click.command()
@endpoint_option
@output_option
def version(endpoint: Path | None, output: str) -> None:
    """Show the version of sdcpctl, and of the instance that is asked if one can be reached."""
    found: dict[str, Any] = {"sdcpctl": sdcpd.__version__}
    try:
        answer = ask_instance(endpoint, "GET", "/status")
        found |= {"instance": answer["name"], "role": answer["role"], "sdcpd": answer["version"]}
    except CtlError as e:
        if endpoint is not None:
            raise
        remark(f"no instance was asked: {e.message}")
    show_one(found, output=output)
