"""Section 6.7: reading output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from sdcpd.engine.api import Score, Scored
from sdcpd.engine.fake import FakeTarget
from sdcpd.protocol.codec import decode
from sdcpd.protocol.commit_log import FenceRecord, encode_record
from sdcpd.protocol.messages import Action, Output, Resume
from tests.kit.answers import output_of, refused, state_of, until, verdict_of
from tests.kit.cluster import ROUTER
from tests.kit.scripted_target import RowsModel, one_hot
from tests.kit.vectors import VECTORS
from tests.kit.verifier_wire import OTHER, Wire

MakeWire = Callable[..., Wire]
TOKENS = VECTORS["output"]["cases"][0]["committed_tokens"]


async def in_state(make_wire: MakeWire, state: str) -> Wire:
    """A session with the vectors' tokens: open, finished or failed."""
    members: dict[str, Any] = {"open": {}, "finished": {"max_new": 5}, "failed": {}}[state]
    model = RowsModel([one_hot(token, 50) for token in TOKENS])
    wire = make_wire(model=model, members=members, config={"output_wait_s": 600.0})
    await wire.ready()
    assert list(verdict_of(await wire.propose(TOKENS[:4])).emitted) == TOKENS
    if state == "failed":
        assert (await wire.send("router", "DELETE", f"sessions/{wire.log_name}")).status == 204
    return wire


@pytest.mark.parametrize("case", VECTORS["output"]["cases"], ids=str)
async def test_output_vectors(case: dict[str, Any], make_wire: MakeWire) -> None:
    """R-6.7-1, R-6.7-6, R-6.7-10, R-6.7-11: from is the number of tokens already had; a session
    that has ended answers at once, and again.
    """
    wire = await in_state(make_wire, case["session"])
    for _ in range(2):
        task = asyncio.ensure_future(wire.output(case["from"]))
        for _ in range(20):
            await asyncio.sleep(0)
        assert task.done() is not case["waits"]
        if case["waits"]:
            task.cancel()
        output = output_of(await (wire.output(case["from"], wait_s=0) if case["waits"] else task))
        assert list(output.tokens) == case["tokens"]
        assert (output.from_, output.final) == (case["from"], case["final"])
        assert output.finish == case.get("finish")


@pytest.mark.parametrize("case", VECTORS["output_queries"]["valid"], ids=lambda c: c["query"])
async def test_valid_queries(case: dict[str, Any], make_wire: MakeWire) -> None:
    """R-6.7-6, R-6.7-12: the answer names the index that was asked for."""
    wire = await in_state(make_wire, "finished")
    response = await wire.send("front_end", "GET", _path(wire, case["query"]))
    assert response.status == 200
    assert decode(Output, response.body).from_ == int(case["from"])


@pytest.mark.parametrize("case", VECTORS["output_queries"]["invalid"], ids=lambda c: c["query"])
async def test_invalid_queries(case: dict[str, Any], make_wire: MakeWire) -> None:
    """R-6.7-12"""
    wire = await in_state(make_wire, "open")
    response = await wire.send("front_end", "GET", _path(wire, case["query"]))
    assert response.status == case["status"] == 400
    assert response.header("content-type") == "application/problem+json"


def _path(wire: Wire, query: str) -> str:
    return f"sessions/{wire.log_name}/output" + (f"?{query}" if query else "")


@pytest.mark.parametrize("wait", ["0", "1", "0.5", "-1", "²", "9" * 400, "x", ""])
async def test_a_wait_is_bounded(make_wire: MakeWire, wait: str) -> None:
    """R-6.7-2: empty after the time, whatever a client prefers and however it writes it."""
    wire = make_wire(config={"output_wait_s": 0.05})
    await wire.ready()
    headers = (("prefer", f"respond-async, wait={wait}"),)
    response = await wire.send("front_end", "GET", _path(wire, "from=0"), headers=headers)
    assert response.status == 200
    output = decode(Output, response.body)
    assert (output.tokens, output.final, output.finish) == ((), False, None)


async def test_prefer_shortens_the_wait(make_wire: MakeWire) -> None:
    """R-6.7-2: wait=0 answers at once where the verifier alone would have waited for minutes."""
    wire = make_wire(config={"output_wait_s": 600.0})
    await wire.ready()
    async with asyncio.timeout(5):
        assert output_of(await wire.output(wait_s=0)).tokens == ()
    head = await wire.send("front_end", "HEAD", _path(wire, "from=0"))
    assert head.status == 200


