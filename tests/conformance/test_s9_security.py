"""Section 9: who may do what, what a hostile drafter can do, and what is never told."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cbor2
import pytest

from sdcpd.engine.fake import FakeModel
from sdcpd.protocol.codec import encode
from sdcpd.protocol.messages import Policy, Sampling, SessionOpen, Verdict
from sdcpd.protocol.problems import ProblemDocument
from sdcpd.protocol.uris import session_path_id
from sdcpd.roles.rates import DRAFTER_FACTOR, RateLimit
from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import PeerRefused, Request, Response
from tests.kit.answers import output_of, refused, state_of, until, verdict_of
from tests.kit.certs import CertKit
from tests.kit.cluster import ROUTER, cluster
from tests.kit.failover import fence
from tests.kit.network import TlsNetwork
from tests.kit.router_rig import router_rig
from tests.kit.verifier_machine import SESSION
from tests.kit.verifier_wire import Wire

MakeWire = Callable[..., Wire]
ORDINARY = ("drafter", "other", "front_end")


def opening(wire: Wire, **changes: Any) -> SessionOpen:
    members: dict[str, Any] = {
        "session": SESSION,
        "epoch": 1,
        "contract": wire.contract,
        "prompt": (1, 2, 3),
        "commit_log": f"{ROUTER}logs/{wire.log_name}",
    }
    return SessionOpen(**{**members, **changes})


# ---- transport


async def test_the_mlc_serves_nobody_without_a_certificate(tmp_path: Path) -> None:
    """R-9-1: objects and logs stand behind the same handshake as every resource."""
    network = TlsNetwork(tmp_path / "pki")
    async with router_rig(network) as rig:
        rig.mlc.objects["s/x"] = b"secret"
        known = await network.client("verifier", "v0").request("GET", rig.base + "objects/s/x")
        assert known.body == b"secret"
        asked = len(rig.mlc.requests)
        port = int(rig.base.rsplit(":", 1)[1].rstrip("/"))
        octets = await asyncio.to_thread(_without_certificate, port)
        assert octets == b""
        other = CertKit(tmp_path / "other")
        client = HttpClient(other.identity("verifier", "v0"))
        with pytest.raises(PeerRefused):
            await client.request("GET", rig.base + "objects/s/x")
        await client.aclose()
        assert len(rig.mlc.requests) == asked
    await network.aclose()


def _without_certificate(port: int) -> bytes:
    """What a server sends to a TLS client that trusts anyone and shows nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    plain = socket.create_connection(("127.0.0.1", port), timeout=5)
    try:
        with context.wrap_socket(plain) as link:
            link.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
            return link.recv(1000)
    except OSError:
        return b""
    finally:
        plain.close()


# ---- roles


@pytest.mark.parametrize("known", [False, True], ids=["unknown session", "open session"])
async def test_the_routers_resources_are_the_routers(any_wire: Wire, known: bool) -> None:
    """R-9-2, R-6.6-9, D-I3, D-I5: drafters and front ends get 403, whatever session they name."""
    wire = any_wire
    if known:
        await wire.ready()
    policy = Policy(session=SESSION, from_round=1, sampling=Sampling())
    for who in ORDINARY:
        for method, path, body in (
            ("POST", "sessions", encode(opening(wire))),
            ("PUT", wire.path_of(SESSION, "drafter"), encode(wire.assignment(m_init=1))),
            ("POST", wire.path_of(SESSION, "policy"), encode(policy)),
            ("DELETE", f"sessions/{wire.log_name}", b""),
        ):
            response = await wire.send(who, method, path, body)
            assert response.status == 403, (who, method, path)
    assert [s.machine.closed for s in wire.verifier.sessions] == ([False] if known else [])
    assert wire.verifier.counts["opened"] == int(known)
    if known:
        assert verdict_of(await wire.propose(wire.good(4))).accepted == 4


async def test_only_the_assigned_drafter_proposes(any_wire: Wire) -> None:
    """R-9-2, R-6.3-2: neither the router nor the front end, with a correct body."""
    await any_wire.ready()
    body = encode(any_wire.proposal(any_wire.good(1)))
    for who in ("router", "front_end", "other"):
        response = await any_wire.send(who, "POST", "proposals", body)
        assert response.status == 403 and b"#sdcp-not-assigned" in response.body
    assert any_wire.records() == []


# ---- a hostile drafter


