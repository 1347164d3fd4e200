"""Sections 3 and 6.1: how a real router opens a session and names its drafter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from sdcpd.protocol.contract import contract_digest
from sdcpd.protocol.digest import prefix_digest0
from sdcpd.protocol.instances import Permitted
from sdcpd.protocol.messages import Action, Rule, Sampling, SessionState
from sdcpd.protocol.problems import (
    BadContract,
    Forbidden,
    SessionClosed,
    StaleBase,
    Unavailable,
    Unprocessable,
)
from sdcpd.protocol.router import RouterSettings
from sdcpd.roles.generation import GenerationError
from sdcpd.transport.http import Response
from tests.kit.router_rig import (
    BRISK,
    GREEDY,
    SAMPLED,
    TARGET,
    RouterRig,
    assigned,
    opened,
    router_rig,
    texts,
)
from tests.kit.scripted import DROP, Answer, Seen, quiet


@pytest.fixture
async def rig() -> AsyncIterator[RouterRig]:
    async with router_rig(machine=BRISK) as made:
        yield made


async def test_opened_then_named_then_assigned(rig: RouterRig) -> None:
    """R-3-1, R-6.1-1, R-6.1-12: in this order, each after the answer to the one before."""
    answer = asyncio.Event()

    async def slowly(seen: Seen) -> Answer:
        await answer.wait()
        found = rig.v0.default(seen)
        assert isinstance(found, SessionState)
        return found

    rig.v0.script("POST", "sessions", slowly)
    await rig.report("v0")
    await rig.report("d0")
    task = asyncio.ensure_future(rig.generate())
    first = opened(await rig.v0.next("POST", "sessions"))
    await quiet()
    assert rig.asked() == ["v0 POST sessions"]
    answer.set()
    await rig.d0.next("POST", "assignments")
    assert rig.asked() == ["v0 POST sessions", "v0 PUT drafter", "d0 POST assignments"]
    assert (first.epoch, first.resume) == (1, None)
    assert first.commit_log == f"{rig.base}logs/{rig.log_name}"
    assert (first.prompt, first.contract.target) == ((1, 2), TARGET)
    await (await task).cancel()


async def test_the_drafter_hears_only_after_the_verifier_has_answered(rig: RouterRig) -> None:
    """R-6.1-12: an assignment is not sent while the PUT is unanswered."""
    answer = asyncio.Event()

    async def slowly(_: Seen) -> Answer:
        await answer.wait()
        return rig.v0.state()

    rig.v0.script("PUT", ".*/drafter", slowly)
    await rig.report("v0")
    await rig.report("d0")
    await rig.generate()
    await rig.v0.next("PUT", ".*/drafter")
    await quiet()
    assert rig.d0.unread("POST", "assignments") == 0
    answer.set()
    await rig.d0.next("POST", "assignments")


async def test_the_assignment_carries_the_verifiers_answer(rig: RouterRig) -> None:
    """R-6.1-13, R-6.9-2, D-N1: round, committed and digest of the answer; tokens as an object."""

    def five(_: Seen) -> SessionState:
        for tokens in ((1, 2), (3, 4), (5, 6), (7, 8), (9,)):
            rig.commit(tokens)
        return rig.v0.state()

    rig.v0.script("PUT", ".*/drafter", five)
    await rig.report("v0")
    await rig.report("d0")
    await rig.generate()
    message = assigned(await rig.d0.next("POST", "assignments"))
    named = assigned(await rig.v0.next("PUT", ".*/drafter"))
    assert (message.round, message.committed, message.digest) == (5, 9, rig.v0.digest)
    assert message.committed_tokens is not None
    name = message.committed_tokens.partition("/objects/")[2]
    assert rig.v0.resumed(name) == rig.v0.tokens
    assert (message.verifier, message.drafter) == (rig.v0.base, rig.d0.base)
    assert message.contract == named.contract and named.drafter == rig.d0.base
    start = prefix_digest0(contract_digest(named.contract), (1, 2))
    assert (named.round, named.committed, named.digest) == (0, 0, start)
    assert 1 <= message.m_init == named.m_init


async def test_a_verifier_that_checks_put_is_asked_again_with_its_values(rig: RouterRig) -> None:
    """R-6.1-13, D-N1: 409 sdcp-stale-base is answered with the values of session_state."""

    def moved(_: Seen) -> StaleBase:
        rig.commit((4, 5, 6))
        return StaleBase("", session_state=rig.v0.state())

    rig.v0.script("PUT", ".*/drafter", moved)
    await rig.report("v0")
    await rig.report("d0")
    await rig.generate()
    await rig.v0.next("PUT", ".*/drafter")
    again = assigned(await rig.v0.next("PUT", ".*/drafter"))
    assert (again.round, again.committed, again.digest) == (1, 3, rig.v0.digest)
    assert assigned(await rig.d0.next("POST", "assignments")).committed == 3


@pytest.mark.parametrize("written", ["https://d1.test/", "HTTPS://D1.test:443"])
async def test_a_permitted_drafter_is_picked(written: str) -> None:
    """R-6.1-11, R-4.1-26, D-H5: rule 2 goes to the drafter that is trusted, whatever the load."""
    async with router_rig(
        sampling_rule="rejection", permitted={written: Permitted(trusted=True)}
    ) as rig:
        await rig.report("v0")
        await rig.report("d0", load=0)
        await rig.report("d1", load=90)
        await rig.generate(SAMPLED)
        message = assigned(await rig.d1.next("POST", "assignments"))
        assert message.contract.rule == Rule.SPECULATIVE_SAMPLING
        assert rig.d0.seen == []


async def test_untrusted_drafters_get_no_rule_2(rig: RouterRig) -> None:
    """R-9-6, D-C7: a rule-2 session is opened and waits; a rule-1 session is assigned."""
    rig.router.config = replace(rig.router.config, sampling_rule="rejection")
    await rig.report("v0")
    await rig.report("d0")
    await rig.report("d1")
    await rig.generate(SAMPLED)
    assert opened(await rig.v0.next("POST", "sessions")).contract.rule == 2
    await rig.report("d0")
    await quiet()
    assert rig.d0.seen == rig.d1.seen == [] and rig.v0.unread("PUT", ".*/drafter") == 0
    await rig.generate(GREEDY)
    assert opened(await rig.v0.next("POST", "sessions")).contract.rule == 1
    await rig.d0.next("POST", "assignments")


async def test_without_a_trusted_drafter_sampling_is_by_rule_200(rig: RouterRig) -> None:
    """R-9-6, D-Z7: the rule that needs no trust; with the client's seed, or one of our own."""
    await rig.report("v0")
    await rig.report("d0")
    await rig.generate(replace(SAMPLED, sampling=Sampling(temperature_milli=700, seed=5)))
    first = opened(await rig.v0.next("POST", "sessions")).contract
    await rig.generate(SAMPLED)
    second = opened(await rig.v0.next("POST", "sessions")).contract
    assert (first.rule, second.rule) == (Rule.RACE, Rule.RACE)
    assert first.sampling is not None and first.sampling.seed == 5
    assert second.sampling is not None and second.sampling.seed is not None


