"""Section 6.9 when the router itself is killed: it takes its sessions up again (D-F5)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sdcpd.protocol.commit_log import read_log
from sdcpd.protocol.instances import Board
from sdcpd.protocol.messages import Action, Sampling, SessionState
from sdcpd.protocol.router import RouterSession, RouterSettings
from sdcpd.protocol.router_io import Answered, LogRead, ReadLog, Save, VerifierLost, WriteFence
from sdcpd.protocol.router_record import RecordCorrupt, decode_record
from sdcpd.protocol.uris import session_path_id
from sdcpd.protocol.verifier_state import VerifierSettings
from sdcpd.roles.generation import GenerationError, GenerationRequest
from sdcpd.roles.output_reader import OutputReader
from sdcpd.transport.http import Request, Response
from tests.kit.cluster import ROUTER, Cluster
from tests.kit.records import MemoryRecords
from tests.kit.verifier_machine import SESSION, contract
from tiers.lmdb_records import LmdbRecords

PROMPT, COUNT = (1, 2, 3), 300
GREEDY = Sampling(temperature_milli=0)


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A router with its records in LMDB, one verifier that is never alone, two drafters."""
    records = LmdbRecords(tmp_path / "sessions", map_bytes=1 << 20, setting="x")
    cluster = Cluster(records=records)
    cluster.add_router()
    cluster.add_verifier(machine=VerifierSettings(None, None), pass_time_s=0.004)
    cluster.add_drafter("d0")
    cluster.add_drafter("d1")
    await cluster.ready()
    yield cluster
    await cluster.aclose()
    await records.aclose()


async def begin(cluster: Cluster, *, until: int) -> OutputReader:
    """A text of which some tokens have been read."""
    reader = await cluster.router.generate(GenerationRequest(PROMPT, COUNT, (), GREEDY))
    count = 0
    async for part in reader:
        count += len(part.tokens)
        if count >= until:
            return reader
    raise AssertionError("the text ended too early")


def restart(cluster: Cluster) -> None:
    """The router is killed and started again; its instances will report to the new one."""
    cluster.kill(ROUTER)
    cluster.add_router()


async def rest(cluster: Cluster, session: bytes, from_: int) -> list[int]:
    """The text from a token on, as the restarted router's front end reads it."""
    reader = cluster.router.reader(session, from_)
    assert reader is not None, "the session was forgotten"
    tokens: list[int] = []
    async for part in reader:
        tokens += part.tokens
    return tokens


async def test_a_session_goes_on_and_is_read_on(made: Cluster) -> None:
    """R-6.9-18: no token is lost or repeated over the router's death."""
    reader = await begin(made, until=9)
    read = reader.stats.committed
    restart(made)
    text = made.model.text(PROMPT, COUNT)
    assert await rest(made, reader.session, read) == text[read:]
    assert made.mlc.tokens(session_path_id(reader.session)) == tuple(text)


@pytest.mark.parametrize("verifier", ["stays", "dies"])
async def test_a_session_that_nobody_reads_any_more_ends(made: Cluster, verifier: str) -> None:
    """R-6.9-18: its client never comes back; the text is finished, at another verifier if need be."""
    reader = await begin(made, until=9)
    restart(made)
    if verifier == "dies":
        async with asyncio.timeout(5):
            while made.router.sessions[0].place is None:
                await asyncio.sleep(0)
        made.add_verifier("v1", machine=VerifierSettings(None, None), pass_time_s=0.001)
        made.kill("https://v0.test/")
    async with asyncio.timeout(10):
        while made.router.sessions or made.records.all():
            await asyncio.sleep(0.005)
    assert made.mlc.tokens(session_path_id(reader.session)) == tuple(made.model.text(PROMPT, COUNT))
    assert all(not one.sessions for one in made.router.board.all())


