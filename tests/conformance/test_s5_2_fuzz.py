"""Section 5.2 under attack: damaged, strange and hostile bodies at the real listeners.

Whatever a body is, the answer is no internal error, and one that refuses leaves everything as it was.
"""

from __future__ import annotations

from typing import Any

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcpd.protocol.messages import (
    Assignment,
    Proposal,
    SessionOpen,
)
from sdcpd.transport.http import Response
from tests.kit import cddl
from tests.kit.answers import refused, verdict_of
from tests.kit.cluster import ROUTER
from tests.kit.fuzz_places import PLACES, Target
from tests.kit.verifier_wire import Wire

REFUSALS = {400, 403, 404, 409, 410, 413, 415, 422, 429}
UNREADABLE = {400, 413, 415, 422}
"""422 is also what a contract that is not of the grammar gets (section 4.1)."""


places = pytest.mark.parametrize("place", PLACES)


async def judged(target: Target, body: bytes) -> Response:
    """Send a body; hold the answer to what the body is, and the state to the answer."""
    before = target.state()
    response = await target.send(body)
    if response.status not in UNREADABLE:
        # The draft's own grammar says what may be taken, not the decoder that took it.
        reason = cddl.why_not(target.kind.__name__, body)
        assert reason is None, (response.status, reason, body.hex())
    if response.status == 503:
        # A drafter can't have the tokens that the body says are committed (D-N8).
        assert target.kind is Assignment and response.header("retry-after")
    else:
        assert response.status in REFUSALS | {200, 201, 204}, body.hex()
    if response.status >= 400:
        assert response.header("content-type") == "application/problem+json"
        assert target.state() == before, body.hex()
    return response


@places
async def test_the_bodies_are_valid_as_they_are(place: str) -> None:
    """R-5.2-6: what is damaged below would have been taken."""
    make, kind = PLACES[place]
    async with make(kind) as target:
        assert (await judged(target, target.body)).status < 300 or kind is SessionOpen


@places
async def test_truncated_anywhere(place: str) -> None:
    """R-5.2-6: at every octet: 400, and nothing changed."""
    make, kind = PLACES[place]
    async with make(kind) as target:
        for end in range(len(target.body)):
            assert (await judged(target, target.body[:end])).status == 400
        for more in (b"\x00", b"\xa0", b"\xff", target.body):
            assert (await judged(target, target.body + more)).status == 400
        assert (await judged(target, b"\xd9\xd9\xf7" + target.body)).status == 400


