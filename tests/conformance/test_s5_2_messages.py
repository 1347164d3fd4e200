"""Section 5.2: unknown keys, members of the moment, and the vectors at a verifier of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cbor2
import pytest

from sdcpd.engine.fake import FakeModel, FakeTarget
from sdcpd.protocol.codec import MEDIA_TYPE, decode, encode, encode_tokens
from sdcpd.protocol.digest import extend
from sdcpd.protocol.messages import (
    Assignment,
    Proposal,
    Resume,
    Sampling,
    SessionOpen,
    SessionState,
    Verdict,
)
from sdcpd.transport.http import Response
from sdcpd.transport.loopback import LoopbackClient
from tests.kit.answers import state_of, verdict_of
from tests.kit.cddl import validate
from tests.kit.cluster import ROUTER, peer
from tests.kit.drafter_rig import RULE_2, drafter_rig
from tests.kit.router_rig import opened, router_rig
from tests.kit.scripted import Seen
from tests.kit.scripted_target import RowsModel, one_hot
from tests.kit.verifier_machine import SESSION
from tests.kit.verifier_wire import Wire

VECTORS = json.loads((Path(__file__).parents[1] / "vectors.json").read_text())
MESSAGES = VECTORS["messages"]
IGNORED = {e["name"]: e for e in MESSAGES["accept_and_ignore"]}
D1 = "https://d1.example:8443/"
STRANGE: dict[Any, Any] = {
    7: [1.5, None],
    -1: "x",
    b"\x01": {"deep": {"er": cbor2.CBORTag(1234, 1.0)}},
    "unheard": cbor2.CBORTag(0, "2026-11-02T00:00:00Z"),
    "nested": {"f": float("inf"), "t": True, "u": cbor2.undefined},
    (1, 2): 2.5,
}
"""Keys and values that no message defines: each must be carried through and ignored (D-E3)."""


def strange(octets: bytes, *nested: str) -> bytes:
    """The message with strange keys, on top and in the maps named."""
    content = cbor2.loads(octets)
    for name in nested:
        content[name] = {**content[name], **STRANGE}
    return cbor2.dumps({**STRANGE, **content})


def answer(octets: bytes) -> Response:
    return Response(200, (("content-type", MEDIA_TYPE),), octets)


class VectorTarget(FakeTarget):
    """Has the digests of the vectors (D-C9), and writes what their example has."""

    def __init__(self, _: FakeModel) -> None:
        outputs = (17, 42, 7, 9, 13, 5)
        super().__init__(RowsModel([one_hot(t, 64) for t in outputs], prompt=4))
        contract = VECTORS["appendix_a"]["contract"]
        digests = [bytes.fromhex(contract[n].strip("h'")) for n in ("target", "tokenizer")]
        self.info = replace(self.info, model=digests[0], tokenizer=digests[1])


@pytest.fixture
async def example(make_wire: Callable[..., Wire]) -> Wire:
    """Appendix A's session after round 1: n = 2, and d1.example drafts."""
    wire = make_wire(engine_kind=VectorTarget, members={"stop": (2,), "max_new": 256})
    wire.clients["d1"] = LoopbackClient(wire.network, peer("drafter", "d1", D1))
    state = state_of(await wire.open(prompt=(1, 2, 3, 4)))
    assert state.digest.hex() == VECTORS["appendix_a"]["d"][0]
    state_of(await wire.name(drafter=D1, prompt=(1, 2, 3, 4)))
    found = verdict_of(await wire.propose([17], who="d1", drafter=D1))
    assert found.digest.hex() == VECTORS["appendix_a"]["d"][2]
    return wire


@pytest.mark.parametrize("name", [n for n, e in IGNORED.items() if e["rule"] == "proposal"])
async def test_proposals_with_unknown_keys_are_served(example: Wire, name: str) -> None:
    """R-5.2-1, R-5.2-2, D-E1: the example's verdict, as without the key."""
    octets = bytes.fromhex(IGNORED[name]["cbor"])
    response = await example.send("d1", "POST", "proposals", octets)
    assert response.status == 200
    verdict = decode(Verdict, response.body)
    wanted = VECTORS["appendix_a"]["example_round"]
    assert (verdict.emitted, verdict.accepted, verdict.committed) == ((7, 9, 13), 2, 5)
    assert list(verdict.emitted) == wanted["emitted"]


@pytest.mark.parametrize("entry", MESSAGES["malformed_proposal"], ids=lambda e: e["name"])
async def test_malformed_proposals_change_nothing_in_the_example(
    example: Wire, entry: dict[str, Any]
) -> None:
    """R-5.2-6: from the assigned drafter, in the right round, and still 400."""
    before = example.snapshot()
    response = await example.send("d1", "POST", "proposals", bytes.fromhex(entry["cbor"]))
    assert response.status == entry["status"] and example.snapshot() == before


