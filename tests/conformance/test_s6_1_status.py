"""Status reports: who may report what, who is alive, and who gets the next session (6.1)."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import cbor2
import pytest

from sdcpd.protocol.codec import encode
from sdcpd.protocol.instances import Board
from sdcpd.protocol.messages import InstanceRole, Proposal, Status
from sdcpd.roles.generation import GenerationError
from sdcpd.roles.status import StatusReporter, instance_name
from tests.kit.cluster import ROUTER, peer
from tests.kit.drafter_rig import drafter_rig
from tests.kit.network import DroppingClient
from tests.kit.router_rig import RouterRig, assigned, router_rig
from tests.kit.scripted import ScriptedPeer, Seen
from tests.kit.verifier_machine import contract
from tests.kit.verifier_wire import Wire


@pytest.fixture
async def rig() -> AsyncIterator[RouterRig]:
    async with router_rig() as made:
        yield made


async def chosen(rig: RouterRig) -> str:
    """The drafter that a new session gets."""
    reader = await rig.generate()
    name = assigned(await rig.v0.next("PUT", ".*/drafter")).drafter
    await rig.until(lambda: rig.d0.unread("POST", ".*") + rig.d1.unread("POST", ".*"))
    await reader.cancel()
    return name


async def expired(rig: RouterRig, base: str, role: InstanceRole) -> None:
    """Wait until the last status of an instance has run out."""
    await rig.until(lambda: not rig.router.board.fresh(base, role, now=time.monotonic()))


@pytest.mark.parametrize(
    "changes",
    [
        {"load": 101},
        {"accept_milli": 1001},
        {"role": 0},
        {"role": 3},
        {"load": None},
        {"ttl_ms": None},
    ],
    ids=str,
)
async def test_a_status_out_of_range_is_400(rig: RouterRig, changes: dict[str, Any]) -> None:
    """R-5.2-13: role 1 or 2, load at most 100, accept_milli at most 1000, and all are required."""
    members: dict[str, Any] = {
        "instance": "d0.1",
        "role": InstanceRole.DRAFTER,
        "load": 100,
        "queue": 0,
        "ttl_ms": 1000,
        "accept_milli": 1000,
    }
    assert await rig.put_status("d0", "d0.1", encode(Status(**members))) == 204
    octets = encode(Status(**{**members, **changes}))
    if None in changes.values():
        octets = cbor2.dumps({k: v for k, v in members.items() if k not in changes})
    assert await rig.put_status("d0", "d0.1", octets) == 400


async def test_path_and_body_name_the_same_instance(rig: RouterRig) -> None:
    """R-6.1-25, D-R2: any name, percent-encoded in the path and compared after decoding."""
    assert await rig.report("d0", path="a", instance="b") == 400
    assert await rig.report("d0", path="D0.1", instance="d0.1") == 400
    assert await rig.report("d0", instance="https://d1.example/") == 204
    assert await rig.report("d0", instance="ein Name/mit % und ü") == 204
    assert await rig.report("d0", path="x y", instance="x y") == 204


async def test_our_reporter_encodes_any_name(rig: RouterRig) -> None:
    """R-6.1-25, D-R2: with slashes, spaces and percent signs; the router takes it."""
    for name in ("https://d0.test/", "a b%2Fc", "plain.1"):
        status = Status(instance=name, role=InstanceRole.DRAFTER, load=0, queue=0, ttl_ms=1000)
        reporter = StatusReporter(
            rig.client("d0"), [rig.base], lambda status=status: status, interval_s=1.0
        )
        task = asyncio.ensure_future(reporter.run())
        await rig.until(
            lambda: rig.router.board.status(rig.d0.base, InstanceRole.DRAFTER) is not None
        )
        found = rig.router.board.status(rig.d0.base, InstanceRole.DRAFTER)
        assert found is not None and found.instance == name
        task.cancel()
        await reporter.withdraw()
        rig.router.board._instances.clear()


async def test_only_the_instance_itself_reports(rig: RouterRig) -> None:
    """R-6.1-26, R-9-4, D-R2: another's name, another's role, or no instance at all: 403."""
    assert await rig.report("d0") == 204
    assert await rig.report("d0", who="d1") == 403
    assert await rig.report("d0", who="v0") == 403
    assert await rig.report("v0", who="d0") == 403
    assert await rig.report("d0", who="f0") == 403
    assert await rig.report("d0") == 204
    await rig.report("v0")
    assert await chosen(rig) == rig.d0.base  # what was refused has changed nothing


async def test_one_that_withdraws_again_and_again_is_lost_once(rig: RouterRig) -> None:
    """D-R1: a drafter whose engine hangs says so with each report, until it can go on."""
    await rig.running()
    for _ in range(3):
        assert await rig.report("d0", ttl_ms=0, ready=False) == 204
    machine = rig.session.machine
    assert (machine.drafter, machine._fruitless) == (None, 1)
    assert await rig.report("d0") == 204
    await rig.d0.next("POST", "assignments")
    await rig.until(lambda: machine.drafter == rig.d0.base)
    (d0,) = [one for one in rig.router.board.all() if one.base == rig.d0.base]
    assert list(d0.names) == ["d0.1"], "it is the same process"


async def test_repeated_reports_are_answered_alike(rig: RouterRig) -> None:
    """R-5.1-15: 204 without content, first time and repeated."""
    assert [await rig.report("d0") for _ in range(3)] == [204] * 3


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"load": 10}, {"load": 90}),
        ({"load": 10, "queue": 9}, {"load": 50, "queue": 0}),
        ({"load": 10, "queue": 1}, {"load": 10, "queue": 5}),
        ({"queue": 1, "accept_milli": 1}, {"queue": 2, "accept_milli": 999}),
        ({"accept_milli": 900}, {"accept_milli": 100}),
        ({"accept_milli": 1}, {}),
    ],
    ids=str,
)
async def test_the_better_drafter_is_chosen(
    rig: RouterRig, better: dict[str, int], worse: dict[str, int]
) -> None:
    """R-6.1-21, D-R6: by load, then queue, then acceptance; whoever reported first."""
    await rig.report("v0")
    await rig.report("d0", **worse)
    await rig.report("d1", **better)
    assert await chosen(rig) == rig.d1.base
    await rig.report("d0", **better)
    await rig.report("d1", **worse)
    assert await chosen(rig) == rig.d0.base


async def test_an_expired_drafter_gets_no_session(rig: RouterRig) -> None:
    """R-6.1-22, R-6.1-23, D-R1: after ttl_ms, counted from receipt; 0 withdraws at once."""
    await rig.report("v0")
    await rig.report("d0", ttl_ms=1, load=0)
    await rig.report("d1", load=80)
    await expired(rig, rig.d0.base, InstanceRole.DRAFTER)
    assert await chosen(rig) == rig.d1.base
    await rig.report("d0", ttl_ms=60_000)
    assert await chosen(rig) == rig.d0.base
    await rig.report("d0", ttl_ms=0)
    assert await chosen(rig) == rig.d1.base


async def test_an_expired_verifier_gets_no_session(rig: RouterRig) -> None:
    """R-6.1-22, R-6.1-23, D-R3: neither expired nor withdrawn; with none the client is told."""
    await rig.report("v0", ttl_ms=1)
    await expired(rig, rig.v0.base, InstanceRole.VERIFIER)
    with pytest.raises(GenerationError, match="no verifier"):
        await rig.generate()
    await rig.report("v0")
    await rig.report("v0", ttl_ms=0)
    await rig.report("v1")
    await rig.generate()
    await rig.v1.next("POST", "sessions")
    assert rig.v0.seen == []


async def test_an_assignment_in_hand_is_not_sent_to_a_drafter_that_expired(rig: RouterRig) -> None:
    """R-6.1-22: not even when it expires between PUT and POST."""

    async def outlives(_: Seen) -> Any:
        await rig.report("d0", ttl_ms=0)
        await rig.report("d1")
        return rig.v0.state()

    rig.v0.script("PUT", ".*/drafter", outlives)
    await rig.report("v0")
    await rig.report("d0")
    await rig.generate()
    await rig.d1.next("POST", "assignments")
    assert rig.d0.seen == []


def test_expiry_is_counted_from_receipt() -> None:
    """R-6.1-23, D-R1: to the millisecond, on the router's clock."""
    board = Board({})
    status = Status(instance="d", role=InstanceRole.DRAFTER, load=0, queue=0, ttl_ms=200)
    board.report("https://d/", status, now=10.0)
    assert board.choose_drafter(contract(), now=10.199) == "https://d/"
    assert board.choose_drafter(contract(), now=10.2) is None
    board.report("https://d/", status, now=10.1)
    assert board.choose_drafter(contract(), now=10.299) == "https://d/"


