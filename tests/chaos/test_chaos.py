"""A cluster of real processes under faults: nothing lost, nothing twice (sections 6.8, 6.9; D-F1 to D-F7).

R-6.9-1, R-6.9-4, R-6.9-9, R-6.9-11, R-6.9-12, R-6.9-16, R-6.9-18, from outside.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.chaos.plan import make_plan
from tests.chaos.run import run
from tests.kit.etcd import need_etcd, running_etcd

SEED = 5371  # its first twenty seconds have kills of each role, a freeze, and cut links


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_twenty_seconds(tmp_path: Path) -> None:
    report = await run(tmp_path, seed=SEED, seconds=20)
    assert not report.wrong, "\n".join(report.lines)
    assert sum(report.faults.values()) >= 4 and report.tokens_checked > 1000


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_two_minutes(tmp_path: Path) -> None:
    report = await run(tmp_path, seed=1, seconds=120)
    assert not report.wrong, "\n".join(report.lines)
    assert report.failovers > 0 and report.reconnects > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_over_http_3(tmp_path: Path) -> None:
    """D-H8: datagrams of a link that is cut are lost."""
    report = await run(tmp_path, seed=3, seconds=60, transport="h3")
    assert not report.wrong, "\n".join(report.lines)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_with_logs_and_records_in_etcd(tmp_path: Path) -> None:
    """D-Z8, D-F5: the router that comes back finds nothing on its own disk."""
    need_etcd()
    with running_etcd(tmp_path / "etcd") as etcd:
        report = await run(tmp_path, seed=2, seconds=60, etcd=etcd.endpoints)
    assert not report.wrong, "\n".join(report.lines)


def test_a_plan_is_its_seeds() -> None:
    """The same seed, the same faults; of all kinds, if there is time."""
    plan = make_plan(7, 1200)
    assert plan == make_plan(7, 1200) != make_plan(8, 1200)
    assert {one.label for one in plan} == {
        *(f"{kind} {role}" for kind in ("kill", "freeze") for role in ROLES),
        *(f"{kind} {link}" for kind in ("cut", "break") for link in LINKS),
    }
    for one, other in pairwise(plan):
        shared = set(one.targets) & set(other.targets)
        assert not shared or other.at_s >= one.at_s + one.lasts_s


ROLES = ("router", "verifier", "drafter")
LINKS = ("router-verifier", "drafter-router", "drafter-verifier")
