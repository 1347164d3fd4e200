"""Section 6.9 at a real router: drafters that go silent, verifiers that are lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sdcpd.protocol.commit_log import CommitRecord, FenceRecord, encode_record
from sdcpd.protocol.messages import Policy, Sampling
from sdcpd.protocol.problems import StaleBase
from sdcpd.protocol.router_io import ChangePolicy
from sdcpd.transport.http import Request, Response
from tests.kit.router_rig import BRISK, SAMPLED, RouterRig, assigned, opened, resume_of, router_rig
from tests.kit.scripted import DROP, Answer, Seen, quiet
from tests.sim.clock import run_virtual

FAILOVER = ["v1 POST sessions", "v1 PUT drafter", "d0 POST assignments"]


@pytest.fixture
async def rig() -> AsyncIterator[RouterRig]:
    async with router_rig(machine=BRISK) as made:
        yield made


# ---- drafters


@pytest.mark.parametrize("how", ["expired", "withdrawn", "restarted", "dropped"])
async def test_a_lost_drafters_sessions_are_reassigned(rig: RouterRig, how: str) -> None:
    """R-6.9-1, R-6.9-2, D-F6: PUT for another first, then its assignment from where things are."""
    await rig.running()
    await rig.report("d1", load=50)
    rig.commit((4, 5))
    rig.watch()
    match how:
        case "expired":
            await rig.report("d0", ttl_ms=1)
        case "withdrawn":
            await rig.report("d0", ttl_ms=0)
        case "restarted":
            await rig.report("d0", instance="d0.2", load=90)
        case "dropped":
            await rig.report("d0", dropped=(rig.v0.session,))
    message = assigned(await rig.d1.next("POST", "assignments"))
    assert rig.asked()[3:] == ["v0 PUT drafter", "d1 POST assignments"]
    assert (message.round, message.committed, message.digest) == (1, 2, rig.v0.digest)
    assert message.committed_tokens is not None and message.epoch == 1
    assert rig.v0.resumed(message.committed_tokens.partition("/objects/")[2]) == (4, 5)


@pytest.mark.parametrize("ttl_ms", [200, 1000, 1700, 3000])
def test_an_expired_status_is_noticed_within_a_second(ttl_ms: int) -> None:
    """R-6.9-1: not before its ttl, and not later than 1 s after it, in virtual time."""

    async def main() -> None:
        async with router_rig() as rig:
            await rig.running()
            await rig.report("d1", load=50)
            rig.watch()
            loop = asyncio.get_running_loop()
            last = loop.time()
            await rig.report("d0", ttl_ms=ttl_ms)
            await rig.v0.next("PUT", ".*/drafter")
            assigned(await rig.d1.next("POST", "assignments"))
            assert ttl_ms / 1000 <= loop.time() - last <= ttl_ms / 1000 + 1

    run_virtual(main(), seed=1)


async def test_reports_in_time_change_nothing(rig: RouterRig) -> None:
    """R-6.9-1: a drafter that reports keeps its sessions."""
    await rig.running()
    await rig.report("d1")
    rig.watch()
    for _ in range(3):
        await rig.report("d0", load=99)
        await asyncio.sleep(0.11)  # one tick of the router's watch
    assert rig.v0.unread("PUT", ".*") == 0


# ---- verifiers: the steps


async def test_fence_then_read_then_open_then_name_then_assign(rig: RouterRig) -> None:
    """R-6.9-4, R-6.9-6, R-6.9-8, D-F2: in this order, all with the new epoch."""
    at_open: list[Any] = []

    def opens(seen: Seen) -> Any:
        at_open.append(rig.log())
        return rig.v1.default(seen)

    rig.v1.script("POST", "sessions", opens)
    await rig.lost((4, 5, 6), (7,))
    message = opened(await rig.v1.next("POST", "sessions"))
    (log,) = at_open
    assert log[-1] == FenceRecord(epoch=2) and len(log) == 3
    last = log[-2]
    assert isinstance(last, CommitRecord) and message.epoch == 2 and message.resume is not None
    resume = message.resume
    assert (resume.round, resume.committed, resume.digest) == (2, 4, last.digest)
    assert resume.committed_tokens.startswith(rig.base + "objects/")
    name = resume.committed_tokens.partition("/objects/")[2]
    assert rig.v1.resumed(name) == (4, 5, 6, 7)
    named = assigned(await rig.v1.next("PUT", ".*/drafter"))
    given = assigned(await rig.d0.next("POST", "assignments"))
    assert rig.asked()[3:] == FAILOVER
    assert {named.epoch, given.epoch} == {2} and given.verifier == rig.v1.base
    assert (given.round, given.committed, given.digest) == (2, 4, last.digest)
    assert opened(rig.v0.seen[0]).commit_log == message.commit_log


async def test_a_commit_that_slips_in_before_the_fence_is_resumed(rig: RouterRig) -> None:
    """R-6.9-5, D-F2: the router's append is refused, and it reads again."""
    slipped: list[bytes] = []

    async def slips(request: Request) -> Response | None:
        if request.method == "PUT" and "/logs/" in request.path and not slipped:
            slipped.append(request.body)
            rig.append(rig.record((9, 9)))
        return None

    rig.mlc.before = slips
    await rig.lost((4,))
    resume = resume_of(await rig.v1.next("POST", "sessions"))
    assert (resume.round, resume.committed) == (2, 3)
    assert [record.epoch for record in rig.log()] == [1, 1, 2]


