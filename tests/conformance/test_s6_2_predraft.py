"""Section 6.2 and D-D4: the next proposal prepared while the verdict on this one is awaited."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from sdcpd.engine.api import Draft, DraftWork, EngineError
from sdcpd.protocol.digest import output_digest
from sdcpd.protocol.drafter import DrafterSettings
from sdcpd.protocol.messages import Action, Proposal
from sdcpd.transport.http import Response
from tests.kit.cluster import cluster
from tests.kit.drafter_rig import PROMPT, RULE_2, DrafterRig, drafter_rig
from tests.kit.scripted import Answer, Seen, hold, quiet
from tests.kit.verifier_machine import SESSION, contract
from tests.sim.clock import run_virtual

ALWAYS = DrafterSettings(predraft=True)


class Watched:
    """What the engine is asked for, and a gate that holds up the work ahead."""

    def __init__(self, rig: DrafterRig) -> None:
        self.works: list[DraftWork] = []
        self.cancelled = 0
        self.may = asyncio.Event()
        self.may.set()
        self.fails = False
        self.changed = asyncio.Condition()
        self._draft: Callable[..., Awaitable[Draft]] = rig.engine.draft
        rig.engine.draft = self.draft  # type: ignore[assignment]

    async def draft(self, work: DraftWork, **options: Any) -> Draft:
        """See DraftEngine."""
        async with self.changed:
            self.works.append(work)
            self.changed.notify_all()
        if work.after:
            try:
                await self.may.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            if self.fails:
                raise EngineError("not ahead")
        return await self._draft(work, **options)

    async def until(self, count: int) -> None:
        """Wait until the engine was asked so often."""
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(lambda: len(self.works) >= count)


@pytest.fixture
async def rig() -> AsyncIterator[DrafterRig]:
    async with drafter_rig(machine=ALWAYS) as made:
        yield made


def written(rig: DrafterRig, tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What the draft model writes after these committed tokens."""
    return tuple(rig.model.text((*PROMPT, *tokens), count))


def right(rig: DrafterRig, seen: Seen) -> Response:
    """All accepted, and the token added that the drafter assumes."""
    proposal = seen.as_(Proposal)
    known = (*rig.verifier.tokens, *proposal.tokens)
    (extra,) = written(rig, known, 1)
    return rig.verifier.accepts(proposal, len(proposal.tokens), extra, m_cap=8)


async def test_a_right_preparation_is_proposed_without_drafting_again(rig: DrafterRig) -> None:
    """R-6.2-8, R-6.2-5: for every round; each proposal is what a fresh drafter would propose."""
    watched = Watched(rig)
    prepared = asyncio.Event()

    async def later(seen: Seen) -> Answer:
        await prepared.wait()
        return right(rig, seen)

    rig.answers(*[later] * 3)
    first = (await rig.begin()).as_(Proposal)
    await watched.until(3)
    await quiet()
    assert rig.verifier.unread("POST", "proposals") == 0  # only after the verdict
    prepared.set()
    proposals = [first, *[await rig.proposal() for _ in range(3)]]
    committed: tuple[int, ...] = ()
    for proposal in proposals:
        assert proposal.base == len(committed)
        assert proposal.tokens == written(rig, committed, len(proposal.tokens))
        committed += written(rig, committed, len(proposal.tokens) + 1)
    assert [bool(work.after) for work in watched.works[:7]] == [False, *[True] * 6]
    assert (rig.drafter.rounds.prepared_used, rig.drafter.rounds.prepared_discarded) == (3, 0)


@pytest.mark.parametrize("kept", range(5))
async def test_a_wrong_preparation_is_not_proposed(rig: DrafterRig, kept: int) -> None:
    """R-6.2-8, R-6.3-37: a token rejected, or another one added than was assumed."""
    watched = Watched(rig)

    async def answers(seen: Seen) -> Answer:
        await watched.until(3)
        await quiet()
        return rig.verifier.accepts(seen.as_(Proposal), kept, 30)

    rig.answers(answers)
    first = (await rig.begin()).as_(Proposal)
    second = await rig.proposal()
    committed = (*first.tokens[:kept], 30)
    assert second.base == len(committed)
    assert second.tokens == written(rig, committed, len(second.tokens))
    assert (rig.drafter.rounds.prepared_used, rig.drafter.rounds.prepared_discarded) == (0, 1)


async def test_a_preparation_longer_than_the_new_m_cap_is_not_proposed(rig: DrafterRig) -> None:
    """R-6.2-8, R-6.2-1, D-D4"""
    watched = Watched(rig)

    async def answers(seen: Seen) -> Answer:
        await watched.until(3)
        await quiet()
        proposal = seen.as_(Proposal)
        (extra,) = written(rig, proposal.tokens, 1)
        return rig.verifier.accepts(proposal, 4, extra, m_cap=2)

    rig.answers(answers)
    await rig.begin()
    assert len((await rig.proposal()).tokens) == 2
    assert rig.drafter.rounds.prepared_discarded == 1


async def test_a_wrong_preparation_keeps_nobody_waiting(rig: DrafterRig) -> None:
    """R-6.2-8: it is given up where it is, and its task ends."""
    watched = Watched(rig)
    watched.may.clear()

    async def answers(seen: Seen) -> Answer:
        await watched.until(2)
        return rig.verifier.accepts(seen.as_(Proposal), 2, 30)

    rig.answers(answers, hold)
    await rig.begin()
    assert (await rig.proposal()).base == 3
    assert watched.cancelled == 1


