"""`sdcpctl`: certificates, and what a running cluster is doing.

Started often and by scripts, so whatever a command needs is imported when it runs.
"""

from __future__ import annotations

import click

import sdcpd
from cli.bench.command import bench
from cli.bugreport import bugreport
from cli.cache import cache
from cli.certificates import certs
from cli.chat import chat
from cli.config import config, reload
from cli.contexts import context, defaults_of
from cli.doctor import doctor
from cli.exact import verify_exact
from cli.instances import instances
from cli.keys import keys
from cli.log import log
from cli.models import models
from cli.sessions import sessions
from cli.shell import completion, manpages
from cli.status import status
from cli.top import top


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(sdcpd.__version__, prog_name="sdcpctl")
@click.option(
    "--context",
    "name",
    envvar="SDCPCTL_CONTEXT",
    help="which of the clusters to ask that sdcpctl context list shows; default: the current one"
    " [env: SDCPCTL_CONTEXT]",
)
@click.pass_context
def main(this: click.Context, name: str | None) -> None:
    """Operate sdcpd.

    Exit codes: 0 done, 1 failed, 2 usage, 3 cannot connect, 4 refused, 5 not found.
    """
    this.default_map = {**(this.default_map or {}), **defaults_of(name, this.command)}


for command in (
    bench,
    bugreport,
    cache,
    certs,
    chat,
    completion,
    config,
    context,
    doctor,
    instances,
    keys,
    log,
    manpages,
    models,
    reload,
    sessions,
    status,
    top,
    verify_exact,
):
    main.add_command(command)


if __name__ == "__main__":
    main(prog_name="sdcpctl")