def members(value: Any, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """The paths of all members, those of nested maps and arrays included."""
    found = []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, member in items:
        found.append((*path, key))
        if isinstance(member, dict | list):
            found += members(member, (*path, key))
    return found


def changed(value: Any, path: tuple[object, ...], new: object) -> Any:
    """A copy in which the member at a path is another one."""
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = new if len(path) == 1 else changed(copy[path[0]], path[1:], new)
    return copy


def nested(depth: int) -> object:
    value: object = 0
    for _ in range(depth):
        value = [value]
    return value


STRANGE: list[object] = [
    *(None, True, False, 0, 1, 2, 255, 2**32 - 1, 2**32, 2**64 - 1, -1, -(2**63)),
    *(2**64, 2**200, -(2**70), 1.0, 1.5, float("nan"), float("inf"), 1e300),
    *("", "x", "\x00", "https://evil.test/", f"{ROUTER}objects/x/y", "é" * 300, b"", b"x"),
    *(bytes(15), bytes(16), bytes(17), bytes(31), bytes(32), bytes(33), bytes(5000)),
    *([], [0], [-1], [2**64], [1.0], [None], [[]], [0] * 70, {}, {"": {}}, {1: 2}, {b"": 1.5}),
    *(cbor2.CBORTag(2, b"\x08"), cbor2.CBORTag(55799, 1), cbor2.CBORSimpleValue(99)),
    *(cbor2.undefined, nested(20), nested(31), nested(33), nested(300)),
]


@places
@settings(max_examples=60, deadline=None)
@given(data=st.data())
async def test_members_of_other_kinds(place: str, data: st.DataObject) -> None:
    """R-5.2-6, R-5.2-1, R-5.2-2: bignums, floats, tags, null, wrong lengths and deep nesting in
    place of each member, and beside them under unknown keys.
    """
    make, kind = PLACES[place]
    async with make(kind) as target:
        for _ in range(8):
            value = cbor2.loads(target.body)
            path = data.draw(st.sampled_from(members(value)))
            path = data.draw(st.sampled_from([path, (*path[:-1], "unknown")]))
            if isinstance(_at(value, path[:-1]), list) and path[-1] == "unknown":
                path = path[:-1]
            body = cbor2.dumps(changed(value, path, data.draw(st.sampled_from(STRANGE))))
            if (await judged(target, body)).status < 300:
                return


def _at(value: Any, path: tuple[object, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


@places
@settings(max_examples=60, deadline=None)
@given(data=st.data())
async def test_damaged_octets(place: str, data: st.DataObject) -> None:
    """R-5.2-6: octets changed, put in, left out or moved at random places."""
    make, kind = PLACES[place]
    async with make(kind) as target:
        for _ in range(8):
            body = bytearray(target.body)
            for _ in range(data.draw(st.integers(1, 3))):
                at = data.draw(st.integers(0, len(body) - 1))
                match data.draw(st.sampled_from(["flip", "put", "cut", "double", "head"])):
                    case "flip":
                        body[at] ^= 1 << data.draw(st.integers(0, 7))
                    case "put":
                        body[at:at] = data.draw(st.binary(min_size=1, max_size=9))
                    case "cut":
                        del body[at : at + data.draw(st.integers(1, 20))]
                    case "double":
                        body[at:at] = body[at : at + data.draw(st.integers(1, 40))]
                    case "head":
                        body[at] = data.draw(st.sampled_from([0x9F, 0xBF, 0xFF, 0x9B, 0xBB, 0xDB]))
                body = body or bytearray(b"\x00")
            if (await judged(target, bytes(body))).status < 300:
                return


@places
async def test_keys_that_come_twice(place: str) -> None:
    """R-5.2-6: each member again, with its own value or another, also under a longer head."""
    make, kind = PLACES[place]
    async with make(kind) as target:
        value = cbor2.loads(target.body)
        head = target.body[0]
        assert head & 0x1F < 23
        for key, member in [*value.items(), ("unknown", 1)]:
            short = cbor2.dumps(key)
            long = b"\x78" + bytes([len(key)]) + key.encode()
            for again in (short, long):
                for other in (member, 1.5):
                    body = bytes([head + 1]) + target.body[1:] + again + cbor2.dumps(other)
                    if key == "unknown":
                        body = bytes([head + 2]) + body[1:] + short + cbor2.dumps(2)
                    assert (await judged(target, body)).status == 400


@places
async def test_bodies_that_are_too_large(place: str) -> None:
    """R-5.1-19: above the resource's limit 413, whatever is in them."""
    make, kind = PLACES[place]
    sizes = {Assignment: 1 << 24, SessionOpen: 1 << 24, Proposal: 1 << 20}
    async with make(kind) as target:
        body = bytes(sizes.get(kind, 1 << 16) + 1)
        before = target.state()
        response = await target.send(body)
        assert response.status == 413 and target.state() == before
        refused_at_limit = await target.send(body[1:])
        assert refused_at_limit.status == 400


async def test_a_refusal_leaves_the_session_to_go_on() -> None:
    """R-5.2-6: after all that a good proposal is answered as if nothing had been sent."""
    wire = Wire()
    await wire.ready()
    for body in (b"", b"\xff", b"\xa1\x61x\x01", b"\xd9\xd9\xf7\xa0"):
        assert (await wire.send("drafter", "POST", "proposals", body)).status == 400
    refused(await wire.propose(wire.good(1), round=9), 409, "sdcp-stale-base")
    assert verdict_of(await wire.propose(wire.good(2))).round == 1
    await wire.verifier.aclose()
