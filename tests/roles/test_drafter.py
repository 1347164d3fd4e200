"""The drafter's resource, asked by a scripted router and answered by a scripted verifier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from sdcpd.engine.fake import FakeDrafter, FakeModel
from sdcpd.protocol.acceptance import check_rows
from sdcpd.protocol.codec import MEDIA_TYPE, decode, encode, encode_tokens
from sdcpd.protocol.contract import contract_digest
from sdcpd.protocol.digest import extend, prefix_digest0
from sdcpd.protocol.messages import (
    Action,
    Assignment,
    Contract,
    Output,
    Proposal,
    Rule,
    Sampling,
    Verdict,
)
from sdcpd.roles.drafter import Drafter, DrafterConfig
from sdcpd.roles.objects import Objects
from sdcpd.transport.http import Handler, Request, Response
from sdcpd.transport.loopback import LoopbackClient
from tests.kit.cluster import PEERS, ROUTER, peer
from tests.kit.mlc import MemoryMlc
from tests.kit.verifier_machine import SESSION, contract

V0, D0 = "https://v0.test/", "https://d0.test/"
PROMPT = (1, 2)


class Rig:
    """A real drafter; the verifier answers each proposal by `script`."""

    def __init__(self) -> None:
        self.network: dict[str, Handler] = {}
        self.model = FakeModel()
        self.mlc = MemoryMlc()
        client = LoopbackClient(self.network, peer("drafter", "d0", D0))
        self.drafter = Drafter(
            DrafterConfig(D0),
            engine=FakeDrafter(self.model),
            client=client,
            objects=Objects(client, bases=(ROUTER, V0, D0), own=D0),
            peers=PEERS,
            mlc=MemoryMlc(),
            name="d0.x",
        )
        self.network[D0] = self.drafter.listener.handle
        self.network[V0] = self.verifier
        self.proposals: asyncio.Queue[Proposal] = asyncio.Queue()
        self.verdicts: asyncio.Queue[Response] = asyncio.Queue()
        self.outputs: list[str] = []
        self.committed: tuple[int, ...] = ()
        self.contract = contract()

    async def verifier(self, request: Request) -> Response:
        if "/objects/" in request.path:
            return await self.mlc.handle(request)
        if request.path == "/proposals":
            self.proposals.put_nowait(decode(Proposal, request.body))
            return await self.verdicts.get()
        self.outputs.append(request.query)
        message = Output(session=SESSION, epoch=1, from_=0, tokens=self.committed, final=False)
        return Response(200, (("content-type", MEDIA_TYPE),), encode(message))

    def digest(self, contract_: Contract, committed: tuple[int, ...]) -> bytes:
        return extend(prefix_digest0(contract_digest(contract_), PROMPT), committed)

    async def assign(self, *, who: str = "router", **changes: object) -> Response:
        contract_ = changes.get("contract", self.contract)
        assert isinstance(contract_, Contract)
        members: dict[str, object] = {
            "session": SESSION,
            "epoch": 1,
            "contract": contract_,
            "verifier": V0,
            "drafter": D0,
            "prompt": PROMPT,
            "round": 0,
            "committed": len(self.committed),
            "digest": self.digest(contract_, self.committed),
            "m_init": 4,
            **changes,
        }
        message = Assignment(**members)  # type: ignore[arg-type]
        client = LoopbackClient(self.network, peer(who, "x", ROUTER))
        return await client.request(
            "POST",
            D0 + "assignments",
            headers=(("content-type", MEDIA_TYPE),),
            body=encode(message),
        )

    def answer(self, proposal: Proposal, emitted: tuple[int, ...], **changes: object) -> None:
        members: dict[str, object] = {
            "session": SESSION,
            "epoch": 1,
            "round": proposal.round,
            "accepted": len(emitted) - 1,
            "emitted": emitted,
            "committed": proposal.base + len(emitted),
            "digest": extend(proposal.base_digest, emitted),
            "action": Action.CONTINUE,
            "m_cap": 4,
            "low": 0,
            "load": 0,
            **changes,
        }
        verdict = Verdict(**members)  # type: ignore[arg-type]
        self.verdicts.put_nowait(Response(200, (("content-type", MEDIA_TYPE),), encode(verdict)))


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    yield made
    await made.drafter.aclose()


async def test_proposes_and_goes_on_from_the_verdict(rig: Rig) -> None:
    """R-5.1-14, R-5.2-14, R-6.2-5, R-6.2-8, R-6.3-37"""
    assert (await rig.assign()).status == 204
    first = await rig.proposals.get()
    assert (first.round, first.base, first.drafter) == (1, 0, D0)
    assert list(first.tokens) == rig.model.text(PROMPT, len(first.tokens))
    assert first.status.instance == "d0.x"
    rig.answer(first, (first.tokens[0], 30))
    second = await rig.proposals.get()
    prefix = (*PROMPT, first.tokens[0], 30)
    assert (second.round, second.base) == (2, 2)
    assert list(second.tokens) == rig.model.text(prefix, len(second.tokens))


@pytest.mark.parametrize("action", [Action.SWITCH, Action.SELF_DECODE])
async def test_named_again_at_the_very_round_it_stopped(rig: Rig, action: Action) -> None:
    """R-6.2-13, D-N9: after a stop an equal round is a new assignment."""
    await rig.assign()
    first = await rig.proposals.get()
    rig.answer(first, (5,), action=action)
    while rig.drafter.sessions:
        await asyncio.sleep(0)
    rig.committed = (5,)
    assert (await rig.assign(round=1)).status == 204
    assert (await rig.proposals.get()).round == 2


async def test_delayed_duplicate_does_not_rewind(rig: Rig) -> None:
    """R-6.2-13"""
    await rig.assign()
    first = await rig.proposals.get()
    rig.answer(first, (5,))
    second = await rig.proposals.get()
    assert (await rig.assign()).status == 204
    rig.answer(second, (6,))
    assert (await rig.proposals.get()).round == 3


async def test_committed_tokens_from_the_cache_or_from_output(rig: Rig) -> None:
    """R-6.2-14, D-N7"""
    rig.committed = (9, 8, 7)
    rig.mlc.objects["x/tokens"] = encode_tokens(rig.committed)
    await rig.assign(round=2, committed_tokens=V0 + "objects/x/tokens")
    assert (await rig.proposals.get()).base == 3 and rig.outputs == []
    await rig.assign(round=3, committed_tokens=V0 + "objects/x/gone")
    assert (await rig.proposals.get()).round == 4 and rig.outputs == ["from=0"]


async def test_assignments_are_checked(rig: Rig) -> None:
    """R-6.2-12, R-9-3, R-4.1-27, D-N8"""
    assert (await rig.assign(who="verifier")).status == 403
    assert (await rig.assign(digest=bytes(32))).status == 422
    assert (await rig.assign(drafter="https://other.test/")).status == 422
    assert (await rig.assign(m_init=0)).status == 422
    other = await rig.assign(contract=contract(drafters=(bytes(32),)))
    assert other.status == 422 and b"sdcp-bad-contract" in other.body
    assert (await rig.assign(epoch=3)).status == 204
    stale = await rig.assign(epoch=2)
    assert stale.status == 409 and b"sdcp-stale-epoch" in stale.body
    assert rig.drafter.counts["assigned"] == 1


async def test_rows_are_there_before_the_proposal(rig: Rig) -> None:
    """R-3-3, R-5.2-15, R-6.2-3, R-6.4-10: in the verifier's cache, each sampled from its row."""
    rig.contract = contract(
        rule=Rule.SPECULATIVE_SAMPLING, sampling=Sampling(temperature_milli=1000)
    )
    await rig.assign(vocab=rig.model.vocab)
    proposal = await rig.proposals.get()
    assert proposal.q_rows is not None and proposal.q_rows.startswith(V0 + "objects/")
    octets = rig.mlc.objects[proposal.q_rows.split("/objects/")[1]]
    assert len(octets) == 4 * rig.model.vocab * len(proposal.tokens)
    rows = check_rows(octets, rig.model.vocab, proposal.tokens)
    assert all(row[token] > 0 for row, token in zip(rows, proposal.tokens, strict=True))
    rig.answer(proposal, (1,))
    await rig.proposals.get()
    while any(name.endswith(proposal.q_rows[-12:]) for name in rig.mlc.objects):
        await asyncio.sleep(0)  # R-6.3-38: released after the verdict


async def test_dropped_sessions_are_reported_once(rig: Rig) -> None:
    """D-Z5"""
    await rig.assign()
    await rig.proposals.get()
    rig.verdicts.put_nowait(Response(404))
    while rig.drafter.sessions:
        await asyncio.sleep(0)
    assert rig.drafter.status().dropped == (SESSION,)
    assert rig.drafter.status().dropped is None