async def test_a_verifier_that_refuses_rule_200_is_asked_for_rule_2(rig: RouterRig) -> None:
    """R-Z-6, D-Z7: a session of its own, with the same profile."""
    rig.v0.script("POST", "sessions", BadContract("rule 200 is not served"))
    await rig.report("v0")
    await rig.report("d0")
    await rig.generate(SAMPLED)
    first = opened(await rig.v0.next("POST", "sessions"))
    second = opened(await rig.v0.next("POST", "sessions"))
    assert (first.contract.rule, second.contract.rule) == (200, 2)
    assert first.session != second.session and second.epoch == 1
    assert second.contract.sampling is not None
    assert second.contract.sampling.temperature_milli == 700


async def test_other_refusals_are_told_to_the_client(rig: RouterRig) -> None:
    """R-Z-6: rule 1 has no other rule to fall back to."""
    rig.v0.always("POST", "sessions", BadContract("unknown target"))
    await rig.report("v0")
    with pytest.raises(GenerationError, match="sdcp-bad-contract"):
        await rig.generate(GREEDY)
    assert rig.v0.unread("POST", "sessions") == 1 and not rig.router.sessions


async def test_no_drafter_then_the_first_that_comes(rig: RouterRig) -> None:
    """R-6.1-27, R-6.1-11, D-R3: the session is opened and waits."""
    await rig.report("v0")
    await rig.generate()
    await rig.v0.next("POST", "sessions")
    await quiet()
    assert rig.v0.unread("PUT", ".*/drafter") == 0
    await rig.report("d1")
    assert assigned(await rig.v0.next("PUT", ".*/drafter")).drafter == rig.d1.base
    await rig.d1.next("POST", "assignments")


