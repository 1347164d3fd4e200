"""Section 10: the media type, the rules and the actions as registered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sdcpd.protocol.codec import encode
from sdcpd.protocol.messages import Sampling, SessionOpen
from tests.kit.answers import refused, state_of, verdict_of
from tests.kit.cluster import ROUTER
from tests.kit.verifier_machine import SESSION
from tests.kit.verifier_wire import Wire


async def test_the_media_type(any_wire: Wire) -> None:
    """R-10-1: exactly that, with no parameter, in session-state, verdict and output."""
    wire = any_wire
    opened = SessionOpen(
        session=SESSION,
        epoch=1,
        contract=wire.contract,
        prompt=(1, 2, 3),
        commit_log=f"{ROUTER}logs/{wire.log_name}",
    )
    answers = [await wire.send("router", "POST", "sessions", encode(opened))]
    path = f"sessions/{wire.log_name}"
    answers.append(await wire.send("router", "PUT", f"{path}/drafter", encode(wire.assignment())))
    proposal = encode(wire.proposal(wire.good(2)))
    answers.append(await wire.send("drafter", "POST", "proposals", proposal))
    answers.append(await wire.send("front_end", "GET", f"{path}/output?from=0"))
    assert [answer.status for answer in answers] == [201, 200, 200, 200]
    types = {answer.header("content-type") for answer in answers}
    assert types == {"application/sdcp+cbor"}


@pytest.mark.parametrize("rule", [0, 192, 199, 201, 255])
async def test_reserved_and_private_rules(wire: Wire, rule: int) -> None:
    """R-10-2: 0 is reserved, and of the private ones only 200 is anything here (D-Z7)."""
    contract = replace(wire.contract, rule=rule, sampling=Sampling(seed=1))
    refused(await wire.open(contract=contract), 422, "sdcp-bad-contract")
    refused(await wire.name(contract=contract), 404)


@pytest.mark.parametrize("rule", [1, 2, 200])
async def test_served_rules(wire: Wire, rule: int) -> None:
    """R-10-2"""
    contract = replace(wire.contract, rule=rule, sampling=Sampling(seed=1))
    state_of(await wire.open(contract=contract))


async def test_a_private_action_is_in_no_ladder(wire: Wire) -> None:
    """R-10-3: the numbers 0 to 5 are all there are; 0, 4 and private ones are no fallback."""
    for entry in (0, 4, 6, 192, 255):
        contract = replace(wire.contract, fallback=(entry,))
        refused(await wire.open(contract=contract), 422, "sdcp-bad-contract")
    await wire.ready()
    assert int(verdict_of(await wire.propose(wire.good(1))).action) == 0
