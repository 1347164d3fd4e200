"""Events and policies at a real router (6.5.2, 6.6, 5.2)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from sdcpd.protocol.contract import contract_digest
from sdcpd.protocol.messages import Assignment, Policy, Sampling
from sdcpd.protocol.problems import StaleBase
from sdcpd.protocol.router import RouterSettings
from sdcpd.protocol.router_io import ChangePolicy
from tests.kit.router_rig import SAMPLED, RouterRig, assigned, opened, router_rig
from tests.kit.scripted import Seen, quiet

NEW = Sampling(temperature_milli=300, top_k=5)


@pytest.fixture
async def rig() -> AsyncIterator[RouterRig]:
    async with router_rig() as made:
        yield made


async def test_switch_names_another_drafter_once(rig: RouterRig) -> None:
    """R-6.5.2-18, R-6.5.2-32, R-5.1-15, D-V3: PUT and POST for another; a repetition is 204."""
    await rig.running()
    await rig.report("d1", load=90)
    rig.commit((4, 5))
    answers = [await rig.event(2) for _ in range(3)]
    assert [(a.status, a.body) for a in answers] == [(204, b"")] * 3
    named = assigned(await rig.v0.next("PUT", ".*/drafter"))
    message = assigned(await rig.d1.next("POST", "assignments"))
    assert named.drafter == message.drafter == rig.d1.base
    assert (message.round, message.committed) == (1, 2)
    await rig.event(2)
    await quiet()
    assert rig.v0.unread("PUT", ".*") == rig.d0.unread("POST", ".*") == 0


async def test_switch_with_no_other_drafter_names_it_again(rig: RouterRig) -> None:
    """R-6.5.2-18, D-R4: after switch_grace; an expired other is no other."""
    await rig.running()
    await rig.report("d1", ttl_ms=0)
    rig.commit((4, 5))
    await rig.event(2)
    assert assigned(await rig.v0.next("PUT", ".*/drafter")).drafter == rig.d0.base
    assert assigned(await rig.d0.next("POST", "assignments")).round == 1


async def test_switch_takes_another_that_comes_in_the_grace() -> None:
    """R-6.5.2-18, D-R4: another is preferred always."""
    async with router_rig(machine=RouterSettings(switch_grace_s=None)) as rig:
        await rig.running()
        rig.commit((4, 5))
        await rig.event(2)
        await quiet()
        assert rig.v0.unread("PUT", ".*") == 0
        await rig.report("d0")
        await quiet()
        assert rig.v0.unread("PUT", ".*") == 0  # "never": not the same one
        await rig.report("d1")
        await rig.d1.next("POST", "assignments")


async def test_after_self_decoding_a_drafter_is_named_again(rig: RouterRig) -> None:
    """R-6.5.2-33, D-V5: PUT and POST follow, for the best drafter, be it the same."""
    await rig.running()
    await rig.report("d1", load=99)
    rig.commit((4,))
    assert (await rig.event(3)).status == 204
    assert assigned(await rig.v0.next("PUT", ".*/drafter")).drafter == rig.d0.base
    assert assigned(await rig.d0.next("POST", "assignments")).committed == 1


@pytest.mark.parametrize("kind", [4, 5, 6, 77, 255])
async def test_the_end_and_unknown_kinds_release_the_session(rig: RouterRig, kind: int) -> None:
    """R-5.2-4, D-V5, D-E4: 204; no assignment follows, whatever comes later."""
    await rig.running()
    await rig.report("d1")
    assert (await rig.event(kind)).status == 204
    assert not rig.router.sessions
    assert (await rig.event(2)).status == 204
    await rig.report("d0")
    await quiet()
    assert rig.v0.unread("PUT", ".*") == rig.d1.unread("POST", ".*") == 0


@pytest.mark.parametrize("kind", [0, 1])
async def test_kinds_without_need_are_answered_and_ignored(rig: RouterRig, kind: int) -> None:
    """D-V5: 204, no action."""
    await rig.running()
    await rig.report("d1")
    assert (await rig.event(kind)).status == 204
    await quiet()
    assert len(rig.router.sessions) == 1 and rig.v0.unread("PUT", ".*") == 0


async def test_a_need_already_met_is_answered_without_action(rig: RouterRig) -> None:
    """R-6.5.2-32, D-V3: a drafter was named after that many tokens."""
    await rig.running()
    await rig.report("d1")
    rig.commit((4, 5))
    old = rig.v0.digest
    rig.commit((6,))
    await rig.event(2)
    await rig.d1.next("POST", "assignments")
    await rig.v0.next("PUT", ".*/drafter")
    assert (await rig.event(3, committed=2, digest=old)).status == 204
    await quiet()
    assert rig.v0.unread("PUT", ".*") == 0


async def test_events_are_checked(rig: RouterRig) -> None:
    """R-6.5.2-34, R-9-4, D-V4: whose, which epoch, which session, and that it is one."""
    await rig.running()
    await rig.report("d1")
    await rig.report("v1")
    assert (await rig.event(2, who="v1")).status == 403
    assert (await rig.event(2, who="d0")).status == 403
    assert (await rig.event(2, who="f0")).status == 403
    assert (await rig.event(2, session=bytes(16))).status == 404
    old = await rig.event(2, epoch=0)
    assert old.status == 409 and b"#sdcp-stale-epoch" in old.body
    assert (await rig.post_event("v0", b"\xa1\x61x\x01")).status == 400
    await quiet()
    assert rig.v0.unread("PUT", ".*") == 0 and len(rig.router.sessions) == 1


# ---- policies


def policy(seen: Seen) -> Policy:
    return seen.as_(Policy)


async def test_a_policy_is_for_a_round_to_come(rig: RouterRig) -> None:
    """R-6.6-1: from_round is the first after those known; 409 tells how far they have come."""

    def later(_: Seen) -> StaleBase:
        rig.commit((6,))
        rig.commit((7,))
        return StaleBase("", session_state=rig.v0.state())

    await rig.running(SAMPLED)
    rig.v0.script("POST", ".*/policy", later)
    rig.session.step(ChangePolicy(NEW))
    first, second = [policy(await rig.v0.next("POST", ".*/policy")) for _ in range(2)]
    assert (first.from_round, second.from_round) == (1, 3)
    assert first.sampling == second.sampling == NEW


async def test_later_assignments_carry_the_profile_and_the_same_contract(rig: RouterRig) -> None:
    """R-6.6-6, D-Y10: to the verifier and to the drafter; absent until a policy has changed it."""
    await rig.report("v0")
    await rig.report("d0")
    await rig.generate(SAMPLED)
    before: list[Assignment] = [
        assigned(await rig.v0.next("PUT", ".*/drafter")),
        assigned(await rig.d0.next("POST", "assignments")),
    ]
    await rig.until(lambda: rig.session.machine.drafter)
    contract = opened(await rig.v0.next("POST", "sessions")).contract
    rig.session.step(ChangePolicy(NEW))
    await rig.v0.next("POST", ".*/policy")
    await rig.report("d1")
    rig.commit((4, 5))
    await rig.until(lambda: rig.session.machine.drafter)
    await rig.event(2)
    message = assigned(await rig.d1.next("POST", "assignments"))
    named = [s for s in rig.v0.seen if s.path.endswith("/drafter")][-1].as_(Assignment)
    assert [a.sampling for a in before] == [None, None]
    assert named.sampling == message.sampling == NEW
    assert {contract_digest(a.contract) for a in (*before, named, message)} == {
        contract_digest(contract)
    }
    assert message.contract.sampling == contract.sampling != NEW


async def test_a_policy_that_comes_while_opening_is_posted_before_the_drafter_is_named(
    rig: RouterRig,
) -> None:
    """R-6.6-1, D-Y8: session-open has no place for it."""
    go_on = asyncio.Event()

    async def slowly(seen: Seen) -> object:
        await go_on.wait()
        return rig.v0.default(seen)

    rig.v0.script("POST", "sessions", slowly)  # type: ignore[arg-type]
    await rig.report("v0")
    await rig.report("d0")
    task = asyncio.ensure_future(rig.generate(SAMPLED))
    await rig.v0.next("POST", "sessions")
    rig.session.step(ChangePolicy(NEW))
    go_on.set()
    message = assigned(await rig.d0.next("POST", "assignments"))
    assert rig.asked()[:3] == ["v0 POST sessions", "v0 POST policy", "v0 PUT drafter"]
    assert message.sampling == NEW
    await (await task).cancel()
