"""Rule 2 at a real drafter: rows, their leases, and what a slow cache does (5.2, 6.2, 6.4, 8)."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdcpd.protocol.acceptance import verifier_random
from sdcpd.protocol.drafter import DrafterSettings
from sdcpd.protocol.messages import Proposal, Sampling
from sdcpd.protocol.problems import LimitExceeded, QUnavailable
from sdcpd.protocol.speculation import choose_m
from sdcpd.transport.http import Request, Response
from tests.kit.drafter_rig import RULE_2, DrafterRig, drafter_rig
from tests.kit.scripted import Seen, hold
from tests.kit.verifier_machine import SESSION
from tests.sim.clock import run_virtual

VECTORS = json.loads((Path(__file__).parents[1] / "vectors.json").read_text())


@pytest.fixture
async def rig() -> AsyncIterator[DrafterRig]:
    async with drafter_rig() as made:
        made.contract = RULE_2
        yield made


def rows_of(rig: DrafterRig, proposal: Proposal) -> list[tuple[float, ...]]:
    """The object that a proposal refers to, row by row; it must be there now."""
    assert proposal.q_rows is not None
    octets = rig.verifier.mlc.objects[proposal.q_rows.partition("/objects/")[2]]
    vocab = rig.model.vocab
    assert len(octets) == 4 * vocab * len(proposal.tokens)
    return [
        struct.unpack_from(f"<{vocab}f", octets, 4 * vocab * i) for i in range(len(proposal.tokens))
    ]


async def test_rows_are_in_the_cache_when_the_proposal_arrives(rig: DrafterRig) -> None:
    """R-3-3, R-6.2-3, R-5.2-15, R-5.2-16, R-6.4-10: as an object, a row of V for each token."""
    found: list[list[tuple[float, ...]]] = []

    def looks(seen: Seen) -> Any:
        found.append(rows_of(rig, seen.as_(Proposal)))
        return rig.verifier.accepts(seen.as_(Proposal), 1, 3)

    rig.answers(*[looks] * 5, hold)
    proposals = [(await rig.begin()).as_(Proposal)]
    proposals += [await rig.proposal() for _ in range(5)]
    for proposal, rows in zip(proposals, found, strict=False):
        assert proposal.q_rows is not None
        assert proposal.q_rows.startswith(rig.verifier.base + "objects/")
        assert len(rows) == len(proposal.tokens)
        for row, token in zip(rows, proposal.tokens, strict=True):
            assert abs(math.fsum(row) - 1) < 1e-3 and row[token] > 0
    names = [proposal.q_rows for proposal in proposals]
    assert len(set(names)) == len(names)  # written once, under fresh names


async def test_objects_lie_in_the_sessions_scope(rig: DrafterRig) -> None:
    """R-9-10, D-M3: in the contract's scope, or else in one of the session's own."""
    rig.contract = replace(RULE_2, scope=b"\x07" * 16)
    first = (await rig.begin()).as_(Proposal)
    assert first.q_rows is not None and "/objects/BwcHBwcHBwcHBwcHBwcHBw/" in first.q_rows


async def test_the_profile_of_the_assignment_comes_before_the_contracts(rig: DrafterRig) -> None:
    """R-6.6-6, D-Y10: temperature 0 makes rows that are certain."""
    rig.holds()
    assert await rig.assign(sampling=Sampling(temperature_milli=0)) is None
    proposal = await rig.proposal()
    for row, token in zip(rows_of(rig, proposal), proposal.tokens, strict=True):
        assert row[token] == 1.0


async def test_rows_have_the_targets_length(rig: DrafterRig) -> None:
    """R-5.2-15, D-E6: V of the assignment, and no token beyond it."""
    rig.holds()
    assert await rig.assign(vocab=20) is None
    proposal = await rig.proposal()
    assert proposal.q_rows is not None and max(proposal.tokens) < 20
    octets = rig.verifier.mlc.objects[proposal.q_rows.partition("/objects/")[2]]
    assert len(octets) == 4 * 20 * len(proposal.tokens)


async def test_leases_are_held_until_the_verdict_and_released_after(rig: DrafterRig) -> None:
    """R-6.2-4, R-6.3-38, D-M10: written with a lease, renewed at half time, then released."""
    rig.objects.lease_ms = 20
    answered = asyncio.Event()

    async def slow(seen: Seen) -> Any:
        await answered.wait()
        return rig.verifier.accepts(seen.as_(Proposal), 1, 3)

    rig.answers(slow)
    first = (await rig.begin()).as_(Proposal)
    cache = rig.verifier.mlc
    async with asyncio.timeout(10):
        while len(renewals(cache.requests)) < 3:
            await asyncio.sleep(0)
    (written,) = [request for request in cache.requests if request.method == "PUT"]
    assert int(written.header("sdcp-lease") or 0) > 0
    assert rows_of(rig, first)
    assert {request.path for request in renewals(cache.requests)} == {written.path}
    answered.set()
    await rig.proposal()
    async with asyncio.timeout(10):
        while written.path.removeprefix("/objects/") in cache.objects:
            await asyncio.sleep(0)
    releases = [r for r in cache.requests if r.header("sdcp-lease") == "0"]
    assert [request.path for request in releases] == [written.path]


def test_leases_are_renewed_at_half_time() -> None:
    """R-6.2-4, D-M10: through a verdict that takes longer than a lease, in virtual time."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        held: list[tuple[float, int]] = []

        async def noted(request: Request) -> Response | None:
            lease_ms = int(request.header("sdcp-lease") or 0)
            if lease_ms:
                held.append((loop.time(), lease_ms))
            return None

        async with drafter_rig() as rig:
            rig.contract = RULE_2
            rig.verifier.mlc.before = noted
            answered: list[float] = []

            async def slow(seen: Seen) -> Any:
                await asyncio.sleep(50)  # virtual: a verdict that takes its time
                answered.append(loop.time())
                return rig.verifier.accepts(seen.as_(Proposal), 1, 3)

            rig.answers(slow)
            first = (await rig.begin()).as_(Proposal)
            while not answered:
                await asyncio.sleep(1)
            assert rows_of(rig, first)
            until = [time for time, _ in held if time < answered[0]] + answered
            lease_s = held[0][1] / 1000
            assert len(until) > 3 and {ms for _, ms in held} == {held[0][1]}
            for begun, following in itertools.pairwise(until):
                assert following - begun <= lease_s / 2 + 0.01

    run_virtual(main(), seed=1)


