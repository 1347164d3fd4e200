"""Section 6.4: acceptance rules 1 and 2, through proposals to a real verifier."""

from __future__ import annotations

import hmac
import math
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from sdcpd.protocol.acceptance import draw_from
from sdcpd.protocol.messages import Action, Rule, Sampling, Verdict
from tests.kit.answers import output_of, state_of, until, verdict_of
from tests.kit.scripted_target import ExactTarget, RowsModel, octets_of, one_hot
from tests.kit.vectors import VECTORS
from tests.kit.verifier_machine import SESSION
from tests.kit.verifier_wire import Wire

MakeWire = Callable[..., Wire]
RULE2 = VECTORS["rule2"]
P = [0.5, 0.25, 0.125, 0.125]


async def advance(wire: Wire, n: int, token: int) -> None:
    """Commit n of a token of which the target is certain; under rule 2 so is the drafter."""
    if n:
        tokens = [token] * (n - 1) or [(token + 1) % wire.model.vocab]
        q_rows = wire.put("first", octets_of([one_hot(t, wire.model.vocab) for t in tokens]))
        assert verdict_of(await wire.propose(tokens, q_rows=q_rows)).committed == n


def check(found: Verdict, entry: dict[str, Any]) -> None:
    assert found.accepted == entry["a"]
    assert list(found.emitted) == entry["emitted"]
    assert found.committed == entry["committed"]
    assert (found.action is Action.FINISH) is entry["finished"]


@pytest.mark.parametrize("entry", VECTORS["rule1"], ids=lambda e: e["name"])
async def test_rule_1(entry: dict[str, Any], make_wire: MakeWire) -> None:
    """R-6.4-1, R-6.4-2, R-6.4-3, R-6.3-26, R-6.3-27, R-6.3-28, R-6.3-29"""
    vocab = len(entry["p_rows"][0]) if "p_rows" in entry else 16
    rows = entry.get("p_rows") or [one_hot(token, vocab) for token in entry["argmax"]]
    before = [one_hot(0, vocab)] * entry["n"]
    wire = make_wire(
        model=RowsModel([*before, *rows]),
        members={"stop": tuple(entry["stop"]), "max_new": entry["max_new"]},
    )
    await wire.ready(m_init=8)
    await advance(wire, entry["n"], 0)
    found = verdict_of(await wire.propose(entry["tokens"]))
    check(found, entry)
    if not entry["finished"]:
        assert found.emitted[-1] == entry["additional"]
    assert output_of(await wire.output(entry["n"])).tokens == found.emitted


async def test_rule_1_gives_one_text_whoever_proposes(make_wire: MakeWire) -> None:
    """R-6.4-4: perfect, wrong and middling drafters: the same tokens and the same last digest."""
    ends = set()
    for good in (0, 1, 2, 3, 4):
        wire = make_wire(members={"low_rounds": 99, "max_new": 30})
        await wire.ready()
        while not wire.served().machine.closed:
            verdict_of(await wire.propose(wire.bad(4, good=good)))
        tokens = output_of(await wire.output()).tokens
        ends.add((tokens, wire.commits()[-1].digest))
    assert len(ends) == 1
    assert list(tokens) == wire.model.text((1, 2, 3), 30)


async def test_rule_1_ignores_the_profile(make_wire: MakeWire) -> None:
    """R-6.4-5: any temperature, top_k and top_p leave the text as it is."""
    texts = set()
    for sampling in (
        None,
        Sampling(temperature_milli=2000, top_k=3, top_p_milli=100, seed=3),
        Sampling(temperature_milli=1),
    ):
        wire = make_wire(members={"sampling": sampling} if sampling else {})
        await wire.ready()
        for _ in range(4):
            verdict_of(await wire.propose(wire.bad(4, good=3)))
        texts.add(output_of(await wire.output()).tokens)
    assert len(texts) == 1


def rule2_wire(make_wire: MakeWire, rows: Sequence[Sequence[float]], **members: Any) -> Wire:
    return make_wire(
        model=RowsModel(rows),
        engine_kind=ExactTarget,
        members={"rule": Rule.SPECULATIVE_SAMPLING, "low_rounds": 9999, "max_new": 9999, **members},
    )


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the operating system's generator gives next, as values in [0, 1)."""
    values: list[float] = []
    monkeypatch.setattr("secrets.randbits", lambda bits: values.pop(0) * 2**bits)
    return values


@pytest.mark.parametrize("entry", RULE2["cases"], ids=lambda e: e["name"])
async def test_rule_2(entry: dict[str, Any], make_wire: MakeWire, draws: list[float]) -> None:
    """R-6.4-6, R-6.4-7, R-6.4-8, R-6.4-15, R-6.4-17, R-6.4-18: by exactly the draws of the
    vector, which come from the operating system's generator and from nowhere else.
    """
    before = [one_hot(0, 4)] * entry["n"]
    wire = rule2_wire(
        make_wire,
        [*before, *entry["p"]],
        stop=tuple(entry["stop"]),
        max_new=entry["max_new"],
    )
    await wire.ready(m_init=8)
    draws[:] = [0.5] * entry["n"]
    await advance(wire, entry["n"], 0)
    draws[:] = [*entry["r"], entry["u"]]
    q_rows = wire.put("q", bytes.fromhex(entry["q_rows"]))
    found = verdict_of(await wire.propose(entry["tokens"], q_rows=q_rows))
    check(found, entry)
    assert draws == [], "one value a test up to the first rejection, and one for what follows"