@pytest.mark.parametrize(
    "refusal",
    [Unprocessable(""), BadContract(""), Forbidden(""), Response(404), Response(302), DROP],
)
async def test_a_drafter_that_does_not_take_it_is_replaced(rig: RouterRig, refusal: Any) -> None:
    """R-6.1-12, D-N10: another drafter, starting again with PUT."""
    rig.d0.script("POST", "assignments", refusal)
    await rig.report("v0")
    await rig.report("d0", load=0)
    await rig.report("d1", load=50)
    await rig.generate()
    await rig.d1.next("POST", "assignments")
    assert rig.asked()[1:] == [
        "v0 PUT drafter",
        "d0 POST assignments",
        "v0 PUT drafter",
        "d1 POST assignments",
    ]


async def test_a_drafter_that_the_verifier_does_not_trust_is_replaced(rig: RouterRig) -> None:
    """D-C7, D-N10: 403 to PUT; the drafter refused never hears of the session."""
    rig.v0.script("PUT", ".*/drafter", Forbidden("not trusted here"))
    await rig.report("v0")
    await rig.report("d0", load=0)
    await rig.report("d1", load=50)
    await rig.generate()
    await rig.d1.next("POST", "assignments")
    assert rig.d0.seen == []


async def test_a_busy_drafter_is_asked_again(rig: RouterRig) -> None:
    """D-H14, D-N10: 503 is for now; with no other drafter the same is named again."""
    rig.d0.script("POST", "assignments", Unavailable("", retry_after_s=1))
    await rig.report("v0")
    await rig.report("d0")
    await rig.generate()
    for _ in range(2):
        await rig.v0.next("PUT", ".*/drafter")
        await rig.d0.next("POST", "assignments")


async def test_put_answered_410_releases_the_session(rig: RouterRig) -> None:
    """D-N10, D-H12: it is over, and no failure: nothing is assigned, and its text is read."""

    def ended(_: Seen) -> SessionClosed:
        rig.commit((4, 5), finish=Action.FINISH)
        return SessionClosed("")

    rig.v0.script("PUT", ".*/drafter", ended)
    await rig.report("v0")
    await rig.report("d0")
    reader = await rig.generate()
    await rig.until(lambda: not rig.router.sessions)
    await quiet()
    assert rig.d0.seen == [] and await texts(reader) == [4, 5]


async def test_drafters_that_refuse_are_not_asked_in_turn_for_ever() -> None:
    """D-N10: each once; with none left the router waits."""
    async with router_rig(machine=RouterSettings(switch_grace_s=None)) as rig:
        for drafter in rig.drafters:
            drafter.always("POST", "assignments", Unprocessable(""))
        await rig.report("v0")
        await rig.report("d0", load=0)
        await rig.report("d1", load=50)
        await rig.generate()
        await rig.d1.next("POST", "assignments")
        await quiet()
        assert (len(rig.d0.seen), len(rig.d1.seen)) == (1, 1)


async def test_max_new_and_stop_are_the_requests(rig: RouterRig) -> None:
    """R-6.1-1: what the client asked for is in the contract, and self_load for service alone."""
    await rig.report("v0")
    await rig.generate(replace(GREEDY, max_new=17, stop=(3, 4)))
    contract = opened(await rig.v0.next("POST", "sessions")).contract
    assert (contract.max_new, contract.stop, contract.self_load) == (17, (3, 4), 100)
    assert contract.fallback and set(contract.fallback) <= {1, 2, 3, 5}
