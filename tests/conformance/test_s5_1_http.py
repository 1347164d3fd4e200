"""Section 5.1: how resources answer, at real roles in memory and over HTTP/2 with TLS."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sdcpd.protocol.codec import MEDIA_TYPE, decode, encode
from sdcpd.protocol.messages import Assignment, Output, SessionOpen, SessionState, Verdict
from sdcpd.protocol.uris import session_path_id
from tests.kit.drafter_rig import drafter_rig
from tests.kit.every_role import ROLES, every_role
from tests.kit.network import MemoryNetwork, Network, network_of
from tests.kit.router_rig import router_rig
from tests.kit.verifier_machine import SESSION
from tests.kit.verifier_wire import Wire

VECTORS = json.loads((Path(__file__).parents[1] / "vectors.json").read_text())
IDS = VECTORS["session_ids"]
KINDS = [("content-type", MEDIA_TYPE)]


@pytest.fixture(params=["memory", "tls"])
async def network(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Network]:
    """The same test over each transport."""
    async with network_of(request.param, tmp_path) as made:
        yield made


# ---- content types, methods, paths


async def test_answers_have_the_media_type(any_wire: Wire) -> None:
    """R-5.1-9, R-10-1, D-H1, D-H9: exactly, for session-state, verdict and output."""
    wire = any_wire
    opened = await wire.send("router", "POST", "sessions", encode(_open_message(wire)))
    assert isinstance(await wire.name(), SessionState)
    proposal = encode(wire.proposal(wire.good(2)))
    verdict = await wire.send("drafter", "POST", "proposals", proposal)
    output = await wire.send("front_end", "GET", f"sessions/{wire.log_name}/output?from=0")
    for answer, kind, status in (
        (opened, SessionState, 201),
        (verdict, Verdict, 200),
        (output, Output, 200),
    ):
        assert (answer.status, answer.header("content-type")) == (status, MEDIA_TYPE)
        assert answer.header("cache-control") == "no-store"
        decode(kind, answer.body)
    assert opened.header("location") == f"{wire.base}sessions/{wire.log_name}"


def _open_message(wire: Wire) -> Any:
    return SessionOpen(
        session=SESSION,
        epoch=1,
        contract=wire.contract,
        prompt=(1, 2, 3),
        commit_log=f"https://r0.test/logs/{wire.log_name}",
    )


@pytest.mark.parametrize("who", ROLES)
@pytest.mark.parametrize(
    ("given", "served"),
    [
        (MEDIA_TYPE, True),
        ("Application/SDCP+CBOR; v=1", True),
        ("application/sdcp+cbor;charset=x", True),
        ("application/sdcp+cbor ; v=1", True),
        ("application/cbor", False),
        ("application/json", False),
        ("application/sdcp+cbor-seq", False),
        ("application/sdcp", False),
        ("", False),
        (None, False),
    ],
)
async def test_request_media_types(who: str, given: str | None, served: bool) -> None:
    """R-5.1-10, D-H2: others, or none, are 415 with the type that is wanted."""
    headers = (("content-type", given),) if given is not None else ()
    async with every_role() as roles:
        answer = await roles.send(who, headers=headers)
    if served:
        assert answer.status == 400  # an empty body is no message
        return
    assert answer.status == 415 and answer.header("accept") == MEDIA_TYPE
    assert json.loads(answer.body)["status"] == 415


@pytest.mark.parametrize(
    ("who", "path", "method", "allow"),
    [
        ("verifier", "sessions", "GET", "OPTIONS, POST"),
        ("verifier", "proposals", "PUT", "OPTIONS, POST"),
        ("verifier", "sessions/AAAAAAAAAAAAAAAAAAAAAA/drafter", "POST", "OPTIONS, PUT"),
        ("verifier", "sessions/AAAAAAAAAAAAAAAAAAAAAA/output", "POST", "GET, OPTIONS"),
        ("verifier", "sessions/AAAAAAAAAAAAAAAAAAAAAA/policy", "PUT", "OPTIONS, POST"),
        ("drafter", "assignments", "GET", "OPTIONS, POST"),
        ("router", "instances/a/status", "POST", "OPTIONS, PUT"),
        ("router", "events", "DELETE", "OPTIONS, POST"),
    ],
)
async def test_other_methods(who: str, path: str, method: str, allow: str) -> None:
    """R-5.1-13, R-5.1-18, D-H4: 405 with Allow; OPTIONS says the same with 204."""
    async with every_role() as roles:
        refused = await roles.send(who, method=method, path=path)
        options = await roles.send(who, method="OPTIONS", path=path)
    assert refused.status == 405
    assert (options.status, options.body) == (204, b"")
    for answer in (refused, options):
        assert [part.strip() for part in (answer.header("allow") or "").split(",")] == allow.split(
            ", "
        )


@pytest.mark.parametrize("who", ROLES)
@pytest.mark.parametrize(
    "path",
    ["", "x", "proposals/", "assignments/", "events/", "sessions/", "instances//status"],
)
async def test_unknown_paths(who: str, path: str) -> None:
    """R-5.1-13, D-H5: 404; a trailing slash makes another path."""
    async with every_role() as roles:
        answer = await roles.send(who, path=path)
    assert answer.status == 404
    assert json.loads(answer.body)["status"] == 404


@pytest.mark.parametrize("path", ["a/", "sdcp/v1/"])
async def test_resources_live_below_the_base_uri(path: str) -> None:
    """R-5.1-8, D-H5: a drafter and a router whose base URIs have a path, and nothing at the root."""
    network = MemoryNetwork(path)
    async with drafter_rig(network) as rig:
        rig.answers(rig.keeps(1, 3))
        await rig.begin()
        assert (await rig.proposal()).drafter == f"https://d0.test/{path}"
        network.handlers["https://d0.test/"] = rig.drafter.listener.handle
        body = encode(rig.assignment())
        client = network.client("router", "r0")
        for wrong in (
            "assignments",
            f"x{path}assignments",
            f"{path}{path}assignments",
            f"z{path[1:]}assignments",
        ):
            uri = f"https://d0.test/{wrong}"
            assert (
                await client.request("POST", uri, headers=tuple(KINDS), body=body)
            ).status == 404
    async with router_rig(MemoryNetwork(path)) as router:
        await router.running()
        assert (await router.event(0)).status == 204
        assert router.v0.seen[0].path == "sessions"


# ---- success without content


async def test_assignments_are_answered_204(network: Network) -> None:
    """R-5.1-14, R-6.2-3, R-5.1-9: over each transport; and the drafter's proposal comes back."""
    async with drafter_rig(network) as rig:
        rig.holds()
        answers = [await rig.post(encode(rig.assignment())) for _ in range(2)]
        assert [(a.status, a.body) for a in answers] == [(204, b"")] * 2
        assert answers[0].header("content-type") is None
        proposal = await rig.verifier.next("POST", "proposals")
        assert proposal.request.header("content-type") == MEDIA_TYPE
        accept = proposal.request.header("accept") or ""
        assert MEDIA_TYPE in accept and "application/problem+json" in accept


