"""The router's resources, asked by scripted verifiers and drafters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from sdcpd.protocol.codec import MEDIA_TYPE, decode, encode
from sdcpd.protocol.messages import (
    Action,
    Assignment,
    Event,
    InstanceRole,
    Message,
    Rule,
    Sampling,
    SessionOpen,
    SessionState,
    Status,
)
from sdcpd.protocol.problems import BadContract, to_json
from sdcpd.roles.generation import GenerationError, GenerationRequest
from sdcpd.transport.http import Request, Response
from sdcpd.transport.loopback import LoopbackClient
from tests.kit.cluster import ROUTER, Cluster, cluster, peer

V0, D0, D1 = "https://v0.test/", "https://d0.test/", "https://d1.test/"
GREEDY = GenerationRequest((1, 2), 8, (), Sampling(temperature_milli=0))


class Scripted:
    """A cluster whose verifier and drafters note what they are asked and answer by script."""

    def __init__(self, **router: object) -> None:
        self.cluster = Cluster()
        self.cluster.add_router(**router)
        self.seen: list[tuple[str, Message]] = []
        self.refuse_rule: int | None = None
        self.cluster.network[V0] = self.verifier
        self.cluster.network[D0] = self.cluster.network[D1] = self.drafter
        self.rules: tuple[int, ...] | None = (1, 2, 200)

    async def verifier(self, request: Request) -> Response:
        if request.path == "/sessions":
            opened = decode(SessionOpen, request.body)
            self.seen.append(("open", opened))
            if opened.contract.rule == self.refuse_rule:
                problem = BadContract("rule not served")
                return Response(
                    422, (("content-type", "application/problem+json"),), to_json(problem)
                )
            return self._state(opened.session, opened.epoch, 0)
        if request.path.endswith("/drafter"):
            named = decode(Assignment, request.body)
            self.seen.append(("name", named))
            return self._state(named.session, named.epoch, 5)
        if request.method == "DELETE":
            return Response(204)
        await asyncio.Event().wait()  # output: nothing ever comes
        raise AssertionError

    async def drafter(self, request: Request) -> Response:
        self.seen.append(("assign", decode(Assignment, request.body)))
        return Response(204)

    def _state(self, session: bytes, epoch: int, round_: int) -> Response:
        message = SessionState(
            session=session, epoch=epoch, round=round_, committed=2 * round_, digest=bytes(32)
        )
        return Response(200, (("content-type", MEDIA_TYPE),), encode(message))

    def client(self, role: str, base: str) -> LoopbackClient:
        return LoopbackClient(self.cluster.network, peer(role, "x", base))

    async def report(
        self,
        role: InstanceRole,
        base: str,
        *,
        name: str = "",
        path: str = "",
        who: str = "",
        **changes: object,
    ) -> Response:
        kind = role.name.lower()
        members: dict[str, object] = {
            "instance": name or base,
            "role": role,
            "load": 0,
            "queue": 0,
            "ttl_ms": 5000,
            "model": bytes(32),
            "rules": self.rules,
            **changes,
        }
        status = Status(**members)  # type: ignore[arg-type]
        path = path or status.instance.replace("/", "%2F").replace(":", "%3A")
        return await self.client(who or kind, base).request(
            "PUT",
            f"{ROUTER}instances/{path}/status",
            headers=(("content-type", MEDIA_TYPE),),
            body=encode(status),
        )

    async def event(
        self, session: bytes, kind: Action, *, base: str = V0, epoch: int = 1
    ) -> Response:
        event = Event(session=session, epoch=epoch, kind=kind, committed=10, digest=bytes(32))
        return await self.client("verifier", base).request(
            "POST", ROUTER + "events", headers=(("content-type", MEDIA_TYPE),), body=encode(event)
        )

    async def until(self, what: str, count: int = 1) -> Message:
        """Wait for the count-th message of a kind."""
        while sum(kind == what for kind, _ in self.seen) < count:
            await asyncio.sleep(0)
        return [message for kind, message in self.seen if kind == what][count - 1]


@pytest.fixture
async def scripted() -> AsyncIterator[Scripted]:
    made = Scripted()
    yield made
    await made.cluster.aclose()


async def test_open_name_assign_over_http(scripted: Scripted) -> None:
    """R-3-1, R-6.1-1, R-6.1-12, R-6.1-13: order and content as the peers see them."""
    assert (await scripted.report(InstanceRole.VERIFIER, V0)).status == 204
    assert (await scripted.report(InstanceRole.DRAFTER, D0)).status == 204
    reader = await scripted.cluster.router.generate(GREEDY)
    assignment = await scripted.until("assign")
    assert [kind for kind, _ in scripted.seen] == ["open", "name", "assign"]
    opened = scripted.seen[0][1]
    assert isinstance(opened, SessionOpen) and isinstance(assignment, Assignment)
    assert opened.epoch == 1 and opened.commit_log.startswith(ROUTER + "logs/")
    assert opened.contract.rule == Rule.GREEDY
    assert (assignment.round, assignment.committed) == (5, 10)
    assert assignment.contract == opened.contract
    await reader.cancel()


async def test_status_is_checked(scripted: Scripted) -> None:
    """R-6.1-25, R-6.1-26, R-9-4, R-5.2-13, D-R2"""
    drafter = InstanceRole.DRAFTER
    assert (await scripted.report(drafter, D0, name="b", path="a")).status == 400
    assert (await scripted.report(drafter, D0, name="d0.a")).status == 204
    assert (await scripted.report(drafter, D1, name="d0.a")).status == 403
    assert (await scripted.report(drafter, V0, who="verifier")).status == 403
    assert (await scripted.report(drafter, D1, who="front_end")).status == 403


async def test_events_are_checked(scripted: Scripted) -> None:
    """R-6.5.2-34, D-V4, D-V3: unknown 404, another's 403, old epoch 409, repeated 204 once."""
    await scripted.report(InstanceRole.VERIFIER, V0)
    await scripted.report(InstanceRole.DRAFTER, D0)
    await scripted.report(InstanceRole.DRAFTER, D1)
    reader = await scripted.cluster.router.generate(GREEDY)
    first = await scripted.until("assign")
    while scripted.cluster.router.sessions[0].machine.drafter is None:
        await asyncio.sleep(0)
    session = reader.session
    assert (await scripted.event(bytes(16), Action.SWITCH)).status == 404
    assert (await scripted.event(session, Action.SWITCH, base="https://v9.test/")).status == 403
    assert (await scripted.event(session, Action.SWITCH, epoch=0)).status == 409
    assert (await scripted.event(session, Action.SWITCH)).status == 204
    assert (await scripted.event(session, Action.SWITCH)).status == 204
    second = await scripted.until("assign", 2)
    assert isinstance(first, Assignment) and isinstance(second, Assignment)
    assert {first.drafter, second.drafter} == {D0, D1}
    await reader.cancel()


