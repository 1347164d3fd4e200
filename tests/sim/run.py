"""Run a seed; on a broken invariant, find the smallest schedule that still breaks it.

python -m tests.sim.run SEED            run one seed and print its schedule
python -m tests.sim.run FIRST COUNT     run many
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from tests.sim.checks import Broken
from tests.sim.clock import NothingLeft, run_virtual
from tests.sim.plan import Plan, make_plan
from tests.sim.world import World


class Failure(Exception):
    """An invariant is broken; the text has the schedule, shrunk."""


def run_plan(plan: Plan) -> World:
    """Run one world; raises Broken."""
    world = World(plan)
    errors = _Errors()
    logger = logging.getLogger("sdcpd")
    level, logger.level = logger.level, logging.ERROR
    logger.addHandler(errors)
    try:
        run_virtual(world.run(), seed=plan.seed)
    except NothingLeft:
        raise Broken("everybody waits for something that will not come") from None
    finally:
        logger.removeHandler(errors)
        logger.setLevel(level)
    if errors.found:
        raise Broken(f"a role logged an error: {errors.found[0]}")
    return world


class _Errors(logging.Handler):
    """Whatever a role logs as an error is a fault of the role."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if "the disk is full" not in text:  # a fault of the plan's
            self.found.append(text)


def broken(plan: Plan) -> str | None:
    """What breaks under a plan, None if nothing does."""
    try:
        run_plan(plan)
    except Broken as why:
        return str(why)
    return None


def shrink(plan: Plan) -> Plan:
    """Leave out faults and texts as long as something still breaks."""
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(plan):
            if broken(smaller) is not None:
                plan, changed = smaller, True
                break
    return plan


def _smaller(plan: Plan) -> Iterable[Plan]:
    for index in range(len(plan.texts) - 1, -1, -1):
        if len(plan.texts) > 1:
            yield replace(plan, texts=plan.texts[:index] + plan.texts[index + 1 :])
    for index in range(len(plan.faults)):
        yield replace(plan, faults=plan.faults[:index] + plan.faults[index + 1 :])


def check_seed(seed: int) -> World:
    """Run a seed; raises Failure with a schedule that a person can read."""
    plan = make_plan(seed)
    try:
        return run_plan(plan)
    except Broken as why:
        small = shrink(plan)
        text = broken(small) or str(why)
        raise Failure(
            f"{text}\nfirst seen as: {why}\nthe smallest schedule that breaks:\n{small}"
        ) from None


def check_seeds(seeds: Iterable[int]) -> Counter[str]:
    """Run seeds; returns what was seen, raises Failure at the first that breaks."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        world = check_seed(seed)
        seen["seeds"] += 1
        seen["steps"] += world.checker.steps
        seen["fences that slipped in"] += world.checker.slips
        seen["rounds of rule 2 replayed"] += world.checker.replayed
        for fate, count in world.prepared.items():
            seen[f"prepared proposals {fate}"] += count
        for outcome in world.outcomes:
            seen["texts"] += 1
            seen[(outcome.ended or "?").split(":")[0]] += 1
            seen["tokens"] += len(outcome.tokens)
        for watched in world.checker.sessions.values():
            seen["failovers"] += max(0, watched.log.highest_epoch - 1)
    return seen


def main(first: int, count: int = 1) -> None:
    """See the module."""
    if count == 1:
        print(make_plan(first))
    print(dict(check_seeds(range(first, first + count))))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