async def test_a_policy_with_unknown_keys_is_served(example: Wire) -> None:
    """R-5.2-1, R-5.2-2: in policy.sampling, which is not the contract's."""
    (entry,) = [e for e in IGNORED.values() if e["rule"] == "policy"]
    octets = bytes.fromhex(entry["cbor"])
    path = f"sessions/{example.log_name}/policy"
    for body in (octets, strange(octets, "sampling")):
        assert (await example.send("router", "POST", path, body)).status == 200


async def test_a_status_with_unknown_keys_is_served() -> None:
    """R-5.2-1, R-5.2-2: and counts like any other."""
    (entry,) = [e for e in IGNORED.values() if e["rule"] == "status"]
    async with router_rig() as rig:
        await rig.report("v0")
        name = cbor2.loads(bytes.fromhex(entry["cbor"]))["instance"]
        for body in (bytes.fromhex(entry["cbor"]), strange(bytes.fromhex(entry["cbor"]))):
            assert await rig.put_status("d0", name, body) == 204
        await rig.generate()
        await rig.d0.next("POST", "assignments")


async def test_requests_to_a_verifier_with_unknown_keys(wire: Wire) -> None:
    """R-5.2-1, R-5.2-2, D-E3: openings (resume too), namings, proposals (status too)."""
    resume = Resume(round=0, committed=0, digest=bytes(32), committed_tokens=ROUTER + "objects/x/y")
    message = SessionOpen(
        session=SESSION,
        epoch=1,
        contract=wire.contract,
        prompt=(1, 2, 3),
        commit_log=f"{ROUTER}logs/{wire.log_name}",
    )
    opened_ = await wire.send("router", "POST", "sessions", strange(encode(message)))
    assert opened_.status == 201
    state = decode(SessionState, opened_.body)
    again = replace(message, epoch=2, resume=replace(resume, digest=state.digest))
    body = strange(encode(again), "resume")
    assert (await wire.send("router", "POST", "sessions", body)).status == 201
    named = strange(encode(wire.assignment(epoch=2)))
    path = wire.path_of(SESSION, "drafter")
    assert (await wire.send("router", "PUT", path, named)).status == 200
    proposal = wire.proposal(wire.good(2), epoch=2)
    response = await wire.send("drafter", "POST", "proposals", strange(encode(proposal), "status"))
    assert decode(Verdict, response.body).accepted == 2


async def test_answers_to_a_drafter_and_its_assignment_with_unknown_keys() -> None:
    """R-5.2-1, R-5.2-2: assignments (sampling too), verdicts, and output."""
    async with drafter_rig() as rig:
        rig.holds((9, 8), round_=3)
        rig.verifier.script("GET", ".*", lambda _: answer(strange(encode(rig.verifier.output(0)))))

        def verdict(seen: Seen) -> Response:
            return answer(strange(encode(rig.verifier.accepts(seen.as_(Proposal), 1, 5))))

        rig.answers(verdict)
        body = strange(encode(rig.assignment(sampling=Sampling(top_k=3))), "sampling")
        assert (await rig.post(body)).status == 204
        first, second = await rig.proposal(), await rig.proposal()
        assert (first.round, second.round, second.base) == (4, 5, 4)
        content = cbor2.loads(encode(rig.assignment(epoch=9)))
        content["contract"] = {**content["contract"], "unheard": 1}
        refusal = await rig.post(cbor2.dumps(content))
        assert refusal.status == 422 and b"#sdcp-bad-contract" in refusal.body


async def test_answers_to_a_router_and_its_reader_with_unknown_keys() -> None:
    """R-5.2-1, R-5.2-2: session-states, output and events."""
    async with router_rig() as rig:

        def state(seen: Seen) -> Response:
            found = rig.v0.default(seen)
            assert isinstance(found, SessionState)
            return answer(strange(encode(found)))

        rig.v0.script("POST", "sessions", state)
        rig.v0.script("PUT", ".*/drafter", state)
        rig.v0.script("GET", ".*", lambda _: answer(strange(encode(rig.v0.output(0)))))
        reader = await rig.running()
        event = cbor2.dumps(
            {
                **STRANGE,
                "session": rig.v0.session,
                "epoch": 1,
                "kind": 3,
                "committed": 0,
                "digest": rig.v0.digest,
            }
        )
        assert (await rig.post_event("v0", event)).status == 204
        await rig.v0.next("PUT", ".*/drafter")
        rig.commit((4, 5))
        first = await anext(aiter(reader))
        assert list(first.tokens) == [4, 5]


