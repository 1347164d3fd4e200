"""Section 6.3, the order of the checks (D-P1): each combination of conditions, through the wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sdcpd.protocol.codec import encode
from sdcpd.protocol.commit_log import FenceRecord, encode_record
from sdcpd.protocol.messages import Proposal, Rule, Sampling
from sdcpd.protocol.problems import parse_problem
from tests.kit.answers import refused, state_of, verdict_of
from tests.kit.scripted_target import octets_of
from tests.kit.vectors import VECTORS
from tests.kit.verifier_machine import STATUS
from tests.kit.verifier_wire import DRAFTER, OTHER, Wire

MakeWire = Callable[..., Wire]
UNIFORM = [1 / 32] * 32


def rows(wire: Wire, name: str, tokens: list[int], *, zero_at: int | None = None) -> str:
    """Uniform rows in the MLC, one of which may give its token nothing."""
    made = [list(UNIFORM) for _ in tokens]
    if zero_at is not None:
        made[zero_at] = [0.0 if t == tokens[zero_at] % 32 else 1 / 31 for t in range(32)]
    return wire.put(name, octets_of(made))


async def arranged(make_wire: MakeWire, conditions: set[str]) -> tuple[Wire, bytes]:
    """A session in which the conditions on its state hold, and the first round's verdict."""
    ended = "session finished or failed" in conditions
    suspended = "suspended after switch or self_decode" in conditions
    rule2 = any(c.startswith("rule 2") for c in conditions)
    wire = make_wire(
        members={
            "rule": Rule.SPECULATIVE_SAMPLING if rule2 else Rule.GREEDY,
            "sampling": Sampling(temperature_milli=0),
            "low_rounds": 1,
            "fallback": (2,) if suspended else (5,),
        }
    )
    if "unknown session" in conditions:
        return wire, b""
    await wire.ready()
    body = b""
    if ended or suspended or "verdict recorded for the round" in conditions:
        tokens = wire.bad(2) if ended or suspended else wire.good(2)
        proposal = wire.proposal(tokens, q_rows=rows(wire, "first", tokens))
        response = await wire.send("drafter", "POST", "proposals", encode(proposal))
        assert response.status == 200
        body = response.body
    if ended and suspended:
        cancelled = await wire.send("router", "DELETE", f"sessions/{wire.log_name}")
        assert cancelled.status == 204
    if "fenced" in conditions:
        wire.mlc.append(wire.log_name, encode_record(FenceRecord(epoch=2)))
        refused(await wire.propose(wire.good(1)), 409, "sdcp-stale-epoch")
    return wire, body


def proposal(wire: Wire, conditions: set[str]) -> tuple[str, bytes]:
    """Who proposes, and a proposal that is wrong in exactly the ways listed."""
    recorded = "verdict recorded for the round" in conditions
    tokens = [5, 6] if "unknown session" in conditions else wire.good(2)
    if "other content than the first time" in conditions:
        tokens = [9, 9, 9]
    if "M above m_cap" in conditions:
        tokens = [*tokens, 3, 3, 3, 3, 3]
    if "token >= V" in conditions:
        tokens = [*tokens[:-1], wire.model.vocab]
    changes: dict[str, Any] = {"drafter": DRAFTER}
    if "unknown session" in conditions:
        changes |= {"session": bytes(16), "round": 1, "base": 0, "base_digest": bytes(32)}
        strange = Proposal(epoch=1, tokens=tuple(tokens), status=STATUS, **changes)
        return "drafter", encode(strange)
    machine = wire.served().machine
    if recorded:
        changes["round"] = 1
    for condition, change in (
        ("body names another drafter", {"drafter": OTHER}),
        ("wrong epoch", {"epoch": 2}),
        ("wrong round", {"round": 9}),
        ("wrong base", {"base": machine.committed + 1}),
        ("wrong base_digest", {"base_digest": bytes(32)}),
        ("rule 2: rows not obtainable", {"q_rows": wire.put("x", b"") + "-gone"}),
        ("rule 2: q of a proposed token is zero", {"q_rows": rows(wire, "z", tokens, zero_at=-1)}),
    ):
        if condition in conditions:
            changes |= change
    who = "other" if "not the assigned drafter" in conditions else "drafter"
    return who, encode(wire.proposal(tokens, **changes))


@pytest.mark.parametrize(
    "case",
    VECTORS["proposal_order"]["cases"],
    ids=lambda c: " + ".join(c["conditions"]) or "nothing wrong",
)
async def test_order_of_checks(case: dict[str, Any], make_wire: MakeWire) -> None:
    """R-6.3-1, R-6.3-4, R-6.3-6, R-6.3-12, R-6.3-13, R-6.3-17: the first of the conditions that
    hold decides, and nothing else changes (R-6.3-40).
    """
    conditions = set(case["conditions"])
    wire, first = await arranged(make_wire, conditions)
    who, body = proposal(wire, conditions)
    before = wire.snapshot() if "unknown session" not in conditions else ()
    response = await wire.send(who, "POST", "proposals", body)
    assert response.status == case["status"]
    if case.get("answer") == "new verdict":
        assert len(wire.records()) == 1
        return
    if case.get("answer") == "recorded verdict":
        assert response.body == first
    else:
        problem = parse_problem(response.status, response.body, response.header("content-type"))
        suffix = case["type"].partition("#")[2] if "type" in case else None
        refused(problem, case["status"], suffix)
    if before:
        assert wire.snapshot() == before


async def test_errors_count_for_nothing(make_wire: MakeWire) -> None:
    """R-6.3-40: ten refusals before three low rounds, and more between: the third escalates."""
    wire = make_wire(members={"low_rounds": 3, "fallback": (1, 5)})
    await wire.ready()

    async def refusals() -> None:
        for changes, tokens in (
            ({"epoch": 2}, wire.bad(1)),
            ({"base": 99}, wire.bad(1)),
            ({"round": 7}, wire.bad(1)),
            ({"base_digest": bytes(32)}, wire.bad(1)),
            ({"drafter": OTHER}, wire.bad(1)),
            ({}, [0] * 9),
            ({}, [99]),
        ):
            assert not hasattr(await wire.propose(tokens, **changes), "action")

    await refusals()
    found = []
    for _ in range(3):
        verdict = verdict_of(await wire.propose(wire.bad(1)))
        found.append((verdict.round, verdict.low, int(verdict.action)))
        await refusals()
    assert found == [(1, 1, 0), (2, 2, 0), (3, 0, 1)]
    assert len(wire.records()) == 3 and state_of(await wire.name()).round == 3
