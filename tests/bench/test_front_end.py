"""The benchmark of the front end works: a few clients, a few seconds."""

from __future__ import annotations

import pytest

from tests.bench.front_end import cost, cost_lines, load, load_lines


@pytest.mark.slow
def test_a_little_load() -> None:
    found = load(8, 5.0)
    assert found["failed"] == [] and found["error_count"] == 0
    assert found["texts"] >= 8 and found["tokens"] == 64 * found["texts"]
    assert len(load_lines(found)) == 4 + 1 + len(found["memory_mib"])


@pytest.mark.slow
def test_a_little_cost() -> None:
    """That it is little is what the benchmark claims, on a machine that does nothing else."""
    found = cost(100.0, 4, 1, 1.0, profile=False)
    assert found["whole"]["tokens_per_s"] == pytest.approx(100, rel=0.2)
    assert found["whole"]["cpu_percent"] > 0
    assert len(cost_lines([found])) == 2