@pytest.mark.parametrize("seed", range(4))
async def test_a_fuzzing_drafter_cannot_change_the_text(make_wire: MakeWire, seed: int) -> None:
    """R-9-5: random tokens, lengths, rounds, repetitions and haste; the output is greedy."""
    chance = random.Random(seed)
    wire = make_wire(members={"max_new": 40, "low_rounds": 10_000, "fallback": (5,)})
    await wire.ready()
    while not wire.served().machine.closed:
        batch = [wire.proposal(guess(wire, chance), **lies(wire, chance)) for _ in range(4)]
        answers = await asyncio.gather(
            *(wire.ask("drafter", "POST", "proposals", one, Verdict) for one in batch)
        )
        for answer in answers:
            assert isinstance(answer, Verdict) or answer.status in (409, 410, 422)
    output = output_of(await wire.output())
    assert list(output.tokens) == wire.model.text((1, 2, 3), 40) and output.final
    assert [record.round for record in wire.commits()] == list(range(1, len(wire.commits()) + 1))


def guess(wire: Wire, chance: random.Random) -> list[int]:
    """Some right tokens, then noise, at times too many or beyond the vocabulary."""
    right = wire.good(chance.randint(0, 4))
    noise = [chance.randrange(0, wire.model.vocab + 2) for _ in range(chance.randint(0, 6))]
    return [*right, *noise] or [0]


def lies(wire: Wire, chance: random.Random) -> dict[str, Any]:
    """A member that is wrong, sometimes."""
    machine = wire.served().machine
    return chance.choice(
        [
            {},
            {},
            {},
            {"round": max(0, machine.round + chance.randint(-3, 3))},
            {"base": machine.committed + 1},
            {"base_digest": bytes(32)},
            {"epoch": 2},
        ]
    )


@pytest.mark.parametrize("m_cap", [1, 4])
async def test_m_cap_is_enforced_before_any_pass(any_wire: Wire, m_cap: int) -> None:
    """R-9-7: one token too many costs no forward pass, and the document says the limit."""
    await any_wire.ready(m_init=m_cap)
    for count in (m_cap + 1, 64, 65, 2000):
        answer = refused(await any_wire.propose([1] * count), 422, "sdcp-limit")
        assert answer.m_cap == m_cap
    assert any_wire.engine.scored == []
    verdict_of(await any_wire.propose(any_wire.good(m_cap)))


async def test_rounds_of_a_session_are_rate_limited(make_wire: MakeWire) -> None:
    """R-9-8, D-X2: a flood gets 429 with Retry-After, and nothing is committed for it."""
    wire = make_wire(config={"round_rate": 3.0}, members={"max_new": 1000})
    await wire.ready()
    statuses = []
    for _ in range(30):
        body = encode(wire.proposal(wire.good(1)))
        response = await wire.send("drafter", "POST", "proposals", body)
        statuses.append(response.status)
        if response.status == 429:
            assert int(response.header("retry-after") or 0) >= 1
    assert statuses[:3] == [200] * 3 and statuses.count(429) > 10
    assert len(wire.commits()) == statuses.count(200)


async def test_rounds_of_a_drafter_are_rate_limited(make_wire: MakeWire) -> None:
    """R-9-8, D-X2: over many sessions; another drafter is not made to pay."""
    wire = make_wire(config={"round_rate": 1.0, "max_sessions": 99})
    statuses = []
    for index in range(3 * DRAFTER_FACTOR):
        session = bytes([index + 1]) * 16
        log = f"{ROUTER}logs/{session_path_id(session)}"
        state_of(await wire.open(session=session, commit_log=log))
        state_of(await wire.name(session=session))
        body = encode(wire.proposal([1], session=session))
        statuses.append((await wire.send("drafter", "POST", "proposals", body)).status)
    assert statuses[:DRAFTER_FACTOR] == [200] * DRAFTER_FACTOR and 429 in statuses
    state_of(await wire.open())
    state_of(await wire.name(drafter="https://d1.test/"))
    verdict_of(await wire.propose(wire.good(1), who="other"))


def test_a_normal_rate_is_never_limited() -> None:
    """R-9-8: at the rate itself, in one session and in as many as a drafter may have."""
    now = 0.0
    limit = RateLimit(10.0, clock=lambda: now)
    for _ in range(500):
        now += 0.1
        assert all(limit.allow(bytes([i]) * 16, "d0") for i in range(DRAFTER_FACTOR))
    assert sum(limit.allow(b"s" * 16, "d1") for _ in range(100)) == 10  # a second's burst


def test_a_pause_saves_nothing_up() -> None:
    """R-9-8: after any silence a session and a drafter have a second's burst, as at the start."""
    now = 0.0
    limit = RateLimit(10.0, clock=lambda: now)
    assert limit.allow(b"s" * 16, "d0")
    now = 1000.0
    assert sum(limit.allow(b"s" * 16, "d0") for _ in range(100)) == 10
    many = [limit.allow(bytes([i]) * 16, "d0") for i in range(250)]
    assert sum(many) == 10 * DRAFTER_FACTOR - 10


async def test_a_stranger_uses_up_no_sessions_rounds(make_wire: MakeWire) -> None:
    """R-9-8, D-X2: what a drafter that is not the assigned one sends counts for itself alone."""
    wire = make_wire(config={"round_rate": 1.0})
    await wire.ready()
    for _ in range(5):
        refused(await wire.propose([1], who="other"), 403, "sdcp-not-assigned")
    verdict_of(await wire.propose(wire.good(1)))


