"""Section 6.1 at a real verifier: opening a session, and naming its drafter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from sdcpd.engine.fake import FakeModel, FakeTarget
from sdcpd.protocol.codec import encode
from sdcpd.protocol.commit_log import CommitRecord, encode_record
from sdcpd.protocol.contract import contract_digest
from sdcpd.protocol.digest import extend, prefix_digest0
from sdcpd.protocol.messages import SessionOpen, Verdict
from sdcpd.protocol.problems import ProblemDocument
from sdcpd.protocol.uris import session_path_id
from sdcpd.transport.http import Peer, Request, Response
from sdcpd.transport.loopback import LoopbackClient
from tests.kit.answers import output_of, refused, state_of, until, verdict_of
from tests.kit.cluster import ROUTER, peer
from tests.kit.failover import fence, resume_of
from tests.kit.mlc import never
from tests.kit.vectors import VECTORS
from tests.kit.verifier_machine import SESSION
from tests.kit.verifier_wire import OTHER, Wire, with_contract

MakeWire = Callable[..., Wire]


class GatedTarget(FakeTarget):
    """Scores only when the test lets it."""

    def __init__(self, model: FakeModel) -> None:
        super().__init__(model)
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = 0

    async def score(self, work: Any) -> Any:
        """See TargetEngine."""
        self.waiting += 1
        await self.gate.wait()
        return await super().score(work)


# ---- opening


async def test_a_fresh_session(any_wire: Wire) -> None:
    """R-6.1-4: round 0, committed 0, d[0], and the session and epoch asked for."""
    state = state_of(await any_wire.open())
    d0 = prefix_digest0(contract_digest(any_wire.contract), (1, 2, 3))
    assert (state.session, state.epoch) == (SESSION, 1)
    assert (state.round, state.committed, state.digest) == (0, 0, d0)


@pytest.mark.parametrize("member", ["target", "tokenizer"])
async def test_another_model_or_tokenizer_is_refused(wire: Wire, member: str) -> None:
    """R-6.1-2, R-6.1-3, D-C5: 422 sdcp-bad-contract, and the session is unknown afterwards."""
    wrong = with_contract(wire, **{member: b"\x66" * 32})
    refused(await wire.open(contract=wrong), 422, "sdcp-bad-contract")
    refused(await wire.name(contract=wrong), 404)
    assert wire.verifier.counts["opened"] == 0


@pytest.mark.parametrize(
    "prompt_kv",
    [
        ROUTER + "objects/x/nowhere",
        ROUTER + "objects/x/garbage",
        "https://evil.test/objects/x/kv",
        "http://r0.test/objects/x/kv",
        "",
    ],
)
async def test_prompt_kv_never_changes_anything(wire: Wire, prompt_kv: str) -> None:
    """R-6.1-5, D-O10: missing, garbage or outside the MLC: computed, and nobody else contacted."""
    contacted: list[Request] = []

    async def evil(request: Request) -> Response:
        contacted.append(request)
        return Response(200, (), b"kv")

    wire.network["https://evil.test/"] = evil
    wire.mlc.objects["x/garbage"] = b"\xff" * 100
    state_of(await wire.open(prompt_kv=prompt_kv))
    state_of(await wire.name())
    good = wire.model.text((1, 2, 3), 4)
    found = verdict_of(await wire.propose(good[:3]))
    assert list(found.emitted) == good and contacted == []


LONG = tuple(i * 7 % 32 for i in range(80))


@pytest.mark.parametrize(("covered", "computed"), [(80, 0), (79, 0), (50, 29), (1, 78)])
async def test_prompt_kv_that_is_usable_is_used(
    make_wire: MakeWire, covered: int, computed: int
) -> None:
    """R-6.1-5: what the object covers is not computed, and the output is the same."""
    wire = make_wire()
    state_of(await wire.open(prompt=LONG))
    octets = await wire.engine.export(SESSION, 1, covered)
    assert octets is not None and wire.engine.prefilled == [79]
    other = make_wire(mlc=wire.mlc)
    state_of(await other.open(prompt=LONG, prompt_kv=wire.put("kv", octets)))
    assert other.engine.prefilled == [computed]
    state_of(await other.name())
    good = wire.model.text(LONG, 4)
    assert list(verdict_of(await other.propose(good[:3])).emitted) == good


class HandedTarget(FakeTarget):
    """Notes what it is handed."""

    kv: bytes | None = b"not asked"

    async def prepare(
        self, session: Any, epoch: int, prefix: Any, *, kv: Any = None, blocks: Any = ()
    ) -> int:
        """See TargetEngine."""
        self.kv = kv
        return await super().prepare(session, epoch, prefix, kv=kv, blocks=blocks)


@pytest.mark.parametrize("how", ["largest", "too large", "gone", "silent", "other scope"])
async def test_prompt_kv_that_cannot_be_had(
    make_wire: MakeWire, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """R-6.1-5, R-9-11, D-O10: bounded in size and time; what can't be had is computed."""
    monkeypatch.setattr("sdcpd.roles.target_kv.LOAD_S", 0.01)
    wire = make_wire(engine_kind=HandedTarget, members={"scope": b"s" * 16})
    engine = wire.engine
    assert isinstance(engine, HandedTarget)
    most = engine.kv_octets(80) + 4096
    name = f"{session_path_id((b'o' if how == 'other scope' else b's') * 16)}/kv"
    if how != "gone":
        wire.mlc.objects[name] = bytes(most + (how == "too large"))
    if how == "silent":

        async def silent(request: Request) -> Response | None:
            return await never(request) if request.path.endswith("/kv") else None

        wire.mlc.before = silent
    state_of(await wire.open(prompt=LONG, prompt_kv=f"{ROUTER}objects/{name}"))
    assert engine.kv == (bytes(most) if how == "largest" else None)
    assert engine.prefilled == [79]
    asked = [request for request in wire.mlc.requests if request.path.endswith("/kv")]
    assert len(asked) == (how != "other scope")


