"""What is going to happen to a cluster, and when: a list that a seed decides."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

KILL, FREEZE, CUT, BREAK = "kill", "freeze", "cut", "break"
HEAL_S = 4.0  # after the last fault: texts are to end undisturbed
PAUSE_S = (1.5, 3.5)  # between two faults
START_S = 8.0  # a process that was killed is itself again so long after it was started
SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Fault:
    """At `at_s` after the beginning, for `lasts_s`: then what was killed is started again."""

    at_s: float
    kind: str
    targets: tuple[str, ...]
    """One instance, or the two whose link is cut."""
    lasts_s: float

    @property
    def label(self) -> str:
        """As the report names it: "kill verifier", "cut drafter-verifier"."""
        return f"{self.kind} {'-'.join(sorted(_role(one) for one in self.targets))}"

    def __str__(self) -> str:
        where = " - ".join(self.targets)
        return f"{self.at_s:7.1f} s  {self.kind} {where} for {self.lasts_s:.1f} s"


def _role(name: str) -> str:
    return {"r": "router", "v": "verifier", "d": "drafter"}[name[0]]


def make_plan(
    seed: int, seconds: float, *, routers: int = 1, verifiers: int = 3, drafters: int = 3
) -> list[Fault]:
    """Faults of every kind in turn, in an order and at places that `seed` decides."""
    chooser = random.Random(seed)
    names = {
        "r": [f"r{i}" for i in range(routers)],
        "v": [f"v{i}" for i in range(verifiers)],
        "d": [f"d{i}" for i in range(drafters)],
    }
    faults: list[Fault] = []
    kinds: list[tuple[str, str]] = []
    at_s = 1.0
    while at_s < seconds - HEAL_S:
        if not kinds:
            kinds = _kinds()
            chooser.shuffle(kinds)
        kind, roles = kinds.pop()
        targets = tuple(chooser.choice(names[role]) for role in roles)
        lasts_s = round(chooser.uniform(*_LASTS[kind]), 1)
        fault = Fault(round(at_s, 2), kind, targets, lasts_s)
        if not _meets(fault, faults):
            faults.append(fault)
        at_s += chooser.uniform(*PAUSE_S)
    return faults


_LASTS = {KILL: (0.5, 3.0), FREEZE: (0.5, 4.0), CUT: (1.0, 5.0), BREAK: (0.5, 3.0)}


def _kinds() -> list[tuple[str, str]]:
    """Each kind of fault once, those of verifiers twice: they are what sessions depend on."""
    one = [(KILL, "v"), (KILL, "v"), (FREEZE, "v"), (FREEZE, "v"), (KILL, "d"), (FREEZE, "d")]
    two = [(kind, link) for kind in (CUT, BREAK) for link in ("rv", "rd", "vd")]
    return [*one, (KILL, "r"), (FREEZE, "r"), *two]


def _meets(fault: Fault, others: Sequence[Fault]) -> bool:
    """Whether one of the same instances is not itself at that time: a second would undo it."""
    return any(
        set(fault.targets) & set(other.targets)
        and fault.at_s < other.at_s + other.lasts_s + (START_S if other.kind == KILL else SETTLE_S)
        for other in others
    )
