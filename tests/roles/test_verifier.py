"""The verifier's resources, asked by a scripted router and drafter; the log does as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import cbor2
import pytest

from sdcpd.protocol.codec import MEDIA_TYPE, encode
from sdcpd.protocol.commit_log import FenceRecord, decode_log, encode_record, read_log
from sdcpd.protocol.contract import contract_digest
from sdcpd.protocol.digest import extend, prefix_digest0
from sdcpd.protocol.messages import Output, Resume, SessionOpen, SessionState, Verdict
from sdcpd.protocol.problems import ProblemDocument
from sdcpd.transport.http import Request, Response
from tests.kit.cluster import ROUTER
from tests.kit.mlc import MemoryMlc
from tests.kit.verifier_machine import SESSION
from tests.kit.verifier_wire import BASE, Wire, with_contract


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    made = Wire()
    yield made
    await made.verifier.aclose()


def problem(answer: object, status: int, suffix: str | None = None) -> ProblemDocument:
    assert isinstance(answer, ProblemDocument), answer
    assert (answer.status, answer.suffix) == (status, suffix), answer
    return answer


async def again(wire: Wire) -> Verdict:
    """Repeat round 1, with other content, until it is answered."""
    while True:
        answer = await wire.propose([3], round=1, base=0)
        if isinstance(answer, Verdict):
            return answer
        assert answer.status == 503
        await asyncio.sleep(0.05)  # a drafter's own backoff


async def test_open_answers_201_with_its_place_and_200_when_repeated(wire: Wire) -> None:
    """D-H1, R-6.1-6, D-O1"""
    await wire.ready()
    assert isinstance(await wire.propose(wire.good(2)), Verdict)
    again = await wire.open()
    assert isinstance(again, SessionState) and again.round == 1
    other = await wire.open(prompt=(9, 9))
    problem(other, 409)
    problem(await wire.open(epoch=0), 400)
    problem(
        await wire.open(contract=with_contract(wire, target=bytes(32))), 422, "sdcp-bad-contract"
    )


async def test_who_may_do_what(wire: Wire) -> None:
    """R-9-2, R-6.3-2, R-6.7-13, R-6.6-9, D-I3, D-I5"""
    await wire.ready()
    for who in ("drafter", "front_end"):
        for method, path in (
            ("POST", "sessions"),
            ("PUT", f"sessions/{wire.log_name}/drafter"),
            ("POST", f"sessions/{wire.log_name}/policy"),
            ("DELETE", f"sessions/{wire.log_name}"),
        ):
            assert (await wire.send(who, method, path, b"x")).status == 403
    assert isinstance(await wire.output(who="drafter"), Output)
    wire.network[BASE] = wire.verifier.listener.handle
    path = f"sessions/{wire.log_name}/output?from=0"
    assert (await wire.send("router", "GET", path)).status == 200


async def test_general_checks(wire: Wire) -> None:
    """D-H2, D-H4, D-H6, D-H7, D-H13, R-5.1-10, R-5.1-13, R-5.1-16, R-5.1-18, R-5.1-19"""
    await wire.ready()
    response = await wire.send(
        "drafter", "POST", "proposals", b"x", (("content-type", "application/cbor"),)
    )
    assert response.status == 415
    assert (await wire.send("drafter", "GET", "proposals")).status == 405
    assert (await wire.send("drafter", "POST", "proposals/")).status == 404
    assert (
        await wire.send("router", "PUT", "sessions/" + "A" * 23 + "/drafter", b"x")
    ).status == 404
    options = await wire.send("drafter", "OPTIONS", "proposals")
    assert (options.status, options.header("allow")) == (204, "OPTIONS, POST")
    assert (
        await wire.send("drafter", "POST", "proposals", b"\xa0" * ((1 << 20) + 1))
    ).status == 413
    response = await wire.send(
        "drafter",
        "POST",
        "proposals",
        b"\xa1\x61",
        ((("Content-Type"), MEDIA_TYPE.upper() + "; v=1"),),
    )
    assert response.status == 400
    assert response.header("content-type") == "application/problem+json"
    assert response.header("cache-control") == "no-store"


async def test_unknown_contract_key_is_named(wire: Wire) -> None:
    """R-4.1-16: refused with its type, and the session does not exist."""
    whole = encode(
        SessionOpen(
            session=SESSION,
            epoch=1,
            contract=wire.contract,
            prompt=(1,),
            commit_log=ROUTER + "logs/x",
        )
    )
    value = cbor2.loads(whole)
    value["contract"]["note"] = 1
    body = cbor2.dumps(value)
    response = await wire.send("router", "POST", "sessions", body)
    assert response.status == 422
    assert b"sdcp-bad-contract" in response.body and b"note" in response.body
    problem(await wire.name(), 404)


async def test_prompt_beyond_vocabulary_or_context(wire: Wire) -> None:
    """R-4.2-5, D-E6"""
    problem(await wire.open(prompt=(wire.model.vocab,)), 422)


async def test_answer_lost_after_the_append_is_one_record(wire: Wire) -> None:
    """R-6.3-34, D-P16: written, its answer lost: read, found, committed once."""
    await wire.ready()
    wire.own_client.lose_answers = 1
    answer = await wire.propose(wire.good(2))
    if isinstance(answer, ProblemDocument):  # told to come again while the log was read
        answer = await again(wire)
    assert isinstance(answer, Verdict)
    assert len(decode_log(wire.mlc.logs[wire.log_name][1])) == 1
    assert wire.mlc.tokens(wire.log_name) == answer.emitted


async def test_log_that_does_not_answer_holds_the_round(wire: Wire) -> None:
    """D-P16, R-6.7-4: 503 meanwhile, nothing in output; the same tokens once it answers."""
    await wire.ready()
    wire.own_client.unreachable = True
    problem(await wire.propose(wire.good(2)), 503)
    output = await wire.output()
    assert isinstance(output, Output) and output.tokens == ()
    scored = len(wire.engine.scored)
    wire.own_client.unreachable = False
    answer = await again(wire)
    assert len(wire.engine.scored) == scored, "the result was kept, not drawn again"
    assert wire.mlc.tokens(wire.log_name) == answer.emitted


@pytest.mark.parametrize("status", [409, 412])
async def test_fenced_while_appending(wire: Wire, status: int) -> None:
    """R-6.3-33: whichever way the store says no, the round is discarded."""
    await wire.ready()
    assert isinstance(await wire.propose(wire.good(1)), Verdict)
    before = await wire.output()

    async def fence(request: Request) -> Response | None:
        if request.method == "PUT":
            wire.mlc.append(wire.log_name, encode_record(FenceRecord(epoch=2)))
            return Response(status)
        return None

    wire.mlc.before = fence
    poll = asyncio.ensure_future(wire.output(from_=2))
    problem(await wire.propose(wire.good(1)), 409, "sdcp-stale-epoch")
    problem(await poll, 409, "sdcp-stale-epoch")
    problem(await wire.output(), 409, "sdcp-stale-epoch")
    assert isinstance(before, Output)
    assert wire.mlc.tokens(wire.log_name) == before.tokens


class FencingMlc(MemoryMlc):
    """Lets a fence slip in before each appended record, and does not enforce it."""

    def _log(self, request: Request, name: str) -> Response:
        if request.method == "PUT":
            body = encode_record(FenceRecord(epoch=2)) + request.body
            request = Request(
                request.method, request.path, request.query, request.headers, body, request.peer
            )
        return super()._log(request, name)


async def test_store_that_does_not_enforce_is_read_after_each_append() -> None:
    """R-6.8-7: a fence that precedes the record makes the append a failed one."""
    wire = Wire(mlc=FencingMlc(enforcing=False), enforcing=False)
    await wire.ready()
    problem(await wire.propose(wire.good(2)), 409, "sdcp-stale-epoch")
    assert read_log(decode_log(wire.mlc.logs[wire.log_name][1])).tokens == ()
    await wire.verifier.aclose()


async def test_foreign_record_of_the_same_epoch_ends_the_authority(wire: Wire) -> None:
    """R-6.8-4, R-6.8-12, D-M9"""
    await wire.ready()
    first = await wire.propose(wire.good(1))
    assert isinstance(first, Verdict)
    (record,) = decode_log(wire.mlc.logs[wire.log_name][1])
    foreign = encode_record(
        type(record)(epoch=1, round=2, emitted=(0,), committed=9, digest=bytes(32))
    )  # type: ignore[call-arg]
    wire.mlc.append(wire.log_name, foreign)
    problem(await wire.propose(wire.good(1)), 409, "sdcp-stale-epoch")
    problem(await wire.output(), 409, "sdcp-stale-epoch")


async def test_resume_is_checked_against_the_log(wire: Wire) -> None:
    """R-6.1-9, R-6.9-7, R-6.9-13, D-O5, D-O6"""
    await wire.ready()
    assert isinstance(await wire.propose(wire.good(2)), Verdict)
    tokens = wire.mlc.tokens(wire.log_name)
    fresh = Wire(mlc=wire.mlc)
    stale = problem(await fresh.open(), 409, "sdcp-stale-base")
    assert stale.session_state is not None and stale.session_state.committed == len(tokens)
    start = prefix_digest0(contract_digest(fresh.contract), (1, 2, 3))
    right = Resume(
        round=1,
        committed=len(tokens),
        digest=extend(start, tokens),
        committed_tokens=ROUTER + "objects/x/gone",
    )
    wrong = Resume(
        round=1, committed=len(tokens), digest=bytes(32), committed_tokens=ROUTER + "objects/x/gone"
    )
    problem(await fresh.open(epoch=2, resume=wrong), 409, "sdcp-stale-base")
    opened = await fresh.open(epoch=2, resume=right)
    assert isinstance(opened, SessionState) and (opened.round, opened.epoch) == (1, 2)
    output = await fresh.output()
    assert isinstance(output, Output) and (output.tokens, output.epoch) == (tokens, 2)
    problem(await fresh.open(epoch=1), 409, "sdcp-stale-epoch")
    await fresh.verifier.aclose()


async def test_untrusted_references_are_never_contacted(wire: Wire) -> None:
    """R-9-9, R-9-11, D-M2, D-O8"""
    contacted = []

    async def evil(request: Request) -> Response:
        contacted.append(request)
        return Response(200)

    wire.network["https://evil.test/"] = evil
    problem(await wire.open(commit_log="https://evil.test/logs/x"), 422)
    problem(await wire.open(prompt="https://evil.test/objects/a/b"), 422)
    assert contacted == []


async def test_long_poll_wakes_with_the_tokens(wire: Wire) -> None:
    """R-6.7-2, R-6.7-3, R-6.7-12"""
    await wire.ready()
    poll = asyncio.ensure_future(wire.output())
    await asyncio.sleep(0)
    found = await wire.propose(wire.good(2))
    output = await poll
    assert isinstance(output, Output) and isinstance(found, Verdict)
    assert output.tokens == found.emitted
    empty = await wire.output(from_=output.from_ + len(output.tokens))
    assert isinstance(empty, Output) and empty.tokens == () and not empty.final
    for query in ("", "from=", "from=-1", "from=0&from=1"):
        response = await wire.send("front_end", "GET", f"sessions/{wire.log_name}/output?{query}")
        assert response.status == 400


async def test_rounds_are_rate_limited() -> None:
    """R-9-8, D-X2"""
    from sdcpd.roles.rates import RateLimit

    now = 0.0
    limit = RateLimit(10, clock=lambda: now)
    assert [limit.allow(b"s", "d") for _ in range(11)] == [True] * 10 + [False]
    now = 0.1
    assert limit.allow(b"s", "d")
    assert sum(limit.allow(bytes([i]), "other") for i in range(250)) == 200