async def test_an_opening_repeated_tells_the_current_state(any_wire: Wire) -> None:
    """R-6.1-6, D-O1: 200 with round 2; nothing is restarted."""
    wire = any_wire
    await wire.ready()
    for _ in range(2):
        last = verdict_of(await wire.propose(wire.good(2)))
    message = SessionOpen(
        session=SESSION,
        epoch=1,
        contract=wire.contract,
        prompt=(1, 2, 3),
        commit_log=f"{ROUTER}logs/{wire.log_name}",
    )
    before = wire.snapshot()
    assert (await wire.send("router", "POST", "sessions", encode(message))).status == 200
    state = state_of(await wire.open())
    assert (state.round, state.committed, state.digest) == (2, last.committed, last.digest)
    assert wire.snapshot() == before and wire.verifier.counts["opened"] == 1
    assert verdict_of(await wire.propose(wire.good(1))).round == 3


async def test_a_repetition_waits_for_the_first(wire: Wire) -> None:
    """R-6.1-6, D-O1: both get the one session."""
    answers = await asyncio.gather(*(wire.open() for _ in range(4)))
    assert len({state_of(answer).digest for answer in answers}) == 1
    assert wire.verifier.counts["opened"] == 1


@pytest.mark.parametrize("member", ["prompt", "contract", "commit_log"])
async def test_other_content_in_the_same_epoch_is_a_conflict(wire: Wire, member: str) -> None:
    """R-6.1-7, D-O2: a plain 409; the session goes on unharmed."""
    await wire.ready()
    verdict_of(await wire.propose(wire.good(2)))
    before = wire.snapshot()
    other: dict[str, Any] = {
        "prompt": (1, 2, 4),
        "contract": with_contract(wire, max_new=63),
        "commit_log": ROUTER + "logs/other",
    }
    refused(await wire.open(**{member: other[member]}), 409)
    assert wire.snapshot() == before
    assert verdict_of(await wire.propose(wire.good(2))).round == 2


async def test_epochs_of_openings(wire: Wire) -> None:
    """R-6.1-8, D-O3: 0 is 400, a lower one 409 sdcp-stale-epoch, a higher one re-opens."""
    refused(await wire.open(epoch=0), 400)
    await wire.ready()
    verdict_of(await wire.propose(wire.good(2)))
    fence(wire, 2)
    state = state_of(await wire.open(epoch=2, resume=resume_of(wire)))
    assert (state.epoch, state.round, state.committed) == (2, 1, 3)
    refused(await wire.open(epoch=1), 409, "sdcp-stale-epoch")
    refused(await wire.open(epoch=0), 400)
    assert wire.served().machine.epoch == 2


