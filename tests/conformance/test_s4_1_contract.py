"""Section 4.1: the Session Contract, judged by a real verifier and a real drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

import cbor2
import pytest

from sdcpd.protocol.codec import MEDIA_TYPE, decode, encode, encode_item
from sdcpd.protocol.contract import contract_digest
from sdcpd.protocol.digest import prefix_digest0
from sdcpd.protocol.messages import Contract, Rule, Sampling, SessionState
from sdcpd.protocol.problems import TYPE_PREFIX, parse_problem
from sdcpd.roles.drafter import Drafter
from sdcpd.transport.http import Response
from tests.kit.answers import output_of, refused, state_of, verdict_of
from tests.kit.cluster import ROUTER
from tests.kit.scripted_target import RowsModel, log_row, octets_of, one_hot
from tests.kit.vectors import VECTORS, hashes
from tests.kit.verifier_machine import SESSION
from tests.kit.verifier_wire import DRAFTER, Wire
from tests.kit.wire_peers import add_drafter

CONTRACTS = VECTORS["contracts"]
BAD = TYPE_PREFIX + "sdcp-bad-contract"
PROMPT = (1, 2, 3, 4)
MakeWire = Callable[..., Wire]


def named(entries: list[dict[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("entry", entries, ids=[e["name"] for e in entries])


@pytest.fixture
def wire(make_wire: MakeWire) -> Wire:
    """A verifier of the vectors' model and tokenizer (D-C9)."""
    made = make_wire()
    members = hashes(VECTORS["appendix_a"]["contract"])
    made.engine.info = replace(
        made.engine.info, model=members["target"], tokenizer=members["tokenizer"]
    )
    made.contract = Contract(**{k: tuple(v) if type(v) is list else v for k, v in members.items()})
    return made


def spliced(envelope: dict[str, object], contract: bytes) -> bytes:
    """A message with the octets of a contract in it, unchanged."""
    rest = encode_item(envelope)
    assert rest[0] & 0x1F < 23, "one more member must fit the short head"
    return bytes([rest[0] + 1]) + rest[1:] + encode_item("contract") + contract


def opening(wire: Wire, contract: bytes) -> bytes:
    log = f"{ROUTER}logs/{wire.log_name}"
    envelope = {"session": SESSION, "epoch": 1, "prompt": list(PROMPT), "commit_log": log}
    return spliced(envelope, contract)


def assignment(wire: Wire, contract: bytes, digest: bytes = bytes(32)) -> bytes:
    envelope = {
        "session": SESSION,
        "epoch": 1,
        "verifier": wire.base,
        "drafter": DRAFTER,
        "prompt": list(PROMPT),
        "round": 0,
        "committed": 0,
        "digest": digest,
        "m_init": 4,
    }
    return spliced(envelope, contract)


async def open_with(wire: Wire, contract: bytes) -> Response:
    return await wire.send("router", "POST", "sessions", opening(wire, contract))


async def assign(wire: Wire, body: bytes) -> Response:
    return await wire.clients["router"].request(
        "POST", DRAFTER + "assignments", headers=(("content-type", MEDIA_TYPE),), body=body
    )


@pytest.fixture
async def drafter(wire: Wire) -> Any:
    """A real drafter in the wire's network."""
    made = add_drafter(wire)
    yield made
    await made.aclose()


@named(CONTRACTS["refuse"])
async def test_verifier_refuses(entry: dict[str, Any], wire: Wire) -> None:
    """R-4.1-2, R-4.1-3, R-4.1-4, R-4.1-5, R-4.1-7, R-4.1-8, R-4.1-9, R-4.1-10, R-4.1-11,
    R-4.1-12, R-4.1-13, R-4.1-14, R-4.1-15, R-4.1-16, R-4.1-17, R-4.1-18: and there is no session.
    """
    response = await open_with(wire, bytes.fromhex(entry["cbor"]))
    problem = parse_problem(response.status, response.body, response.header("content-type"))
    assert entry["type"] == BAD and entry["status"] == 422
    refused(problem, 422, "sdcp-bad-contract")
    refused(await wire.name(), 404)
    assert wire.mlc.requests == [], "nothing is read for a contract that cannot be served"


@named(CONTRACTS["refuse"])
async def test_drafter_refuses(entry: dict[str, Any], wire: Wire, drafter: Drafter) -> None:
    """R-4.1-2, R-4.1-3, R-4.1-4, R-4.1-5, R-4.1-7, R-4.1-8, R-4.1-9, R-4.1-10, R-4.1-11,
    R-4.1-12, R-4.1-13, R-4.1-14, R-4.1-15, R-4.1-16, R-4.1-17, R-4.1-18: nothing is drafted.
    """
    response = await assign(wire, assignment(wire, bytes.fromhex(entry["cbor"])))
    problem = parse_problem(response.status, response.body, response.header("content-type"))
    refused(problem, 422, "sdcp-bad-contract")
    assert drafter.sessions == []


