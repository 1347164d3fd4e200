"""The benchmark of rounds measures what it says; how fast they are is no matter here."""

from __future__ import annotations

import pytest

from tests.bench.rounds import measure
from tests.bench.rounds_served import LOOP, STAGES


@pytest.mark.slow
def test_it_measures_rounds_and_where_their_time_goes() -> None:
    found = measure(2, 1.0, stages=True)
    assert found["sessions"] == 2 and found["rounds_per_s"] > 2
    assert 0 < found["p50_ms"] <= found["p99_ms"]
    assert set(found["cpu_us"]) == {"router", "verifier", "drafter"}
    assert {"HTTP/2", "TLS", "machine", "append"} <= found["stages_us"].keys()
    assert found["stages_us"].keys() <= {stage for stage, _ in STAGES} | {LOOP}
