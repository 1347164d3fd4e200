"""Section 2: identifiers, lengths, rounds and epochs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cbor2
import pytest

from sdcpd.protocol.codec import decode, encode
from sdcpd.protocol.messages import Output
from tests.kit.answers import output_of, refused, state_of, verdict_of
from tests.kit.vectors import VECTORS
from tests.kit.verifier_machine import SESSION
from tests.kit.verifier_wire import Wire


@pytest.mark.parametrize("octets", [0, 15, 17, 32])
async def test_a_session_is_named_by_16_octets(wire: Wire, octets: int) -> None:
    """R-2-1: any other length is malformed, in a session-open and in a proposal."""
    await wire.ready()
    proposal = cbor2.loads(encode(wire.proposal(wire.good(1))))
    proposal["session"] = (SESSION + SESSION)[:octets]
    response = await wire.send("drafter", "POST", "proposals", cbor2.dumps(proposal))
    assert response.status == 400
    refused(await wire.open(session=(SESSION + SESSION)[:octets]), 400)
    assert wire.records() == []


async def test_the_prompt_is_not_counted(wire: Wire) -> None:
    """R-2-2: with a prompt of four tokens n is 0, and the first output token has index 0."""
    opened = state_of(await wire.open(prompt=(1, 2, 3, 4)))
    assert opened.committed == 0
    await wire.name()
    found = verdict_of(await wire.propose(wire.good(2), base=0))
    assert found.committed == 3
    assert output_of(await wire.output(0)).tokens == found.emitted


async def test_rounds_count_from_1(wire: Wire) -> None:
    """R-2-3: a fresh session has completed round 0, and its first proposal is of round 1."""
    assert state_of(await wire.open()).round == 0
    assert state_of(await wire.name()).round == 0
    problem = refused(await wire.propose(wire.good(1), round=0), 409, "sdcp-stale-base")
    assert problem.session_state is not None and problem.session_state.round == 0
    assert verdict_of(await wire.propose(wire.good(1), round=1)).round == 1


async def test_the_epoch_changes_by_session_open_alone(wire: Wire) -> None:
    """R-2-4: twenty rounds carry the epoch of the opening and nothing raises it."""
    state_of(await wire.open(epoch=7))
    state_of(await wire.name(epoch=7))
    for _ in range(20):
        found = verdict_of(await wire.propose(wire.good(1), epoch=7))
        assert found.epoch == 7
        assert output_of(await wire.output(0)).epoch == 7
    assert {record.epoch for record in wire.records()} == {7}
    assert len(wire.records()) == 20


IDS = VECTORS["session_ids"]


@pytest.mark.parametrize("entry", IDS["valid"], ids=lambda e: e["id"])
async def test_session_ids_in_paths(entry: dict[str, Any], make_wire: Callable[..., Wire]) -> None:
    """R-2-1, R-5.1-16: the id that stands for each session's octets, at every resource."""
    wire = make_wire(members={"max_new": 0})
    session = bytes.fromhex(entry["session"])
    state_of(await wire.open(session=session))
    path = f"sessions/{entry['id']}"
    answer = await wire.send("front_end", "GET", f"{path}/output?from=0")
    assert decode(Output, answer.body).session == session
    body = encode(wire.assignment(session=session))
    assert (await wire.send("router", "PUT", f"{path}/drafter", body)).status == 410
    assert (await wire.send("router", "DELETE", path)).status == 204


@pytest.mark.parametrize("entry", IDS["invalid"], ids=lambda e: e["name"])
async def test_what_is_no_session_id(entry: dict[str, Any], wire: Wire) -> None:
    """R-2-1, R-5.1-16: names no resource, although the session it resembles is open."""
    await wire.ready()
    path = f"sessions/{entry['id']}"
    body = encode(wire.assignment())
    for who, method, at in (
        ("front_end", "GET", f"{path}/output?from=0"),
        ("router", "PUT", f"{path}/drafter"),
        ("router", "POST", f"{path}/policy"),
        ("router", "DELETE", path),
    ):
        assert (await wire.send(who, method, at, body)).status == entry["status"] == 404
    verdict_of(await wire.propose(wire.good(1)))
