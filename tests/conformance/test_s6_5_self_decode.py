"""Section 6.5.2: self-decoding, its end, and the events that tell the router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from sdcpd.engine.api import Score, Scored
from sdcpd.engine.fake import FakeModel, FakeTarget
from sdcpd.protocol.messages import Action, State
from sdcpd.protocol.verifier_state import VerifierSettings
from tests.kit.answers import output_of, refused, state_of, until, verdict_of
from tests.kit.verifier_wire import OTHER, Wire

MakeWire = Callable[..., Wire]


class SteppedTarget(FakeTarget):
    """Each token of self-decoding waits for a step that a test allows."""

    def __init__(self, model: FakeModel) -> None:
        super().__init__(model)
        self.steps = asyncio.Semaphore(0)

    async def score(self, work: Score) -> Scored:
        """Proposals at once, tokens alone one by one."""
        if not work.proposed:
            await self.steps.acquire()
        return await super().score(work)


async def alone(make_wire: MakeWire, **members: object) -> tuple[Wire, SteppedTarget]:
    """A session whose first round, a low one, has led to self-decoding."""
    wire = make_wire(
        engine_kind=SteppedTarget,
        members={"low_rounds": 1, "fallback": (3, 5), "self_load": 50, **members},
        config={"load": 0},
    )
    await wire.ready()
    assert verdict_of(await wire.propose(wire.bad(1))).action is Action.SELF_DECODE
    assert isinstance(wire.engine, SteppedTarget)
    return wire, wire.engine


async def step(wire: Wire, engine: SteppedTarget) -> None:
    """One more token."""
    machine = wire.served().machine
    before = machine.round
    engine.steps.release()
    await until(lambda: machine.round > before)


@pytest.mark.parametrize(
    ("load", "self_load", "action"), [(40, 40, 3), (0, 0, 3), (41, 40, 2), (1, 0, 2), (0, None, 2)]
)
async def test_permitted_by_load(
    make_wire: MakeWire, load: int, self_load: int | None, action: int
) -> None:
    """R-6.5.2-19, R-6.5.2-6: at exactly self_load, not above it, and never without one."""
    members = {"low_rounds": 1, "fallback": (3, 2, 5), "self_load": self_load, "self_max": 0}
    wire = make_wire(members=members, config={"load": load})
    await wire.ready()
    found = verdict_of(await wire.propose(wire.bad(1)))
    assert (found.action, found.load) == (action, load)
    if action == 2:
        state_of(await wire.name())
        wire.pin_load(0)
        assert verdict_of(await wire.propose(wire.bad(1))).action is Action.FAIL


async def test_one_token_a_round_and_a_record(make_wire: MakeWire) -> None:
    """R-6.5.2-20, R-6.5.2-21, R-6.5.2-27: each is published as it is committed; plain greedy."""
    wire, engine = await alone(make_wire)
    for n in range(1, 6):
        poll = asyncio.ensure_future(wire.output(n))
        await step(wire, engine)
        assert len(output_of(await poll).tokens) == 1
        record = wire.commits()[-1]
        assert (record.round, record.committed, len(record.emitted)) == (n + 1, n + 1, 1)
    tokens = output_of(await wire.output()).tokens
    assert list(tokens) == wire.model.text((1, 2, 3), 6)
    assert wire.events == []


async def test_self_max_ends_the_period(make_wire: MakeWire) -> None:
    """R-6.5.2-22, R-6.5.2-24, R-6.5.2-25: exactly five, then the event with the last values;
    rounds go on from there, and a round that was decoded alone has no verdict.
    """
    wire = make_wire(members={"low_rounds": 3, "fallback": (3, 5), "self_load": 100, "self_max": 5})
    await wire.ready()
    for _ in range(3):
        found = verdict_of(await wire.propose(wire.bad(1)))
    assert found.action is Action.SELF_DECODE
    await until(lambda: wire.events)
    last = wire.commits()[-1]
    assert [len(r.emitted) for r in wire.commits()] == [1] * 8 and last.round == 8
    (event,) = wire.events
    assert (event.kind, event.committed, event.digest) == (3, last.committed, last.digest)
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(wire.records()) == 8
    state = state_of(await wire.name(drafter=OTHER))
    assert (state.round, state.committed, state.digest) == (8, 8, last.digest)
    refused(await wire.propose([1], who="other", round=4), 409, "sdcp-stale-base")
    assert verdict_of(await wire.propose(wire.good(2), who="other", round=9)).round == 9


async def test_self_max_0_commits_nothing(make_wire: MakeWire) -> None:
    """R-6.5.2-22, D-C8: the event is sent at once."""
    wire, _ = await alone(make_wire, self_max=0)
    await until(lambda: wire.events)
    assert [event.kind for event in wire.events] == [3] and len(wire.records()) == 1


async def test_load_ends_the_period(make_wire: MakeWire) -> None:
    """R-6.5.2-23, R-6.5.2-24: within one token, with the event; the state says waiting."""
    wire, engine = await alone(make_wire)
    await step(wire, engine)
    wire.pin_load(51)
    await step(wire, engine)
    await until(lambda: wire.events)
    last = wire.commits()[-1]
    (event,) = wire.events
    assert (event.kind, event.committed, event.digest) == (3, last.committed, last.digest)
    assert last.round == 3 and not wire.served().machine.busy
    assert wire.served().machine.state_message().state is State.WAITING


async def test_load_ends_the_period_of_a_silent_drafter(make_wire: MakeWire) -> None:
    """R-6.5.2-23, D-R9: one that no escalation began; the drafter stays the assigned one."""
    wire = make_wire(
        engine_kind=SteppedTarget,
        members={"self_load": 50},
        config={"machine": VerifierSettings(None, 0.2), "load": 0},
    )
    await wire.ready()
    engine = wire.engine
    assert isinstance(engine, SteppedTarget)
    await step(wire, engine)
    wire.pin_load(51)
    await step(wire, engine)
    await until(lambda: wire.events)
    assert (wire.events[0].kind, len(wire.commits())) == (3, 2)
    assert wire.served().machine.state_message().state is State.ASSIGNED


async def test_load_at_self_load_does_not_end_it(make_wire: MakeWire) -> None:
    """R-6.5.2-23: only load above self_load does."""
    wire, engine = await alone(make_wire)
    wire.pin_load(50)
    for _ in range(3):
        await step(wire, engine)
    assert wire.events == [] and wire.served().machine.busy


async def test_the_counters_are_left_alone(make_wire: MakeWire) -> None:
    """R-6.5.2-26, R-6.5.2-9: two low rounds, three tokens alone, one low round: R = 3 is reached.

    The period is that of a silent drafter (D-R9), which no escalation began.
    """
    wire = make_wire(
        members={"low_rounds": 3, "fallback": (1, 5), "self_load": 100, "self_max": 3},
        config={"machine": VerifierSettings(None, 0.2)},
    )
    await wire.ready(m_init=6)
    assert [verdict_of(await wire.propose(wire.bad(1))).low for _ in range(2)] == [1, 2]
    await until(lambda: wire.events)
    assert len(wire.records()) >= 5
    found = verdict_of(await wire.propose(wire.bad(1)))
    assert (found.action, found.low, found.m_cap) == (Action.REDUCE, 0, 3)


@pytest.mark.parametrize("by_stop", [False, True])
async def test_the_text_may_end_during_the_period(make_wire: MakeWire, by_stop: bool) -> None:
    """R-6.5.2-28: at max_new or a stop token; final, finish 4, and no event of kind 3."""
    text = make_wire().model.text((1, 2, 3), 4)
    members = {"stop": (text[3],)} if by_stop else {"max_new": 4}
    wire, engine = await alone(make_wire, **members)
    for _ in range(3):
        await step(wire, engine)
    await until(lambda: wire.events)
    output = output_of(await wire.output())
    assert (list(output.tokens), output.final, output.finish) == (text, True, Action.FINISH)
    assert [event.kind for event in wire.events] == [Action.FINISH]


async def test_a_new_assignment_ends_the_period(make_wire: MakeWire) -> None:
    """R-6.5.2-31, R-6.5.2-25: proposals are refused during it; a PUT ends it, with no event."""
    wire, engine = await alone(make_wire)
    await step(wire, engine)
    refused(await wire.propose(wire.good(1)), 403, "sdcp-not-assigned")
    refused(await wire.propose(wire.good(1), who="other"), 403, "sdcp-not-assigned")
    put = asyncio.ensure_future(wire.name(drafter=OTHER))
    await asyncio.sleep(0)
    engine.steps.release()
    state = state_of(await put)
    records = len(wire.records())
    engine.steps.release()
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(wire.records()) == records and wire.events == []
    assert state.round == wire.commits()[-1].round
    found = verdict_of(await wire.propose(wire.good(2), who="other", round=state.round + 1))
    assert found.accepted == 2


async def test_an_identical_put_is_a_new_assignment(make_wire: MakeWire) -> None:
    """R-6.1-18, R-6.5.2-31: after self-decoding the same drafter, named the same way, proposes."""
    wire, _ = await alone(make_wire, self_max=0)
    refused(await wire.propose(wire.good(1)), 403, "sdcp-not-assigned")
    state_of(await wire.name())
    verdict_of(await wire.propose(wire.good(1)))


async def test_events_are_sent_until_they_are_taken(
    make_wire: MakeWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-6.5.2-32, R-5.1-12: 503, 599 and 429: the same event a fourth time, and then no more."""
    monkeypatch.setattr("sdcpd.roles.events.RETRY_FIRST_S", 0.001)
    wire = make_wire(members={"low_rounds": 1, "fallback": (2, 5)})
    wire.event_answers = [503, 599, 429]
    await wire.ready()
    verdict_of(await wire.propose(wire.bad(1)))
    await until(lambda: wire.events)
    for _ in range(50):
        await asyncio.sleep(0)
    assert wire.deliveries == [wire.events[0]] * 4 and len(wire.events) == 1


