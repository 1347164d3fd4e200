"""`sdcpctl cache`: what an instance keeps for later texts."""

from __future__ import annotations

from pathlib import Path

import click

from cli.asking import ask_instance, endpoint_option
from cli.output import output_option, show_json, show_list
from cli.text import echo
from sdcpd.units import size_value

COLUMNS = (
    ("TIER", "kind"),
    ("SIZE", "size"),
    ("USED", "used"),
    ("LEASED", "leased"),
    ("OBJECTS", "objects"),
    ("HITS", "hit_rate"),
    ("EVICTED", "evicted"),
    ("FAILURES", "failures"),
)
HOLDINGS = (
    ("TIER", "tier"),
    ("SCOPE", "scope"),
    ("KIND", "kind"),
    ("OBJECTS", "objects"),
    ("SIZE", "size"),
    ("LEASED", "leased"),
)
ALL_S = 300.0  # a million objects, each deleted from its disk
WIDE = (("CORRUPT", "corrupt"), ("DROPPED", "dropped"), ("PINNED", "pinned"))


@click.group()
def cache() -> None:
    """Show what an instance keeps, and have it let go of it."""


@cache.command()
@endpoint_option
@output_option
def tiers(endpoint: Path | None, output: str) -> None:
    """Show the levels of the cache, fastest first; name another instance with --endpoint."""
    found = ask_instance(endpoint, "GET", "/cache")["tiers"]
    for one in found:
        asked = one["hits"] + one["misses"]
        one["hit_rate"] = f"{one['hits'] / asked:.0%}" if asked else None
        for name in ("size", "used", "leased"):
            one[name] = _shown(one[f"{name}_bytes"])
        one.pop("parts", None)
    show_list(found, COLUMNS, name="tiers", output=output, wide=WIDE)


@cache.command()
@endpoint_option
@output_option
def ls(endpoint: Path | None, output: str) -> None:
    """Show what is kept, by scope (tenant or session) and kind, the largest first."""
    found = ask_instance(endpoint, "GET", "/cache/objects", timeout_s=ALL_S)["holdings"]
    for one in found:
        one["size"] = _shown(one["size_bytes"])
    show_list(found, HOLDINGS, name="holdings", output=output, none="nothing is kept")


@cache.command()
@click.option("--scope", help="only of this scope, as `sdcpctl cache ls` shows it")
@click.option("--kind", help="only of this kind, such as target_kv")
@click.option("--yes", is_flag=True, help="do not ask")
@endpoint_option
@output_option
def gc(
    scope: str | None, kind: str | None, *, yes: bool, endpoint: Path | None, output: str
) -> None:
    """Delete what no lease holds: all of it, or of one scope or kind.

    No text depends on it: what is gone is computed again.
    """
    from tiers.meter import KINDS, OTHER

    if kind is not None and kind not in (*KINDS, OTHER):
        raise click.UsageError(f"--kind {kind}: a kind is one of {', '.join((*KINDS, OTHER))}")
    what = " ".join(filter(None, (scope and f"scope {scope}", kind and f"kind {kind}")))
    if not yes:
        click.confirm(f"Delete {what or 'all'} that no lease holds?", abort=True, err=True)
    body = {"scope": scope, "kind": kind}
    gone = ask_instance(endpoint, "POST", "/cache/gc", body, timeout_s=ALL_S)
    said = f"{gone['objects']} objects deleted, {_shown(gone['bytes'])}"
    if not show_json(gone, output=output):
        echo(said)


def _shown(octets: int) -> str:
    """A size in a unit of which there are some, for people."""
    for shift in (30, 20, 10):
        if octets >= 10 << shift:
            return size_value(octets >> shift << shift)
    return size_value(octets)
