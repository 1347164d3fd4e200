"""Thousands of seeded worlds in which messages, processes and statuses fail; and tests of the tests.

What holds after every step is in `checks`; what goes wrong is in `plan`.  A seed that breaks is run
again by `python -m tests.sim.run SEED`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from multiprocessing import get_context
from unittest.mock import patch

import pytest

from sdcpd.protocol.commit_log import CommitRecord
from sdcpd.protocol.messages import SessionState, Verdict
from sdcpd.protocol.preparation import Preparation
from sdcpd.protocol.router import Phase, RouterSession
from sdcpd.protocol.verifier import VerifierSession
from sdcpd.protocol.verifier_io import Appended, Propose
from sdcpd.roles.commit_log import CommitLog, LogUnavailable, Outcome
from sdcpd.roles.output_reader import OutputReader
from sdcpd.roles.router import Router
from sdcpd.roles.verifier_session import ServedSession
from sdcpd.transport.http import Response
from tests.sim.plan import make_plan
from tests.sim.run import Failure, broken, check_seed, check_seeds

QUICK, ALL, CHUNK = 200, 10_000, 50


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[] if first < QUICK // 2 else pytest.mark.slow)
        for first in range(0, QUICK, CHUNK)
    ],
)
def test_every_invariant_holds(first: int) -> None:
    """R-6.3-11, R-6.3-34, R-6.3-35, R-6.7-9, R-6.8-4, R-6.9-11, R-Z-2: under 200 schedules of faults."""
    seen = check_seeds(range(first, first + CHUNK))
    assert seen["finished"] > CHUNK / 2, seen
    assert seen["prepared proposals used"] and seen["prepared proposals discarded"], seen


@pytest.mark.slow
def test_every_invariant_holds_ten_thousand_times() -> None:
    """R-6.3-11, R-6.3-34, R-6.3-35, R-6.7-9, R-6.8-4, R-6.9-11, R-Z-2: under 10,000 of them."""
    chunks = [range(first, first + CHUNK) for first in range(0, ALL, CHUNK)]
    seen: Counter[str] = Counter()
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for part in pool.map(check_seeds, chunks):
            seen += part
    print(dict(seen))
    assert seen["seeds"] == ALL
    for what in ("finished", "failed", "cancelled", "failovers", "rounds of rule 2 replayed"):
        assert seen[what] > ALL / 100, seen


def test_a_seed_is_one_world() -> None:
    """The same seed gives the same messages, or a schedule that breaks could not be looked at."""
    for seed in (5, 6):
        one, other = check_seed(seed), check_seed(seed)
        assert one.checker.steps == other.checker.steps
        assert one.outcomes == other.outcomes
        assert set(one.checker.sessions) == set(other.checker.sessions)


# ---- tests of the tests: faults on purpose are found


async def _reply_before_append(self: ServedSession, work: int, record: CommitRecord) -> None:
    self.step(Appended(work, 0))
    try:
        await self._log.append(record)
    except LogUnavailable:
        return


_propose = VerifierSession._propose


def _any_epoch(self: VerifierSession, event: Propose, now: float) -> None:
    _propose(self, replace(event, proposal=replace(event.proposal, epoch=self.epoch)), now)


_answered = RouterSession._answered
_fail_over = RouterSession._fail_over


def _no_fence(self: RouterSession, now: float) -> None:
    """As if a verifier that does not answer were dead: no log is read, and none is fenced."""
    self._drop_drafter()
    self.epoch += 1
    self._reopen(None, now)


def _sessions_forgotten(self: RouterSession, state: SessionState | None, now: float) -> None:
    """An answer to opening that counts as the end of the session."""
    _answered(self, state, now)
    if self.phase is Phase.NAMING and self.epoch > 1:
        self._close(None)


_take = OutputReader._take


def _read_again(self: OutputReader, output: object) -> None:
    """The front end begins again where it stood before its last answer."""
    before = self._read
    _take(self, output)  # type: ignore[arg-type]
    if self._epoch > 1:
        self._read = before


async def _believe(self: CommitLog, record: CommitRecord, response: Response) -> Outcome:
    """A store that does not enforce fences is taken at its word."""
    return Outcome.COMMITTED if response.header("etag") else Outcome.UNKNOWN


def _kept(self: Router, routed: object) -> None:
    """A router that never forgets a session."""


def _whatever_was_added(self: Preparation, verdict: Verdict, m_cap: int) -> bool:
    """A preparation that is used when all was accepted, whatever token came behind."""
    return self.assumed and verdict.accepted == len(self.after) - 1


FAULTS: dict[str, tuple[Callable[[], AbstractContextManager[object]], range]] = {
    "a verdict before its record": (
        lambda: patch.object(ServedSession, "_append", _reply_before_append),
        range(10),
    ),
    "a proposal of an old epoch is taken": (
        lambda: patch.object(VerifierSession, "_propose", _any_epoch),
        range(800, 1300),  # the first is 864
    ),
    "a failover without a fence": (
        lambda: patch.object(RouterSession, "_fail_over", _no_fence),
        range(200),
    ),
    "a failover that drops the session": (
        lambda: patch.object(RouterSession, "_answered", _sessions_forgotten),
        range(200),
    ),
    "a commit without a look at the fence": (
        lambda: patch.object(CommitLog, "_after_success", _believe),
        range(200),
    ),
    "a session that the router never forgets": (
        lambda: patch.object(Router, "_closed", _kept),
        range(5),
    ),
    "a preparation after another token than was assumed": (
        lambda: patch.object(Preparation, "confirmed_by", _whatever_was_added),
        range(200),
    ),
    "tokens read twice after a failover": (
        lambda: patch.object(OutputReader, "_take", _read_again),
        range(200),
    ),
}


LONG = (
    "a failover without a fence",
    "a failover that drops the session",
    "a commit without a look at the fence",
    "a proposal of an old epoch is taken",
)


@pytest.fixture(
    params=[pytest.param(f, marks=pytest.mark.slow if f in LONG else ()) for f in FAULTS]
)
def seeds(request: pytest.FixtureRequest) -> Iterator[range]:
    """Seeds to run while one fault is in the product."""
    fault, seeds = FAULTS[request.param]
    with fault():
        yield seeds


def test_a_fault_on_purpose_is_found(seeds: range) -> None:
    """A simulator that finds nothing proves nothing; what it finds it shows small."""
    found = next((seed for seed in seeds if broken(make_plan(seed)) is not None), None)
    assert found is not None, "the fault was not found"
    with pytest.raises(Failure) as failure:
        check_seed(found)
    text = str(failure.value)
    assert f"seed {found}: rule" in text
    assert text.count("\n  ") <= len(make_plan(found).faults) + len(make_plan(found).texts)
    print(text)
