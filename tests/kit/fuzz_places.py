"""Every resource that takes a message, with a valid body and a look at what it may change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from sdcpd.protocol.codec import MEDIA_TYPE, encode
from sdcpd.protocol.messages import (
    Action,
    Assignment,
    Event,
    InstanceRole,
    Message,
    Policy,
    Proposal,
    Resume,
    Sampling,
    SessionOpen,
    Status,
)
from sdcpd.protocol.verifier_state import VerifierSettings
from sdcpd.roles.generation import GenerationRequest
from sdcpd.transport.http import Response
from tests.kit.answers import verdict_of
from tests.kit.cluster import ROUTER, Cluster
from tests.kit.verifier_machine import SESSION
from tests.kit.verifier_wire import DRAFTER, Wire
from tests.kit.wire_peers import add_drafter


@dataclass
class Target:
    """A resource, a valid body for it, and what a refusal must not change."""

    kind: type[Message]
    body: bytes
    send: Callable[[bytes], Any]
    state: Callable[[], object]


@asynccontextmanager
async def verifier(kind: type[Message]) -> AsyncIterator[Target]:
    """A session with one round behind it."""
    wire = Wire()
    wire.contract = Wire(
        members={"sampling": Sampling(seed=7, top_k=3), "scope": bytes(16)}
    ).contract
    await wire.ready()
    verdict_of(await wire.propose(wire.good(2)))
    path = f"sessions/{wire.log_name}"
    other = bytes(range(1, 17))
    resume = Resume(round=0, committed=0, digest=bytes(32), committed_tokens=f"{ROUTER}objects/x/t")
    opened = SessionOpen(
        session=other,
        epoch=1,
        contract=wire.contract,
        prompt=(1, 2, 3),
        commit_log=f"{ROUTER}logs/other",
        resume=resume,
        self_decode_after_ms=5,
    )
    who, method, at, message = {
        SessionOpen: ("router", "POST", "sessions", opened),
        Assignment: (
            "router",
            "PUT",
            f"{path}/drafter",
            wire.assignment(sampling=Sampling(seed=1), m_init=3),
        ),
        Policy: (
            "router",
            "POST",
            f"{path}/policy",
            Policy(session=SESSION, from_round=4, sampling=Sampling(seed=1, top_p_milli=5)),
        ),
        Proposal: (
            "drafter",
            "POST",
            "proposals",
            wire.proposal(wire.good(3), q_rows=f"{ROUTER}objects/x/q"),
        ),
    }[kind]

    async def send(body: bytes) -> Response:
        return await wire.send(who, method, at, body)

    def state() -> object:
        return wire.snapshot(), len(wire.verifier.sessions)

    try:
        yield Target(kind, encode(message), send, state)
    finally:
        await wire.verifier.aclose()


@asynccontextmanager
async def drafter(kind: type[Message]) -> AsyncIterator[Target]:
    """A drafter that has nothing to do yet."""
    wire = Wire()
    made = add_drafter(wire)
    state = await wire.open()
    message = wire.assignment(digest=state.digest)  # type: ignore[union-attr]

    async def send(body: bytes) -> Response:
        return await wire.clients["router"].request(
            "POST", DRAFTER + "assignments", headers=(("content-type", MEDIA_TYPE),), body=body
        )

    try:
        yield Target(kind, encode(message), send, lambda: len(made.sessions))
    finally:
        await made.aclose()
        await wire.verifier.aclose()


@asynccontextmanager
async def router(kind: type[Message]) -> AsyncIterator[Target]:
    """A router with a session that waits for a drafter."""
    cluster = Cluster()
    cluster.add_router()
    made = cluster.add_verifier(machine=VerifierSettings(None, None))
    await cluster.ready()
    request = GenerationRequest((1, 2), 8, (), Sampling(temperature_milli=0))
    await cluster.router.generate(request)
    while not made.sessions:
        await asyncio.sleep(0)
    session = made.sessions[0].machine.session
    base = "https://v0.test/"
    status = Status(instance="x", role=InstanceRole.VERIFIER, load=3, queue=1, ttl_ms=900, vocab=4)
    event = Event(
        session=session, epoch=1, kind=Action.SWITCH, committed=3, digest=bytes(range(32))
    )
    method, at, message = {
        Status: ("PUT", "instances/x/status", status),
        Event: ("POST", "events", event),
    }[kind]

    async def send(body: bytes) -> Response:
        return await cluster.client("verifier", "v0", base).request(
            method, ROUTER + at, headers=(("content-type", MEDIA_TYPE),), body=body
        )

    def state() -> object:
        sessions = [(r.label, r.machine.phase, r.place) for r in cluster.router.sessions]
        return sessions, list(cluster.router.reports.alive.items())

    try:
        yield Target(kind, encode(message), send, state)  # type: ignore[arg-type]
    finally:
        await cluster.aclose()


PLACES = {
    "session-open": (verifier, SessionOpen),
    "assignment": (verifier, Assignment),
    "policy": (verifier, Policy),
    "proposal": (verifier, Proposal),
    "assignment at a drafter": (drafter, Assignment),
    "status": (router, Status),
    "event": (router, Event),
}