async def test_a_wait_ends_with_the_tokens(make_wire: MakeWire) -> None:
    """R-6.7-3: every reader that waits gets them, though each would have waited for minutes."""
    wire = make_wire(config={"output_wait_s": 600.0})
    await wire.ready()
    polls = [asyncio.ensure_future(wire.output(n)) for n in (0, 0, 1)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert not any(poll.done() for poll in polls)
    found = verdict_of(await wire.propose(wire.good(2)))
    async with asyncio.timeout(5):
        parts = [output_of(await poll).tokens for poll in polls]
    assert parts == [found.emitted, found.emitted, found.emitted[1:]]


async def test_a_wait_ends_with_the_session(make_wire: MakeWire) -> None:
    """R-6.7-10, R-6.7-3: finish or fail wakes the reader at the very end."""
    wire = make_wire(config={"output_wait_s": 600.0})
    await wire.ready()
    poll = asyncio.ensure_future(wire.output())
    await asyncio.sleep(0)
    await wire.send("router", "DELETE", f"sessions/{wire.log_name}")
    async with asyncio.timeout(5):
        output = output_of(await poll)
    assert (output.tokens, output.final, output.finish) == ((), True, Action.FAIL)


async def test_nothing_of_a_round_in_work_is_returned(make_wire: MakeWire) -> None:
    """R-6.7-4: not while it is scored, and not while its record is being written."""
    wire = make_wire(engine_kind=_Held)
    await wire.ready()
    engine = wire.engine
    assert isinstance(engine, _Held)
    round_ = asyncio.ensure_future(wire.propose(wire.good(3)))
    await until(lambda: engine.scored)
    assert output_of(await wire.output(wait_s=0)).tokens == ()
    engine.go_on.set()
    found = verdict_of(await round_)
    assert output_of(await wire.output(wait_s=0)).tokens == found.emitted


class _Held(FakeTarget):
    """Passes end when the test says so."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.go_on = asyncio.Event()

    async def score(self, work: Score) -> Scored:
        """Score, then wait."""
        found = await super().score(work)
        await self.go_on.wait()
        return found


async def test_indices_are_stable(make_wire: MakeWire) -> None:
    """R-6.7-5, R-6.7-10: each answer from 0 begins with the one before; finish at the end alone."""
    wire = make_wire(members={"max_new": 20, "low_rounds": 99})
    await wire.ready()
    seen: tuple[int, ...] = ()
    good = 0
    while not wire.served().machine.closed:
        verdict_of(await wire.propose(wire.bad(3, good=good % 3)))
        good += 1
        output = output_of(await wire.output())
        assert output.tokens[: len(seen)] == seen and len(output.tokens) > len(seen)
        assert output.final is wire.served().machine.closed
        assert output.finish == (Action.FINISH if output.final else None)
        seen = output.tokens
    for n in range(len(seen) + 1):
        assert output_of(await wire.output(n)).tokens == seen[n:]
    verdicts = list(wire.served().machine.verdicts.values())
    counted = (len(verdicts), 3 * len(verdicts), sum(v.accepted for v in verdicts), 0)
    assert (output.rounds, output.drafted, output.accepted, output.self_decoded) == counted


async def test_long_output_comes_in_parts(make_wire: MakeWire) -> None:
    """R-6.7-1, R-6.7-10, D-G7: final in the last part alone, and nothing lost between."""
    wire = make_wire(members={"max_new": 5000, "self_load": 100, "fallback": (3,), "low_rounds": 1})
    await wire.ready()
    machine = wire.served().machine
    text = wire.model.text((1, 2, 3), 4998)
    machine.tokens += text
    machine.chain.append(text)
    verdict_of(await wire.propose(wire.good(2)))
    first = output_of(await wire.output())
    assert len(first.tokens) == 4096 and not first.final and first.finish is None
    rest = output_of(await wire.output(4096))
    assert len(rest.tokens) == 904 and rest.final and rest.finish is Action.FINISH


async def test_after_a_failover_the_tokens_are_the_same(make_wire: MakeWire) -> None:
    """R-6.7-7: at the new epoch, those of the old one included."""
    wire = make_wire()
    await wire.ready()
    found = verdict_of(await wire.propose(wire.good(3)))
    assert output_of(await wire.output()).epoch == 1
    second = make_wire(mlc=wire.mlc, base="https://v1.test/")
    resume = Resume(
        round=1,
        committed=found.committed,
        digest=found.digest,
        committed_tokens=f"{ROUTER}objects/x/gone",
    )
    state_of(await second.open(epoch=2, resume=resume))
    output = output_of(await second.output())
    assert (output.epoch, output.tokens) == (2, found.emitted)


async def test_who_may_read(wire: Wire) -> None:
    """R-6.7-13: front end, router, and the drafter that is named, no other."""
    state_of(await wire.open())
    refused(await wire.output(who="drafter"), 403)
    state_of(await wire.name())
    verdict_of(await wire.propose(wire.good(1)))
    for who in ("front_end", "router", "drafter"):
        assert len(output_of(await wire.output(who=who)).tokens) == 2
    refused(await wire.output(who="other"), 403)
    state_of(await wire.name(drafter=OTHER))
    refused(await wire.output(who="drafter"), 403)
    assert len(output_of(await wire.output(who="other")).tokens) == 2


async def test_a_fence_ends_reading(make_wire: MakeWire) -> None:
    """R-6.7-14: a poll that waits ends with 409 when the fence is met, and so do later ones."""
    wire = make_wire(config={"output_wait_s": 600.0})
    await wire.ready()
    found = verdict_of(await wire.propose(wire.good(1)))
    poll = asyncio.ensure_future(wire.output(found.committed))
    await asyncio.sleep(0)
    wire.mlc.append(wire.log_name, encode_record(FenceRecord(epoch=2)))
    refused(await wire.propose(wire.good(1)), 409, "sdcp-stale-epoch")
    async with asyncio.timeout(5):
        refused(await poll, 409, "sdcp-stale-epoch")
    refused(await wire.output(0), 409, "sdcp-stale-epoch")