@pytest.mark.parametrize("status", [400, 403, 404, 409, 418, 499])
async def test_an_event_that_is_refused_is_not_sent_again(make_wire: MakeWire, status: int) -> None:
    """R-6.5.2-32, R-5.1-12: a 4xx but 429 is an answer (D-V2)."""
    wire = make_wire(members={"low_rounds": 1, "fallback": (2, 5)})
    wire.event_answers = [status]
    await wire.ready()
    verdict_of(await wire.propose(wire.bad(1)))
    await until(lambda: wire.deliveries)
    for _ in range(50):
        await asyncio.sleep(0)
    state_of(await wire.name())
    verdict_of(await wire.propose(wire.bad(1)))
    await until(lambda: wire.events)
    assert [event.kind for event in wire.deliveries] == [Action.SWITCH, Action.FAIL]


async def test_an_assignment_withdraws_the_call_for_one(
    make_wire: MakeWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-6.5.2-32, D-V2: what it asked for has come, so a switch is not sent any more."""
    monkeypatch.setattr("sdcpd.roles.events.RETRY_FIRST_S", 0.001)
    wire = make_wire(members={"low_rounds": 1, "fallback": (2, 5)})
    wire.event_answers = [503] * 1000
    await wire.ready()
    verdict_of(await wire.propose(wire.bad(1)))
    await until(lambda: len(wire.deliveries) > 2)
    state_of(await wire.name(drafter=OTHER))
    wire.event_answers = []
    verdict_of(await wire.propose(wire.bad(1), who="other"))
    await until(lambda: wire.events)
    assert [event.kind for event in wire.events] == [Action.FAIL]


async def test_a_silent_drafter_that_comes_back(make_wire: MakeWire) -> None:
    """R-6.5.2-25, R-6.3-35, D-R9: its proposal waits for the token in work, is stale then, ends the
    period without an event, and its next one is taken; every round is committed once.
    """
    wire = make_wire(
        engine_kind=SteppedTarget,
        members={"self_load": 100},
        config={"machine": VerifierSettings(None, 0.2), "load": 0},
    )
    await wire.ready()
    engine = wire.engine
    assert isinstance(engine, SteppedTarget)
    await until(lambda: wire.served().machine.busy)
    late = asyncio.ensure_future(wire.propose(wire.good(3)))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not late.done()
    engine.steps.release()
    state = refused(await late, 409, "sdcp-stale-base").session_state
    assert state is not None and (state.round, state.committed) == (1, 1)
    machine = wire.served().machine
    assert not machine.busy and wire.events == []
    assert machine.state_message().state is State.ASSIGNED
    assert verdict_of(await wire.propose(wire.good(3))).round == 2
    assert [record.round for record in wire.commits()] == [1, 2]