def renewals(requests: list[Request]) -> list[Request]:
    return [r for r in requests if r.method == "POST" and r.header("sdcp-lease") == "20"]


@pytest.mark.parametrize("action", [4, 5])
async def test_leases_go_with_the_session(rig: DrafterRig, action: int) -> None:
    """R-6.5.2-29: nothing stays in the cache of a session that is over."""
    rig.answers(rig.keeps(1, 3, action=action))
    await rig.begin()
    async with asyncio.timeout(10):
        while rig.drafter.sessions or rig.verifier.mlc.objects:
            await asyncio.sleep(0)


async def test_rows_go_to_the_verifiers_own_cache_first(rig: DrafterRig) -> None:
    """R-8-2: the fastest that both reach; where it takes none, the drafter's own serves them."""

    async def refuses(request: Request) -> Response | None:
        return Response(507) if request.method == "PUT" else None

    rig.verifier.mlc.before = refuses
    first = (await rig.begin()).as_(Proposal)
    assert first.q_rows is not None and first.q_rows.startswith(rig.base + "objects/")
    assert first.q_rows.partition("/objects/")[2] in rig.mlc.objects
    assert [r.method for r in rig.verifier.mlc.requests] == ["PUT"]


async def test_lost_rows_are_written_again(rig: DrafterRig, monkeypatch: Any) -> None:
    """R-6.2-3, D-D1: under a new name, with the same tokens in the same round."""
    monkeypatch.setattr("sdcpd.protocol.drafter.REPEAT_FIRST_S", 0.001)
    rig.answers(QUnavailable("gone"), QUnavailable("gone"), rig.keeps(1, 3))
    first = (await rig.begin()).as_(Proposal)
    second, third = await rig.proposal(), await rig.proposal()
    assert (first.round, first.tokens) == (second.round, second.tokens)
    assert (third.round, third.tokens) == (first.round, first.tokens)
    assert len({first.q_rows, second.q_rows, third.q_rows}) == 3
    assert rows_of(rig, third) and (await rig.proposal()).round == 2