async def test_a_right_one_is_waited_for(rig: DrafterRig) -> None:
    """R-6.2-8: what was begun is what would begin now."""
    watched = Watched(rig)

    async def answers(seen: Seen) -> Answer:
        watched.may.set()
        await watched.until(3)
        return right(rig, seen)

    watched.may.clear()
    rig.answers(answers)
    await rig.begin()
    second = await rig.proposal()
    assert second.tokens == written(rig, rig.verifier.tokens, len(second.tokens))
    assert [bool(work.after) for work in watched.works[:3]] == [False, True, True]
    assert rig.drafter.rounds.prepared_used == 1


async def test_an_engine_that_fails_ahead_fails_nobody(rig: DrafterRig) -> None:
    """R-6.2-8, D-D4"""
    watched = Watched(rig)
    watched.fails = True
    rig.answers(rig.keeps(4, 3), rig.keeps(1, 5))
    await rig.begin()
    assert [(await rig.proposal()).round for _ in range(2)] == [2, 3]
    assert rig.drafter.status().dropped is None


@pytest.mark.parametrize("action", [Action.SWITCH, Action.FINISH])
async def test_the_end_of_a_session_ends_its_preparation(rig: DrafterRig, action: Action) -> None:
    """R-6.5.2-16, D-D4: no task is left, and nothing more is proposed."""
    watched = Watched(rig)
    watched.may.clear()

    async def answers(seen: Seen) -> Answer:
        await watched.until(2)
        return rig.verifier.accepts(seen.as_(Proposal), 2, 30, action=action)

    rig.answers(answers)
    await rig.begin()
    assert not await rig.dropped()
    await quiet()
    assert watched.cancelled == 1 and not rig.drafter._tasks._tasks
    assert rig.engine.forgotten == [SESSION]


async def test_a_newer_assignment_ends_the_preparation_of_the_older(rig: DrafterRig) -> None:
    """D-N9, D-D4"""
    watched = Watched(rig)
    watched.may.clear()
    await rig.begin()
    await watched.until(2)
    assert await rig.assign(epoch=2) is None
    assert (await rig.proposal()).epoch == 2
    assert watched.cancelled == 1


async def test_rows_of_a_preparation_are_written_after_the_verdict(rig: DrafterRig) -> None:
    """R-6.2-3, R-6.2-4, R-6.2-8, R-5.2-16, D-D4: rows of the tokens proposed, and of no others."""
    rig.contract = RULE_2
    watched = Watched(rig)

    async def answers(seen: Seen) -> Answer:
        await watched.until(3)
        await quiet()
        assert len(rig.verifier.mlc.objects) == 1
        return right(rig, seen)

    rig.answers(answers, hold)
    await rig.begin()
    second = await rig.proposal()
    assert rig.drafter.rounds.prepared_used == 1 and second.q_rows is not None
    octets = rig.verifier.mlc.objects[second.q_rows.partition("/objects/")[2]]
    assert len(octets) == 4 * rig.model.vocab * len(second.tokens)
    for place, token in enumerate(second.tokens):
        row = struct.unpack_from(f"<{rig.model.vocab}f", octets, 4 * rig.model.vocab * place)
        assert row[token] > 0
    puts = [request for request in rig.verifier.mlc.requests if request.method == "PUT"]
    assert len(puts) == 2


@pytest.mark.parametrize(("settings", "wanted_s"), [(True, 0.1), (None, 0.1), (False, 0.14)])
def test_drafting_is_hidden_behind_the_verdict(settings: bool | None, wanted_s: float) -> None:
    """R-6.2-8: a round takes as long as its verdict, in virtual time."""
    starts: list[float] = []

    async def main() -> None:
        async with drafter_rig(machine=DrafterSettings(m=4, predraft=settings)) as rig:
            rig.engine.token_s = rig.engine._token_time_s = 0.01

            async def slow(seen: Seen) -> Answer:
                starts.append(asyncio.get_running_loop().time())
                await asyncio.sleep(0.1)
                return right(rig, seen)

            rig.contract = contract(max_new=1000)
            rig.answers(*[slow] * 150)
            await rig.begin()
            for _ in range(149):
                await rig.proposal()

    run_virtual(main(), seed=1)
    took = [b - a for a, b in zip(starts[-64:], starts[-63:], strict=False)]
    assert sorted(took)[len(took) // 2] == pytest.approx(wanted_s, abs=0.001)


@pytest.mark.parametrize("seed", [None, 7])
async def test_a_text_is_the_same_with_and_without(seed: int | None) -> None:
    """R-6.2-8, R-Z-5: greedy and by the race, over drafters that are right, sometimes or never."""
    sampling = {} if seed is None else {"temperature_milli": 900, "seed": seed}
    texts = []
    for noise in (0.0, 0.1, 1.0):
        for predraft in (True, False):
            async with cluster(drafters=0) as made:
                drafter = made.add_drafter(noise=noise, predraft=predraft)
                await made.ready()
                texts.append(output_digest(await made.text(count=60, **sampling)))
            assert (drafter.rounds.prepared_used > 0) is (predraft and noise < 1)
            assert drafter.rounds.prepared_discarded == 0 or predraft
    assert len(set(texts)) == 1
