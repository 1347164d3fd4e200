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
from cli.guard import Guarded
from cli.instances import instances
from cli.keys import keys
from cli.log import log
from cli.models import models
from cli.sessions import sessions
from cli.shell import completion, manpages
from cli.status import status
from cli.text import QUIET, TIMEOUT
from cli.top import top
from cli.version import version


@click.group(cls=Guarded, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(sdcpd.__version__, prog_name="sdcpctl")
@click.option(
    "--context",
    "name",
    envvar="SDCPCTL_CONTEXT",
    help="which of the clusters to ask that sdcpctl context list shows; default: the current one"
    " [env: SDCPCTL_CONTEXT]",
)
@click.option("--no-color", is_flag=True, help="no colours on a terminal either [env: NO_COLOR]")
@click.option(
    "--timeout",
    type=click.FloatRange(0.1, 3600),
    metavar="SECONDS",
    help="how long an instance may take for a whole answer; default: 10 to 300, by command",
)
@click.option("-q", "--quiet", is_flag=True, help="no progress and remarks on standard error")
@click.pass_context
def main(
    this: click.Context, *, name: str | None, no_color: bool, timeout: float | None, quiet: bool
) -> None:
    """Operate sdcpd.

    Exit codes: 0 done, 1 failed, 2 usage, 3 cannot connect, 4 refused, 5 not found.
    """
    if no_color:
        this.color = False
    this.meta[TIMEOUT], this.meta[QUIET] = timeout, quiet
    if this.invoked_subcommand == "context":
        return  # it can mend what is kept
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
    version,
):
    main.add_command(command)


if __name__ == "__main__":
    main(prog_name="sdcpctl")