# ---- members


async def test_a_prompt_by_reference_is_the_same_prompt(wire: Wire) -> None:
    """R-5.2-7, D-M4: one digest, and one text, whichever way it came."""
    inline = state_of(await wire.open())
    other = b"\x05" * 16
    wire.mlc.objects["x/prompt"] = encode_tokens((1, 2, 3))
    by_reference = state_of(
        await wire.open(
            session=other, prompt=ROUTER + "objects/x/prompt", commit_log=ROUTER + "logs/other"
        )
    )
    assert by_reference.digest == inline.digest
    for session in (SESSION, other):
        state_of(await wire.name(session=session))
        proposal = wire.proposal(wire.model.text((1, 2, 3), 3), session=session)
        assert (
            verdict_of(await wire.ask("drafter", "POST", "proposals", proposal, Verdict)).accepted
            == 3
        )


@pytest.mark.parametrize("member", ["session", "epoch", "contract", "prompt", "commit_log"])
async def test_an_opening_needs_its_members(wire: Wire, member: str) -> None:
    """R-5.2-8, D-E7: 400 without any of them, commit_log included."""
    message = SessionOpen(
        session=SESSION,
        epoch=1,
        contract=wire.contract,
        prompt=(1, 2, 3),
        commit_log=f"{ROUTER}logs/{wire.log_name}",
    )
    content = cbor2.loads(encode(message))
    del content[member]
    response = await wire.send("router", "POST", "sessions", cbor2.dumps(content))
    assert response.status == 400 and not wire.verifier.sessions


async def test_session_states_are_of_the_moment(any_wire: Wire) -> None:
    """R-5.2-9: after two rounds PUT, an opening repeated and a policy say what the verdict said."""
    wire = any_wire
    await wire.ready()
    verdict_of(await wire.propose(wire.good(3)))
    last = verdict_of(await wire.propose(wire.bad(2)))
    for state in (
        await wire.name(m_init=3),
        await wire.open(),
        await wire.policy(9, temperature_milli=0),
    ):
        found = state_of(state)
        assert (found.session, found.epoch, found.round) == (SESSION, 1, 2)
        assert (found.committed, found.digest) == (last.committed, last.digest)


async def test_the_members_of_every_verdict(wire: Wire) -> None:
    """R-5.2-10, R-5.2-11, R-5.2-12, R-3-2: bounds, lengths and digests through a long run."""
    await wire.ready()
    digest, committed = wire.served().machine.chain.digest, 0
    for kept in (0, 1, 2, 3, 4, 0, 4, 2):
        tokens = [*wire.good(kept), *wire.bad(4, kept)[kept:]][:4] if kept < 4 else wire.good(4)
        limit = wire.served().machine._limit
        verdict = verdict_of(await wire.propose(tokens[:limit]))
        assert verdict.accepted == min(kept, limit) and len(verdict.emitted) == verdict.accepted + 1
        digest, committed = extend(digest, verdict.emitted), committed + len(verdict.emitted)
        assert (verdict.committed, verdict.digest) == (committed, digest)
        assert 0 <= verdict.load <= 100 and verdict.action in (0, 1, 2, 3, 4, 5)
        if verdict.action in (2, 3):
            state_of(await wire.name())


async def test_what_a_drafter_sends_is_a_proposal() -> None:
    """R-5.2-14, R-6.4-10: by the draft's CDDL, with its own base URI and status."""
    async with drafter_rig() as rig:
        rig.contract = RULE_2
        seen = await rig.begin()
        validate("Proposal", seen.request.body)
        content = cbor2.loads(seen.request.body)
        assert content["drafter"] == rig.base and "q_rows" in content
        assert content["status"]["instance"] == rig.drafter.instance
        assert content["status"]["role"] == 1 and content["status"]["ttl_ms"] == 3000


async def test_what_a_router_sends_is_as_the_cddl_has_it() -> None:
    """R-5.2-18, D-E9: session-open, assignment and policy; optional members absent, not empty."""
    async with router_rig() as rig:
        reader = await rig.running()
        for seen in rig.v0.seen + rig.d0.seen:
            if seen.message is not None:
                validate(type(seen.message).__name__, seen.request.body)
        content = cbor2.loads(rig.v0.seen[0].request.body)
        assert "resume" not in content and "sampling" not in content["contract"]
        assert opened(rig.v0.seen[0]).epoch == 1
        assert isinstance(rig.d0.seen[0].message, Assignment)
        await reader.cancel()
