"""Section 6.9, D-F1: what a real router takes for the failure of a verifier, and what it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sdcpd.protocol.commit_log import FenceRecord
from sdcpd.protocol.messages import Policy, Sampling
from sdcpd.protocol.problems import NotFound, StaleEpoch, TooManyRequests, Unavailable
from sdcpd.protocol.router_io import ChangePolicy
from sdcpd.transport.http import Response
from tests.kit.cluster import cluster
from tests.kit.network import DroppingClient
from tests.kit.router_rig import BRISK, GREEDY, SAMPLED, RouterRig, opened, resume_of, router_rig
from tests.kit.scripted import DROP, Answer, Seen, quiet


@pytest.fixture
async def rig() -> AsyncIterator[RouterRig]:
    async with router_rig(machine=BRISK) as made:
        yield made


async def on_put(rig: RouterRig, *answers: Any) -> None:
    """v0 serves; its next answers to PUT drafter are these, and an event asks for one."""
    await rig.running()
    await rig.report("v1", load=90)  # and is chosen all the same where v0 has failed
    rig.commit((4, 5))
    rig.v0.script("PUT", ".*/drafter", *answers)
    await rig.event(3)
    await rig.v0.next("PUT", ".*/drafter")


async def on_policy(rig: RouterRig, *answers: Any) -> None:
    """v0 serves; its next answers to POST policy are these, and a policy is posted."""
    await rig.running(SAMPLED)
    await rig.report("v1", load=90)
    rig.commit((4, 5))
    rig.v0.script("POST", ".*/policy", *answers)
    rig.session.step(ChangePolicy(Sampling(temperature_milli=1)))
    await rig.v0.next("POST", ".*/policy")


failures = pytest.mark.parametrize(
    "answers",
    [
        (NotFound(""),),
        (StaleEpoch(""),),
        (DROP, DROP, DROP),
        (Response(500), Response(500), Response(500)),
    ],
    ids=["404", "stale-epoch", "silent", "500"],
)
trouble = pytest.mark.parametrize(
    "answers",
    [(Unavailable(""),) * 5, (TooManyRequests(""),) * 5, (DROP, DROP), (Response(500),) * 2],
    ids=["503", "429", "silent twice", "500 twice"],
)


@failures
async def test_failures_of_a_verifier(rig: RouterRig, answers: tuple[Any, ...]) -> None:
    """R-6.9-16, D-F1: it has forgotten the session or lost authority, or fails three times."""
    await on_put(rig, *answers)
    message = opened(await rig.v1.next("POST", "sessions"))
    assert message.epoch == 2 and message.resume is not None


@failures
async def test_failures_at_a_policy(rig: RouterRig, answers: tuple[Any, ...]) -> None:
    """R-6.9-16, R-6.6-8, D-F1: the same, and the next verifier gets the policy."""
    await on_policy(rig, *answers)
    message = opened(await rig.v1.next("POST", "sessions"))
    assert message.epoch == 2 and message.resume is not None
    posted = (await rig.v1.next("POST", ".*/policy")).as_(Policy)
    assert posted.sampling == Sampling(temperature_milli=1)
    assert rig.v0.unread("POST", ".*/policy") == len(answers) - 1


@trouble
async def test_trouble_at_a_policy_is_no_failure(rig: RouterRig, answers: tuple[Any, ...]) -> None:
    """R-6.9-16, D-F1: it is posted again, with the same content, until it is taken."""
    await on_policy(rig, *answers)
    for _ in answers:
        again = (await rig.v0.next("POST", ".*/policy")).as_(Policy)
        assert again.sampling == Sampling(temperature_milli=1)
    await quiet()
    assert rig.v0.unread("POST", ".*/policy") == 0
    assert rig.v1.seen == [] and rig.session.machine.epoch == 1


@trouble
async def test_trouble_that_is_no_failure(rig: RouterRig, answers: tuple[Any, ...]) -> None:
    """R-6.9-16, D-F1: the PUT is repeated, and nothing is opened elsewhere."""
    await on_put(rig, *answers)
    await rig.d0.next("POST", "assignments")
    assert rig.v1.seen == [] and rig.session.machine.epoch == 1


@pytest.mark.parametrize("answer", [DROP, Response(500)], ids=["silent", "500"])
async def test_failures_at_the_opening(rig: RouterRig, answer: Response) -> None:
    """R-6.9-16, D-F1, D-F3: three times over; it may be open there, so it is fenced first."""
    await rig.report("v0")
    await rig.report("v1", load=90)
    rig.v0.script("POST", "sessions", *[answer] * 3)
    await rig.generate()
    message = opened(await rig.v1.next("POST", "sessions"))
    assert (message.epoch, message.resume) == (2, None)
    rig.v0.session = message.session
    assert rig.log() == (FenceRecord(epoch=2),)
    assert rig.v0.unread("POST", "sessions") == 3


async def test_a_slow_answer_is_no_failure(rig: RouterRig) -> None:
    """R-6.9-16, D-F1: PUT waits for a round, opening for the prompt; while the status is fresh."""
    answer = asyncio.Event()

    async def slowly(_: Seen) -> Answer:
        await answer.wait()
        return rig.v0.state()

    rig.watch()
    await on_put(rig, slowly)
    await asyncio.sleep(0.25)  # two ticks of the router's watch
    assert rig.v1.seen == [] and rig.log() and rig.session.machine.epoch == 1
    answer.set()
    await rig.d0.next("POST", "assignments")
    assert rig.v1.seen == []
    client = rig.own_client
    assert isinstance(client, DroppingClient)
    assert client.patience["PUT drafter"] > 30 and client.patience["POST sessions"] > 60


@pytest.mark.parametrize("how", ["expired", "restarted"])
async def test_a_verifier_whose_status_says_so_is_lost(rig: RouterRig, how: str) -> None:
    """R-6.9-16, D-F1, D-R2: expired, or a new process under the same identity."""
    await rig.running()
    rig.commit((4, 5))
    rig.watch()
    if how == "expired":
        await rig.report("v1")
        await rig.report("v0", ttl_ms=1)
        seen = await rig.v1.next("POST", "sessions")
    else:
        rig.v0.mlc = rig.mlc
        await rig.report("v0", instance="v0.2")
        seen = await rig.v0.next("POST", "sessions")
    assert opened(seen).epoch == 2 and resume_of(seen).committed == 2


async def test_a_restarted_verifier_goes_on_with_the_text() -> None:
    """R-6.9-16, R-6.9-9: its memory is lost and the log is not; the text is the target's."""
    async with cluster(noise=0.3) as c:
        base = "https://v0.test/"
        c.verifiers[base]._engine._pass_time_s = 0.005  # type: ignore[attr-defined]
        reader = await c.router.generate(GREEDY)
        tokens: list[int] = []
        async for part in reader:
            if len(tokens) < 10 <= len(tokens) + len(part.tokens):
                c.kill(base)
                c.add_verifier("v0")
            tokens += part.tokens
        assert tokens == c.model.text(GREEDY.prompt, 40)
        (served,) = c.verifiers[base].sessions
        assert served.machine.epoch >= 2
