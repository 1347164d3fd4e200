"""Sections 6.3 and 6.9: the target's KV in the MLC, published by one verifier, loaded by another."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from sdcpd.config import Config, parse_config
from sdcpd.engine.fake import FakeTarget
from sdcpd.parts import Parts
from sdcpd.protocol.messages import Sampling
from sdcpd.protocol.problems import Forbidden
from sdcpd.protocol.uris import session_path_id
from sdcpd.roles.generation import GenerationRequest
from sdcpd.roles.prefix_kv import draft_kind
from sdcpd.settings import router_config, verifier_config
from sdcpd.stores import Stores
from sdcpd.transport.http import Peer, Request, Response
from tests.kit.answers import output_of, refused, state_of, until, verdict_of
from tests.kit.cluster import ROUTER, cluster
from tests.kit.failover import fence, resume_of, second
from tests.kit.mlc import LossyClient
from tests.kit.router_rig import BRISK, RouterRig, router_rig
from tests.kit.router_rig import resume_of as resumed
from tests.kit.scripted import quiet
from tests.kit.verifier_machine import SESSION
from tests.kit.verifier_wire import Wire
from tiers.host import HostTier

MakeWire = Callable[..., Wire]
PROMPT = tuple(i * 5 % 32 for i in range(64))
SCOPE = b"\x07" * 16


def name_of(prompt: tuple[int, ...]) -> str:
    """What the KV of a prompt is called (D-M4)."""
    octets = b"".join(token.to_bytes(4, "big") for token in prompt)
    return "target_kv." + hashlib.sha256(b"SDCP-KV-1\0" + octets).hexdigest()


def published(wire: Wire) -> list[Request]:
    """What the verifier wrote as KV, in order."""
    return [r for r in wire.mlc.requests if r.method == "PUT" and "target_kv" in r.path]


async def everything() -> None:
    """Let the background have its turn."""
    await quiet()
    await quiet()


class SilentClient(LossyClient):
    """Asked about KV, nobody answers."""

    async def request(self, method: str, uri: str, **options: Any) -> Response:
        """See Client."""
        self.unreachable = "target_kv" in uri
        return await super().request(method, uri, **options)


# ---- the verifier publishes


@pytest.mark.parametrize("scope", [None, SCOPE])
async def test_a_verifier_publishes_the_prompts_kv(
    make_wire: MakeWire, scope: bytes | None
) -> None:
    """R-6.3-39: after the first round, once, under a name that the router can tell."""
    wire = make_wire(config={"publish_kv": True}, members={"scope": scope})
    state_of(await wire.open(prompt=PROMPT))
    state_of(await wire.name())
    await everything()
    assert not published(wire)
    for _ in range(3):
        verdict_of(await wire.propose(wire.good(2)))
        await everything()
    (put,) = published(wire)
    assert put.path == f"/objects/{session_path_id(scope or SESSION)}/{name_of(PROMPT)}"
    assert put.header("if-none-match") == "*" and put.header("sdcp-lease") is None
    assert put.body == await wire.engine.export(SESSION, 1, 64)


@pytest.mark.parametrize("why", ["short", "not asked", "there already"])
async def test_what_is_not_published(make_wire: MakeWire, why: str) -> None:
    """R-6.3-39, D-O10: of a short prompt, without `publish_kv`, or twice."""
    wire = make_wire(config={"publish_kv": why != "not asked"})
    if why == "there already":
        wire.put(name_of(PROMPT), b"kv")
    prompt = PROMPT[:63] if why == "short" else PROMPT
    state_of(await wire.open(prompt=prompt))
    state_of(await wire.name())
    verdict_of(await wire.propose(wire.good(2)))
    await everything()
    assert not published(wire)


@pytest.mark.parametrize("failure", ["full", "lost"])
async def test_a_cache_that_does_not_take_it(
    make_wire: MakeWire, failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    """R-6.3-39: the session goes on; one line in the log."""
    wire = make_wire(config={"publish_kv": True})

    async def full(request: Request) -> Response | None:
        kv = request.method == "PUT" and "target_kv" in request.path
        return Response(507) if kv else None

    if failure == "lost":
        wire.verifier._objects._client = SilentClient(wire.own_client)
    else:
        wire.mlc.before = full
    state_of(await wire.open(prompt=PROMPT))
    state_of(await wire.name())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            verdict_of(await wire.propose(wire.good(2)))
            await everything()
    assert ["not published" in record.message for record in caplog.records] == [True]


async def test_of_a_session_that_has_ended_nothing_is_published(make_wire: MakeWire) -> None:
    """R-6.3-39: its KV is gone."""
    wire = make_wire(config={"publish_kv": True}, members={"max_new": 2})
    state_of(await wire.open(prompt=PROMPT))
    state_of(await wire.name())
    verdict_of(await wire.propose(wire.good(4)))
    await everything()
    assert not published(wire)


# ---- another verifier loads


async def taken_over(make_wire: MakeWire, wire: Wire, target_kv: str | None) -> Wire:
    """The session at a second verifier, which has written a few tokens more."""
    other = second(make_wire, wire)
    fence(wire, 2)
    resume = resume_of(wire, target_kv=target_kv)
    # What the resume names is nearer to what is needed than the prompt's, and comes first.
    gone = f"{ROUTER}objects/x/gone"
    state_of(await other.open(epoch=2, prompt=PROMPT, resume=resume, prompt_kv=gone))
    state_of(await other.name(epoch=2))
    verdict_of(await other.propose(other.good(3), epoch=2))
    return other


@pytest.mark.parametrize("there", [True, False])
async def test_a_second_verifier_loads_it(make_wire: MakeWire, there: bool) -> None:
    """R-6.3-39, R-6.9-6, D-O10: the KV of the prompt is loaded; the text is the same either way."""
    wire = make_wire(config={"publish_kv": there})
    state_of(await wire.open(prompt=PROMPT))
    state_of(await wire.name())
    verdict_of(await wire.propose(wire.good(3)))
    await everything()
    reference = f"{ROUTER}objects/{wire.log_name}/{name_of(PROMPT)}"
    other = await taken_over(make_wire, wire, reference)
    assert other.engine.prefilled == ([3] if there else [67])
    tokens = output_of(await other.output()).tokens
    assert list(tokens) == wire.model.text(PROMPT, 8)


async def test_an_opening_repeated_without_the_kv_is_the_same(make_wire: MakeWire) -> None:
    """R-6.1-6, D-O1: accelerators are no content; a router may have found it only now."""
    wire = make_wire()
    state_of(await wire.open(prompt=PROMPT))
    state_of(await wire.name())
    verdict_of(await wire.propose(wire.good(3)))
    other = await taken_over(make_wire, wire, f"{ROUTER}objects/x/kv")
    resume = other.served().opened.resume
    assert resume is not None and resume.target_kv is not None
    again = await other.open(epoch=2, prompt=PROMPT, resume=replace(resume, target_kv=None))
    assert state_of(again).committed == 8
    assert other.verifier.counts["opened"] == 1
    refused(await other.open(epoch=2, prompt=PROMPT, resume=replace(resume, round=2)), 409)


# ---- the router says where it is


@pytest.fixture
async def rig() -> AsyncIterator[RouterRig]:
    async with router_rig(kv_objects=True, machine=BRISK) as made:
        yield made


async def lost(rig: RouterRig, prompt: tuple[int, ...] = PROMPT, *, there: bool = True) -> None:
    """v0 has published the prompt's KV, committed a round, and is gone."""
    request = GenerationRequest(prompt, 40, (), Sampling(temperature_milli=0))
    await rig.running(request)
    if there:
        rig.mlc.objects[f"{rig.log_name}/{name_of(prompt)}"] = b"kv"
    rig.commit((4, 5))
    await rig.report("v0", ttl_ms=0)