async def test_the_end_is_told_before_the_verifier_is_found_again(made: Cluster) -> None:
    """R-6.9-18: an event gets through while the verifier does not answer; the text is in the log."""
    reader = await begin(made, until=9)
    read = reader.stats.committed
    made.kill(ROUTER)

    async def logs_alone(request: Request) -> Response:
        return await made.mlc.handle(request) if "/logs/" in request.path else Response(503)

    made.network[ROUTER] = logs_alone
    (served,) = made.verifiers["https://v0.test/"].sessions
    async with asyncio.timeout(20):
        while not served.machine.closed:
            await asyncio.sleep(0)
    del made.network["https://v0.test/"]  # it still reaches others
    made.add_router()
    text = made.model.text(PROMPT, COUNT)
    assert await rest(made, reader.session, read) == text[read:]
    assert made.router.counts["event_finish"] == 1


async def test_an_ended_session_is_not_taken_up(made: Cluster) -> None:
    """R-6.9-18: what has ended needs no router any more."""
    await made.text(PROMPT, 8)
    async with asyncio.timeout(2):
        while made.records.all():
            await asyncio.sleep(0)
    restart(made)
    assert made.router.sessions == []


async def test_a_drafter_lost_later_is_replaced(made: Cluster) -> None:
    """R-6.9-18: the restarted router follows the session's failures as the first one did."""
    reader = await begin(made, until=5)
    session, drafter = (
        reader.session,
        made.verifiers["https://v0.test/"].sessions[0].machine.drafter,
    )
    restart(made)
    (served,) = made.router.sessions
    async with asyncio.timeout(2):
        while served.machine.drafter != drafter:
            await asyncio.sleep(0)
    assert drafter is not None
    made.kill(drafter)  # whoever drafted is gone: its status expires, another is named
    text = made.model.text(PROMPT, COUNT)
    assert await rest(made, session, 0) == text
    named = made.verifiers["https://v0.test/"].sessions[0].machine.drafter
    assert named not in (None, drafter)


async def test_killed_between_the_answer_to_an_event_and_the_naming(made: Cluster) -> None:
    """R-6.9-18, D-F5: a drafter is named after the restart, and later switch events are served."""
    verifier = made.verifiers["https://v0.test/"]
    naming = asyncio.Event()

    async def deaf(request: Request) -> Response:
        """Naming hangs from the first event on, as at a router that dies before it sends."""
        if request.path.endswith("/drafter") and verifier.rounds.rounds[Action.SWITCH]:
            naming.set()
            await asyncio.Event().wait()
        return await verifier.listener.handle(request)

    made.network["https://v0.test/"] = deaf
    for drafter in made.drafters.values():
        drafter._engine.own._noise = 1.0  # type: ignore[attr-defined]
    made.router.config = made.router.config.__class__(
        ROUTER,
        made.router.config.tokenizer,
        machine=RouterSettings(switch_grace_s=0.1),
        low_rounds=1,
        fallback=(Action.SWITCH,) * 40,
    )
    reader = await made.router.generate(GenerationRequest(PROMPT, 20, (), GREEDY))
    async with asyncio.timeout(3):
        await naming.wait()
    assert made.router.counts["event_switch"] == 1
    made.network["https://v0.test/"] = verifier.listener.handle
    restart(made)
    assert await rest(made, reader.session, 0) == made.model.text(PROMPT, 20)
    assert made.router.counts["event_switch"] > 1


async def test_the_drafter_that_was_named_is_named_again(made: Cluster) -> None:
    """R-6.9-18, D-N2: the stored drafter, so that nothing changes where it is at work."""
    reader = await begin(made, until=5)
    (before,) = made.router.sessions
    record = decode_record(made.records.all()[reader.session])
    assert record.drafter == before.machine.drafter
    restart(made)
    (served,) = made.router.sessions
    async with asyncio.timeout(2):
        while served.machine.drafter is None:
            await asyncio.sleep(0)
    assert served.machine.drafter == record.drafter