@named(CONTRACTS["accept"])
async def test_verifier_accepts(entry: dict[str, Any], wire: Wire) -> None:
    """R-4.1-3, R-4.1-5, R-4.1-7, R-4.1-9, R-4.1-10, R-4.1-11, R-4.1-12, R-4.1-13, R-4.1-21:
    whatever is allowed is served, and d[0] is that of the vector's digest.
    """
    response = await open_with(wire, bytes.fromhex(entry["cbor"]))
    assert response.status == 201
    digest = prefix_digest0(bytes.fromhex(entry["digest"]), PROMPT)
    assert decode(SessionState, response.body).digest == digest


@named([e for e in CONTRACTS["accept"] if "drafters" not in e["members"]])
async def test_drafter_accepts(entry: dict[str, Any], wire: Wire, drafter: Drafter) -> None:
    """R-4.1-5, R-4.1-7, R-4.1-9, R-4.1-10, R-4.1-11, R-4.1-12, R-4.1-13, R-4.1-19: the digest in
    the assignment is the vector's, so a drafter that computes another one refuses.
    """
    digest = prefix_digest0(bytes.fromhex(entry["digest"]), PROMPT)
    response = await assign(wire, assignment(wire, bytes.fromhex(entry["cbor"]), digest))
    assert response.status == 204


@pytest.mark.parametrize("entry", CONTRACTS["same_content"], ids=lambda e: e["name"] + e["of"])
async def test_digest_covers_the_content(entry: dict[str, Any], wire: Wire) -> None:
    """R-4.1-20, R-4.1-21: any encoding of one contract gives one d[0], and is its repetition."""
    response = await open_with(wire, bytes.fromhex(entry["cbor"]))
    assert response.status == 201
    digest = prefix_digest0(bytes.fromhex(entry["digest"]), PROMPT)
    assert decode(SessionState, response.body).digest == digest
    plain = next(e for e in CONTRACTS["accept"] if e["name"] == entry["of"])
    assert (await open_with(wire, bytes.fromhex(plain["cbor"]))).status == 200


async def test_appendix_a_through_the_wire(wire: Wire) -> None:
    """R-4.1-19: the session-state of Appendix A's contract and prompt has its d[0]."""
    response = await open_with(wire, bytes.fromhex(VECTORS["appendix_a"]["contract_cbor"]))
    assert decode(SessionState, response.body).digest.hex() == VECTORS["appendix_a"]["d"][0]


async def test_unknown_key_makes_no_session(wire: Wire) -> None:
    """R-4.1-16, R-4.1-17: `note` in the contract, `min_p` in its sampling, both by name."""
    value = cbor2.loads(encode(wire.contract))
    for key, changed in (("note", {"note": 1}), ("min_p", {"sampling": {"min_p": 1}})):
        response = await open_with(wire, cbor2.dumps({**value, **changed}))
        assert response.status == 422
        assert BAD.encode() in response.body and key.encode() in response.body
        refused(await wire.name(), 404)


@pytest.mark.parametrize("key", ["rule", "sampling", "top_k"])
async def test_a_key_twice_in_maps_of_indefinite_length(wire: Wire, key: str) -> None:
    """R-4.1-18: they are searched as well, the contract and the sampling inside it (D-E1)."""
    contract = encode(replace(wire.contract, sampling=Sampling(top_k=3)))
    sampling = encode_item({"top_k": 3})
    value = 3 if key == "top_k" else cbor2.loads(contract)[key]
    twice = encode_item(key) + encode_item(value)

    def written(within: bytes, after: bytes) -> bytes:
        nested = b"\xbf" + sampling[1:] + within + b"\xff"
        return b"\xbf" + contract[1:].replace(sampling, nested) + after + b"\xff"

    wrong = written(twice, b"") if key == "top_k" else written(b"", twice)
    assert (await open_with(wire, wrong)).status == 422
    assert (await open_with(wire, written(b"", b""))).status == 201


@pytest.mark.parametrize("rule", [0, 3, 191, 192, 201, 255, 256, 2**32 + 1])
async def test_rules_that_are_not_served(wire: Wire, rule: int) -> None:
    """R-4.1-4: 1, 2 and 200 are; no other number is, however large."""
    refused(await wire.open(contract=replace(wire.contract, rule=rule)), 422, "sdcp-bad-contract")


@pytest.mark.parametrize("rule", [Rule.GREEDY, Rule.SPECULATIVE_SAMPLING, Rule.RACE])
async def test_rules_that_are_served(wire: Wire, rule: Rule) -> None:
    """R-4.1-4"""
    contract = replace(wire.contract, rule=rule, sampling=Sampling(seed=1))
    state_of(await wire.open(contract=contract))


