"""Section 6.3, steps 7 and 8: what is committed, and that nothing is seen before it is written."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from sdcpd.engine.fake import FakeModel
from sdcpd.protocol.commit_log import FenceRecord, encode_record
from sdcpd.protocol.contract import contract_digest
from sdcpd.protocol.digest import extend, prefix_digest0
from sdcpd.protocol.messages import Action, Resume, Rule, Verdict
from sdcpd.transport.http import Request, Response
from tests.kit.answers import output_of, refused, state_of, verdict_of
from tests.kit.cluster import ROUTER
from tests.kit.scripted_target import RowsModel, octets_of, one_hot
from tests.kit.vectors import VECTORS
from tests.kit.verifier_wire import OTHER, Wire

MakeWire = Callable[..., Wire]


class Gate:
    """Holds writes to logs until it is opened."""

    def __init__(self, wire: Wire) -> None:
        self.opened, self.reached = asyncio.Event(), asyncio.Event()
        wire.mlc.before = self._before

    async def _before(self, request: Request) -> Response | None:
        if request.method == "PUT" and "/logs/" in request.path:
            self.reached.set()
            await self.opened.wait()
        return None


async def test_appendix_a_round(make_wire: MakeWire) -> None:
    """R-6.3-26, R-A-3: two of three accepted, one more after them, five committed, not low."""
    example = VECTORS["appendix_a"]["example_round"]
    committed = VECTORS["appendix_a"]["committed"]
    rows = [one_hot(token, 50) for token in [*committed, *example["argmax"]]]
    wire = make_wire(
        model=RowsModel(rows, prompt=4),
        members={"m_max": 8, "max_new": 256, "stop": (2,), "low_rounds": 3},
    )
    prompt = tuple(VECTORS["appendix_a"]["prompt"])
    state_of(await wire.open(prompt=prompt))
    state_of(await wire.name(prompt=prompt))
    assert verdict_of(await wire.propose(committed[:1])).emitted == tuple(committed)
    found = verdict_of(await wire.propose(example["tokens"]))
    assert found.accepted == example["a"] and found.emitted == (7, 9, 13)
    assert (found.committed, found.low, found.action) == (5, 0, Action.CONTINUE)


async def test_max_new_is_never_exceeded(make_wire: MakeWire) -> None:
    """R-6.3-28: five tokens wanted, two rounds of four accepted: finish at exactly five."""
    wire = make_wire(members={"max_new": 5})
    await wire.ready()
    first = verdict_of(await wire.propose(wire.good(4)))
    assert first.committed == 5 and first.action is Action.FINISH
    output = output_of(await wire.output())
    assert (len(output.tokens), output.final, output.finish) == (5, True, Action.FINISH)
    assert first.accepted == 4


async def test_accepted_is_not_truncated(make_wire: MakeWire) -> None:
    """R-6.3-27, R-6.3-29: a stop token second of three: accepted 3, emitted 2, stop included."""
    model = RowsModel([one_hot(token, 16) for token in (7, 2, 9, 5)])
    wire = make_wire(model=model, members={"stop": (2,)})
    await wire.ready()
    found = verdict_of(await wire.propose([7, 2, 9]))
    assert (found.accepted, found.emitted, found.committed) == (3, (7, 2), 2)
    assert found.action is Action.FINISH
    assert output_of(await wire.output()).tokens == (7, 2)
    assert wire.commits()[0].emitted == (7, 2)


async def test_nothing_is_seen_before_the_record_is_written(wire: Wire) -> None:
    """R-6.3-30, R-6.3-31, R-6.7-4: while the append waits there is no verdict and no token."""
    await wire.ready()
    gate = Gate(wire)
    tokens = wire.good(3)
    round_ = asyncio.ensure_future(wire.propose(tokens))
    poll = asyncio.ensure_future(wire.output())
    await gate.reached.wait()
    for _ in range(50):
        await asyncio.sleep(0)
    assert not round_.done() and not poll.done()
    assert output_of(await wire.output(wait_s=0)).tokens == ()
    again = asyncio.ensure_future(wire.propose(tokens))
    gate.opened.set()
    found = verdict_of(await round_)
    assert [record.emitted for record in wire.commits()] == [found.emitted]
    assert output_of(await poll).tokens == found.emitted
    assert await again == found


async def test_records_are_the_rounds(wire: Wire) -> None:
    """R-6.3-32, R-6.8-3: epoch, round, emitted, n and d[n] of each, chained from d[0]."""
    await wire.ready()
    digest = prefix_digest0(contract_digest(wire.contract), (1, 2, 3))
    found = [verdict_of(await wire.propose(wire.bad(3, good=i % 3))) for i in range(9)]
    n = 0
    for verdict, record in zip(found, wire.records(), strict=True):
        n += len(verdict.emitted)
        digest = extend(digest, verdict.emitted)
        assert record == type(record)(
            epoch=1, round=verdict.round, emitted=verdict.emitted, committed=n, digest=digest
        )  # type: ignore[call-arg]
    assert [record.round for record in wire.commits()] == list(range(1, 10))


@pytest.mark.parametrize("status", [409, 412])
async def test_a_fence_ends_the_authority_for_good(wire: Wire, status: int) -> None:
    """R-6.3-33: the round is discarded, whichever way the store refuses, and all is refused."""
    await wire.ready()
    first = verdict_of(await wire.propose(wire.good(2)))

    async def fence(request: Request) -> Response | None:
        if request.method != "PUT":
            return None
        wire.mlc.append(wire.log_name, encode_record(FenceRecord(epoch=2)))
        wire.mlc.before = None
        return Response(status)

    wire.mlc.before = fence
    refused(await wire.propose(wire.good(2)), 409, "sdcp-stale-epoch")
    for _ in range(2):
        refused(await wire.propose([1]), 409, "sdcp-stale-epoch")
        refused(await wire.propose([1], round=1), 409, "sdcp-stale-epoch")
        refused(await wire.output(), 409, "sdcp-stale-epoch")
        refused(await wire.name(), 409, "sdcp-stale-epoch")
        refused(await wire.name(drafter=OTHER), 409, "sdcp-stale-epoch")
        refused(await wire.policy(9), 409, "sdcp-stale-epoch")
        refused(await wire.open(), 409, "sdcp-stale-epoch")
    assert wire.mlc.tokens(wire.log_name) == first.emitted
    assert len(wire.commits()) == 1 and wire.events == []


@pytest.mark.parametrize("written", [True, False])
async def test_an_append_of_unknown_outcome(make_wire: MakeWire, written: bool) -> None:
    """R-6.3-34: the same tokens, drawn once, in one record, whether it was written or not."""
    wire = make_wire(model=FakeModel(vocab=4), members={"rule": Rule.SPECULATIVE_SAMPLING})
    await wire.ready()
    q_rows = wire.put("q", octets_of([[0.25] * 4] * 2))
    if written:
        wire.own_client.lose_answers = 1
    else:
        gate = Gate(wire)
    round_ = asyncio.ensure_future(wire.propose([1, 2], q_rows=q_rows))
    if not written:
        await gate.reached.wait()
        wire.mlc.before = _unreachable
        gate.opened.set()
    answer = await round_
    scored = len(wire.engine.scored)
    wire.mlc.before = None
    while not isinstance(answer, Verdict):
        refused(answer, 503)
        answer = await wire.propose([3], round=1, base=0)
        await asyncio.sleep(0.02)  # a drafter's own backoff
    assert len(wire.engine.scored) == scored == 1, "nothing is drawn a second time"
    assert [record.emitted for record in wire.commits()] == [answer.emitted]
    assert output_of(await wire.output()).tokens == answer.emitted


async def _unreachable(request: Request) -> Response | None:
    return Response(503)


async def test_fifty_proposals_at_once_commit_each_round_once(wire: Wire) -> None:
    """R-6.3-35: for rounds r and r + 1, right and wrong ones: the log is a clean chain."""
    await wire.ready()
    chooser = random.Random(7)
    for _ in range(4):
        at = wire.served().machine
        first, base, digest = at.round + 1, at.committed, at.chain.digest
        text = wire.good(12)

        async def one(first: int, base: int, digest: bytes, text: list[int]) -> object:
            ahead = chooser.randrange(3)
            tokens = chooser.choice([text[:1], text[:3], [0], [5, 5]])
            changes: dict[str, object] = {"round": first + chooser.randrange(2)}
            if ahead:
                changes |= {"base": base + ahead, "base_digest": extend(digest, text[:ahead])}
            else:
                changes |= {"base": base, "base_digest": digest}
            return await wire.propose(tokens, **changes)

        answers = await asyncio.gather(*(one(first, base, digest, text) for _ in range(50)))
        by_round: dict[int, set[object]] = {}
        for answer in answers:
            if isinstance(answer, Verdict):
                by_round.setdefault(answer.round, set()).add(answer)
        assert all(len(verdicts) == 1 for verdicts in by_round.values()), "one verdict a round"
        assert first in by_round
        at = wire.served().machine
        assert at.round >= first
    rounds = [record.round for record in wire.commits()]
    assert rounds == list(range(1, len(rounds) + 1))
    tokens = wire.mlc.tokens(wire.log_name)
    assert list(tokens) == wire.model.text((1, 2, 3), len(tokens))
    assert output_of(await wire.output()).tokens == tokens


@pytest.mark.parametrize("reference", [None, "gone", "garbage", "foreign"])
async def test_target_kv_changes_nothing(make_wire: MakeWire, reference: str | None) -> None:
    """R-6.3-39: a failover with and without it goes on with the same text (D-O10)."""
    wire = make_wire()
    await wire.ready()
    verdict_of(await wire.propose(wire.good(3)))
    last = wire.commits()[-1]
    target_kv = {
        None: None,
        "gone": f"{ROUTER}objects/x/gone",
        "garbage": wire.put("kv", b"\xff" * 100),
        "foreign": "https://evil.test/objects/x/kv",
    }[reference]
    second = make_wire(mlc=wire.mlc, base="https://v1.test/")
    resume = Resume(
        round=last.round,
        committed=last.committed,
        digest=last.digest,
        committed_tokens=f"{ROUTER}objects/x/gone",
        target_kv=target_kv,
    )
    contacted: list[Request] = []

    async def evil(request: Request) -> Response:
        contacted.append(request)
        return Response(200)

    second.network["https://evil.test/"] = evil
    state_of(await second.open(epoch=2, resume=resume))
    state_of(await second.name(epoch=2))
    verdict_of(await second.propose(second.good(4), epoch=2))
    tokens = output_of(await second.output()).tokens
    assert list(tokens) == wire.model.text((1, 2, 3), 9) and contacted == []