async def test_a_limit_cuts_the_rows_too(rig: DrafterRig) -> None:
    """R-5.2-15, D-D1 sdcp-limit: a new object with as many rows as there are tokens now."""
    rig.answers(LimitExceeded("", m_cap=2))
    first = (await rig.begin()).as_(Proposal)
    second = await rig.proposal()
    assert (second.round, second.tokens) == (1, first.tokens[:2])
    assert rows_of(rig, second) == rows_of(rig, first)[:2]
    assert second.q_rows != first.q_rows


async def test_a_slow_cache_makes_proposals_shorter() -> None:
    """R-6.2-10: with writes throttled to some rows a second, the mean M falls."""

    async def mean_m(rows_per_s: float | None) -> float:
        async with drafter_rig(verify_s=0.001) as rig:
            rig.contract = RULE_2

            async def throttled(request: Request) -> Response | None:
                if rows_per_s is not None and request.method == "PUT":
                    rows = len(request.body) / (4 * rig.model.vocab)
                    await asyncio.sleep(rows / rows_per_s)  # the bandwidth that is being faked
                return None

            rig.verifier.mlc.before = throttled
            rig.answers(*[lambda s: rig.verifier.accepts(s.as_(Proposal), 4, 1, m_cap=8)] * 8)
            lengths = [len((await rig.begin()).as_(Proposal).tokens)]
            lengths += [len((await rig.proposal()).tokens) for _ in range(8)]
            return sum(lengths) / len(lengths)

    assert await mean_m(20) < await mean_m(None)


@pytest.mark.parametrize("case", VECTORS["speculation_length"]["cases"])
def test_speculation_length_vectors(case: dict[str, float]) -> None:
    """R-6.2-9: the M that commits most a second; ties to the smaller."""
    m = choose_m(case["alpha"], case["t_d"], case["t_v"], int(case["limit"]))
    assert m == case["M"]


def test_of_equal_lengths_the_shortest() -> None:
    """R-6.2-9, D-D6: where more tokens bring and cost nothing."""
    assert choose_m(0.0, 0.0, 1.0, 8) == 1


async def test_the_verifiers_derivation_is_not_the_drafters(rig: DrafterRig) -> None:
    """R-6.4-16, R-6.4-12: the seed predicts no proposed token from its published row."""
    rig.contract = replace(RULE_2, sampling=Sampling(temperature_milli=1000, seed=5))
    rig.answers(*[rig.keeps(1, 3, m_cap=8)] * 30)
    await rig.begin()
    hits = total = 0
    for seen in [await rig.verifier.next("POST", "proposals") for _ in range(29)]:
        proposal = seen.as_(Proposal)
        written = [r for r in rig.verifier.mlc.requests if r.path.endswith(_name(proposal))]
        octets = written[0].body
        for i, token in enumerate(proposal.tokens):
            row = struct.unpack_from(f"<{rig.model.vocab}f", octets, 4 * rig.model.vocab * i)
            for purpose in (0, 1):
                u = verifier_random(5, SESSION, proposal.round, i + 1, purpose)
                hits += _drawn(row, u) == token
                total += 1
    assert total > 100 and hits < total / 2


def _name(proposal: Proposal) -> str:
    assert proposal.q_rows is not None
    return proposal.q_rows.rpartition("/")[2]


def _drawn(row: tuple[float, ...], u: float) -> int:
    reached = 0.0
    for token, q in enumerate(row):
        reached += q
        if reached > u * sum(row):
            return token
    return len(row) - 1


async def test_a_fixed_m_ignores_the_caches_pace() -> None:
    """R-6.2-9: an operator's M is not changed by measured times."""
    async with drafter_rig(machine=DrafterSettings(m=2)) as rig:
        rig.contract = RULE_2
        rig.engine.token_s = 5.0
        rig.answers(*[rig.keeps(1, 3, m_cap=8)] * 2)
        lengths = [len((await rig.begin()).as_(Proposal).tokens)]
        lengths += [len((await rig.proposal()).tokens) for _ in range(2)]
        assert lengths == [2, 2, 2]