async def test_the_contract_never_changes(wire: Wire) -> None:
    """R-4.1-1, R-4.1-22: a policy is no part of it, and the chain goes on as it began."""
    contract = replace(wire.contract, rule=Rule.RACE, sampling=Sampling(seed=1))
    start = state_of(await wire.open(contract=contract))
    state_of(await wire.name(contract=contract))
    state_of(await wire.policy(1, seed=2, temperature_milli=700))
    merged = replace(contract, sampling=Sampling(seed=2, temperature_milli=700))
    refused(await wire.name(contract=merged, m_init=2), 422, "sdcp-bad-contract")
    assert state_of(await wire.name(contract=contract)).digest == start.digest
    found = verdict_of(await wire.propose([0, 0]))
    digest = prefix_digest0(contract_digest(contract), (1, 2, 3))
    assert digest == start.digest
    for token in found.emitted:
        digest = sha256(digest + token.to_bytes(4, "big")).digest()
    assert found.digest == digest


async def test_low_ratio_0_is_another_contract_that_behaves_alike(make_wire: MakeWire) -> None:
    """R-4.1-9: absent and 0 have different digests, and a = 1 of 4 is low in neither."""
    seen = []
    for members in ({}, {"low_ratio": 0}):
        wire = make_wire(members=members)
        await wire.ready()
        seen.append(wire.served().machine.state_message().digest)
        assert verdict_of(await wire.propose(wire.bad(4, good=1))).low == 0
        assert verdict_of(await wire.propose(wire.bad(4))).low == 1
    assert seen[0] != seen[1]


async def test_m_max_bounds_proposals(make_wire: MakeWire) -> None:
    """R-4.1-5: from 1 to 64 tokens, and never one more."""
    for m_max in (1, 64):
        wire = make_wire(members={"m_max": m_max, "max_new": 1000})
        await wire.ready(m_init=m_max)
        refused(await wire.propose([0] * (m_max + 1)), 422, "sdcp-limit")
        assert verdict_of(await wire.propose(wire.good(m_max))).accepted == m_max


async def test_max_new_0_is_finished_at_once(make_wire: MakeWire) -> None:
    """R-4.1-6: output is empty and final; nobody is named, and no proposal is taken (D-C3)."""
    wire = make_wire(members={"max_new": 0})
    opened = state_of(await wire.open())
    assert (opened.round, opened.committed, opened.state) == (0, 0, 3)
    output = output_of(await wire.output())
    assert (output.tokens, output.final, output.finish) == ((), True, 4)
    refused(await wire.name(), 410, "sdcp-session-closed")
    refused(await wire.propose([1]), 403, "sdcp-not-assigned")


async def test_max_new_bounds_the_output(make_wire: MakeWire) -> None:
    """R-4.1-6: five tokens and no more, whatever was accepted."""
    wire = make_wire(members={"max_new": 5})
    await wire.ready()
    verdict_of(await wire.propose(wire.good(2)))
    verdict_of(await wire.propose(wire.good(4)))
    output = output_of(await wire.output())
    assert len(output.tokens) == 5 and output.final


@named(VECTORS["target_distribution"]["cases"])
async def test_target_distribution(
    entry: dict[str, Any], make_wire: MakeWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-4.1-23, R-4.1-24, R-4.1-25: p measured from outside, by the draws that accept each token."""
    wire = make_wire(
        model=RowsModel([log_row(entry["model"])]),
        members={
            "rule": Rule.SPECULATIVE_SAMPLING,
            "sampling": Sampling(**entry["sampling"]),
            "low_rounds": 1000,
            "max_new": 1000,
        },
    )
    draws: list[float] = []
    monkeypatch.setattr("secrets.randbits", lambda bits: draws.pop(0) * 2**bits)
    await wire.ready()
    margin = VECTORS["target_distribution"]["tolerance"]
    for token, p in enumerate(entry["p"]):
        q_rows = wire.put(f"q{token}", octets_of([one_hot(token, wire.model.vocab)]))
        for draw, accepted in ((p - margin, 1), (p + margin, 0)):
            if 0 <= draw < 1:
                draws[:] = [draw, 0.0]
                found = verdict_of(await wire.propose([token], q_rows=q_rows))
                assert found.accepted == accepted, (token, draw)


@pytest.mark.parametrize("rule", [Rule.SPECULATIVE_SAMPLING, Rule.RACE])
async def test_temperature_0_is_greedy(rule: Rule, make_wire: MakeWire) -> None:
    """R-4.1-24: the same text as rule 1, ties to the smallest identifier."""
    wire = make_wire(members={"rule": rule, "sampling": Sampling(temperature_milli=0, seed=1)})
    await wire.ready()
    uniform = [1 / wire.model.vocab] * wire.model.vocab
    for propose in (wire.good, wire.bad, lambda m: wire.bad(m, good=2)):
        tokens = propose(3)
        q_rows = wire.put("q", octets_of([uniform] * len(tokens)))
        verdict_of(await wire.propose(tokens, q_rows=q_rows))
    output = output_of(await wire.output())
    assert len(output.tokens) == 4 + 1 + 3
    assert list(output.tokens) == wire.model.text((1, 2, 3), len(output.tokens))