async def test_the_log_is_read_after_the_fence(rig: RouterRig) -> None:
    """R-6.9-5, D-F2: even if the store took the fence although a commit had come before it."""
    done: list[bytes] = []

    async def lets_both_in(request: Request) -> Response | None:
        if request.method != "PUT" or "/logs/" not in request.path or done:
            return None
        done.append(request.body)
        rig.append(rig.record((9, 9)))
        rig.append(FenceRecord(epoch=2))
        return Response(204, (("etag", '"lax"'),))

    rig.mlc.before = lets_both_in
    await rig.lost((4,))
    resume = resume_of(await rig.v1.next("POST", "sessions"))
    assert (resume.round, resume.committed) == (2, 3)
    assert encode_record(FenceRecord(epoch=2)) in done[0]


async def test_records_of_the_old_epoch_behind_the_fence_are_void(rig: RouterRig) -> None:
    """R-6.9-6, D-M8: what the old verifier writes after the fence is not resumed."""

    async def too_late(request: Request) -> Response | None:
        log = rig.log()
        if request.method == "GET" and "/logs/" in request.path and len(log) == 2:
            rig.append(rig.record((9, 9)))
        return None

    rig.mlc.before = too_late
    await rig.lost((4,))
    resume = resume_of(await rig.v1.next("POST", "sessions"))
    assert (resume.round, resume.committed) == (1, 1) and len(rig.log()) == 3


async def test_a_failure_before_any_commit(rig: RouterRig) -> None:
    """R-6.9-15, D-F3: epoch 2 without resume, and a drafter from round 0."""
    await rig.lost()
    message = opened(await rig.v1.next("POST", "sessions"))
    assert (message.epoch, message.resume) == (2, None)
    assert rig.log() == (FenceRecord(epoch=2),)
    given = assigned(await rig.d0.next("POST", "assignments"))
    assert (given.epoch, given.round, given.committed) == (2, 0, 0)
    assert given.committed_tokens is None


async def test_another_routers_fence_wins(rig: RouterRig) -> None:
    """R-6.9-7, D-M9, D-F1: of two that race one opens the session; the other lets it go."""

    async def other_router(request: Request) -> Response | None:
        if request.method == "PUT" and "/logs/" in request.path and len(rig.log()) == 1:
            rig.append(FenceRecord(epoch=2))
        return None

    rig.mlc.before = other_router
    await rig.lost((4,))
    await rig.until(lambda: not rig.router.sessions)
    await quiet()
    assert rig.v1.seen == []
    assert [record.epoch for record in rig.log()] == [1, 2]


async def test_a_fence_whose_answer_was_lost_is_followed_by_a_higher_one(rig: RouterRig) -> None:
    """R-6.9-4, R-6.9-7: never two session-opens with one epoch, nor one without a fence."""
    first: list[Request] = []

    async def lost_answer(request: Request) -> Response | None:
        if request.method == "PUT" and "/logs/" in request.path and not first:
            first.append(request)
            rig.append(FenceRecord(epoch=2))
            return DROP
        return None

    rig.mlc.before = lost_answer
    await rig.lost((4,))
    message = opened(await rig.v1.next("POST", "sessions"))
    assert message.epoch == 3 and rig.log()[-1] == FenceRecord(epoch=3)


async def test_a_log_that_cannot_be_read_now_is_read_later(rig: RouterRig) -> None:
    """R-6.9-4, D-H14: before the fence and after it; nothing is opened on a guess."""
    refusals = {"GET": 0, "PUT": 0}

    async def unavailable(request: Request) -> Response | None:
        if "/logs/" not in request.path or refusals[request.method] >= 2:
            return None
        refusals[request.method] += 1
        return Response(503)

    await rig.running()
    await rig.report("v1")
    rig.commit((4, 5))
    rig.mlc.before = unavailable
    await rig.report("v0", ttl_ms=0)
    resume = resume_of(await rig.v1.next("POST", "sessions"))
    assert resume.committed == 2 and refusals == {"GET": 2, "PUT": 2}


async def test_a_policy_is_posted_again_before_the_drafter_is_named(rig: RouterRig) -> None:
    """R-6.6-8, D-Y8: from the round after the resumed one; again if self-decoding went on."""

    def decoded_meanwhile(_: Seen) -> Answer:
        rig.v1.commit((8,))
        return StaleBase("", session_state=rig.v1.state())

    await rig.running(SAMPLED)
    await rig.report("v1")
    profile = Sampling(temperature_milli=1, seed=3)
    rig.session.step(ChangePolicy(profile))
    await rig.v0.next("POST", ".*/policy")
    rig.commit((4, 5))
    rig.v1.script("POST", ".*/policy", decoded_meanwhile)
    await rig.report("v0", ttl_ms=0)
    posted = [(await rig.v1.next("POST", ".*/policy")).as_(Policy) for _ in range(2)]
    given = assigned(await rig.v1.next("PUT", ".*/drafter"))
    assert [p.from_round for p in posted] == [2, 3]
    assert {p.sampling for p in posted} == {profile} == {given.sampling}
    mine = [entry for entry in rig.asked() if entry.startswith("v1")]
    assert mine == ["v1 POST sessions", "v1 POST policy", "v1 POST policy", "v1 PUT drafter"]


async def test_no_other_verifier_then_one_comes(rig: RouterRig) -> None:
    """R-6.9-6: the fence is written at once; the session is opened when there is somewhere."""
    await rig.running()
    rig.commit((4, 5))
    await rig.report("v0", ttl_ms=0)
    await rig.until(lambda: rig.log()[-1] == FenceRecord(epoch=2))
    await quiet()
    await rig.report("v1")
    assert resume_of(await rig.v1.next("POST", "sessions")).committed == 2
