"""What a verifier keeps, admits and does not let peers spoil."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from sdcpd.engine.api import Prefix, Score, Scored
from sdcpd.protocol.messages import Proposal, SessionState, Verdict
from sdcpd.protocol.problems import ProblemDocument
from sdcpd.protocol.uris import session_path_id
from sdcpd.roles.status import StatusReporter
from sdcpd.transport.http import Request, RequestTimeout, Response
from sdcpd.transport.loopback import LoopbackClient
from tests.kit.cluster import ROUTER, peer
from tests.kit.verifier_machine import SESSION, STATUS
from tests.kit.verifier_wire import Wire


@pytest.fixture
async def wire() -> Any:
    made = Wire()
    yield made
    await made.verifier.aclose()


def names(count: int) -> list[bytes]:
    return [bytes([i]) * 16 for i in range(1, count + 1)]


async def open_(wire: Wire, session: bytes) -> SessionState | ProblemDocument:
    log = f"{ROUTER}logs/{session_path_id(session)}"
    return await wire.open(session=session, commit_log=log)


async def test_sessions_being_opened_count_towards_the_limit(wire: Wire) -> None:
    """A burst of openings is held to max_sessions (D-H14)."""
    wire.verifier.config = replace(wire.verifier.config, max_sessions=3)
    answers = await asyncio.gather(*(open_(wire, name) for name in names(6)))
    assert sum(isinstance(a, SessionState) for a in answers) == 3
    assert {a.status for a in answers if isinstance(a, ProblemDocument)} == {429}


async def test_openings_of_one_session_never_run_side_by_side(wire: Wire) -> None:
    """D-O1: nor when the first fails, the second waits, and a third comes just then."""
    running, most, begun = 0, 0, 0
    third: list[asyncio.Task[object]] = []

    async def prepare(
        session: bytes,
        epoch: int,
        prefix: Prefix,
        *,
        kv: bytes | None = None,
        blocks: Sequence[bytes] = (),
    ) -> int:
        nonlocal running, most, begun
        begun += 1
        running += 1
        most = max(most, running)
        for _ in range(20):
            await asyncio.sleep(0)
        running -= 1
        if begun == 1:
            raise RuntimeError("out of memory")
        return 0

    wire.engine.prepare = prepare  # type: ignore[method-assign]
    first = asyncio.ensure_future(wire.open())
    first.add_done_callback(lambda _: third.append(asyncio.ensure_future(wire.open())))
    second = asyncio.ensure_future(wire.open())
    await asyncio.gather(first, second)
    assert isinstance(await third[0], SessionState)
    assert most == 1 and wire.verifier.counts["opened"] == 1


async def test_a_proposal_beyond_the_context_is_cut_not_fatal(wire: Wire) -> None:
    """Section 9: what a drafter proposes must not end a session."""
    wire.engine.info = replace(wire.engine.info, context_max=6)
    await wire.ready()
    answer = await wire.propose(wire.good(4))
    assert isinstance(answer, Verdict) and answer.accepted == 3
    assert len(wire.engine.scored[-1].proposed) == 3


async def test_a_scoring_bug_is_500_and_leaves_the_session_as_it_was(wire: Wire) -> None:
    """D-K12"""
    await wire.ready()
    good, score = wire.good(2), wire.engine.score

    async def broken(work: Score) -> Scored:
        raise ValueError("a bug")

    wire.engine.score = broken  # type: ignore[method-assign]
    answer = await wire.propose(good)
    assert isinstance(answer, ProblemDocument) and answer.status == 500
    wire.engine.score = score  # type: ignore[method-assign]
    assert isinstance(await wire.propose(good), Verdict)


async def test_other_drafters_do_not_use_up_a_sessions_rounds(wire: Wire) -> None:
    """D-X2: only the named drafter's proposals count towards the session's rate."""
    await wire.ready()
    wire.clients["other"] = LoopbackClient(wire.network, peer("drafter", "d9", "https://d9.test/"))
    good = wire.good(2)
    machine = wire.verifier.sessions[0].machine
    message = Proposal(
        session=SESSION,
        epoch=1,
        round=1,
        drafter="https://d9.test/",
        base=0,
        base_digest=machine.chain.digest,
        tokens=(1,),
        status=STATUS,
    )
    for _ in range(300):
        answer = await wire.ask("other", "POST", "proposals", message, Verdict)
        assert isinstance(answer, ProblemDocument) and answer.status == 403
    assert isinstance(await wire.propose(good), Verdict)


async def test_logs_that_append_in_place_are_not_kept_in_memory(wire: Wire) -> None:
    """D-Z3"""
    await wire.ready()
    for _ in range(4):
        assert isinstance(await wire.propose(wire.good(3)), Verdict)
    log = wire.verifier.sessions[0]._log
    assert log._content == b"" and log._length == len(wire.mlc.logs[wire.log_name][1])
    puts = [r for r in wire.mlc.requests if r.method == "PUT"]
    assert all(r.header("content-range") for r in puts[1:])


async def test_a_router_that_hangs_does_not_delay_reports_to_the_others() -> None:
    """D-R1: reports come well within the ttl, whatever another router does."""
    other, times = "https://r1.test/", []
    loop = asyncio.get_running_loop()

    async def hears(request: Request) -> Response:
        times.append(loop.time())
        return Response(204)

    class Client(LoopbackClient):
        async def request(self, method: str, uri: str, **rest: Any) -> Response:
            if uri.startswith(other):
                await asyncio.sleep(rest["timeout_s"])
                raise RequestTimeout("no answer")
            return await super().request(method, uri, **rest)

    client = Client({ROUTER: hears}, peer("drafter", "d0"))
    reporter = StatusReporter(client, [ROUTER, other], lambda: STATUS, interval_s=0.2)
    task = asyncio.ensure_future(reporter.run())
    while len(times) < 3:
        await asyncio.sleep(0.01)
    task.cancel()
    assert max(b - a for a, b in itertools.pairwise(times)) < 0.55


async def test_an_opening_repeated_with_another_hint_is_a_repetition(wire: Wire) -> None:
    """D-O1: the content is contract, prompt, log and resume; drafters may have come meanwhile."""
    assert isinstance(await wire.open(self_decode_after_ms=0), SessionState)
    assert isinstance(await wire.open(), SessionState)
    other = await wire.open(prompt=(1, 2, 4))
    assert isinstance(other, ProblemDocument) and other.status == 409
