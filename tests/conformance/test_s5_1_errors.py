"""Errors over HTTP: problem documents, methods, sizes, and which sessions are known (5.1, 7)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cbor2
import pytest

from sdcpd.protocol.codec import MEDIA_TYPE, encode
from sdcpd.protocol.limits import (
    ASSIGNMENT_BYTES_MAX,
    BODY_BYTES_MAX,
    PROPOSAL_BYTES_MAX,
    SESSION_OPEN_BYTES_MAX,
)
from sdcpd.protocol.messages import Action, Message, Output, Policy, Sampling, SessionState, Verdict
from sdcpd.protocol.problems import ProblemDocument
from sdcpd.transport.http import Response
from tests.kit.every_role import OWN, ROLES, EveryRole, every_role
from tests.kit.verifier_machine import SESSION
from tests.kit.verifier_wire import Wire
from tests.sim.clock import run_virtual

MALFORMED = json.loads((Path(__file__).parents[1] / "vectors.json").read_text())["messages"][
    "malformed_proposal"
]


@pytest.fixture
async def roles() -> AsyncIterator[EveryRole]:
    async with every_role() as made:
        yield made


def document(answer: Response) -> dict[str, Any]:
    """The problem document of an error answer, as RFC 9457 and D-H10 want it."""
    assert answer.header("content-type") == "application/problem+json"
    assert answer.header("cache-control") == "no-store"
    found = json.loads(answer.body)
    assert found["status"] == answer.status and found["title"]
    assert isinstance(found["type"], str) and isinstance(found.get("detail", ""), str)
    assert set(found) <= {"type", "title", "status", "detail", "session_state", "m_cap"}
    return dict(found)


@pytest.mark.parametrize("who", ROLES)
async def test_errors_are_problem_documents(roles: EveryRole, who: str) -> None:
    """R-5.1-11, D-H10: each of the general ones, at each role."""
    cases: list[tuple[int, dict[str, Any]]] = [
        (400, {"body": b"\xff"}),
        (400, {"body": b"\xa0"}),
        (404, {"path": "nothing"}),
        (405, {"method": "PATCH"}),
        (415, {"headers": ()}),
        (413, {"body": bytes(1 << 25)}),
    ]
    if OWN[who][2] != "proposals":
        cases.append((403, {"by": "front_end", "body": b"\xff"}))
    for status, request in cases:
        answer = await roles.send(who, **request)
        assert answer.status == status, request
        assert document(answer)["type"] == "about:blank"


async def test_the_order_of_general_checks(roles: EveryRole) -> None:
    """R-5.1-11, D-H13: path, method, role, media type, size, content."""
    large = bytes(1 << 25)
    assert (await roles.send("router", path="x", method="PATCH")).status == 404
    assert (await roles.send("router", method="PATCH", by="drafter")).status == 405
    refused = await roles.send("router", by="drafter", headers=(), body=large)
    assert refused.status == 403
    assert (await roles.send("router", headers=(), body=large)).status == 415
    assert (await roles.send("router", body=large)).status == 413


async def test_an_error_of_ours_is_500_and_says_nothing(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    """R-5.1-11, D-H14: the log tells the operator; the document tells a peer nothing."""

    async def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret prompt text")

    wire.engine.prepare = broken  # type: ignore[method-assign]
    wire.verifier._opener.open = broken  # type: ignore[assignment]
    answer = await wire.open()
    assert isinstance(answer, ProblemDocument) and answer.status == 500
    assert "secret" not in str(answer) and "secret prompt text" in caplog.text


@pytest.mark.parametrize("entry", MALFORMED, ids=lambda entry: entry["name"])
async def test_malformed_proposals_change_nothing(wire: Wire, entry: dict[str, Any]) -> None:
    """R-5.2-6, D-E2, D-E7: 400 and the session as it was, vector by vector."""
    await wire.ready()
    before = wire.snapshot()
    octets = bytes.fromhex(entry["cbor"])
    answer = await wire.send("drafter", "POST", "proposals", octets)
    assert answer.status == entry["status"]
    assert document(answer)["type"] == "about:blank"
    assert wire.snapshot() == before
    assert isinstance(await wire.propose(wire.good(2)), Verdict)


@pytest.mark.parametrize("who", ROLES)
@pytest.mark.parametrize(
    "octets",
    [
        b"",
        b"\x80",
        b"\xa0\xa0",
        b"\xa1",
        b"\xa2\x61a\x01\x61a\x02",
        b"\xd8\x2a\xa0",
        b"\xa1\x61\xff\x01",
        b"\xa1\x61a\xff",
        b"\xa1\x61a" + b"\x81" * 40 + b"\x00",
        b'{"session": 1}',
    ],
    ids=["empty", "array", "two", "cut", "twice", "tag", "utf-8", "break", "deep", "json"],
)
async def test_malformed_bodies_at_every_role(roles: EveryRole, who: str, octets: bytes) -> None:
    """R-5.2-6, D-E2: the same strictness everywhere."""
    answer = await roles.send(who, body=octets)
    assert answer.status == 400
    document(answer)


async def test_head_is_get_without_content_and_without_waiting(any_wire: Wire) -> None:
    """R-5.1-18, D-H4: at once, also where GET would wait."""
    wire = any_wire
    await wire.ready()
    path = f"sessions/{wire.log_name}/output?from=0"
    # Longer than the client's patience: a HEAD that waits fails here.
    wire.verifier.config = replace(wire.verifier.config, output_wait_s=60.0)
    answer = await wire.send("front_end", "HEAD", path)
    assert (answer.status, answer.body) == (200, b"")
    assert answer.header("content-type") == MEDIA_TYPE
    options = await wire.send("front_end", "OPTIONS", path)
    assert (options.status, options.body) == (204, b"")


def padded(message: Any, size: int) -> bytes:
    """A message that an unknown key makes `size` octets long."""
    content = cbor2.loads(encode(message))
    content["x"] = b""
    return cbor2.dumps({**content, "x": bytes(size - len(cbor2.dumps(content)) - 4)})


@pytest.mark.parametrize("over", [0, 1])
async def test_sizes_at_the_verifier(wire: Wire, over: int) -> None:
    """R-5.1-19, D-H7: 16 MiB to open, 1 MiB to propose, 64 KiB for others; one octet more is 413."""
    await wire.ready()
    proposal = padded(wire.proposal(wire.good(1)), PROPOSAL_BYTES_MAX + over)
    assert len(proposal) == PROPOSAL_BYTES_MAX + over == (1 << 20) + over
    assert (await wire.send("drafter", "POST", "proposals", proposal)).status == (
        413 if over else 200
    )
    named = padded(wire.assignment(m_init=3), SESSION_OPEN_BYTES_MAX + over)
    answer = await wire.send("router", "PUT", wire.path_of(SESSION, "drafter"), named)
    assert answer.status == (413 if over else 200)
    assert (SESSION_OPEN_BYTES_MAX, ASSIGNMENT_BYTES_MAX) == (16 << 20, 16 << 20)
    policy = bytes(BODY_BYTES_MAX + over)
    answer = await wire.send("router", "POST", wire.path_of(SESSION, "policy"), policy)
    assert answer.status == (413 if over else 400) and BODY_BYTES_MAX == 64 << 10


async def test_a_large_opening_is_refused(wire: Wire) -> None:
    """R-5.1-19: 17 MiB -> 413, and no session."""
    answer = await wire.send("router", "POST", "sessions", bytes(17 << 20))
    assert answer.status == 413 and not wire.verifier.sessions


async def test_a_very_long_proposal_is_over_the_limit_not_over_the_size(any_wire: Wire) -> None:
    """R-5.1-19, R-7-5: 2000 tokens -> 422 sdcp-limit."""
    await any_wire.ready()
    answer = await any_wire.propose([1] * 2000)
    assert isinstance(answer, ProblemDocument)
    assert (answer.status, answer.suffix) == (422, "sdcp-limit")


async def test_unknown_sessions(wire: Wire) -> None:
    """R-5.1-20, D-H12: 404 for what was never here, to everyone."""
    await wire.ready()
    other = b"\x09" * 16
    proposal = replace(wire.proposal([1]), session=other)
    policy = Policy(session=other, from_round=1, sampling=Sampling())
    output = wire.path_of(other, "output") + "?from=0"
    answers = [
        await wire.ask("drafter", "POST", "proposals", proposal, Verdict),
        await wire.ask(
            "router",
            "PUT",
            wire.path_of(other, "drafter"),
            wire.assignment(session=other),
            SessionState,
        ),
        await wire.ask("router", "POST", wire.path_of(other, "policy"), policy, SessionState),
        await wire.ask("front_end", "GET", output, None, Output),
    ]
    assert [a.status for a in answers if isinstance(a, ProblemDocument)] == [404] * 4


async def test_closed_sessions(make_wire: Any) -> None:
    """R-5.1-20, D-H12: 410 sdcp-session-closed to proposals, PUT and policy; output still 200."""
    wire: Wire = make_wire(members={"max_new": 3})
    await wire.ready()
    assert isinstance(await wire.propose(wire.good(3)), Verdict)
    answers = [await wire.propose([1]), await wire.name(), await wire.policy(9, top_k=1)]
    for answer in answers:
        assert isinstance(answer, ProblemDocument)
        assert (answer.status, answer.suffix) == (410, "sdcp-session-closed")
    output = await wire.output()
    assert isinstance(output, Output) and output.final
    assert isinstance(await wire.open(), SessionState)


def test_what_is_left_of_a_closed_session() -> None:
    """R-5.1-20, D-H12: all of it for 10 minutes, 410 to everything for an hour more, then 404."""

    async def main() -> None:
        wire = Wire(members={"max_new": 3})
        await wire.ready()
        state = await wire.open()
        assert isinstance(state, SessionState)
        proposal = wire.proposal(wire.good(3))
        naming = wire.assignment(digest=state.digest)
        verdict = await wire.ask("drafter", "POST", "proposals", proposal, Verdict)
        assert isinstance(verdict, Verdict) and verdict.action == Action.FINISH

        async def answers() -> list[Message | ProblemDocument]:
            later = replace(proposal, round=2)
            drafter = wire.path_of(SESSION, "drafter")
            return [
                await wire.output(),
                await wire.ask("drafter", "POST", "proposals", proposal, Verdict),
                await wire.ask("drafter", "POST", "proposals", later, Verdict),
                await wire.ask("router", "PUT", drafter, naming, SessionState),
                await wire.policy(9, top_k=1),
            ]

        async def after(seconds: float) -> list[int | tuple[int, str | None]]:
            await asyncio.sleep(seconds)  # virtual
            return [
                (a.status, a.suffix) if isinstance(a, ProblemDocument) else 200
                for a in await answers()
            ]

        closed = (410, "sdcp-session-closed")
        assert await after(0) == [200, 200, closed, closed, closed]
        assert await after(599) == [200, 200, closed, closed, closed]
        assert await after(3) == [closed] * 5
        assert await after(3596) == [closed] * 5
        assert await after(5) == [(404, None)] * 5
        await wire.verifier.aclose()

    run_virtual(main(), seed=1)
