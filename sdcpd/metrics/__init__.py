"""A role's counters as Prometheus text (section 8, D-X3); served at the admin socket alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from sdcpd.engine.api import KvUsage
from sdcpd.protocol.problems import PROBLEMS_BY_SUFFIX
from sdcpd.roles.counts import ESCALATIONS, RoundCounts
from sdcpd.transport.refusals import REASONS, REQUEST_REASONS
from tiers.api import TierStats

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)


class Metrics:
    """What one role shows at its admin socket."""

    def __init__(self, role: str, rounds: RoundCounts | None = None) -> None:
        """`rounds` are those of a verifier or drafter."""
        self.handshake_failures: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        """Connections that were not let in, by reason."""
        self.refused_requests: Counter[str] = Counter(dict.fromkeys(REQUEST_REASONS, 0))
        """Requests that the transport refused, by reason."""
        self.expiry_s: Callable[[], float] | None = None
        """When the role's certificate expires, in seconds since the epoch."""
        self.local_requests: Callable[[], int] | None = None
        """Requests for objects that came through shared memory."""
        self.kv: Callable[[], KvUsage | None] | None = None
        """How the engine's memory for keys and values is used."""
        self.cache: Callable[[], TierStats] | None = None
        """The process's cache, tier by tier."""
        self.ready: Callable[[], bool] | None = None
        """Whether the instance can serve."""
        self._registry = CollectorRegistry()
        self._registry.register(_Tls(role, self))
        self._registry.register(_Kv(role, self))
        self._registry.register(_Cache(role, self))
        self._registry.register(_Loop(role))
        self._registry.register(_Ready(role, self))
        if rounds is not None:
            self._registry.register(_Rounds(role, rounds))

    def refused(self, reason: str) -> None:
        """Count one refusal of the transport, by its word."""
        of_requests = reason in self.refused_requests
        (self.refused_requests if of_requests else self.handshake_failures)[reason] += 1

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry)


