"""`sdcpctl doctor`: everything that can be looked at, with a cure for what is wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.asking import endpoint_option, meant
from cli.config import FILE, file_option, set_option
from cli.endpoint import is_dev
from cli.errors import CtlError
from cli.output import output_option, show_list
from cli.text import echo, table, timeout_given_s

if TYPE_CHECKING:
    from sdcpd.config import Config
    from sdcpd.doctor.finding import Finding
    from sdcpd.parts import Instance

STATUS_S = 10.0
COLOURS = {"ok": "green", "warn": "yellow", "FAIL": "red"}


@click.command()
@file_option
@set_option
@endpoint_option
@click.option(
    "--role",
    "roles",
    multiple=True,
    metavar="ROLE[-NAME]",
    help="look at this instance; default: each that the file has a section for",
)
@click.option("--strict", is_flag=True, help="exit 1 for warnings too")
@output_option
def doctor(
    *,
    path: Path,
    settings: tuple[str, ...],
    endpoint: Path | None,
    roles: tuple[str, ...],
    strict: bool,
    output: str,
) -> None:
    """Look for what is wrong on this host, and in the cluster that its router sees.

    Exit 1 if anything fails. Without a configuration file the running cluster alone is looked at.
    """
    findings = list(_findings(path, settings, endpoint, roles))
    counts = {level: sum(one.level == level for one in findings) for level in COLOURS}
    as_json = output in ("json", "jsonl")
    if as_json:
        shown = [{"area": one.area, "level": one.level, "text": one.text} for one in findings]
        show_list(shown, (), name="findings", output=output)
    else:
        rows = [
            (one.area, click.style(one.level, COLOURS[one.level]), one.text) for one in findings
        ]
        echo("\n".join(table(rows)))
    text = f"{counts['ok']} ok, {counts['warn']} warnings, {counts['FAIL']} failed"
    if counts["FAIL"] or (strict and counts["warn"]):
        raise CtlError(text)
    if not as_json:
        echo(text)


def _findings(
    path: Path, settings: tuple[str, ...], endpoint: Path | None, roles: tuple[str, ...]
) -> Iterator[Finding]:
    from sdcpd.doctor.finding import FAIL, OK, Finding

    if path == FILE and not path.exists():
        if roles:
            raise click.UsageError(
                f"--role looks at what a file says, and {path} is not there; name one with -c FILE"
            )
        yield from _cluster(meant(endpoint))
        return
    from sdcpd.config import ConfigError, load_config
    from sdcpd.doctor.host import host_findings, port_findings
    from sdcpd.doctor.peers import cluster_findings, instance_findings, path_findings
    from sdcpd.reload import flat

    try:
        config = load_config(path, environ=os.environ, settings=settings)
    except ConfigError as e:
        yield from (Finding("config", FAIL, problem) for problem in e.problems)
        return
    yield Finding("config", OK, f"{path}: {len(flat(config))} keys, 0 unknown")
    instances = list(_instances(config, roles))
    yield from host_findings(config, instances)
    for instance in instances:
        answer = _status(config, instance)
        yield from port_findings(config, instance, running=not isinstance(answer, str))
        socket = config.admin.socket
        started = not socket or instance.fill(socket).exists()
        yield from instance_findings(instance.label, answer, started=started)
        yield from path_findings(config, instance)
        if instance.role == "router" and not isinstance(answer, str):
            yield from cluster_findings(answer)


def _instances(config: Config, roles: tuple[str, ...]) -> Iterator[Instance]:
    from sdcpd.config import ROLE_NAMES
    from sdcpd.parts import Instance

    wanted = roles or [role for role in ROLE_NAMES if getattr(config, role) is not None]
    for text in wanted:
        role, _, name = text.partition("-")
        if role not in ROLE_NAMES or getattr(config, role) is None:
            raise click.UsageError(f"--role {text}: the file has no section for such a role")
        yield Instance(role, config.instance_name(name or None), text)


def _status(config: Config, instance: Instance) -> dict[str, Any] | str:
    """What an instance says of itself, or why it says nothing."""
    from sdcpd.admin_client import AdminRefused, AdminUnreachable, ask

    if not config.admin.socket:
        return "[admin] socket is empty, so that it can't be asked.  Set it"
    try:
        return ask(instance.fill(config.admin.socket), "GET", "/status", timeout_s=_timeout_s())
    except (AdminUnreachable, AdminRefused) as e:
        return f"{e}.  Start it: systemctl start sdcpd@{instance.unit or instance.role}"


def _timeout_s() -> float:
    return timeout_given_s() or STATUS_S


def _cluster(socket: Path) -> Iterator[Finding]:
    """A cluster without a file, such as that of sdcpd dev."""
    from sdcpd.admin_client import AdminRefused, AdminUnreachable, ask
    from sdcpd.doctor.peers import JOURNAL, TERMINAL, cluster_findings, instance_findings

    try:
        answer = ask(socket, "GET", "/status", timeout_s=_timeout_s())
    except (AdminUnreachable, AdminRefused) as e:
        yield from instance_findings("router", str(e))
        return
    yield from instance_findings(f"{answer['role']} {answer['name']}", answer)
    if answer["role"] == "router":
        log = TERMINAL if is_dev(socket) else JOURNAL
        yield from cluster_findings(answer, log=log)
