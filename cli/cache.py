"""`sdcpctl cache`: what an instance keeps for later texts."""

from __future__ import annotations

from pathlib import Path

import click

from cli.asking import ask_instance, endpoint_option
from cli.output import output_option, show_list
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
WIDE = (("CORRUPT", "corrupt"), ("DROPPED", "dropped"), ("PINNED", "pinned"))


@click.group()
def cache() -> None:
    """Show the cache of an instance."""


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


def _shown(octets: int) -> str:
    """A size in a unit of which there are some, for people."""
    for shift in (30, 20, 10):
        if octets >= 10 << shift:
            return size_value(octets >> shift << shift)
    return size_value(octets)
