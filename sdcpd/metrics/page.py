"""The tables of docs/metrics.md, written anew: python -m sdcpd.metrics.page docs/metrics.md."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import sdcpd.metrics  # noqa: F401  makes all families
from sdcpd.metrics.families import DRAFTING, FAMILIES, ROLES, Family

FIRST = "## All roles\n"
_GROUPS = (
    (FIRST, ROLES),
    ("## Verifier and drafter\n", DRAFTING),
    ("## Verifier\n", ("verifier",)),
    ("## Drafter\n", ("drafter",)),
    ("## Router and verifier\n", ("router", "verifier")),
    ("## Router\n", ("router",)),
)


def tables() -> str:
    """What there is, by the roles that have it."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    for title, roles in _GROUPS:
        yield title
        yield "| metric | type, labels | |\n|---|---|---|"
        yield from (_row(one) for one in FAMILIES.values() if one.roles == roles)
        yield ""


def _row(family: Family) -> str:
    labels = ", ".join(f"`{one}`" for one in family.labels)
    return f"| `{family.name}` | {family.kind} {labels}".rstrip() + f" | {family.help} |"


def written(text: str) -> str:
    """A page with its tables as they should be."""
    return text.partition(FIRST)[0] + tables()


def main() -> None:
    """Write the page named on the command line."""
    page = Path(sys.argv[1])
    page.write_text(written(page.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
