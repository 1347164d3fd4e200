"""Sections 6.4 and D-Z7: a seed is the verifier's own affair under rule 2, and shared under 200."""

from __future__ import annotations

import hashlib
import hmac
import math
import struct
from collections.abc import Callable

import pytest

from sdcpd.protocol.acceptance import draw_from, target_distribution
from sdcpd.protocol.messages import Rule, Sampling
from tests.kit.answers import verdict_of
from tests.kit.cluster import cluster
from tests.kit.verifier_wire import Wire

MakeWire = Callable[..., Wire]
ROUNDS = 200


def from_seed(seed: int, session: bytes, index: int) -> float:
    """What a drafter that derives its values from the session's seed would draw with (D-A7)."""
    message = b"SDCP-DRAFT-1\x00" + session + struct.pack(">I", index)
    octets = hmac.new(seed.to_bytes(8, "big"), message, hashlib.sha256).digest()
    return (int.from_bytes(octets[:8], "big") >> 11) / 2**53


@pytest.mark.parametrize("seeded", [True, False])
async def test_acceptance_does_not_depend_on_how_the_drafter_draws(
    make_wire: MakeWire, seeded: bool
) -> None:
    """R-6.4-12: with the drafter's values from the same seed, as often as the distributions say."""
    seed = 5
    profile = Sampling(temperature_milli=1500, seed=seed if seeded else None)
    wire = make_wire(
        members={
            "rule": Rule.SPECULATIVE_SAMPLING,
            "sampling": profile,
            "max_new": 10_000,
            "low_rounds": 10_000,
        }
    )
    await wire.ready()
    expected = variance = 0.0
    accepted = 0
    for index in range(ROUNDS):
        p = target_distribution(wire.model.scores(wire.served().machine.tokens), profile)
        flat = struct.unpack(f"<{len(p)}f", struct.pack(f"<{len(p)}f", *[1 / len(p)] * len(p)))
        token = draw_from(flat, from_seed(seed, wire.served().machine.session, index))
        q_rows = wire.put(f"q{index}", struct.pack(f"<{len(p)}f", *flat))
        overlap = math.fsum(min(x, y) for x, y in zip(p, flat, strict=True))
        expected, variance = expected + overlap, variance + overlap * (1 - overlap)
        accepted += verdict_of(await wire.propose([token], q_rows=q_rows)).accepted
    assert abs(accepted - expected) < 5 * math.sqrt(variance)  # one run in a million


@pytest.mark.parametrize("seed", [1, 2**64 - 1])
async def test_a_drafter_equal_to_the_target_wins_every_race(seed: int) -> None:
    """R-Z-5: every proposed token is accepted, at every output index."""
    async with cluster() as c:
        assert len(await c.text(temperature_milli=1000, seed=seed)) == 40
        counts = c.verifiers["https://v0.test/"].rounds.as_json()
        assert counts["accepted"] == counts["drafted"] > 20
        assert counts["rounds"] > 3


async def test_a_drafter_with_another_model_loses_some() -> None:
    """R-Z-5: and costs nothing but acceptance."""
    async with cluster(noise=0.5) as c:
        text = await c.text(temperature_milli=1000, seed=3)
        counts = c.verifiers["https://v0.test/"].rounds.as_json()
        assert 0 < counts["accepted"] < counts["drafted"] and len(text) == 40
