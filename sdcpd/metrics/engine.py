"""Metrics of an engine: its memory for keys and values, its passes, its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdcpd.metrics.families import DRAFTING, Samples, counter, gauge, histogram

if TYPE_CHECKING:
    from sdcpd.metrics import Metrics

BATCHES = histogram(
    "sdcp_batch_proposals",
    "Rounds that a pass of the target scored together; self-decoded tokens are rounds too.",
    roles=("verifier",),
)
LOAD_S = gauge("sdcp_model_load_seconds", "How long the model took to load.", roles=DRAFTING)
CAPACITY = gauge(
    "sdcp_kv_capacity_tokens", "Tokens whose keys and values fit the engine.", roles=DRAFTING
)
USED = gauge("sdcp_kv_used_tokens", "Tokens of blocks in use.", roles=DRAFTING)
WAITING = gauge("sdcp_kv_waiting", "Pieces of work that wait for room.", roles=DRAFTING)
EVICTED = counter("sdcp_kv_evictions", "Sessions that had to make room.", roles=DRAFTING)
ADOPTED = counter("sdcp_kv_adopted_tokens", "Tokens begun with and not computed.", roles=DRAFTING)


def samples(metrics: Metrics) -> Samples:
    """All of them that a role has."""
    if metrics.batches is not None and (batches := metrics.batches()) is not None:
        yield BATCHES(batches)
    if metrics.model_load_s is not None:
        yield LOAD_S(metrics.model_load_s)
    usage = metrics.kv() if metrics.kv is not None else None
    if usage is not None:
        yield CAPACITY(usage.tokens_max)
        yield USED(usage.tokens_used)
        yield WAITING(usage.waiting)
        yield EVICTED(usage.evicted)
        yield ADOPTED(usage.adopted)
