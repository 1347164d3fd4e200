"""Section 7: problem types, their statuses and members, as they stand in the answer's octets."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from sdcpd.engine.fake import FakeModel
from sdcpd.protocol.codec import encode
from sdcpd.protocol.messages import Policy, Rule, Sampling, SessionOpen
from sdcpd.transport.http import Response
from tests.kit.answers import state_of, verdict_of
from tests.kit.cluster import ROUTER
from tests.kit.scripted_target import octets_of
from tests.kit.vectors import VECTORS
from tests.kit.verifier_machine import SESSION
from tests.kit.verifier_wire import Wire, with_contract

MakeWire = Callable[..., Wire]
PREFIX = "https://iana.org/assignments/sdcp#"


async def post(wire: Wire, tokens: list[int], who: str = "drafter", **changes: Any) -> Response:
    body = encode(wire.proposal(tokens, who, **changes))
    return await wire.send(who, "POST", "proposals", body)


async def stale_epoch(make: MakeWire) -> Response:
    wire = make()
    await wire.ready()
    return await post(wire, wire.good(1), epoch=2)


async def stale_base(make: MakeWire) -> Response:
    wire = make()
    await wire.ready()
    return await post(wire, wire.good(1), base=1)


def rule2(make: MakeWire) -> Wire:
    return make(model=FakeModel(vocab=4), members={"rule": Rule.SPECULATIVE_SAMPLING})


async def q_unavailable(make: MakeWire) -> Response:
    wire = rule2(make)
    await wire.ready()
    return await post(wire, [1], q_rows=f"{ROUTER}objects/x/gone")


async def bad_contract(make: MakeWire) -> Response:
    wire = make()
    opened = SessionOpen(
        session=SESSION,
        epoch=1,
        contract=replace(wire.contract, m_max=0),
        prompt=(1,),
        commit_log=f"{ROUTER}logs/x",
    )
    return await wire.send("router", "POST", "sessions", encode(opened))


async def limit(make: MakeWire) -> Response:
    wire = make()
    await wire.ready(m_init=2)
    return await post(wire, wire.good(3))


async def closed(make: MakeWire) -> Response:
    wire = make(members={"max_new": 1})
    await wire.ready()
    verdict_of(await wire.propose(wire.good(1)))
    return await post(wire, [1])


async def failed(make: MakeWire) -> Response:
    wire = make(members={"low_rounds": 1, "fallback": (5,)})
    await wire.ready()
    verdict_of(await wire.propose(wire.bad(1)))
    return await post(wire, [1])


async def bad_proposal(make: MakeWire) -> Response:
    wire = rule2(make)
    await wire.ready()
    return await post(wire, [1], q_rows=wire.put("q", octets_of([[0.5, 0.0, 0.5, 0.0]])))


async def not_assigned(make: MakeWire) -> Response:
    wire = make()
    await wire.ready()
    return await post(wire, wire.good(1), "other")


TABLE_2 = [
    (stale_epoch, 409, "stale-epoch", "Epoch is not current"),
    (stale_base, 409, "stale-base", "Proposal does not extend the committed prefix"),
    (
        q_unavailable,
        409,
        "q-unavailable",
        "Draft probabilities required by the rule are unavailable",
    ),
    (bad_contract, 422, "bad-contract", "Contract invalid or not supported"),
    (limit, 422, "limit", "Proposal violates m_cap or m_max"),
    (closed, 410, "session-closed", "Session has finished or failed"),
    (failed, 410, "session-closed", "Session has finished or failed"),
    (bad_proposal, 422, "bad-proposal", "Proposal inconsistent with its draft distributions"),
    (not_assigned, 403, "not-assigned", "Drafter is not assigned to the session"),
]


@pytest.mark.parametrize(("make", "status", "suffix", "title"), TABLE_2)
async def test_table_2(
    make: Callable[[MakeWire], Awaitable[Response]],
    status: int,
    suffix: str,
    title: str,
    make_wire: MakeWire,
) -> None:
    """R-7-1, R-7-2, R-7-3, R-7-4, R-7-5, R-7-6, R-7-7, R-7-8: type, title and status, to the letter,
    in the status line and in the document.
    """
    response = await make(make_wire)
    assert response.status == status
    assert response.header("content-type") == "application/problem+json"
    document = json.loads(response.body)
    assert document["type"] == f"{PREFIX}sdcp-{suffix}"
    assert (document["title"], document["status"]) == (title, status)
    assert ("session_state" in document) is (suffix == "stale-base")
    assert ("m_cap" in document) is (suffix == "limit")


async def test_stale_base_carries_the_state(wire: Wire) -> None:
    """R-7-9: the last verdict's round, committed and digest; octets in base64url, no padding."""
    await wire.ready()
    verdict_of(await wire.propose(wire.good(3)))
    last = verdict_of(await wire.propose(wire.good(1)))
    state = json.loads((await post(wire, wire.good(1), base=0)).body)["session_state"]
    assert set(state) == set(VECTORS["messages"]["problem_stale_base"]["body"]["session_state"])
    assert (state["epoch"], state["round"], state["committed"]) == (1, 2, last.committed)
    assert len(state["session"]) == 22 and len(state["digest"]) == 43
    assert urlsafe_b64decode(state["session"] + "==") == SESSION
    assert urlsafe_b64decode(state["digest"] + "=") == last.digest
    assert state["session"] == wire.log_name


