"""An instance says honestly whether it can work: engines that hang, and stores that take nothing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from sdcpd.admin import DrafterAdmin, RouterAdmin, VerifierAdmin
from sdcpd.admin_resources import JsonResources
from sdcpd.engine import worker
from sdcpd.metrics import Metrics
from sdcpd.protocol.commit_log import FenceRecord, encode_record
from sdcpd.protocol.messages import InstanceRole, Sampling, Verdict
from sdcpd.protocol.uris import session_path_id
from sdcpd.roles.generation import GenerationRequest
from sdcpd.roles.health import CACHE_TROUBLE_S, Health, Level, cache_check, engine_check
from sdcpd.roles.log_stalls import LogStalls
from sdcpd.transport.http import Request, Response
from tests.kit.answers import state_of
from tests.kit.api import text_model
from tests.kit.cluster import ROUTER, Cluster, cluster
from tests.kit.full_logs import BIG, filled
from tests.kit.threaded_target import ThreadedTarget
from tests.kit.verifier_wire import Wire
from tiers.api import TierStats
from tiers.build import TierSpec, build_objects, open_logs
from tiers.lmdb_log import LmdbLogStore
from tiers.resource import MlcResource
from tiers.watched import WatchedLogs

PROMPT = (1, 2, 3)
SILENCE_S = 0.3


@pytest.fixture
def lively(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle threads show that they live often, so that a short silence means something."""
    monkeypatch.setattr(worker, "IDLE_S", 0.02)


async def until(condition: Callable[[], object], what: str) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def asked(admin: JsonResources, path: str) -> tuple[int, dict[str, object]]:
    response = await admin.handle(Request("GET", path, ""))
    return response.status, json.loads(response.body)


# ---- the noun


def test_what_is_noted_lasts_until_it_is_cleared() -> None:
    health = Health("verifier v0")
    assert health.ready and health.reasons == [] and health.wedged is None
    health.note("logs", Level.UNREADY, "the disk is full")
    (first,) = health.troubles()
    health.note("logs", Level.UNREADY, "the disk is still full")
    (again,) = health.troubles()
    assert again.since == first.since and health.reasons == ["the disk is still full"]
    health.note("cache", Level.DEGRADED, "the cache fails")
    assert health.degraded == ["the cache fails"] and health.wedged is None
    health.clear("logs")
    health.clear("logs")
    assert health.ready and health.degraded == ["the cache fails"]


def test_what_is_watched_is_asked_for_when_somebody_looks() -> None:
    health, said = Health(), [""]
    health.watch("engine", Level.WEDGED, lambda: said[0] or None)
    health.note("logs", Level.UNREADY, "full")
    assert health.wedged is None
    said[0] = "it hangs"
    assert health.wedged == "it hangs" and health.reasons == ["it hangs", "full"]
    said[0] = ""
    assert health.wedged is None and health.reasons == ["full"]


def test_an_engine_counts_as_stuck_after_its_time_and_not_before() -> None:
    silent = [19.9]
    check = engine_check(lambda: silent[0], 20.0)
    assert check() is None
    silent[0] = 23.4
    assert "no sign of life for 23 s" in (check() or "")


def test_a_tier_that_fails_is_told_for_a_minute() -> None:
    def tier(kind: str, failures: int = 0, parts: tuple[TierStats, ...] = ()) -> TierStats:
        sizes = {"size_bytes": 1, "used_bytes": 0, "leased_bytes": 0, "objects": 0}
        return TierStats(kind=kind, failures=failures, parts=parts, **sizes)

    failures, now = [0], [1000.0]

    def stack() -> TierStats:
        return tier("stack", 9, (tier("host"), tier("lmdb", failures[0])))

    check = cache_check(stack, clock=lambda: now[0])
    assert check() is None
    failures[0] = 3
    assert (check() or "").startswith("[mlc] tiers fail (entry 2, lmdb, 3 times in all): ")
    now[0] += CACHE_TROUBLE_S
    assert check() is None
    failures[0] = 4
    assert "4 times" in (check() or "")


# ---- an engine that hangs


@pytest.fixture
async def threaded(lively: None) -> AsyncIterator[Cluster]:
    """Two verifiers with threads of their own, and a drafter."""
    made = Cluster()
    made.add_router()
    engines = [ThreadedTarget(made.model) for _ in range(2)]
    for number, engine in enumerate(engines):
        made.add_verifier(f"v{number}", engine=engine, engine_silence_s=SILENCE_S)
    made.add_drafter()
    await made.ready()
    yield made
    for engine in engines:
        await engine.aclose()
    await made.aclose()


