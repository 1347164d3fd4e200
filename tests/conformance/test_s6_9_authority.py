"""Section 6.9 at verifiers: what an old one can no longer do."""

from __future__ import annotations

import asyncio

from sdcpd.protocol.verifier_state import VerifierSettings
from sdcpd.transport.http import Request, Response
from tests.kit.answers import output_of, refused, state_of, until, verdict_of
from tests.kit.failover import MakeWire, fence, resume_of, second
from tests.kit.scripted_target import GatedTarget
from tests.kit.verifier_wire import OTHER, Wire


async def test_a_failed_drafter_comes_too_late(wire: Wire) -> None:
    """R-6.9-3: its proposals are refused once another is named, right as they may be."""
    await wire.ready()
    verdict_of(await wire.propose(wire.good(2)))
    state_of(await wire.name(drafter=OTHER))
    refused(await wire.propose(wire.good(2)), 403, "sdcp-not-assigned")
    verdict_of(await wire.propose(wire.good(2), who="other"))


async def test_older_epochs_are_refused(make_wire: MakeWire) -> None:
    """R-6.9-10: at the new verifier, from the drafter that it was assigned."""
    first = make_wire()
    await first.ready()
    verdict_of(await first.propose(first.good(2)))
    fence(first, 2)
    other = second(make_wire, first)
    state_of(await other.open(epoch=2, resume=resume_of(first)))
    state_of(await other.name(epoch=2))
    refused(await other.propose(other.good(1), epoch=1), 409, "sdcp-stale-epoch")
    refused(await other.propose(other.good(1), epoch=1, round=1), 409, "sdcp-stale-epoch")
    refused(await other.propose(other.good(1), epoch=2, round=1), 409, "sdcp-stale-base")
    refused(await other.name(epoch=1), 409, "sdcp-stale-epoch")
    refused(await other.open(epoch=1), 409, "sdcp-stale-epoch")
    assert verdict_of(await other.propose(other.good(1), epoch=2)).epoch == 2
    for round_ in (2, 3):  # nor is a verdict of the new epoch told
        refused(await other.propose(other.good(1), epoch=1, round=round_), 409, "sdcp-stale-epoch")


async def test_a_partitioned_verifier_can_do_nothing_more(make_wire: MakeWire) -> None:
    """R-6.9-11: it still gets proposals: 409; its output gains nothing and then ends, while the
    other goes on; the log has none of it.
    """
    first = make_wire()
    await first.ready()
    verdict_of(await first.propose(first.good(2)))
    before = output_of(await first.output()).tokens
    fence(first, 2)
    other = second(make_wire, first)
    state_of(await other.open(epoch=2, resume=resume_of(first)))
    state_of(await other.name(epoch=2, drafter=OTHER))
    found = verdict_of(await other.propose(other.good(3), who="other", epoch=2))
    assert output_of(await first.output()).tokens == before, "what was committed stays readable"
    refused(await first.propose(first.good(2)), 409, "sdcp-stale-epoch")
    refused(await first.output(), 409, "sdcp-stale-epoch")
    assert output_of(await other.output()).tokens == (*before, *found.emitted)
    assert first.mlc.tokens(first.log_name) == (*before, *found.emitted)


async def test_a_partitioned_verifier_stops_decoding_alone(make_wire: MakeWire) -> None:
    """R-6.9-11: self-decoding ends at the first token that the log refuses; no event is sent."""
    wire = make_wire(
        members={"self_load": 100, "max_new": 100_000},
        config={"machine": VerifierSettings(0.0, None)},
    )
    state_of(await wire.open())
    await until(lambda: len(wire.records()) > 3)
    fence(wire, 2)
    await until(lambda: wire.served().machine.fenced)
    tokens = wire.mlc.tokens(wire.log_name)
    for _ in range(50):
        await asyncio.sleep(0)
    assert wire.mlc.tokens(wire.log_name) == tokens and wire.events == []
    refused(await wire.output(), 409, "sdcp-stale-epoch")


async def test_back_at_the_same_verifier(wire: Wire) -> None:
    """R-6.9-10, R-6.7-7: a higher epoch re-opens it; a round of the old one is discarded (D-O3)."""
    await wire.ready()
    found = verdict_of(await wire.propose(wire.good(2)))
    held, go_on = asyncio.Event(), asyncio.Event()

    async def hold(request: Request) -> Response | None:
        if request.method == "PUT":
            held.set()
            await go_on.wait()
        return None

    wire.mlc.before = hold
    late = asyncio.ensure_future(wire.propose(wire.good(2)))
    await held.wait()
    wire.mlc.before = None
    fence(wire, 3)
    state_of(await wire.open(epoch=3, resume=resume_of(wire)))
    go_on.set()
    refused(await late, 409, "sdcp-stale-epoch")
    output = output_of(await wire.output())
    assert (output.epoch, output.tokens) == (3, found.emitted)
    state_of(await wire.name(epoch=3))
    assert verdict_of(await wire.propose(wire.good(1), epoch=3)).round == 2


async def test_a_round_of_the_old_epoch_is_discarded(make_wire: MakeWire) -> None:
    """R-6.9-10, R-6.8-4, D-O3: re-opened while a round is being scored, and before any fence: the
    round ends with 409 and never reaches the log.
    """
    wire = make_wire(engine_kind=GatedTarget)
    await wire.ready()
    engine = wire.engine
    assert isinstance(engine, GatedTarget)
    late = asyncio.ensure_future(wire.propose(wire.good(2)))
    await until(lambda: engine.scored)
    state_of(await wire.open(epoch=2))
    refused(await late, 409, "sdcp-stale-epoch")
    engine.gate.set()
    for _ in range(50):
        await asyncio.sleep(0)
    assert wire.records() == []
    state_of(await wire.name(epoch=2))
    assert verdict_of(await wire.propose(wire.good(1), epoch=2)).round == 1
    assert [record.epoch for record in wire.records()] == [2]
