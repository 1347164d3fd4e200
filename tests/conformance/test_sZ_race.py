"""Rule 200 (D-Z7): one text for each seed, whoever drafts and whatever happens."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from sdcpd.engine.fake import FakeModel
from sdcpd.protocol import acceptance
from sdcpd.protocol.messages import Rule, Sampling
from sdcpd.protocol.uris import session_path_id
from sdcpd.protocol.verifier_state import VerifierSettings
from tests.kit.answers import output_of, refused, state_of, until, verdict_of
from tests.kit.cluster import ROUTER, cluster
from tests.kit.failover import fence, resume_of, second
from tests.kit.scripted_target import ExactTarget, RowsModel, one_hot
from tests.kit.vectors import VECTORS
from tests.kit.verifier_wire import Wire

MakeWire = Callable[..., Wire]
RACE = VECTORS["race"]
PROFILE = Sampling(temperature_milli=4000, seed=77)
MEMBERS = {"rule": Rule.RACE, "sampling": PROFILE, "max_new": 24, "low_rounds": 999}


@pytest.mark.parametrize("entry", RACE["noise"])
def test_noise(entry: dict[str, Any]) -> None:
    """R-Z-1: keys and uniforms, bit for bit."""
    key = acceptance.noise_key(int(entry["seed"]), entry["k"])
    assert key == int(entry["key"], 16)
    assert acceptance.uniform(key, entry["token"]) == float.fromhex(entry["u_hex"])


def race(make_wire: MakeWire, rows: Sequence[Sequence[float]], seed: str) -> Wire:
    """A target with these distributions, whose verifier goes by that seed."""
    return make_wire(
        model=RowsModel(rows),
        engine_kind=ExactTarget,
        members={"rule": Rule.RACE, "sampling": Sampling(seed=int(seed)), "low_rounds": 99},
    )


async def advance(wire: Wire, n: int) -> None:
    """Commit n tokens of which the target is certain."""
    for _ in range(n):
        assert len(verdict_of(await wire.propose([1])).emitted) == 1


@pytest.mark.parametrize("entry", RACE["winners"])
async def test_winners(entry: dict[str, Any], make_wire: MakeWire) -> None:
    """R-Z-1: the token that a verifier commits at index k of the output, not of the round."""
    k = entry["k"]
    wire = race(make_wire, [one_hot(0, 4)] * (k - 1) + [entry["p"]], entry["seed"])
    await wire.ready()
    await advance(wire, k - 1)
    wrong = (entry["winner"] + 1) % 4
    found = verdict_of(await wire.propose([wrong]))
    assert (found.accepted, found.emitted) == (0, (entry["winner"],))


@pytest.mark.parametrize("entry", RACE["rounds"])
async def test_rounds(entry: dict[str, Any], make_wire: MakeWire) -> None:
    """R-Z-1: what is accepted of a proposal, and what follows it."""
    wire = race(make_wire, [one_hot(0, 4)] * entry["base"] + entry["p"], entry["seed"])
    await wire.ready()
    await advance(wire, entry["base"])
    found = verdict_of(await wire.propose(entry["tokens"]))
    assert found.accepted == entry["accepted"]
    assert list(found.emitted) == entry["emitted"]
    assert found.emitted[-1] == entry["additional"]


def alone(model: FakeModel, count: int = 24) -> list[int]:
    """The text that the definition gives: the winner of each index, one after another."""
    tokens = [1, 2, 3]
    for k in range(1, count + 1):
        p = acceptance.target_distribution(model.scores(tokens), PROFILE)
        assert PROFILE.seed is not None
        tokens.append(acceptance.winner(p, PROFILE.seed, k))
    return tokens[3:]


def proposed(kind: str, wire: Wire, m: int, session: bytes) -> list[int]:
    """What each kind of drafter makes of the prefix."""
    tokens = list(wire.served(session).machine.tokens)
    right = alone(wire.model)[len(tokens) - 3 :]
    chooser = random.Random(len(tokens))
    made = {
        "perfect": right[:m] or [0],
        "wrong": [(token + 1) % 32 for token in right[:m]],
        "random": [chooser.randrange(32) for _ in range(m)],
        "n-gram": (tokens * m)[-m:],
    }
    return made[kind]


@pytest.mark.parametrize("m", [1, 2, 5, 8])
@pytest.mark.parametrize("kind", ["perfect", "wrong", "random", "n-gram"])
async def test_one_text_whoever_drafts(kind: str, m: int, make_wire: MakeWire) -> None:
    """R-Z-2: four kinds of drafter, M from 1 to m_max, two session ids: the tokens of the definition."""
    for session in (bytes(16), bytes(range(16, 32))):
        wire = make_wire(members=MEMBERS)
        log = f"{ROUTER}logs/{session_path_id(session)}"
        state_of(await wire.open(session=session, commit_log=log))
        state_of(await wire.name(session=session, m_init=8))
        while not wire.served(session).machine.closed:
            m_cap = wire.served(session).machine._limit
            tokens = proposed(kind, wire, min(m, m_cap), session)
            found = verdict_of(await wire.propose(tokens, session=session))
            if kind == "perfect":
                assert found.accepted == len(tokens)
        assert list(wire.mlc.tokens(session_path_id(session))) == alone(wire.model)


async def test_one_text_without_a_drafter(make_wire: MakeWire) -> None:
    """R-Z-2: the verifier alone."""
    wire = make_wire(
        members={**MEMBERS, "self_load": 100}, config={"machine": VerifierSettings(0.0, None)}
    )
    state_of(await wire.open())
    await until(lambda: wire.served().machine.closed)
    assert list(output_of(await wire.output()).tokens) == alone(wire.model)


async def test_one_text_over_self_decoding_and_failover(make_wire: MakeWire) -> None:
    """R-Z-2: rounds, a period alone, rounds, another verifier, and rounds again."""
    members = {**MEMBERS, "low_rounds": 1, "fallback": (3, 1), "self_load": 100, "self_max": 4}
    wire = make_wire(members=members)
    await wire.ready()
    session = wire.served().machine.session
    verdict_of(await wire.propose(proposed("perfect", wire, 3, session)))
    verdict_of(await wire.propose(proposed("wrong", wire, 2, session)))
    await until(lambda: wire.events)
    state_of(await wire.name())
    verdict_of(await wire.propose(proposed("perfect", wire, 2, session)))
    assert len(wire.commits()) == 7
    fence(wire, 2)
    other = second(make_wire, wire, members=members)
    state_of(await other.open(epoch=2, resume=resume_of(wire)))
    state_of(await other.name(epoch=2))
    while not other.served().machine.closed:
        verdict_of(await other.propose(proposed("perfect", other, 3, session), epoch=2))
    assert list(output_of(await other.output()).tokens) == alone(wire.model)


async def test_another_seed_is_another_text(make_wire: MakeWire) -> None:
    """R-Z-2: and the text does depend on the seed."""
    texts = set()
    for seed in range(5):
        wire = make_wire(
            members={**MEMBERS, "sampling": Sampling(temperature_milli=4000, seed=seed)}
        )
        await wire.ready()
        verdict_of(await wire.propose([0, 0]))
        for _ in range(5):
            verdict_of(await wire.propose([0]))
        texts.add(output_of(await wire.output()).tokens[:6])
    assert len(texts) == 5


async def test_the_text_has_the_targets_distribution(make_wire: MakeWire) -> None:
    """R-Z-3: four hundred seeds at a real verifier, a drafter that is always wrong: chi-square."""
    p, counts = [0.4, 0.3, 0.2, 0.1], Counter[int]()
    wire = race(make_wire, [p], "0")
    sessions = 400
    for seed in range(sessions):
        session = seed.to_bytes(16, "big")
        contract = replace(wire.contract, sampling=Sampling(seed=seed), max_new=1)
        changes = {"session": session, "contract": contract}
        log = f"{ROUTER}logs/{session_path_id(session)}"
        state_of(await wire.open(commit_log=log, **changes))
        state_of(await wire.name(**changes))
        counts[verdict_of(await wire.propose([3], session=session)).emitted[0]] += 1
    chi_square = sum((counts[t] - sessions * x) ** 2 / (sessions * x) for t, x in enumerate(p))
    assert chi_square < 21.11, "exceeded once in 10,000 times by a right machine"


async def test_a_seed_is_required(make_wire: MakeWire) -> None:
    """R-Z-4: at session-open 422, at a policy 400; with one both are taken."""
    without = make_wire(members={"rule": Rule.RACE, "sampling": Sampling(temperature_milli=500)})
    refused(await without.open(), 422, "sdcp-bad-contract")
    wire = make_wire(members=MEMBERS)
    await wire.ready()
    refused(await wire.policy(2, temperature_milli=500), 400)
    state_of(await wire.policy(2, temperature_milli=500, seed=1))


async def test_a_drafter_with_the_targets_model_is_always_right() -> None:
    """R-Z-5: a real drafter role: every token that it proposes is accepted."""
    async with cluster() as c:
        texts = await asyncio.gather(
            *(c.text(temperature_milli=3000, seed=seed, count=20) for seed in range(4))
        )
        counts = c.verifiers["https://v0.test/"].rounds.as_json()
        assert counts["accepted"] == counts["drafted"] > 0
        assert len({tuple(text) for text in texts}) == 4