async def test_a_session_goes_on_elsewhere_when_its_verifiers_engine_hangs(
    threaded: Cluster,
) -> None:
    """D-R1: withdrawn before anybody asks for it; and what comes of it late adds nothing."""
    c = threaded
    reader = await c.router.generate(
        GenerationRequest(PROMPT, 60, (), Sampling(temperature_milli=0))
    )
    tokens: list[int] = []
    left = ""
    async for part in reader:
        if len(tokens) < 10 <= len(tokens) + len(part.tokens):
            place = c.router.sessions[0].place
            assert place is not None
            left = place[0]
            c.verifiers[left]._engine.hold()  # type: ignore[attr-defined]
        tokens += part.tokens
    assert tokens == c.model.text(PROMPT, 60)
    stuck = c.verifiers[left]
    assert stuck.health.wedged is not None and not stuck.health.ready
    status = stuck.status()
    assert (status.ttl_ms, status.ready) == (0, False)
    board = c.router.board
    assert not board.fresh(left, InstanceRole.VERIFIER, now=time.monotonic())
    assert board.choose_verifier(now=time.monotonic()) not in (None, left)
    (log,) = c.mlc.logs.values()
    # The pass ends after all: its round is discarded, the log is what it was, and nobody takes the
    # verifier for another process.
    stuck._engine.release()  # type: ignore[attr-defined]
    await until(lambda: stuck.sessions[0].machine.fenced, "it has learnt that it is fenced")
    await until(
        lambda: board.fresh(left, InstanceRole.VERIFIER, now=time.monotonic()), "it is back"
    )
    assert stuck.health.ready and stuck.status().ttl_ms > 0
    assert [log] == list(c.mlc.logs.values())
    (instance,) = [one for one in board.all() if one.base == left]
    assert list(instance.names) == [stuck.instance]


async def test_one_verifier_that_was_stuck_goes_on_with_its_session(lively: None) -> None:
    """There is no other: its session waits, and is opened there again, in a new epoch."""
    made = Cluster()
    made.add_router()
    engine = ThreadedTarget(made.model)
    verifier = made.add_verifier(engine=engine, engine_silence_s=SILENCE_S)
    await made.ready()
    engine.hold()
    writing = asyncio.ensure_future(made.text(PROMPT, 20))
    try:
        await until(lambda: verifier.health.wedged, "the engine is stuck")
        await until(lambda: not made.router.readiness().ready, "the router stops assigning")
        assert "no verifier is ready" in made.router.readiness().reason
        engine.release()
        async with asyncio.timeout(10):
            assert await writing == made.model.text(PROMPT, 20)
        await until(lambda: made.router.readiness().ready, "all is well")
    finally:
        writing.cancel()
        await engine.aclose()
        await made.aclose()


# ---- stores that take nothing


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LmdbLogStore]:
    made = open_logs(tmp_path, 300_000)
    yield made
    await made.aclose()