class _Collector:
    """Makes metrics that carry the role."""

    def __init__(self, role: str) -> None:
        self._role = role

    def _family(self, name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(name, text, labels=("role", *labels))

    def _total(self, name: str, text: str, value: int) -> Metric:
        family = self._family(name, text)
        family.add_metric([self._role], value)
        return family

    def _histogram(self, name: str, text: str, lengths: Counter[int]) -> Metric:
        family = HistogramMetricFamily(name, text, labels=("role",))
        buckets = [
            (str(float(le)), float(sum(n for length, n in lengths.items() if length <= le)))
            for le in LENGTHS
        ]
        buckets.append(("+Inf", float(sum(lengths.values()))))
        total = sum(length * n for length, n in lengths.items())
        family.add_metric([self._role], buckets, sum_value=total)
        return family


class _Tls(_Collector):
    """Who was not let in, who came by the short way, and until when others let us in."""

    def __init__(self, role: str, metrics: Metrics) -> None:
        super().__init__(role)
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """All of it."""
        failures = self._family(
            "sdcp_tls_handshake_failures", "Connections not let in, by reason.", "reason"
        )
        for reason, count in self._metrics.handshake_failures.items():
            failures.add_metric([self._role, reason], count)
        yield failures
        refused = self._family(
            "sdcp_requests_refused", "Requests refused by the transport, by reason.", "reason"
        )
        for reason, count in self._metrics.refused_requests.items():
            refused.add_metric([self._role, reason], count)
        yield refused
        if self._metrics.local_requests is not None:
            yield self._total(
                "sdcp_local_requests",
                "Requests for objects that came through shared memory, from this host.",
                self._metrics.local_requests(),
            )
        if self._metrics.expiry_s is not None:
            expiry = GaugeMetricFamily(
                "sdcp_tls_certificate_expiry_timestamp_seconds",
                "When the role's certificate expires.",
                labels=("role",),
            )
            expiry.add_metric([self._role], self._metrics.expiry_s())
            yield expiry


class _Cache(_Collector):
    """What is in the process's cache; a tier is named by its place and kind: "1 host"."""

    def __init__(self, role: str, metrics: Metrics) -> None:
        super().__init__(role)
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """All of it."""
        if self._metrics.cache is None:
            return
        whole = self._metrics.cache()
        labels = ("role", "tier")
        used = GaugeMetricFamily("sdcp_cache_bytes", "Octets used in a tier.", labels=labels)
        leased = GaugeMetricFamily(
            "sdcp_cache_leased_bytes", "Octets of objects under a lease.", labels=labels
        )
        for number, tier in enumerate(whole.parts or (whole,), 1):
            named = [self._role, f"{number} {tier.kind}"]
            used.add_metric(named, tier.used_bytes)
            leased.add_metric(named, tier.leased_bytes)
        yield used
        yield leased


class _Loop(_Collector):
    """What the event loop of the process has to do."""

    def collect(self) -> Iterator[Metric]:
        """All of it."""
        try:
            count = len(asyncio.all_tasks())
        except RuntimeError:
            return  # asked from outside a loop: there are none to count
        tasks = GaugeMetricFamily("sdcp_tasks", "Tasks of the event loop.", labels=("role",))
        tasks.add_metric([self._role], count)
        yield tasks


class _Ready(_Collector):
    """Whether the instance can serve."""

    def __init__(self, role: str, metrics: Metrics) -> None:
        super().__init__(role)
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """1 or 0, as GET /ready says."""
        if self._metrics.ready is not None:
            gauge = GaugeMetricFamily("sdcp_ready", "1 if it can serve now.", labels=("role",))
            gauge.add_metric([self._role], float(self._metrics.ready()))
            yield gauge


class _Kv(_Collector):
    """The engine's memory for keys and values."""

    def __init__(self, role: str, metrics: Metrics) -> None:
        super().__init__(role)
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """All of it, where there is such a memory."""
        usage = self._metrics.kv() if self._metrics.kv is not None else None
        if usage is None:
            return
        for name, text, value in (
            ("capacity_tokens", "Tokens whose keys and values fit the engine.", usage.tokens_max),
            ("used_tokens", "Tokens of blocks in use.", usage.tokens_used),
            ("waiting", "Pieces of work that wait for room.", usage.waiting),
        ):
            gauge = GaugeMetricFamily(f"sdcp_kv_{name}", text, labels=("role",))
            gauge.add_metric([self._role], value)
            yield gauge
        yield self._total("sdcp_kv_evictions", "Sessions that had to make room.", usage.evicted)
        yield self._total(
            "sdcp_kv_adopted_tokens", "Tokens begun with and not computed.", usage.adopted
        )


class _Rounds(_Collector):
    """Reads the counters of rounds when it is asked."""

    def __init__(self, role: str, counts: RoundCounts) -> None:
        super().__init__(role)
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """All metrics of the role."""
        counts = self._counts
        rounds = self._family("sdcp_rounds", "Verdicts by action.", "action")
        for action, count in counts.rounds.items():
            rounds.add_metric([self._role, action.name.lower()], count)
        yield rounds
        yield self._total("sdcp_draft_tokens", "Tokens proposed.", counts.tokens_proposed)
        yield self._total(
            "sdcp_accepted_tokens",
            "Proposed tokens accepted; divided by sdcp_rounds_total, the mean accepted length.",
            counts.tokens_accepted,
        )
        yield self._histogram("sdcp_round_draft_tokens", "M of each round.", counts.proposed)
        yield self._histogram("sdcp_round_accepted_tokens", "a of each round.", counts.accepted)
        escalations = self._family("sdcp_escalations", "Escalations by action.", "action", "result")
        for action in ESCALATIONS:
            name = action.name.lower()
            escalations.add_metric([self._role, name, "applied"], counts.rounds[action])
        escalations.add_metric([self._role, "self_decode", "skipped"], counts.skipped)
        yield escalations
        yield self._total(
            "sdcp_self_decoded_tokens", "Tokens decoded without a drafter.", counts.self_decoded
        )
        prepared = self._family(
            "sdcp_prepared_proposals",
            "Proposals prepared before the verdict that they need, by what became of them.",
            "result",
        )
        prepared.add_metric([self._role, "used"], counts.prepared_used)
        prepared.add_metric([self._role, "discarded"], counts.prepared_discarded)
        yield prepared
        rejected = self._family("sdcp_proposals_rejected", "Proposals refused.", "reason")
        for suffix in sorted({*PROBLEMS_BY_SUFFIX, *counts.rejected}):
            rejected.add_metric([self._role, _label(suffix)], counts.rejected[suffix])
        yield rejected


def _label(suffix: str) -> str:
    return suffix.removeprefix("sdcp-").replace("-", "_").replace(" ", "_")
