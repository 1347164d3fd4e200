"""Section 8: batch windows, cache placement, and service without a drafter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sdcpd.engine.fake import FakeTarget
from sdcpd.protocol.messages import Action, Proposal, Verdict
from sdcpd.protocol.verifier_state import VerifierSettings
from sdcpd.transport.http import Request
from tests.kit.answers import output_of, refused, state_of, until, verdict_of
from tests.kit.drafter_rig import RULE_2, drafter_rig
from tests.kit.verifier_wire import Wire
from tests.sim.clock import run_virtual
from tiers.api import Key
from tiers.host import HostTier
from tiers.lmdb_tier import LmdbTier
from tiers.resource import MlcResource
from tiers.stack import TierStack

MakeWire = Callable[..., Wire]
PASS_S = 0.05


def test_a_round_of_a_single_session_waits_for_no_batch() -> None:
    """R-8-1: a round takes less than two forward passes, window included; in virtual time."""

    async def main() -> None:
        wire = Wire(engine_kind=lambda model: FakeTarget(model, pass_time_s=PASS_S))
        await wire.ready()
        for _ in range(5):
            begun = asyncio.get_running_loop().time()
            verdict_of(await wire.propose(wire.good(2)))
            assert asyncio.get_running_loop().time() - begun < 2 * PASS_S
        await wire.verifier.aclose()

    run_virtual(main(), seed=1)


async def test_new_rows_are_in_the_memory_tier(tmp_path: Path) -> None:
    """R-8-2: of the verifier's cache, although a disk stands below it; leased, so they stay."""
    memory, disk = HostTier(1 << 20), LmdbTier(tmp_path / "objects", 1 << 20)
    stack = TierStack([memory, disk])

    def anybody(request: Request, kind: str, write: bool) -> None:
        """Who may is not the question here."""

    async with drafter_rig() as rig:
        rig.contract = RULE_2
        rig.verifier.mlc = MlcResource(  # type: ignore[assignment]
            base_path="", objects=stack, logs=None, authorize=anybody, object_bytes_max=1 << 20
        )
        proposal = (await rig.begin()).as_(Proposal)
        assert proposal.q_rows is not None
        scope, _, name = proposal.q_rows.partition("/objects/")[2].partition("/")
        key = Key(scope, name)
        assert await memory.holds(key) and not await disk.holds(key)
        assert memory.stats().leased_bytes > 4 * rig.model.vocab * len(proposal.tokens)
    await stack.aclose()


def serving(make_wire: MakeWire, settings: VerifierSettings, **members: Any) -> Wire:
    """A verifier that may decode by itself whatever its load."""
    return make_wire(config={"machine": settings}, members={"self_load": 100, **members})


async def text(wire: Wire) -> list[int]:
    """What a front end reads to the end, epoch by epoch and index by index."""
    tokens: list[int] = []
    while not (output := output_of(await wire.output(len(tokens)))).final:
        tokens += output.tokens
    assert output.finish == Action.FINISH
    return [*tokens, *output.tokens]


async def test_without_a_drafter_the_verifier_decodes(make_wire: MakeWire) -> None:
    """R-8-4, D-R5: no PUT at all, and the output completes."""
    wire = serving(make_wire, VerifierSettings(0.001, None), max_new=12)
    state_of(await wire.open())
    assert await text(wire) == wire.model.text((1, 2, 3), 12)
    assert [len(record.emitted) for record in wire.commits()] == [1] * 12


async def test_with_self_max_period_follows_period(make_wire: MakeWire) -> None:
    """R-8-4, D-R5: an event of kind 3 after each five tokens, and the output completes."""
    wire = serving(make_wire, VerifierSettings(0.001, None), max_new=17, self_max=5)
    state_of(await wire.open())
    assert await text(wire) == wire.model.text((1, 2, 3), 17)
    await until(lambda: wire.events and wire.events[-1].kind == Action.FINISH)
    asked = [(event.kind, event.committed) for event in wire.events if event.kind == 3]
    assert asked == [(3, 5), (3, 10), (3, 15)]


