"""Section 6.6: sampling policies at a real verifier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cbor2
import pytest

from sdcpd.engine.fake import FakeModel
from sdcpd.protocol.codec import encode
from sdcpd.protocol.messages import Policy, Rule, Sampling, Verdict
from tests.kit.answers import output_of, refused, state_of, verdict_of
from tests.kit.scripted_target import octets_of
from tests.kit.vectors import VECTORS
from tests.kit.verifier_machine import SESSION
from tests.kit.verifier_wire import Wire

MakeWire = Callable[..., Wire]
UNIFORM = octets_of([[0.25] * 4])


def rule2(make_wire: MakeWire, **sampling: int) -> Wire:
    return make_wire(
        model=FakeModel(vocab=4),
        members={
            "rule": Rule.SPECULATIVE_SAMPLING,
            "sampling": Sampling(**sampling),
            "low_rounds": 999,
            "max_new": 999,
        },
    )


async def rounds(wire: Wire, count: int) -> list[Verdict]:
    """Rounds of one token each, of which the drafter knows nothing."""
    q_rows = wire.put("q", UNIFORM)
    return [verdict_of(await wire.propose([i % 4], q_rows=q_rows)) for i in range(count)]


@pytest.mark.parametrize("entry", VECTORS["policy"]["cases"], ids=lambda e: e["name"])
async def test_profiles_by_round(entry: dict[str, Any], make_wire: MakeWire) -> None:
    """R-6.6-2, R-6.6-3, R-6.6-4, R-6.6-5: what each round is scored with, as the engine is told."""
    wire = rule2(make_wire, **entry["contract_sampling"])
    await wire.ready()
    for current in range(6):
        for policy in entry["policies"]:
            if policy["after_round"] == current:
                answer = await wire.policy(policy["from_round"], **policy["sampling"])
                if policy["status"] == 200:
                    assert state_of(answer).round == current
                else:
                    problem = refused(answer, policy["status"], "sdcp-stale-base")
                    assert problem.session_state is not None
                    assert problem.session_state.round == current
        await rounds(wire, 1)
    wanted = [Sampling(**profile) for profile in entry["profile_of_rounds_1_to_6"]]
    assert [work.sampling for work in wire.engine.scored] == wanted


async def test_from_round_must_be_to_come(wire: Wire) -> None:
    """R-6.6-2: after round 3, 3 is refused with the state, and 4 is taken."""
    await wire.ready()
    for _ in range(3):
        last = verdict_of(await wire.propose(wire.good(1)))
    state = refused(await wire.policy(3, top_k=1), 409, "sdcp-stale-base").session_state
    assert state is not None
    assert (state.round, state.committed, state.digest) == (3, last.committed, last.digest)
    assert state_of(await wire.policy(4, top_k=1)).round == 3


async def test_greedy_from_its_round_on(make_wire: MakeWire) -> None:
    """R-6.6-3, R-6.6-7: round r + 1 as if there were none, r + 2 greedy; output only grows."""
    plain, changed = rule2(make_wire, seed=3), rule2(make_wire, seed=3)
    for wire in (plain, changed):
        await wire.ready()
    before = await rounds(changed, 2)
    seen = output_of(await changed.output()).tokens
    state_of(await changed.policy(4, temperature_milli=0))
    assert [*before, *await rounds(changed, 1)] == await rounds(plain, 3)
    prefix = changed.served().machine.tokens[:]
    last = await rounds(changed, 6)
    greedy = [token for verdict in last for token in verdict.emitted]
    assert greedy == changed.model.text(prefix, len(greedy))
    tokens = output_of(await changed.output()).tokens
    assert tokens[: len(seen)] == seen and len(tokens) > len(seen)


async def test_the_profile_is_replaced_whole(make_wire: MakeWire) -> None:
    """R-6.6-4: without a seed in the policy two runs part; with one they do not."""

    async def run(**policy: int) -> list[Verdict]:
        wire = rule2(make_wire, seed=3, temperature_milli=9000)
        await wire.ready()
        state_of(await wire.policy(1, **policy))
        return await rounds(wire, 40)

    assert await run(seed=4) == await run(seed=4)
    assert await run(temperature_milli=9000) != await run(temperature_milli=9000)


async def test_the_later_policy_by_round_wins(make_wire: MakeWire) -> None:
    """R-6.6-5: 5 posted first, then 4; a repetition after round 5 is answered 200."""
    wire = rule2(make_wire, seed=1)
    await wire.ready()
    state_of(await wire.policy(5, top_k=1))
    state_of(await wire.policy(4, top_k=2))
    await rounds(wire, 6)
    assert [work.sampling.top_k for work in wire.engine.scored] == [None, None, None, 2, 1, 1]
    assert state_of(await wire.policy(5, top_k=1)).round == 6
    assert state_of(await wire.policy(4, top_k=2)).round == 6
    refused(await wire.policy(5, top_k=2), 409, "sdcp-stale-base")


async def post(wire: Wire, policy: dict[str, object], who: str = "router") -> int:
    path = f"sessions/{wire.log_name}/policy"
    return (await wire.send(who, "POST", path, cbor2.dumps(policy))).status


async def test_the_rule_stays(wire: Wire) -> None:
    """R-6.6-7: a key `rule` is an unknown one, in the policy and in its profile."""
    await wire.ready()
    policy = cbor2.loads(encode(Policy(session=SESSION, from_round=1, sampling=Sampling())))
    assert await post(wire, {**policy, "rule": 2}) == 200
    assert await post(wire, {**policy, "from_round": 2, "sampling": {"rule": 2}}) == 200
    for _ in range(3):
        found = verdict_of(await wire.propose(wire.good(2)))
        assert found.accepted == 2
    assert {work.rule for work in wire.engine.scored} == {Rule.GREEDY}


@pytest.mark.parametrize("who", ["drafter", "other", "front_end"])
async def test_only_the_router_posts_policies(wire: Wire, who: str) -> None:
    """R-6.6-9: whoever else does changes nothing."""
    await wire.ready()
    policy = cbor2.loads(encode(Policy(session=SESSION, from_round=1, sampling=Sampling(seed=7))))
    assert await post(wire, policy, who) == 403
    verdict_of(await wire.propose(wire.good(1)))
    assert wire.engine.scored[0].sampling == Sampling()


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_p_milli": 1001},
        {"top_k": -1},
        {"temperature_milli": 1.0},
        {"seed": 2**64},
        {"seed": None},
        [],
    ],
    ids=str,
)
async def test_invalid_profiles(wire: Wire, sampling: object) -> None:
    """R-6.6-10: what a defined member may not be is malformed, and changes nothing."""
    await wire.ready()
    assert await post(wire, {"session": SESSION, "from_round": 1, "sampling": sampling}) == 400
    verdict_of(await wire.propose(wire.good(1)))
    assert wire.engine.scored[0].sampling == Sampling()


@pytest.mark.parametrize("unknown", [{"min_p": 1}, {"min_p": 1.5, 7: None}, {"Top_p_milli": []}])
async def test_unknown_keys_of_a_profile(wire: Wire, unknown: dict[object, object]) -> None:
    """R-6.6-10: are ignored, whatever they hold."""
    await wire.ready()
    sampling = {**unknown, "top_k": 1}
    assert await post(wire, {"session": SESSION, "from_round": 1, "sampling": sampling}) == 200
    verdict_of(await wire.propose(wire.good(1)))
    assert wire.engine.scored[0].sampling == Sampling(top_k=1)


async def test_rule_200_keeps_a_seed(make_wire: MakeWire) -> None:
    """R-Z-4: a contract without one is refused, and a policy without one is malformed."""
    wire = make_wire(members={"rule": Rule.RACE})
    refused(await wire.open(), 422, "sdcp-bad-contract")
    seeded = make_wire(members={"rule": Rule.RACE, "sampling": Sampling(seed=0)})
    await seeded.ready()
    refused(await seeded.policy(1, temperature_milli=0), 400)
    verdict_of(await seeded.propose([1]))
    assert seeded.engine.scored[0].sampling == Sampling(seed=0)
    state_of(await seeded.policy(2, seed=1))


async def test_a_policy_for_no_open_session(make_wire: MakeWire) -> None:
    """R-6.6-10, D-Y6: unknown 404, finished 410."""
    wire = make_wire(members={"max_new": 0})
    refused(await wire.policy(1), 404)
    state_of(await wire.open())
    refused(await wire.policy(1), 410, "sdcp-session-closed")