async def test_an_epoch_below_the_sessions_is_stale(wire: Wire) -> None:
    """R-6.1-8, D-O3: also before the log knows of the higher one."""
    state_of(await wire.open(epoch=2))
    refused(await wire.open(epoch=1), 409, "sdcp-stale-epoch")
    assert wire.served().machine.epoch == 2


async def test_an_epoch_below_the_logs_is_stale(wire: Wire) -> None:
    """R-6.1-8, D-O3: also at a verifier that has never seen the session."""
    fence(wire, 3)
    refused(await wire.open(epoch=2), 409, "sdcp-stale-epoch")
    assert state_of(await wire.open(epoch=3)).epoch == 3


async def test_a_log_with_commits_needs_a_resume(wire: Wire) -> None:
    """R-6.1-9, D-O5: 409 sdcp-stale-base with the log's state; nothing is appended or opened."""
    digest = prefix_digest0(contract_digest(wire.contract), (1, 2, 3))
    for round_, tokens in ((1, (4, 5)), (2, (6,))):
        digest = extend(digest, tokens)
        committed = 2 if round_ == 1 else 3
        record = CommitRecord(
            epoch=1, round=round_, emitted=tokens, committed=committed, digest=digest
        )
        wire.mlc.append(wire.log_name, encode_record(record))
    before = wire.mlc.logs[wire.log_name]
    state = refused(await wire.open(), 409, "sdcp-stale-base").session_state
    assert state is not None and state.session == SESSION
    assert (state.epoch, state.round, state.committed, state.digest) == (1, 2, 3, digest)
    assert wire.mlc.logs[wire.log_name] == before
    refused(await wire.name(), 404)


async def test_a_missing_log_is_an_empty_one(wire: Wire) -> None:
    """R-6.1-10, D-O13: the first round creates it with If-None-Match: *."""
    await wire.ready()
    assert wire.log_name not in wire.mlc.logs
    verdict_of(await wire.propose(wire.good(2)))
    first = next(request for request in wire.mlc.requests if request.method == "PUT")
    assert first.header("if-none-match") == "*" and first.header("if-match") is None
    assert [record.round for record in wire.commits()] == [1]


# ---- naming


async def test_before_any_put_nobody_may_propose(any_wire: Wire) -> None:
    """R-6.1-15, D-N6: 403 sdcp-not-assigned."""
    state_of(await any_wire.open())
    for who in ("drafter", "other"):
        refused(await any_wire.propose([1], who=who), 403, "sdcp-not-assigned")


async def test_the_latest_assignment_counts(any_wire: Wire) -> None:
    """R-6.1-14: the one named before is no longer the session's drafter."""
    wire = any_wire
    await wire.ready()
    state_of(await wire.name(drafter=OTHER))
    refused(await wire.propose(wire.good(1)), 403, "sdcp-not-assigned")
    assert verdict_of(await wire.propose(wire.good(1), who="other")).round == 1


async def test_put_ignores_what_it_says_of_the_session(wire: Wire) -> None:
    """R-6.1-16, D-N1: the answer is the truth, whatever round and committed the body has."""
    await wire.ready()
    last = verdict_of(await wire.propose(wire.good(2)))
    state = state_of(
        await wire.name(
            drafter=OTHER, round=77, committed=999, digest=b"\x01" * 32, prompt=(9,), sampling=None
        )
    )
    assert (state.round, state.committed, state.digest) == (1, last.committed, last.digest)
    assert verdict_of(await wire.propose(wire.good(2), who="other")).round == 2


