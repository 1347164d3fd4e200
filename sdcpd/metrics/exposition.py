"""Samples as Prometheus' text: each family once, whichever roles of the process have it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from sdcpd.metrics.families import FAMILIES, Family, Sample
from sdcpd.protocol.histogram import Histogram

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def text_of(roles: Iterable[tuple[str, Iterable[Sample]]]) -> bytes:
    """The samples of each role in one text."""
    return generate_latest(_Collected(roles))


class _Collected(Collector):
    def __init__(self, roles: Iterable[tuple[str, Iterable[Sample]]]) -> None:
        self._found: dict[str, list[tuple[Sequence[str], float | Histogram]]] = {}
        for role, samples in roles:
            for sample in samples:
                labels = sample.labels if sample.family.of_instances else (role, *sample.labels)
                self._found.setdefault(sample.family.name, []).append((labels, sample.value))

    def collect(self) -> Iterator[Metric]:
        for name, family in FAMILIES.items():
            if name in self._found:
                yield _metric(family, self._found[name])


def _metric(family: Family, found: list[tuple[Sequence[str], float | Histogram]]) -> Metric:
    labels = family.labels if family.of_instances else ("role", *family.labels)
    if family.kind == "histogram":
        made = HistogramMetricFamily(family.name, family.help, labels=labels)
        for values, value in found:
            assert isinstance(value, Histogram)
            made.add_metric(list(values), list(_buckets(value)), sum_value=value.total)
        return made
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    plain = kind(family.name, family.help, labels=labels)
    for values, value in found:
        assert not isinstance(value, Histogram)
        plain.add_metric(list(values), value)
    return plain


def _buckets(value: Histogram) -> Iterator[tuple[str, float]]:
    below = 0
    bounds = [*(str(float(bound)) for bound in value.bounds), "+Inf"]
    for bound, count in zip(bounds, value.counts, strict=True):
        below += count
        yield bound, float(below)