async def test_dropped_sessions_are_named_again_at_once(scripted: Scripted) -> None:
    """D-Z5"""
    await scripted.report(InstanceRole.VERIFIER, V0)
    await scripted.report(InstanceRole.DRAFTER, D0)
    reader = await scripted.cluster.router.generate(GREEDY)
    while not scripted.cluster.router.sessions[0].machine.drafter:
        await asyncio.sleep(0)
    await scripted.report(InstanceRole.DRAFTER, D1)
    await scripted.report(InstanceRole.DRAFTER, D0, dropped=(reader.session,))
    second = await scripted.until("assign", 2)
    assert isinstance(second, Assignment) and second.drafter == D1
    await reader.cancel()


async def test_rule_by_what_verifier_and_drafters_serve(scripted: Scripted) -> None:
    """D-Z7: 200 where both know it, with a seed of our own; the client's seed otherwise."""
    await scripted.report(InstanceRole.VERIFIER, V0)
    await scripted.report(InstanceRole.DRAFTER, D0)
    sampled = GenerationRequest((1,), 8, (), Sampling(temperature_milli=700, seed=5))
    reader = await scripted.cluster.router.generate(sampled)
    opened = await scripted.until("open")
    assert isinstance(opened, SessionOpen) and opened.contract.rule == Rule.RACE
    assert opened.contract.sampling == sampled.sampling
    await reader.cancel()