@pytest.mark.parametrize("entry", RULE2["seeded"])
async def test_rule_2_with_a_seed(entry: dict[str, Any], make_wire: MakeWire) -> None:
    """R-6.4-13, R-6.4-14: the round, i and purpose of each value give the vector's verdict."""
    assert entry["session"] == SESSION.hex()
    model = RowsModel([one_hot(0, 4)])
    wire = rule2_wire(make_wire, [one_hot(0, 4)], sampling=Sampling(seed=int(entry["seed"])))
    wire.engine.model = model
    await wire.ready()
    certain = wire.put("certain", octets_of([one_hot(0, 4)]))
    for _ in range(entry["round"] - 1):
        verdict_of(await wire.propose([0], q_rows=certain))
    model.begin(entry["p"], len(wire.served().machine.tokens))
    q_rows = wire.put("q", octets_of(entry["q"]))
    found = verdict_of(await wire.propose(entry["tokens"], q_rows=q_rows))
    assert (found.round, found.accepted) == (entry["round"], entry["a"])
    assert list(found.emitted) == entry["emitted"]


async def test_rule_2_self_decoding_with_a_seed(make_wire: MakeWire) -> None:
    """R-6.4-13, R-6.4-14: rounds 4 to 6 alone, i = 1 and purpose 1 each (D-A4)."""
    entries = RULE2["self_decoded"]
    certain = one_hot(0, 4)
    wire = rule2_wire(
        make_wire,
        [certain] * 3 + [entries[0]["p"]],
        sampling=Sampling(seed=int(entries[0]["seed"])),
        low_rounds=3,
        fallback=(3,),
        self_load=100,
        self_max=3,
    )
    await wire.ready()
    wrong = wire.put("wrong", octets_of([one_hot(1, 4)]))
    actions = [verdict_of(await wire.propose([1], q_rows=wrong)).action for _ in range(3)]
    assert actions[-1] is Action.SELF_DECODE
    await until(lambda: wire.events)
    found = [(record.round, list(record.emitted)) for record in wire.commits()[3:]]
    assert found == [(entry["round"], entry["emitted"]) for entry in entries]


async def test_a_seed_repeats_a_session(make_wire: MakeWire) -> None:
    """R-6.4-13: same seed, session id and proposals: the same verdicts; another seed: others."""
    assert await text(make_wire, seed=5) == await text(make_wire, seed=5)
    assert await text(make_wire, seed=5) != await text(make_wire, seed=6)


async def test_without_a_seed_runs_differ(make_wire: MakeWire) -> None:
    """R-6.4-17: two identical unseeded runs of forty rounds, whatever Python's own generator gives."""
    state = random.getstate()
    random.seed(1)
    first = await text(make_wire)
    random.seed(1)
    second = await text(make_wire)
    random.setstate(state)
    assert first != second


async def text(make_wire: MakeWire, **sampling: int) -> list[Verdict]:
    wire = rule2_wire(make_wire, [[0.25] * 4], sampling=Sampling(**sampling))
    await wire.ready()
    q_rows = wire.put("q", octets_of([P, P]))
    return [verdict_of(await wire.propose([0, 1], q_rows=q_rows)) for _ in range(40)]


async def test_a_drafter_with_the_same_seed_gains_nothing(make_wire: MakeWire) -> None:
    """R-6.4-12: its own values from the contract's seed leave acceptance at sum min(p, q)."""
    seed, rounds = 99, 300
    q = [0.1, 0.2, 0.3, 0.4]
    wire = rule2_wire(make_wire, [P], sampling=Sampling(seed=seed))
    await wire.ready()
    q_rows = wire.put("q", octets_of([q]))
    exact = struct.unpack("<4f", octets_of([q]))
    accepted = 0
    for round_ in range(1, rounds + 1):
        label = b"SDCP-DRAFT-1\x00" + SESSION + struct.pack(">IIB", round_, 1, 0)
        octets = hmac.digest(seed.to_bytes(8, "big"), label, "sha256")
        token = draw_from(exact, (int.from_bytes(octets[:7], "big") >> 3) / 2**53)
        accepted += verdict_of(await wire.propose([token], q_rows=q_rows)).accepted
    alpha = sum(map(min, P, q))
    deviation = abs(accepted - rounds * alpha) / math.sqrt(rounds * alpha * (1 - alpha))
    assert deviation < 4
    assert state_of(await wire.name()).round == rounds