async def test_full_commit_logs_make_router_and_verifier_unready_until_there_is_room(
    store: LmdbLogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiers.watched.TRY_S", 0.02)
    health = Health("router r0")
    logs = WatchedLogs(
        store,
        failed=lambda why: health.note("commit logs", Level.UNREADY, why),
        worked=lambda: health.clear("commit logs"),
    )
    mlc = MlcResource(
        base_path="",
        objects=await build_objects([TierSpec("host", 1 << 20)]),
        logs=logs,
        authorize=lambda *_: None,
        object_bytes_max=1 << 20,
    )
    await filled(store)
    trying = asyncio.ensure_future(logs.run())
    made = Cluster()
    made.add_router(mlc=mlc, health=health)
    verifier = made.add_verifier()
    await made.ready()
    writing = asyncio.ensure_future(made.text(PROMPT, 10))
    try:
        await until(lambda: not verifier.health.ready, "the verifier says so")
        (reason,) = verifier.health.reasons
        assert reason.startswith("the commit logs at https://r0.test/logs take no records: ")
        assert "have no room for another record" in reason
        assert made.router.readiness().reason == "the commit logs cannot be used now"
        assert health.reasons == ["the commit logs have no room for another record"]
        assert verifier.status().ttl_ms > 0, "it is alive all the same"
        await store.delete(BIG)
        async with asyncio.timeout(10):
            assert await writing == made.model.text(PROMPT, 10)
        await until(lambda: verifier.health.ready and health.ready, "all is well")
    finally:
        writing.cancel()
        trying.cancel()
        await made.aclose()


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    made = Wire()
    await made.ready()
    yield made
    await made.verifier.aclose()


async def no_room(request: Request) -> Response | None:
    return Response(507) if request.method == "PUT" else None


async def test_a_session_that_is_fenced_while_it_stalls_leaves_no_trouble(wire: Wire) -> None:
    wire.mlc.before = no_room
    asking = asyncio.ensure_future(wire.propose(wire.good(2)))
    await until(lambda: not wire.verifier.health.ready, "it stalls")
    wire.mlc.append(wire.log_name, encode_record(FenceRecord(epoch=2)))
    await until(lambda: wire.verifier.health.ready, "it is over")
    assert wire.served().machine.fenced
    await asking


async def test_a_stall_is_over_with_the_next_record(wire: Wire) -> None:
    wire.mlc.before = no_room
    asking = asyncio.ensure_future(wire.propose(wire.good(2)))
    await until(lambda: not wire.verifier.health.ready, "it stalls")
    wire.mlc.before = None
    await until(lambda: wire.verifier.health.ready, "it is over")
    await asking
    assert isinstance(await wire.propose(wire.good(2)), Verdict)


async def test_one_damaged_log_does_not_make_a_verifier_unready_that_serves_others(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdcpd.roles.verifier_session.STALL_RETRY_S", 0.01)
    refused: list[Request] = []

    async def damaged(request: Request) -> Response | None:
        if not request.path.endswith(f"/{wire.log_name}"):
            return None
        refused.append(request)
        return Response(503)

    wire.mlc.before = damaged
    asking = asyncio.ensure_future(wire.propose(wire.good(2)))
    await until(lambda: not wire.verifier.health.ready, "as far as anybody knows")
    other = b"another session!"
    state_of(await wire.open(session=other, commit_log=f"{ROUTER}logs/{session_path_id(other)}"))
    state_of(await wire.name(session=other))
    found = await wire.propose(wire.model.text((1, 2, 3), 2), session=other)
    assert isinstance(found, Verdict) and wire.verifier.health.ready
    count = len(refused)
    await until(lambda: len(refused) > count + 3, "the damaged one is tried on")
    assert wire.verifier.health.ready
    wire.mlc.before = None
    await asking


def test_a_log_that_is_damaged_is_its_sessions_trouble_alone() -> None:
    """Others' records show that the store works, and it is not noted again."""
    health = Health("verifier v0")
    stalls, store = LogStalls(health), "https://r0.test/logs"
    stalls.failed(f"{store}/a", "a", "it is damaged", first=True)
    assert not health.ready, "as far as anybody knows"
    stalls.worked(f"{store}/b")
    stalls.over(f"{store}/b", "b")
    stalls.failed(f"{store}/a", "a", "it is damaged", first=False)
    assert health.ready
    stalls.failed(f"{store}/b", "b", "the store is gone", first=True)
    stalls.over(f"{store}/a", "a")
    assert not health.ready
    stalls.over(f"{store}/b", "b")
    assert health.ready


# ---- what is told of it


async def test_every_admin_socket_says_whether_its_instance_is_ready() -> None:
    async with cluster() as c:
        verifier, drafter = c.verifiers["https://v0.test/"], c.drafters["https://d0.test/"]
        admins: dict[str, JsonResources] = {
            "router": RouterAdmin("r0", c.router, text_model()),
            "verifier": VerifierAdmin("v0", verifier),
            "drafter": DrafterAdmin("d0", drafter),
        }
        for role, one in (("router", c.router), ("verifier", verifier), ("drafter", drafter)):
            admin = admins[role]
            assert await asked(admin, "/health") == (200, {"schema": "sdcpctl/v1", "status": "ok"})
            status, answer = await asked(admin, "/ready")
            assert (status, answer["ready"], answer["reasons"]) == (200, True, [])
            one.health.note("commit logs", Level.UNREADY, "the disk is full")
            one.health.note("y", Level.DEGRADED, "the cache fails")
            status, answer = await asked(admin, "/ready")
            assert (status, answer["error"]) == (503, "not ready: the disk is full")
            assert (await asked(admin, "/health"))[0] == 200
            status, answer = await asked(admin, "/status")
            assert (status, answer["ready"]) == (200, False)
            assert answer["reasons"] == ["the disk is full"]
            assert answer["degraded"] == ["the cache fails"]
        assert c.router.readiness().reason == "the commit logs cannot be used now"


@pytest.mark.parametrize("ready", [True, False])
def test_readiness_is_a_metric(ready: bool) -> None:
    metrics = Metrics("router")
    assert b"sdcp_ready" not in metrics.text()
    metrics.ready = lambda: ready
    assert f'sdcp_ready{{role="router"}} {float(ready)}'.encode() in metrics.text()
