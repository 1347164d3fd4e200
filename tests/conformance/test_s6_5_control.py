"""Section 6.5: m_cap, low rounds and the ladder, at a real verifier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sdcpd.protocol.messages import Action, Verdict
from tests.kit.answers import output_of, refused, state_of, until, verdict_of
from tests.kit.vectors import VECTORS
from tests.kit.verifier_wire import OTHER, Wire

MakeWire = Callable[..., Wire]
TRACES = VECTORS["control"]["traces"]


def last_of(trace: dict[str, Any], key: str) -> int:
    """What the trace's step wants: tokens to self-decode, or 0."""
    return next((step[key] for step in trace["steps"] if key in step), 0)


@pytest.mark.parametrize("trace", TRACES, ids=lambda t: t["name"])
async def test_traces(trace: dict[str, Any], make_wire: MakeWire) -> None:
    """R-6.5.1-1, R-6.5.2-1, R-6.5.2-2, R-6.5.2-3, R-6.5.2-4, R-6.5.2-5, R-6.5.2-6, R-6.5.2-7,
    R-6.5.2-8, R-6.5.2-9, R-6.5.2-10, R-6.5.2-11, R-6.5.2-12, R-6.5.2-14, R-6.5.2-26, R-6.3-36:
    each round is made to accept what the trace says, and its verdict says what the trace says.
    """
    steps = trace["steps"]
    finished_at = _tokens_until_finish(steps)
    members = {**trace["contract"], "max_new": finished_at or 9999}
    members["fallback"] = tuple(members["fallback"])
    if self_decoded := last_of(trace, "self_decoded"):
        members["self_max"] = self_decoded
    wire = make_wire(members=members, config={"load": 0})
    await wire.ready(m_init=trace["m_init"])
    drafters, events = ["drafter", "other"], 0
    for step in steps:
        if "assign" in step:
            drafters.reverse()
            base = OTHER if drafters[0] == "other" else "https://d0.test/"
            state_of(await wire.name(drafter=base, m_init=step["assign"]))
        elif "self_decoded" in step:
            events += 1
            await until(lambda wanted=events: len(wire.events) >= wanted)
            assert wire.served().machine.round == step["last_round"]
        else:
            wire.pin_load(step["load"])
            tokens = wire.bad(step["M"], good=step["a"])
            found = verdict_of(await wire.propose(tokens, who=drafters[0]))
            _check(found, step, trace["contract"]["m_max"])
            events += found.action in (Action.SWITCH, Action.FINISH, Action.FAIL)
    await until(lambda: len(wire.events) >= events)
    kinds = [int(event.kind) for event in wire.events]
    assert kinds[:events] == [
        step.get("action", 3)
        for step in steps
        if step.get("action") in (2, 4, 5) or "self_decoded" in step
    ]


def _tokens_until_finish(steps: list[dict[str, Any]]) -> int | None:
    """The length of output at which the trace's last round ends generation."""
    if not any(step.get("finished") for step in steps):
        return None
    return sum(step["a"] + 1 for step in steps if "a" in step)


def _check(found: Verdict, step: dict[str, Any], m_max: int) -> None:
    wanted = (step["round"], step["a"], step["action"], step["verdict_low"], step["load"])
    assert (found.round, found.accepted, found.action, found.low, found.load) == wanted
    assert 1 <= found.m_cap <= m_max
    if step["m_cap"] is not None:
        assert found.m_cap == step["m_cap"]


async def test_low_rounds_must_be_in_a_row(make_wire: MakeWire) -> None:
    """R-6.5.2-2, R-6.5.2-8: low, low, good, low, low, low with R = 3: only the sixth escalates."""
    wire = make_wire(members={"low_rounds": 3, "fallback": (2, 5)})
    await wire.ready()
    found = []
    for good in (0, 0, 1, 0, 0, 0):
        found.append(verdict_of(await wire.propose(wire.bad(2, good=good))))
    assert [v.action for v in found] == [0, 0, 0, 0, 0, 2]
    assert [v.low for v in found] == [1, 2, 0, 1, 2, 0]


async def test_m_cap_is_the_limit_of_the_next_round(make_wire: MakeWire) -> None:
    """R-6.5.1-2, R-6.5.1-4, R-6.5.2-14: 7, 3, 1, 1 on the way down; one more a round up to m_max."""
    wire = make_wire(members={"m_max": 7, "low_rounds": 1, "fallback": (1, 1, 1, 5)})
    await wire.ready(m_init=7)
    caps = [7]
    for good in (0, 0, 0, 1, 1, 1, 1, 1, 1, 1):
        refused(await wire.propose(wire.good(caps[-1] + 1)), 422, "sdcp-limit")
        tokens = wire.bad(caps[-1], good=good)
        caps.append(verdict_of(await wire.propose(tokens)).m_cap)
    assert caps == [7, 3, 1, 1, 2, 3, 4, 5, 6, 7, 7]


async def test_load_lowers_m_cap(make_wire: MakeWire) -> None:
    """R-6.5.1-3, R-6.5.1-1: above the limit by one a round down to 1, and back afterwards."""
    wire = make_wire(config={"load": 81})
    await wire.ready(m_init=4)
    caps = [verdict_of(await wire.propose(wire.good(1))).m_cap for _ in range(5)]
    assert caps == [3, 2, 1, 1, 1]
    wire.pin_load(80)
    assert [verdict_of(await wire.propose(wire.good(1))).m_cap for _ in range(3)] == [2, 3, 4]


