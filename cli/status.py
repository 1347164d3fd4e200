"""`sdcpctl status`: the cluster as its router sees it, or one instance as it sees itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cli.asking import ask_instance, endpoint_option
from cli.output import output_option, show_json
from cli.text import duration, echo, table
from sdcpd.units import duration_text

STATE_COLOURS = {
    "ready": "green",
    "loading": "yellow",
    "draining": "yellow",
    "expired": "red",
    "stuck": "red",
    "gone": "bright_black",
}
HEADER = (
    "INSTANCE",
    "ROLE",
    "STATE",
    "LOAD",
    "QUEUE",
    "ACCEPT",
    "SESS",
    "SEEN",
    "CERT",
    "BASE URI",
)
RIGHT = (3, 4, 5, 6, 7, 8)
CERTIFICATE_LEFT_S = 14 * 86400


@click.command()
@endpoint_option
@output_option
def status(endpoint: Path | None, output: str) -> None:
    """Show the router, its verifiers and drafters, and the sessions."""
    answer = ask_instance(endpoint, "GET", "/status")
    if show_json(answer, output=output):
        return
    lines = _router(answer) if answer["role"] == "router" else _instance(answer)
    echo("\n".join(lines))


def _router(answer: dict[str, Any]) -> list[str]:
    state = click.style("ready", fg="green") if answer["ready"] else _red("not ready")
    api = f"   API {answer['api']}" if answer["api"] else ""
    lines = [
        f"Router {answer['name']}  up {duration(answer['up_s'])}   {state}{api}"
        f"   model {answer['model']}   version {answer['version']}"
    ]
    rows = [_row(one) for one in sorted(answer["instances"], key=_order)]
    if rows:
        lines += table([HEADER, *rows], right=RIGHT)
    lines.append(_sessions(answer))
    lines += _troubles("", answer)
    lines += [
        f"{_red('!')} {one}, a verifier that [router] verifiers names, has never reported.  Look at"
        " its log, there: journalctl -u 'sdcpd@verifier*' -n 50"
        for one in answer.get("missing_verifiers", ())
    ]
    lines += _expiring(answer["instances"])
    return lines + [
        _remark(one) for one in answer["instances"] if one["state"] in ("expired", "stuck")
    ]


def _order(instance: dict[str, Any]) -> tuple[bool, bool, str]:
    return (instance["state"] == "gone", instance["role"] != "verifier", instance["instance"])


def _row(instance: dict[str, Any]) -> tuple[str, ...]:
    here = instance["state"] in ("ready", "loading", "draining")
    accept = instance["accept"]
    return (
        instance["instance"],
        instance["role"],
        click.style(instance["state"], fg=STATE_COLOURS.get(instance["state"])),
        f"{instance['load']}%" if here else "-",
        str(instance["queue"]) if here else "-",
        "-" if accept is None else f"{accept:.2f}",
        str(instance["sessions"]),
        f"{instance['seen_s']:.1f}s",
        _certificate(instance.get("certificate_left_s")),
        instance["base_uri"],
    )


def _certificate(left_s: int | None) -> str:
    """How long a certificate is still good; "-" where its instance does not tell."""
    if left_s is None:
        return "-"
    text = duration_text(max(0, left_s))
    return text if left_s >= CERTIFICATE_LEFT_S else _red(f"{text} !")


def _expiring(instances: list[dict[str, Any]]) -> list[str]:
    """What to do about certificates that expire soon."""
    found = [
        one
        for one in instances
        if one.get("certificate_left_s") is not None and one["state"] != "gone"
        if one["certificate_left_s"] < CERTIFICATE_LEFT_S
    ]
    return [
        f"{_red('!')} {one['instance']}: its certificate expires in"
        f" {duration_text(max(0, one['certificate_left_s']))}.  Run, where ca.key is: sdcpctl"
        f" certs renew {one['role']}/{one['instance'].partition('.')[0]}, and copy it there"
        for one in found
    ]


def _sessions(answer: dict[str, Any]) -> str:
    count = answer["counts"].get("sessions", 0)
    return f"Sessions {len(answer['sessions'])} open, {count} since start"


def _troubles(who: str, answer: dict[str, Any]) -> list[str]:
    """One line for each thing that is wrong with who answers."""
    yellow = click.style("!", fg="yellow")
    lines = [f"{_red('!')} {who}not ready: {one}" for one in answer.get("reasons", ())]
    return lines + [f"{yellow} {who}degraded: {one}" for one in answer.get("degraded", ())]


def _remark(instance: dict[str, Any]) -> str:
    what = f"no status for {instance['seen_s']:.1f} s"
    if instance["state"] == "stuck":
        what = "it has withdrawn, because its engine does not go on"
    return (
        f"{_red('!')} {instance['instance']}: {what}.  Look at its log, at {instance['base_uri']}: "
        f"journalctl -u 'sdcpd@{instance['role']}*' -n 50"
    )


def _instance(answer: dict[str, Any]) -> list[str]:
    """A verifier or a drafter, asked itself."""
    state = "" if answer.get("ready", True) else f"   {_red('not ready')}"
    load = f"   load {answer['load']}%" if "load" in answer else ""
    lines = [
        f"{answer['role'].capitalize()} {answer['instance']}  up {duration(answer['up_s'])}{state}"
        f"{load}   {answer['base_uri']}   version {answer['version']}"
    ]
    counts = answer["counts"]
    if counts:
        lines.append("   ".join(f"{name} {counts[name]}" for name in sorted(counts)))
    columns = [name for name in ("session", "epoch", "round", "committed") if answer["sessions"]]
    if columns:
        rows = [[str(one[name]) for name in columns] for one in answer["sessions"]]
        lines += table([[name.upper() for name in columns], *rows], right=(1, 2, 3))
    else:
        lines.append("no sessions")
    return lines + _troubles(f"{answer['role']} {answer['name']} ", answer)


def _red(text: str) -> str:
    return click.style(text, fg="red")