def looked_for(rig: RouterRig) -> list[Request]:
    """Requests of the router about KV."""
    return [request for request in rig.mlc.requests if "target_kv" in request.path]


async def test_the_router_says_where_the_kv_is(rig: RouterRig) -> None:
    """R-6.9-6: the resume names the object that the MLC has, asked for once, by HEAD."""
    await rig.report("v1", load=50)
    await lost(rig)
    resume = resumed(await rig.v1.next("POST", "sessions"))
    assert resume.target_kv == f"{rig.base}objects/{rig.log_name}/{name_of(PROMPT)}"
    assert resume.committed == 2
    await rig.d0.next("POST", "assignments")  # which needs the tokens once more, but no KV
    assert [request.method for request in looked_for(rig)] == ["HEAD"]


async def test_the_kv_is_remembered_until_a_verifier_comes(rig: RouterRig) -> None:
    """R-6.9-6: with nobody there, the opening that comes later names it as well."""
    await lost(rig)
    await rig.until(lambda: looked_for(rig))
    await quiet()
    await rig.report("v1")
    assert resumed(await rig.v1.next("POST", "sessions")).target_kv is not None


@pytest.mark.parametrize("how", ["not there", "short", "lost", "error"])
async def test_without_the_kv_the_session_goes_on(rig: RouterRig, how: str) -> None:
    """R-6.9-6, D-O10: opened at once, without target_kv."""

    async def fails(request: Request) -> Response | None:
        return Response(500) if how == "error" and "target_kv" in request.path else None

    rig.mlc.before = fails
    if how == "lost":
        rig.router._objects._client = SilentClient(rig.own_client)
    await rig.report("v1", load=50)
    prompt = PROMPT[:63] if how == "short" else PROMPT
    await lost(rig, prompt, there=how in ("short", "error"))
    resume = resumed(await rig.v1.next("POST", "sessions"))
    assert resume.target_kv is None and resume.committed == 2
    assert bool(looked_for(rig)) == (how not in ("short", "lost"))