async def test_load_lowers_m_cap_after_a_low_round(make_wire: MakeWire) -> None:
    """R-6.5.1-3, D-K2: whether or not a round is low; the halving alone is not lowered further."""
    wire = make_wire(members={"low_rounds": 3, "fallback": (1, 5)}, config={"load": 81})
    await wire.ready(m_init=8)
    found = [verdict_of(await wire.propose(wire.bad(1))) for _ in range(3)]
    assert [(v.action, v.m_cap) for v in found] == [(0, 7), (0, 6), (1, 3)]


async def test_reduce_halves_the_m_cap_in_force(make_wire: MakeWire) -> None:
    """R-6.5.2-14, D-K2: not one that load has lowered in the same round."""
    wire = make_wire(members={"low_rounds": 1, "fallback": (1, 1, 5)}, config={"load": 100})
    await wire.ready(m_init=8)
    for wanted in (4, 2):
        found = verdict_of(await wire.propose(wire.bad(1)))
        assert (found.action, found.m_cap) == (Action.REDUCE, wanted)


async def test_the_verdict_says_the_load(make_wire: MakeWire) -> None:
    """R-5.2-12: the reading pinned at 37."""
    wire = make_wire(config={"load": 37})
    await wire.ready()
    assert verdict_of(await wire.propose(wire.good(1))).load == 37


async def test_switch_suspends_the_drafter(make_wire: MakeWire) -> None:
    """R-6.5.2-15, R-6.5.2-17: an event with that round's values; a replay works, no new round."""
    wire = make_wire(members={"low_rounds": 1, "fallback": (2, 5)})
    await wire.ready()
    verdict_of(await wire.propose(wire.good(2)))
    found = verdict_of(await wire.propose(wire.bad(2)))
    assert found.action is Action.SWITCH
    await until(lambda: wire.events)
    (event,) = wire.events
    assert (event.kind, event.epoch) == (Action.SWITCH, 1)
    assert (event.committed, event.digest) == (found.committed, found.digest)
    assert await wire.propose([1], round=found.round) == found
    refused(await wire.propose(wire.good(1)), 403, "sdcp-not-assigned")
    state = state_of(await wire.name())
    assert state.round == found.round
    assert verdict_of(await wire.propose(wire.good(1))).round == found.round + 1


async def test_fail_delivers_what_was_committed(make_wire: MakeWire) -> None:
    """R-6.5.2-30, R-6.5.2-7, R-7-6: the last token is in the verdict and in output, then 410."""
    wire = make_wire(members={"low_rounds": 1, "fallback": (5,)})
    await wire.ready()
    found = verdict_of(await wire.propose(wire.bad(1)))
    assert found.action is Action.FAIL and len(found.emitted) == 1
    output = output_of(await wire.output())
    assert (output.tokens, output.final, output.finish) == (found.emitted, True, Action.FAIL)
    refused(await wire.propose([1]), 410, "sdcp-session-closed")
    refused(await wire.name(), 410, "sdcp-session-closed")


async def test_the_ladder_ends_with_fail(make_wire: MakeWire) -> None:
    """R-6.5.2-7: reduce is all there is, so the next escalation is fail."""
    wire = make_wire(members={"low_rounds": 1, "fallback": (1,)})
    await wire.ready()
    actions = [verdict_of(await wire.propose(wire.bad(1))).action for _ in range(2)]
    assert actions == [Action.REDUCE, Action.FAIL]
    output = output_of(await wire.output())
    assert output.final and output.finish is Action.FAIL


async def test_finish_comes_before_the_ladder(make_wire: MakeWire) -> None:
    """R-6.5.2-12, R-6.5.2-28: a stop token on the round that would escalate."""
    text = make_wire().model.text((1, 2, 3), 1)
    wire = make_wire(members={"low_rounds": 1, "fallback": (5,), "stop": tuple(text)})
    await wire.ready()
    found = verdict_of(await wire.propose(wire.bad(1)))
    assert (found.action, found.low) == (Action.FINISH, 1)
    assert output_of(await wire.output()).finish is Action.FINISH


async def test_every_action_has_its_registered_number(make_wire: MakeWire) -> None:
    """R-10-3, R-6.5.2-5: one ladder that shows 0 to 3 and 5, and a text that ends with 4."""
    members = {"low_rounds": 1, "fallback": (1, 2, 3, 5), "self_load": 100, "self_max": 1}
    wire = make_wire(members=members)
    await wire.ready()
    found = [int(verdict_of(await wire.propose(wire.good(1))).action)]
    for events in (0, 0, 1, 2):
        await until(lambda wanted=events: len(wire.events) >= wanted)
        state_of(await wire.name())
        found.append(int(verdict_of(await wire.propose(wire.bad(1))).action))
    assert found == [0, 1, 2, 3, 5]
    short = make_wire(members={"max_new": 1})
    await short.ready()
    assert int(verdict_of(await short.propose(short.good(1))).action) == 4
