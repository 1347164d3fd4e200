"""Metrics of the process's cache; a tier is named by its place and kind: "1 host"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdcpd.metrics.families import Samples, counter, gauge, histogram
from tiers.api import TierStats
from tiers.meter import KINDS, OTHER

if TYPE_CHECKING:
    from sdcpd.metrics import Metrics

REQUESTS = counter(
    "sdcp_cache_requests",
    "Objects asked of a tier, by what they are: a hit, or a miss, which is asked of the next.",
    "tier",
    "kind",
    "result",
)
MOVED = counter(
    "sdcp_cache_transfer_bytes", "Octets read from a tier and written to it.", "tier", "direction"
)
SECONDS = histogram(
    "sdcp_cache_request_duration_seconds",
    "What a tier took to read an object (get), to find that it has none (miss), to take one (put).",
    "tier",
    "op",
)
USED = gauge("sdcp_cache_bytes", "Octets used in a tier.", "tier")
CAPACITY = gauge("sdcp_cache_capacity_bytes", "Octets that a tier may use.", "tier")
LEASED = gauge("sdcp_cache_leased_bytes", "Octets of objects under a lease.", "tier")
LEASES = gauge("sdcp_cache_leases", "Objects under a lease.", "tier")
EVICTIONS = counter(
    "sdcp_cache_evictions",
    "Objects that a tier let go: to make room, or because they were damaged.",
    "tier",
    "reason",
)
DROPPED = counter(
    "sdcp_cache_dropped",
    "Objects that were not handed down to the next tier, for want of room or time.",
)
FAILURES = counter("sdcp_cache_failures", "Errors of the storage below a tier.", "tier")


def samples(metrics: Metrics) -> Samples:
    """All of them, where there is a cache."""
    if metrics.cache is None:
        return
    whole = metrics.cache()
    for number, tier in enumerate(whole.parts or (whole,), 1):
        name = f"{number} {tier.kind}"
        yield from _of_meter(tier, name)
        yield USED(tier.used_bytes, name)
        yield CAPACITY(tier.size_bytes, name)
        yield LEASED(tier.leased_bytes, name)
        yield LEASES(tier.leases, name)
        yield EVICTIONS(tier.evicted, name, "room")
        yield EVICTIONS(tier.corrupt, name, "corrupt")
        yield FAILURES(tier.failures, name)
    yield DROPPED(whole.dropped)


def _of_meter(tier: TierStats, name: str) -> Samples:
    if (meter := tier.meter) is None:
        return
    for kind in (*KINDS, OTHER):
        yield REQUESTS(meter.hits[kind], name, kind, "hit")
        yield REQUESTS(meter.misses[kind], name, kind, "miss")
    yield MOVED(meter.read_bytes, name, "read")
    yield MOVED(meter.written_bytes, name, "written")
    for op, seconds in meter.seconds.items():
        yield SECONDS(seconds, name, op)