@pytest.mark.parametrize(
    ("settings", "members"),
    [
        (VerifierSettings(None, None), {}),
        (VerifierSettings(0.001, None), {"self_load": None}),
        (VerifierSettings(0.001, None), {"self_max": 0}),
    ],
    ids=["never", "no self_load", "self_max 0"],
)
async def test_without_leave_nothing_happens(
    make_wire: MakeWire, settings: VerifierSettings, members: dict[str, Any]
) -> None:
    """R-8-4, D-R5: `self_decode_after` "never", or a contract that does not allow it."""
    wire = serving(make_wire, settings, **members)
    state_of(await wire.open())
    assert output_of(await wire.output()).tokens == ()  # after the verifier's whole wait
    assert wire.records() == [] and wire.engine.scored == []


async def test_a_load_above_self_load_forbids_it(make_wire: MakeWire) -> None:
    """R-8-4: until it permits."""
    wire = serving(make_wire, VerifierSettings(0.001, None), max_new=3, self_load=40)
    wire.pin_load(41)
    state_of(await wire.open())
    assert output_of(await wire.output()).tokens == ()
    wire.pin_load(40)
    assert await text(wire) == wire.model.text((1, 2, 3), 3)


async def test_a_silent_drafter_does_not_hold_the_text(make_wire: MakeWire) -> None:
    """R-8-4, D-R9: named, never heard of, and the output completes."""
    wire = serving(make_wire, VerifierSettings(None, 0.001), max_new=12)
    await wire.ready()
    assert await text(wire) == wire.model.text((1, 2, 3), 12)


async def test_a_silent_drafter_comes_back(make_wire: MakeWire) -> None:
    """R-8-4, D-R9: in the middle it is out of date, and in time with its next proposal."""
    wire = serving(make_wire, VerifierSettings(None, 0.5), max_new=500)
    await wire.ready()
    late = wire.proposal(wire.good(2))
    await until(lambda: len(wire.commits()) >= 3)
    stale = refused(
        await wire.ask("drafter", "POST", "proposals", late, Verdict),
        409,
        "sdcp-stale-base",
    )
    state = stale.session_state
    assert state is not None and state.committed == len(wire.commits()) == state.round
    found = verdict_of(await wire.propose(wire.good(2)))
    assert (found.round, found.accepted) == (state.round + 1, 2)
    assert wire.commits()[-1].emitted == found.emitted


@pytest.mark.parametrize(
    ("gaps_s", "silence_s"),
    [((), 3.0), ((0.5,), 3.0), ((2.0,), 8.0), ((2.5, 1.0, 0.1), 10.0)],
    ids=str,
)
def test_a_slow_drafter_gets_four_times_its_longest_gap(
    gaps_s: tuple[float, ...], silence_s: float
) -> None:
    """R-8-4, D-R9: 3 s, or that; since it was named or last answered, in virtual time."""

    async def main() -> None:
        wire = Wire(
            config={"machine": VerifierSettings(None, 3.0)},
            members={"self_load": 100, "max_new": 30},
        )
        await wire.ready()
        for gap_s in gaps_s:
            await asyncio.sleep(gap_s)  # virtual: the drafter takes its time
            verdict_of(await wire.propose(wire.good(2)))
        loop = asyncio.get_running_loop()
        last = loop.time()
        while len(wire.commits()) == len(gaps_s):
            await asyncio.sleep(0.01)
        assert loop.time() - last == pytest.approx(silence_s, abs=0.02)
        await wire.verifier.aclose()

    run_virtual(main(), seed=1)


async def test_the_named_drafter_in_time_is_not_overtaken(make_wire: MakeWire) -> None:
    """R-8-4, D-R9: the verifier decodes nothing while proposals come."""
    wire = serving(make_wire, VerifierSettings(None, 5.0), max_new=30)
    await wire.ready()
    while len(wire.commits()) < 8:
        verdict_of(await wire.propose(wire.good(2)))
        await asyncio.sleep(0)
    assert wire.verifier.rounds.self_decoded == 0