async def test_nothing_is_asked_of_a_verifier_before_the_session_is_stored(made: Cluster) -> None:
    """R-6.9-18, D-F5: the record comes before the first request that it would have to explain."""
    records = MemoryRecords()
    order: list[str] = []
    verifier = made.verifiers["https://v0.test/"]

    async def watch(request: Request) -> Response:
        if not request.path.startswith("/objects"):
            order.append(f"{request.method} stored={len(records.content)}")
        return await verifier.listener.handle(request)

    made.network["https://v0.test/"] = watch
    made.records = records
    restart(made)
    await made.ready()
    await made.text(PROMPT, 3)
    assert order[:2] == ["POST stored=1", "PUT stored=1"]


async def test_a_session_that_cannot_be_stored_is_refused(made: Cluster) -> None:
    """R-6.9-18: rather than served until the next restart; one that runs goes on."""
    records = MemoryRecords()
    made.records = records
    restart(made)
    await made.ready()
    reader = await begin(made, until=3)
    records.failing = True
    with pytest.raises(GenerationError, match="cannot be kept"):
        await made.text(PROMPT, 3)
    text = made.model.text(PROMPT, COUNT)
    assert await rest(made, reader.session, 0) == text


async def test_a_record_that_cannot_be_removed_keeps_nobody_waiting(made: Cluster) -> None:
    """R-6.9-18: the end of a session is told though its record stays; a restart finds it ended."""
    records = MemoryRecords()
    made.records = records
    restart(made)
    await made.ready()
    reader = await begin(made, until=3)
    records.failing = True
    text = made.model.text(PROMPT, COUNT)
    assert await rest(made, reader.session, 0) == text
    async with asyncio.timeout(2):
        while made.router.sessions:
            await asyncio.sleep(0)
    records.failing = False
    assert list(records.content) == [reader.session]
    restart(made)
    async with asyncio.timeout(5):
        while records.content or made.router.sessions:
            await asyncio.sleep(0)
    assert made.mlc.tokens(session_path_id(reader.session)) == tuple(text)


async def test_a_refused_session_is_refused_though_its_record_cannot_be_removed(
    made: Cluster,
) -> None:
    """R-6.9-18: whoever asked is told, and does not wait for a disk."""
    records = MemoryRecords()
    made.records = records

    async def refuse(request: Request) -> Response:
        records.failing = True
        return Response(422, (("content-type", "application/problem+json"),), b"{}")

    restart(made)
    await made.ready()
    made.network["https://v0.test/"] = refuse
    async with asyncio.timeout(5):
        with pytest.raises(GenerationError, match="422"):
            await made.text(PROMPT, 3)
    assert made.router.sessions == []


def test_a_failover_that_a_restart_interrupts_begins_anew() -> None:
    """R-6.9-4, R-6.9-18: the new epoch was stored and not fenced yet, so nothing is opened at it."""
    board = Board({}, trust_all=True)
    settings = RouterSettings()
    machine = RouterSession(
        session=SESSION,
        contract=contract(),
        prompt=PROMPT,
        commit_log="https://r/logs/x",
        verifier="https://v0/",
        board=board,
        settings=settings,
    )
    machine.start(now=0.0)
    state = SessionState(session=SESSION, epoch=1, round=0, committed=0, digest=bytes(32))
    machine.step(Answered(1, state), now=0.0)
    machine.step(VerifierLost("https://v0/", "gone"), now=0.0)
    saved, fence = machine.step(LogRead(2, read_log([]), None), now=0.0)
    assert isinstance(saved, Save) and saved.record is not None and isinstance(fence, WriteFence)
    again = RouterSession.restored(
        decode_record(saved.record.encode()), board=board, settings=settings
    )
    assert [type(action) for action in again.start(now=0.0)] == [ReadLog]
    *_, fence = again.step(LogRead(1, read_log([]), None), now=0.0)
    assert isinstance(fence, WriteFence) and fence.epoch == 3


def test_a_damaged_record_is_told_from_a_good_one() -> None:
    """R-6.9-18: what is not a record is refused, whatever it is."""
    for octets in (b"", b"\xff", b"\xa0", b"\x80", b"\xa1fformatc1.0"):
        with pytest.raises(RecordCorrupt):
            decode_record(octets)