async def test_put_sets_the_limit(wire: Wire) -> None:
    """R-6.1-17, D-N2: min(m_init, m_max), until the next verdict."""
    state_of(await wire.open())
    state_of(await wire.name(m_init=2))
    refused(await wire.propose(wire.good(3)), 422, "sdcp-limit")
    verdict_of(await wire.propose(wire.good(2)))
    state_of(await wire.name(m_init=4))
    verdict_of(await wire.propose(wire.good(4)))
    state_of(await wire.name(drafter=OTHER, m_init=64))
    refused(await wire.propose(wire.good(9), who="other"), 422, "sdcp-limit")
    verdict_of(await wire.propose(wire.good(8), who="other"))
    refused(await wire.name(m_init=0), 422)


async def test_an_identical_put_changes_nothing(make_wire: MakeWire) -> None:
    """R-6.1-18, D-N2: after reduce to 2, the same PUT does not bring 4 back."""
    wire = make_wire(members={"low_rounds": 1, "fallback": (1, 2, 5)})
    await wire.ready()
    assert verdict_of(await wire.propose(wire.bad(4))).m_cap == 2
    state_of(await wire.name())
    refused(await wire.propose(wire.bad(4)), 422, "sdcp-limit")
    assert verdict_of(await wire.propose(wire.bad(2))).action == 2
    refused(await wire.propose(wire.good(1)), 403, "sdcp-not-assigned")
    state_of(await wire.name())  # after switch the same PUT is a new assignment
    assert verdict_of(await wire.propose(wire.good(2))).accepted == 2


@pytest.mark.parametrize("entry", VECTORS["uris"]["base_uri_equal"], ids=lambda e: e["b"])
async def test_the_same_drafter_may_be_written_in_another_way(
    make_wire: MakeWire, entry: dict[str, Any]
) -> None:
    """R-6.1-18, D-N2, D-H5: which spelling PUT has decides nothing, only which instance it names."""
    wire = make_wire()
    uris = (*peer("drafter", "d").uris, entry["a"], entry["b"])
    both = Peer("127.0.0.1", uris, (), "d", "00")
    wire.clients["drafter"] = LoopbackClient(wire.network, both)
    await wire.ready(drafter=entry["a"])
    verdict_of(await wire.propose(wire.good(4), drafter=entry["a"]))
    await wire.name(drafter=entry["b"], m_init=1)
    answer = await wire.propose(wire.good(4), drafter=entry["b"])
    if entry["equal"]:
        verdict_of(answer)  # held to what it last saw, not to m_init
    else:
        assert isinstance(answer, ProblemDocument)
        assert answer.suffix in ("sdcp-limit", "sdcp-not-assigned")


async def test_errors_of_put_in_their_order(make_wire: MakeWire) -> None:
    """R-6.1-19, D-N5: unknown 404, epoch 409, closed 410, contract 422; the first that holds."""
    wire = make_wire(members={"max_new": 2})
    other = with_contract(wire, max_new=3)
    refused(await wire.name(epoch=9, contract=other), 404)
    await wire.ready()
    for epoch in (0, 2):
        refused(await wire.name(epoch=epoch, contract=other), 409, "sdcp-stale-epoch")
    refused(await wire.name(contract=other), 422, "sdcp-bad-contract")
    verdict_of(await wire.propose(wire.good(2)))
    refused(await wire.name(epoch=2, contract=other), 409, "sdcp-stale-epoch")
    refused(await wire.name(contract=other), 410, "sdcp-session-closed")


async def test_put_during_a_round_waits_for_it(make_wire: MakeWire) -> None:
    """R-6.1-20, D-N3: the old drafter gets its verdict, and the answer shows that round."""
    wire = make_wire(engine_kind=GatedTarget)
    assert isinstance(wire.engine, GatedTarget)
    engine = wire.engine
    await wire.ready()
    engine.gate.clear()
    good = wire.good(3)
    round_ = asyncio.ensure_future(wire.propose(good))
    await until(lambda: engine.waiting)
    put = asyncio.ensure_future(wire.name(drafter=OTHER))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not put.done() and not round_.done()
    engine.gate.set()
    verdict, state = verdict_of(await round_), state_of(await put)
    assert isinstance(verdict, Verdict) and list(verdict.emitted[:3]) == good
    assert (state.round, state.committed) == (1, verdict.committed)
    refused(await wire.propose(wire.good(1)), 403, "sdcp-not-assigned")
    assert output_of(await wire.output(wait_s=0)).tokens == verdict.emitted