# ---- user data


async def test_logs_and_errors_tell_no_tokens(caplog: pytest.LogCaptureFixture) -> None:
    """R-9-12, R-7-11, D-M12: prompts and outputs are in no line, whatever goes wrong."""
    caplog.set_level(logging.DEBUG)
    marks = tuple(range(70_001, 70_006))
    async with cluster(verifiers=2, noise=0.4) as c:
        for verifier in c.verifiers.values():
            verifier._engine.model = Shifted()  # type: ignore[attr-defined]
            verifier._engine.info = replace(verifier._engine.info, vocab=1 << 20)
        for drafter in c.drafters.values():
            drafter._engine.own = Shifted(noise=0.5)  # type: ignore[attr-defined]
        text = await c.text(marks, 20)
        c.kill(c.router.board.choose_verifier(now=0.0) or "")
        text += await c.text(marks, 20)
    assert all(token >= 80_000 for token in text) and len(caplog.records) > 5
    for mark in (*marks, *set(text)):
        assert str(mark) not in caplog.text


async def test_a_discarded_round_is_told_nowhere(
    make_wire: MakeWire, caplog: pytest.LogCaptureFixture
) -> None:
    """R-9-12, D-M12: its log is out of reach, then fenced: the tokens are in no line."""
    caplog.set_level(logging.DEBUG)
    wire = make_wire(model=Shifted())
    wire.engine.info = replace(wire.engine.info, vocab=1 << 20)
    await wire.ready()
    verdict_of(await wire.propose(good := wire.good(2)))
    answers = [Response(500)]

    async def ill(request: Request) -> Response | None:
        return answers.pop() if request.method == "PUT" and answers else None

    wire.mlc.before = ill
    refused(await wire.propose(more := wire.good(2)), 503)
    fence(wire, 2)
    await until(lambda: wire.served().machine.fenced)
    assert "cannot append" in caplog.text and "discarded" in caplog.text
    for token in (*good, *more):
        assert token >= 80_000 and str(token) not in caplog.text


@pytest.mark.parametrize("wrong", [-98_761, "98761", 98_761.5, [98_761], 1 << 64])
async def test_malformed_messages_are_not_repeated(wire: Wire, wrong: object) -> None:
    """R-9-12, D-H10: a prompt or proposal that cannot be read is refused without a word of it."""
    tokens = [98_762, wrong, 98_763]
    await wire.ready()
    proposal = cbor2.loads(encode(wire.proposal([1])))
    opened = cbor2.loads(encode(opening(wire, session=bytes(16))))
    stop = {**opened["contract"], "stop": tokens}
    for who, path, message in (
        ("drafter", "proposals", {**proposal, "tokens": tokens}),
        ("router", "sessions", {**opened, "prompt": tokens}),
        ("router", "sessions", {**opened, "contract": stop}),
    ):
        answer = await wire.send(who, "POST", path, cbor2.dumps(message))
        assert answer.status in (400, 422)
        assert b"9876" not in answer.body, answer.body


class Shifted(FakeModel):
    """Writes tokens that no log would have by chance."""

    vocab_shown = 1 << 20

    def scores(self, prefix: Any) -> Any:
        """A row that is zero up to the tokens it chooses from."""
        small = super().scores([token % 32 for token in prefix])
        return Sparse(small)


class Sparse(list[float]):
    """Scores of tokens 80,000 and up."""

    def __init__(self, small: list[float]) -> None:
        super().__init__([-1.0] * 80_000 + small)


async def test_problem_documents_tell_no_tokens(wire: Wire) -> None:
    """R-9-12, R-7-11: every refusal of a proposal, an opening and a naming, scanned."""
    wire.engine.info = replace(wire.engine.info, vocab=99_000)
    marks = tuple(range(98_761, 98_766))
    await wire.ready()
    answers: list[Any] = [
        await wire.propose([98_761, 99_999]),
        await wire.propose([98_761] * 9),
        await wire.propose([98_761], base=7),
        await wire.propose([98_761], epoch=9),
        await wire.propose([98_761], who="other"),
        await wire.open(prompt=marks),
        await wire.open(session=bytes(16), prompt=(*marks, 1 << 31)),
        await wire.open(session=bytes(16), contract=replace(wire.contract, stop=marks, rule=9)),
        await wire.name(m_init=0, prompt=marks),
        await wire.name(epoch=4, prompt=marks),
    ]
    for answer in answers:
        assert isinstance(answer, ProblemDocument), answer
        said = f"{answer.title} {answer.detail} {answer}"
        assert not any(str(mark) in said for mark in (*marks, 99_999, 1 << 31)), said
        assert not any(word.startswith("/") for word in answer.detail.split())  # nor file paths