async def test_statuses_and_events_are_answered_204(network: Network) -> None:
    """R-5.1-15: over each transport, first time and repeated; the router acts on them."""
    async with router_rig(network) as rig:
        assert [await rig.report(name) for name in ("v0", "v0", "d0", "d0")] == [204] * 4
        await rig.generate()
        first = (await rig.d0.next("POST", "assignments")).as_(Assignment)
        await rig.until(lambda: rig.session.machine.drafter == rig.d0.base)
        await rig.report("d1")
        rig.commit((4, 5))
        answers = [await rig.event(2) for _ in range(2)]
        assert [(a.status, a.body) for a in answers] == [(204, b"")] * 2
        second = (await rig.d1.next("POST", "assignments")).as_(Assignment)
        assert (first.committed, second.committed) == (0, 2)
        assert {s.request.header("content-type") for s in rig.d1.seen} == {MEDIA_TYPE}


# ---- session paths


@pytest.mark.parametrize("entry", IDS["valid"], ids=lambda e: e["id"])
async def test_session_ids_that_name_a_session(wire: Wire, entry: dict[str, str]) -> None:
    """R-5.1-16: base64url without padding, in every session path."""
    session = bytes.fromhex(entry["session"])
    assert session_path_id(session) == entry["id"]
    log = f"https://r0.test/logs/{entry['id']}"
    assert isinstance(await wire.open(session=session, commit_log=log), SessionState)
    named = wire.assignment(session=session)
    path = f"sessions/{entry['id']}/"
    assert (await wire.send("router", "PUT", path + "drafter", encode(named))).status == 200
    assert (await wire.send("router", "GET", path + "output?from=0")).status == 200


@pytest.mark.parametrize("entry", IDS["invalid"], ids=lambda e: e["name"])
async def test_session_ids_that_name_nothing(wire: Wire, entry: dict[str, Any]) -> None:
    """R-5.1-16, D-H6: 404, whatever the method and whoever asks."""
    await wire.ready()
    path = f"sessions/{entry['id']}/"
    named = encode(wire.assignment())
    statuses = [
        (await wire.send("router", "PUT", path + "drafter", named)).status,
        (await wire.send("front_end", "GET", path + "output?from=0")).status,
        (await wire.send("router", "POST", path + "policy", named)).status,
    ]
    assert statuses == [entry["status"]] * 3


async def test_body_and_path_name_one_session(wire: Wire) -> None:
    """R-5.1-17, D-H6: 400, and the session of the path is as it was."""
    await wire.ready()
    before = wire.snapshot()
    for other in (bytes(16), b"\xff" * 16):
        body = encode(wire.assignment(session=other, m_init=1))
        answer = await wire.send("router", "PUT", wire.path_of(SESSION, "drafter"), body)
        assert answer.status == 400
    assert wire.snapshot() == before
