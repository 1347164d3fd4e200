"""Metrics of sessions, instances and failovers: mostly a router's."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import TYPE_CHECKING

from sdcpd.metrics.families import Samples, counter, gauge
from sdcpd.protocol.instances import Board, Instance
from sdcpd.protocol.messages import InstanceRole, State
from sdcpd.protocol.router import FAILING_OVER, NAMING, Phase
from sdcpd.roles.counts import VerifierCounts
from sdcpd.roles.overview import STATES, state_of

if TYPE_CHECKING:
    from sdcpd.metrics import Metrics
    from sdcpd.roles.router import Router

_START = re.compile(r"\.[0-9a-f]{8}$")  # what a name has of one process start (D-R2)
_PHASES = {
    Phase.OPENING: "opening",
    Phase.WAITING: "waiting",
    Phase.RUNNING: "running",
    **dict.fromkeys((Phase.POLICY, *NAMING), "naming"),
    **dict.fromkeys(FAILING_OVER, "failing_over"),
}

SESSIONS = gauge(
    "sdcp_sessions",
    "Sessions that have not ended; a router's by what it does for them, a verifier's by state.",
    "state",
    roles=("router", "verifier"),
)
ENDED = counter(
    "sdcp_sessions",
    "Sessions by how they ended; cancelled: for want of a client, or because it had enough.",
    "finish",
    roles=("router", "verifier"),
)
INSTANCES = gauge(
    "sdcp_instances",
    "Instances that have reported to this router, by their role and state.",
    "role",
    "state",
    roles=("router",),
    of_instances=True,
)
LOAD = gauge(
    "sdcp_instance_load_ratio",
    "Load that an instance has reported, 0 to 1; of those whose status has not expired.",
    "role",
    "instance",
    roles=("router",),
    of_instances=True,
)
ASSIGNMENTS = counter(
    "sdcp_assignments",
    "Assignments taken by drafters: a session's first, after a switch or a failover, or the same "
    "drafter once more (resume).",
    "reason",
    roles=("router",),
)
FAILOVERS = counter(
    "sdcp_failovers",
    "Times that a session was fenced and opened at another verifier.",
    roles=("router",),
)
STALE = counter(
    "sdcp_epoch_stale_outputs",
    "Answers with output that no longer counted, as of an epoch that is over.",
    roles=("router",),
)


def samples(metrics: Metrics) -> Samples:
    """All of them that a role has."""
    if metrics.sessions is not None:
        states = metrics.sessions()
        for state in (State.WAITING, State.ASSIGNED, State.SELF_DECODING):
            yield SESSIONS(states[state], state.name.lower())
    if isinstance(metrics.rounds, VerifierCounts):
        yield from (ENDED(n, finish) for finish, n in metrics.rounds.ended.items())
    if metrics.router is not None:
        yield from _of_router(metrics.router)


def _of_router(router: Router) -> Samples:
    phases = Counter(_PHASES.get(one.machine.phase) for one in router.sessions)
    yield from (SESSIONS(phases[name], name) for name in dict.fromkeys(_PHASES.values()))
    totals = router.totals
    yield from (ENDED(count, finish) for finish, count in totals.ended.items())
    yield from (ASSIGNMENTS(count, reason) for reason, count in totals.assignments.items())
    yield FAILOVERS(totals.failovers)
    yield STALE(totals.stale_outputs)
    yield from _of_instances(router.board)


def _of_instances(board: Board) -> Samples:
    now, everyone = time.monotonic(), board.all()
    found = Counter((_role(one), state_of(one, now, board)) for one in everyone)
    for role in ("verifier", "drafter"):
        yield from (INSTANCES(found[(role, state)], role, state) for state in STATES)
    fresh = [one for one in everyone if now < one.expires]
    names = Counter((_role(one), _name(one)) for one in fresh)
    for one in fresh:
        role, name = _role(one), _name(one)
        alone = names[(role, name)] == 1  # two series of one name would be no text at all
        yield LOAD(one.status.load / 100, role, name if alone else one.status.instance)


def _role(one: Instance) -> str:
    return InstanceRole(one.status.role).name.lower()


def _name(one: Instance) -> str:
    return _START.sub("", one.status.instance)