async def test_limit_carries_m_cap(wire: Wire) -> None:
    """R-7-5, D-P7: as a number."""
    await wire.ready(m_init=3)
    assert json.loads((await post(wire, wire.good(4))).body)["m_cap"] == 3


async def test_plain_problems(wire: Wire) -> None:
    """R-7-11: errors outside Table 2 are about:blank, with the phrase of their status."""
    await wire.ready()
    path = f"sessions/{wire.log_name}"
    for who, method, at, body, status, title in (
        ("drafter", "POST", "proposals", b"\xff", 400, "Bad Request"),
        ("drafter", "POST", "sessions", b"\xa0", 403, "Forbidden"),
        ("drafter", "GET", "nowhere", b"", 404, "Not Found"),
        ("drafter", "GET", "proposals", b"", 405, "Method Not Allowed"),
        ("front_end", "GET", f"{path}/output", b"", 400, "Bad Request"),
        ("other", "GET", f"{path}/output?from=0", b"", 403, "Forbidden"),
    ):
        response = await wire.send(who, method, at, body)
        document = json.loads(response.body)
        assert (response.status, document["status"], document["title"]) == (status, status, title)
        assert document["type"] == "about:blank"


async def test_no_error_tells_what_is_the_users(make_wire: MakeWire) -> None:
    """R-7-11: prompt, proposed and committed tokens, keys and places of files are in no document."""
    wire = make_wire(model=FakeModel(vocab=50_000))
    prompt = (41_234, 42_345, 43_456)
    opened = state_of(await wire.open(prompt=prompt))
    state_of(await wire.name(prompt=prompt))
    found = verdict_of(await wire.propose(wire.bad(3, good=2)))
    proposed = [44_567, 45_678]
    other = with_contract(wire, target=b"\x77" * 32)
    open_ = {"session": SESSION, "epoch": 1, "prompt": prompt, "commit_log": f"{ROUTER}logs/x"}
    answers = [
        await post(wire, proposed, base=0),
        await post(wire, proposed, epoch=2),
        await post(wire, proposed, "other"),
        await post(wire, [*proposed, 87_654]),
        await post(wire, proposed * 9),
        await wire.send(
            "router", "POST", "sessions", encode(SessionOpen(contract=wire.contract, **open_))
        ),
        await wire.send("router", "POST", "sessions", encode(SessionOpen(contract=other, **open_))),
        await wire.send("drafter", "POST", "proposals", encode(wire.proposal(proposed))[:-3]),
        await wire.send(
            "router",
            "POST",
            f"sessions/{wire.log_name}/policy",
            encode(Policy(session=bytes(16), from_round=9, sampling=Sampling(seed=98_765))),
        ),
        await wire.send("front_end", "GET", f"sessions/{wire.log_name}/output?from=x"),
    ]

    async def broken(work: object) -> None:
        raise RuntimeError(f"cannot read /home/models/secret.bin for {prompt}")

    wire.engine.score = broken  # type: ignore[method-assign]
    answers.append(await post(wire, proposed))
    assert [answer.status for answer in answers] == [409, 409, 403, 422, 422, 409, 422, 400, 400, 400, 500]  # fmt: skip
    marks = [str(token) for token in (*prompt, *proposed, *found.emitted, 87_654, 98_765)]
    marks += ["/home", "/work", ".py", "Traceback", "secret", opened.digest.hex(), "77777"]
    for answer in answers:
        text = answer.body.decode()
        assert not [mark for mark in marks if mark in text], text
