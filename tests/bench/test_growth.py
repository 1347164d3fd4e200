"""The benchmark of growth measures what it says; how much that is is no matter here."""

from __future__ import annotations

import pytest

from tests.bench import growth_contexts, growth_idle, growth_logs, growth_start
from tests.bench.growth import PARTS, as_page
from tests.bench.growth_figures import described, exponent, grows_worse, slope
from tests.bench.growth_page import machine, text_table

ON = dict.fromkeys(machine(), "x")


def told(name: str, found: object) -> str:
    """The page of one part; its tables are as wide as their heads."""
    for table in PARTS[name].tables:
        assert len(text_table(table(found))) > 1
    return as_page({"machine": ON, "load": {name: [1.0, 2.0]}, "parts": {name: found}})


@pytest.mark.slow
def test_contexts() -> None:
    found = growth_contexts.measure((32, 64), 1)
    assert [one["context"] for one in found] == [32, 64]
    assert all(one["first_s"] > 0 and one["plain_tokens_per_s"] > 0 for one in found)
    assert "The time to the first token" in told("contexts", found)


@pytest.mark.slow
def test_idle_sessions() -> None:
    found = growth_idle.measure((2,), 1.0)
    assert [one["sessions"] for one in found] == [0, 2]
    assert all(0 < one["round_p50_ms"] <= one["round_p99_ms"] for one in found)
    assert "An idle session takes" in told("idle", found)


@pytest.mark.slow
def test_logs() -> None:
    found = growth_logs.measure((1, 300), 0.5)
    assert [one["records"] for one in found["store"]] == [200, 400]
    assert found["store"][0]["octets"] < found["store"][1]["octets"]
    assert all(one["router_restart_s"] > 0 for one in found["session"])
    assert "The time of an append" in told("logs", found)


@pytest.mark.slow
def test_starts() -> None:
    found = growth_start.measure(("bundled",))
    assert found[0]["first"]["ready_s"] > found[0]["first"]["check_s"] > 0
    assert "from exec to READY" in told("start", found)


def test_growth_is_told_as_it_is() -> None:
    xs = (1, 10, 100)
    assert "is constant" in described(xs, (1.0, 1.1, 1.2), "ms", "record")
    assert slope(xs, (1.0, 10.0, 100.0)) == pytest.approx(1.0)
    assert "grows at most linearly" in described(xs, (1.0, 10.0, 100.0), "ms", "record")
    assert exponent(xs, (1.0, 100.0, 10_000.0)) == pytest.approx(2.0)
    assert grows_worse(xs, (1.0, 100.0, 10_000.0))
    assert "grows worse than linearly" in described(xs, (1.0, 1.0, 11e3), "ms", "record")
    assert "falls" in described(xs, (9.0, 5.0, 1.0), "ms", "record")