async def test_no_request_where_nobody_publishes() -> None:
    """R-6.9-6: without `kv_objects` the router asks for nothing and names nothing."""
    async with router_rig() as rig:
        await rig.report("v1", load=50)
        await lost(rig)
        assert resumed(await rig.v1.next("POST", "sessions")).target_kv is None
        assert not looked_for(rig)


# ---- all together


async def test_a_failover_with_the_kv_of_the_lost_verifier() -> None:
    """R-6.9-6, R-6.9-9, R-6.3-39: real roles; the second verifier computes only what was written."""
    async with cluster(verifiers=0, kv_objects=True) as c:
        for name in ("v0", "v1"):
            c.add_verifier(name, pass_time_s=0.01, publish_kv=True)
        await c.ready()
        profile = Sampling(temperature_milli=0)
        reader = await c.router.generate(GenerationRequest(PROMPT, 60, (), profile))
        tokens: list[int] = []
        first = ""
        async for part in reader:
            if not first:
                place = c.router.sessions[0].place
                assert place is not None
                await until(lambda: any("target_kv" in key for key in c.mlc.objects))
                first = place[0]
                c.kill(first)
            tokens += part.tokens
        assert tokens == c.model.text(PROMPT, 60)
        (other,) = (v for base, v in c.verifiers.items() if base != first)
        assert isinstance(other._engine, FakeTarget)
        assert other._engine.prefilled[0] < 60


@pytest.mark.parametrize("asked", [True, False])
def test_who_takes_part_is_configured(asked: bool) -> None:
    """R-6.3-39: off unless the operator says so."""
    lines = [
        '[router]\nbase_uri = "https://r:1/"',
        "kv_objects = true" if asked else "",
        '[verifier]\nbase_uri = "https://v:1/"\nrouter = "https://r:1/"',
        "publish_kv = true" if asked else "",
        'model.path = "/m"',
    ]
    config = parse_config("\n".join(lines), name="x")
    assert config.verifier is not None
    assert router_config(config, tokenizer=b"").kv_objects is asked
    assert verifier_config(config.verifier).publish_kv is asked


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE"])
async def test_drafters_may_not_write_kv(method: str) -> None:
    """R-6.3-39, D-M11: what a drafter made up must never stand where a verifier's KV is sought."""
    parts = Parts(Config())
    resource = Stores(parts).mlc("https://r0.test/", HostTier(1 << 20))
    path = f"/objects/{session_path_id(SESSION)}/{name_of(PROMPT)}"
    headers = (("sdcp-lease", "0"),) if method == "POST" else ()

    async def ask(role: str, method: str, path: str) -> int:
        uris = (f"spiffe://{parts.config.node.trust_domain}/sdcp/{role}/x",)
        body = b"kv" if method == "PUT" else b""
        who = Peer("127.0.0.1", uris, (), "x", "00")
        request = Request(method, path, "", headers, body, peer=who, authority="")
        return (await resource.handle(request)).status

    if method != "PUT":
        assert await ask("verifier", "PUT", path) == 201
    with pytest.raises(Forbidden):
        await ask("drafter", method, path)
    assert await ask("verifier", method, path) < 300
    assert await ask("drafter", "PUT", path.replace("target_kv", "draft_kv")) == 201


async def test_a_drafter_keeps_kv_in_a_shared_cache_under_its_own_name_alone() -> None:
    """D-M11: what one drafter made up must not stand where another looks for its own."""
    parts = Parts(Config())
    resource = Stores(parts).mlc("https://r0.test/", HostTier(1 << 20))
    scopes = ("kv", f"kv_{session_path_id(SESSION)}")

    async def ask(role: str, name: str, method: str, path: str) -> int:
        uris = (f"spiffe://{parts.config.node.trust_domain}/sdcp/{role}/{name}",)
        who = Peer("127.0.0.1", uris, (), name, "00")
        headers = (("sdcp-lease", "0"),) if method == "POST" else ()
        body = b"kv" if method == "PUT" else b""
        request = Request(method, path, "", headers, body, peer=who, authority="")
        return (await resource.handle(request)).status

    for scope in scopes:
        own = f"/objects/{scope}/{draft_kind('drafter/d0')}.aa"
        assert await ask("drafter", "d0", "PUT", own) == 201
        assert await ask("drafter", "d1", "GET", own) == 200
        for method in ("PUT", "POST", "DELETE"):
            with pytest.raises(Forbidden):
                await ask("drafter", "d1", method, own)
            for other in ("draft_kv.aa", "prompt_kv.aa", f"x/{draft_kind('drafter/d1')}.aa"):
                with pytest.raises(Forbidden):
                    await ask("drafter", "d1", method, f"/objects/{scope}/{other}")
        assert await ask("drafter", "d0", "DELETE", own) == 204
        assert await ask("verifier", "v0", "PUT", f"/objects/{scope}/target_kv.aa") == 201