def test_only_permitted_models_are_chosen() -> None:
    """R-6.1-11, R-4.1-27: by the digest that the drafter reports."""
    board = Board({})
    for name in ("a", "b"):
        status = Status(
            instance=name,
            role=InstanceRole.DRAFTER,
            load=0,
            queue=0,
            ttl_ms=1000,
            model=name.encode() * 32,
        )
        board.report(f"https://{name}/", status, now=0.0)
    only_b = contract(drafters=(b"b" * 32,))
    assert board.choose_drafter(only_b, now=0.0) == "https://b/"
    assert board.choose_drafter(only_b, now=0.0, exclude={"https://b/"}) is None
    assert board.choose_drafter(contract(), now=0.0) == "https://a/"


async def test_a_drafter_serves_contracts_that_list_its_model() -> None:
    """R-4.1-26, R-4.1-27: beside others."""
    async with drafter_rig() as rig:
        rig.contract = contract(drafters=(bytes(32), rig.engine.model))
        assert (await rig.begin()).as_(Proposal).round == 1


@pytest.mark.parametrize("role", ["drafter", "verifier"])
async def test_reports_come_well_within_their_ttl(role: str) -> None:
    """R-6.1-24: real roles at their daemon's interval; every gap is shorter than the ttl told."""
    router = ScriptedPeer(ROUTER)
    client = DroppingClient({ROUTER: router.handle}, peer(role, "x", "https://x.test/"))
    times: list[tuple[float, int]] = []
    loop = asyncio.get_running_loop()

    def hears(seen: Seen) -> Any:
        times.append((loop.time(), seen.as_(Status).ttl_ms))
        return router.default(seen)

    router.always("PUT", ".*", hears)
    async with drafter_rig(status_ttl_s=0.3) as rig:
        wire = Wire()
        wire.verifier._status_ttl_s = 0.3
        source = rig.drafter.status if role == "drafter" else wire.verifier.status
        reporter = StatusReporter(client, [ROUTER], source, interval_s=0.1)
        task = asyncio.ensure_future(reporter.run())
        for _ in range(5):
            await router.next("PUT", "instances/.*/status")
        reporter.report_soon()
        await router.next("PUT", "instances/.*/status")
        task.cancel()
        await reporter.withdraw()
        last = (await router.next("PUT", "instances/.*/status")).as_(Status)
        await wire.verifier.aclose()
    assert last.ttl_ms == 0 and last.role == InstanceRole[role.upper()]
    assert {ttl for _, ttl in times[:-1]} == {300}
    assert all((b - a) * 1000 < ttl for (a, ttl), (b, _) in itertools.pairwise(times))


def test_each_start_has_a_name_of_its_own() -> None:
    """R-6.1-25, D-R2: the configured name and a random suffix, all of unreserved characters."""
    names = {instance_name("d0") for _ in range(50)}
    assert len(names) == 50 and all(name.startswith("d0.") for name in names)


async def test_only_verifiers_that_the_operator_names_may_serve() -> None:
    """[router] verifiers: others' reports are refused, and a change counts from the next one on."""
    async with router_rig(verifiers=("https://other.test:443",)) as rig:
        assert await rig.report("v0") == 403
        assert await rig.report("d0") == 204, "drafters are not meant"
        assert rig.router.missing_verifiers == ["https://other.test:443"]
        named = rig.v0.base.upper().replace("HTTPS", "https")
        rig.router.configure(replace(rig.router.config, verifiers=(named,)))
        assert rig.router.missing_verifiers == [named]
        assert await rig.report("v0") == 204, "however its base URI is spelt"
        assert rig.router.missing_verifiers == []
        assert await rig.report("v1") == 403
