"""What tiers hold, for operators: sums by scope and kind, and letting go of what nobody holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tiers.api import Key, Tier
from tiers.ledger import Holding
from tiers.meter import kind_of

AT_ONCE = 5_000
"""Objects that are looked at before others get their turn: some milliseconds."""


@runtime_checkable
class Listing(Protocol):
    """A tier that knows what it holds; a remote one does not."""

    def holdings(self) -> Iterable[Holding]:
        """All of it, as it is at this moment."""
        ...


@dataclass(slots=True)
class Sum:
    """Objects of one scope and kind in one tier."""

    tier: str
    scope: str
    kind: str
    objects: int = 0
    size_bytes: int = 0
    leased: int = 0


def tiers_of(whole: Tier) -> Iterator[tuple[str, Tier]]:
    """Each level of a cache, fastest first, named as in metrics: by its place and kind."""
    levels: Iterable[Tier] = getattr(whole, "levels", (whole,))
    for number, tier in enumerate(levels, 1):
        yield f"{number} {tier.stats().kind}", tier


async def sums(whole: Tier) -> list[Sum]:
    """What a cache holds, the largest first."""
    found: dict[tuple[str, str, str], Sum] = {}
    for name, tier in tiers_of(whole):
        async for one in _slowly(tier):
            place = (name, one.key.scope, kind_of(one.key))
            total = found.setdefault(place, Sum(*place))
            total.objects += 1
            total.size_bytes += one.size_bytes
            total.leased += one.leased
    return sorted(found.values(), key=lambda one: (-one.size_bytes, one.tier, one.scope, one.kind))


async def let_go(
    whole: Tier, *, scope: str | None = None, kind: str | None = None
) -> tuple[int, int]:
    """Delete what is not leased, of all or of one scope or kind; how many objects and octets.

    What is in several tiers is one object, with the octets of all.
    """
    sizes: dict[Key, int] = {}
    leased: set[Key] = set()
    for _, tier in tiers_of(whole):
        async for one in _slowly(tier):
            if scope not in (None, one.key.scope) or kind not in (None, kind_of(one.key)):
                continue
            sizes[one.key] = sizes.get(one.key, 0) + one.size_bytes
            if one.leased:
                leased.add(one.key)
    for key in leased:
        del sizes[key]
    for key in sizes:
        await whole.delete(key)
    return len(sizes), sum(sizes.values())


async def _slowly(tier: Tier) -> AsyncIterator[Holding]:
    """A tier's holdings, with pauses for the event loop."""
    if not isinstance(tier, Listing):
        return
    for number, one in enumerate(tuple(tier.holdings())):
        if number % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0)
        yield one
