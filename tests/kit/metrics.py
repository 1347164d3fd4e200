"""Metrics as a scraper sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from sdcpd.metrics import Metrics, text_of_process
from sdcpd.roles.frontend import FrontEnd
from tests.kit.cluster import Cluster


@dataclass(frozen=True)
class Scrape:
    """One text, parsed."""

    values: dict[tuple[str, frozenset[tuple[str, str]]], float]

    @classmethod
    def of(cls, text: bytes) -> Scrape:
        """Parse a text; a sample that is there twice, or a family without HELP and TYPE, fails."""
        plain = text.decode()
        found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(plain):
            assert family.documentation and family.type != "unknown", family.name
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in found, f"{key} is there twice"
                found[key] = sample.value
        for kind in ("HELP", "TYPE"):
            names = [one.split()[2] for one in plain.splitlines() if one.startswith(f"# {kind} ")]
            assert len(names) == len(set(names)), f"a family has its {kind} twice"
        return cls(found)

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name that have these labels; there is at least one."""
        found = [
            value
            for (one, has), value in self.values.items()
            if one == name and labels.items() <= dict(has).items()
        ]
        assert found, f"{name} {labels} is not there"
        return sum(found)

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """The samples of a name by one label."""
        return {
            dict(has)[label]: value
            for (one, has), value in self.values.items()
            if one == name and labels.items() <= dict(has).items()
        }

    @property
    def names(self) -> set[str]:
        """Every name of a sample."""
        return {name for name, _ in self.values}


def metrics_of(cluster: Cluster, front_end: FrontEnd | None = None) -> list[Metrics]:
    """Those of all roles of a cluster in memory."""
    router = Metrics.of_router(cluster.router)
    router.api = front_end.counts if front_end is not None else None
    verifiers = [Metrics.of_verifier(one) for one in cluster.verifiers.values()]
    return [router, *verifiers, *map(Metrics.of_drafter, cluster.drafters.values())]


def scrape(roles: Sequence[Metrics]) -> Scrape:
    """What a process with these roles would tell."""
    return Scrape.of(text_of_process(roles))