async def test_falls_back_to_rule_2(scripted: Scripted) -> None:
    """R-Z-6: a verifier of another make refuses rule 200."""
    scripted.refuse_rule = Rule.RACE
    await scripted.report(InstanceRole.VERIFIER, V0)
    await scripted.report(InstanceRole.DRAFTER, D0)
    reader = await scripted.cluster.router.generate(
        GenerationRequest((1,), 8, (), Sampling(temperature_milli=700))
    )
    second = await scripted.until("open", 2)
    assert isinstance(second, SessionOpen)
    assert second.contract.rule == Rule.SPECULATIVE_SAMPLING
    await reader.cancel()


async def test_untrusted_drafters_serve_no_rule_2(scripted: Scripted) -> None:
    """R-9-6, D-C7: the rule-2 session is opened but nobody untrusted is assigned."""
    scripted.cluster.router.config = scripted.cluster.router.config.__class__(
        ROUTER, bytes(32), sampling_rule="rejection"
    )
    await scripted.report(InstanceRole.VERIFIER, V0)
    await scripted.report(InstanceRole.DRAFTER, D0)
    reader = await scripted.cluster.router.generate(
        GenerationRequest((1,), 8, (), Sampling(temperature_milli=700))
    )
    await scripted.until("open")
    await scripted.report(InstanceRole.DRAFTER, D0)
    assert "assign" not in [kind for kind, _ in scripted.seen]
    await reader.cancel()


async def test_speculation_off(scripted: Scripted) -> None:
    """D-Z6: no drafter is named, and the verifier begins at once."""
    await scripted.report(InstanceRole.VERIFIER, V0)
    await scripted.report(InstanceRole.DRAFTER, D0)
    reader = await scripted.cluster.router.generate(
        GenerationRequest((1,), 8, (), Sampling(temperature_milli=0), speculate=False)
    )
    opened = await scripted.until("open")
    assert isinstance(opened, SessionOpen)
    assert (opened.self_decode_after_ms, opened.contract.self_load) == (0, 100)
    await scripted.report(InstanceRole.DRAFTER, D0)
    assert "name" not in [kind for kind, _ in scripted.seen]
    await reader.cancel()


async def test_no_verifier_is_said_at_once(scripted: Scripted) -> None:
    """D-R3"""
    with pytest.raises(GenerationError, match="no verifier has reported") as e:
        await scripted.cluster.router.generate(GREEDY)
    assert e.value.retry_after_s is not None
    assert not scripted.cluster.router.readiness().ready


@pytest.mark.parametrize(
    ("configured", "drafters", "wanted"),
    [
        ((Action.REDUCE, Action.SELF_DECODE), 1, (1,) + (3,) * 12),
        ((Action.REDUCE, Action.SWITCH), 1, (1,) * 13),
        ((Action.SWITCH,), 2, (2,) * 13),
        ((Action.REDUCE, Action.FAIL), 1, (1, 5)),
    ],
)
async def test_a_ladder_is_as_long_as_the_text_may_need(
    configured: tuple[int, ...], drafters: int, wanted: tuple[int, ...]
) -> None:
    """A text fails for bad drafters only where the operator says so."""
    async with cluster(drafters=drafters, fallback=configured, low_rounds=3) as made:
        await made.router.generate(GenerationRequest((1,), 38, (), Sampling(temperature_milli=0)))
        (routed,) = made.router.sessions
        assert routed.machine.contract.fallback == wanted


async def test_a_text_outlives_its_bad_drafter() -> None:
    """Low rounds without end, and the text is there to its last token."""
    async with cluster(noise=1.0, low_rounds=1, self_max=1) as made:
        assert await made.text((1, 2), 40) == made.model.text((1, 2), 40)
