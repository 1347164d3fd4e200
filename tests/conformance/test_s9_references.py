"""Section 9: references lead nobody anywhere but into the caches trusted for the session."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdcpd.protocol.codec import encode_tokens
from sdcpd.protocol.contract import contract_digest
from sdcpd.protocol.digest import extend, prefix_digest0
from sdcpd.protocol.messages import Resume, Rule, Sampling
from sdcpd.transport.http import Client, Headers, Response
from tests.kit.answers import refused, state_of, verdict_of
from tests.kit.cluster import ROUTER
from tests.kit.drafter_rig import PROMPT, DrafterRig, drafter_rig
from tests.kit.failover import fence, resume_of
from tests.kit.verifier_wire import Wire, with_contract

CACHE = json.loads((Path(__file__).parents[1] / "vectors.json").read_text())["uris"]["cache_refs"]
BASE, SCOPE = CACHE["trusted_base"], bytes.fromhex(CACHE["scope"])
OBJECTS = f"{BASE}objects/{CACHE['scope_segment']}/"
CASES = pytest.mark.parametrize("entry", CACHE["cases"], ids=lambda e: e["ref"] or "empty")
# Untrusted whatever the scope, which a commit log need not lie in (D-C10).
ELSEWHERE = pytest.mark.parametrize(
    "reference",
    [
        "https://evil.example/logs/x",
        "http://mlc.example:9443/mlc/logs/x",
        "https://mlc.example/mlc/logs/x",
        "https://mlc.example.evil:9443/mlc/logs/x",
        "https://mlc.example:9443@evil.example/mlc/logs/x",
        "https://mlc.example:9443/other/logs/x",
        "https://mlc.example:9443/mlc/../logs/x",
        "https://mlc.example:9443/mlc/%2e%2e/logs/x",
        "https://mlc.example:9443/mlc/logs/x?y",
        "file:///logs/x",
        "logs/x",
        "",
    ],
)


class Everywhere:
    """Reaches the network it is given, and answers any other URI with `octets`; notes those."""

    def __init__(self, inner: Client, known: str) -> None:
        self.inner, self.known = inner, known
        self.asked: list[str] = []
        self.answer = Response(200, (("etag", '"o"'),), b"")

    async def request(
        self,
        method: str,
        uri: str,
        *,
        headers: Headers = (),
        body: bytes = b"",
        timeout_s: float = 30.0,
    ) -> Response:
        """See Client."""
        if uri.startswith(self.known):
            return await self.inner.request(
                method, uri, headers=headers, body=body, timeout_s=timeout_s
            )
        self.asked.append(uri)
        return self.answer

    async def aclose(self) -> None:
        """See Client."""
        await self.inner.aclose()


@pytest.fixture
def scoped(wire: Wire) -> tuple[Wire, Everywhere]:
    """A verifier that trusts the vectors' cache too, and a contract with their scope."""
    objects = wire.verifier._context.objects
    objects._bases = (*objects._bases, BASE)
    wire.contract = with_contract(wire, scope=SCOPE)
    spy = Everywhere(wire.own_client.inner, ROUTER)
    wire.own_client.inner = spy
    return wire, spy


def d(wire: Wire, tokens: tuple[int, ...] = ()) -> bytes:
    """d[n] after these tokens."""
    return extend(prefix_digest0(contract_digest(wire.contract), (1, 2, 3)), tokens)


@CASES
async def test_a_prompt_is_fetched_from_trusted_places_only(
    scoped: tuple[Wire, Everywhere], entry: dict[str, Any]
) -> None:
    """R-9-9, R-9-11, R-9-10, D-O8: others are 422, without a connection."""
    wire, spy = scoped
    spy.answer = Response(200, (), encode_tokens((1, 2, 3)))
    answer = await wire.open(prompt=entry["ref"])
    if entry["fetch"]:
        assert state_of(answer).digest == d(wire) and spy.asked == [entry["ref"]]
    else:
        refused(answer, 422)
        assert spy.asked == []


@ELSEWHERE
async def test_a_log_is_read_in_trusted_places_only(
    scoped: tuple[Wire, Everywhere], reference: str
) -> None:
    """R-9-11, D-O8: 422, without a connection, and no session."""
    wire, spy = scoped
    refused(await wire.open(commit_log=reference), 422)
    assert spy.asked == [] and wire.verifier.sessions == []


@CASES
async def test_committed_tokens_are_fetched_from_trusted_places_only(
    scoped: tuple[Wire, Everywhere], entry: dict[str, Any]
) -> None:
    """R-9-11, D-O6: another place is never asked; what the log holds is enough."""
    wire, spy = scoped
    state_of(await wire.open())
    state_of(await wire.name())
    tokens = verdict_of(await wire.propose(wire.good(2))).emitted
    fence(wire, 2)
    spy.answer = Response(200, (), encode_tokens(tokens))
    resume = resume_of(wire, committed_tokens=entry["ref"])
    answer = await wire.open(epoch=2, resume=resume)
    assert spy.asked == ([entry["ref"]] if entry["fetch"] else [])
    assert (state_of(answer).committed, state_of(answer).digest) == (3, d(wire, tokens))


@CASES
async def test_kv_is_fetched_from_trusted_places_only(
    scoped: tuple[Wire, Everywhere], entry: dict[str, Any]
) -> None:
    """R-9-11, R-6.1-5, D-O10: prompt_kv and target_kv are ignored otherwise, and never needed."""
    wire, spy = scoped
    spy.answer = Response(200, (), b"kv")
    state_of(await wire.open(prompt_kv=entry["ref"]))
    assert entry["fetch"] or spy.asked == []
    resume = Resume(
        round=0,
        committed=0,
        digest=d(wire),
        committed_tokens=OBJECTS + "tokens",
        target_kv=entry["ref"],
    )
    state_of(await wire.open(epoch=2, resume=resume))
    assert entry["fetch"] or [uri for uri in spy.asked if uri != OBJECTS + "tokens"] == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_not_followed(scoped: tuple[Wire, Everywhere], status: int) -> None:
    """R-9-9, D-M2, D-H9: of rows and of a prompt; the target is not contacted."""
    wire, spy = scoped
    wire.contract = with_contract(
        wire,
        scope=SCOPE,
        rule=Rule.SPECULATIVE_SAMPLING,
        sampling=Sampling(temperature_milli=1000),
    )
    spy.answer = Response(status, (("location", "https://evil.example/x"),), b"")
    refused(await wire.open(prompt=OBJECTS + "p"), 422)
    state_of(await wire.open())
    state_of(await wire.name())
    answer = await wire.propose([1], q_rows=OBJECTS + "q")
    refused(answer, 409, "sdcp-q-unavailable")
    assert spy.asked == [OBJECTS + "p", OBJECTS + "q"]


# ---- a drafter


@pytest.fixture
async def drafter() -> AsyncIterator[tuple[DrafterRig, Everywhere]]:
    async with drafter_rig() as rig:
        objects = rig.drafter._objects
        objects._bases = (*objects._bases, BASE)
        spy = Everywhere(objects._client, rig.verifier.base)
        objects._client = spy
        rig.contract = replace(rig.contract, scope=SCOPE)
        rig.holds()
        yield rig, spy


@CASES
async def test_a_drafter_fetches_a_prompt_from_trusted_places_only(
    drafter: tuple[DrafterRig, Everywhere], entry: dict[str, Any]
) -> None:
    """R-9-11, D-M2: 422 otherwise, without a connection."""
    rig, spy = drafter
    spy.answer = Response(200, (), encode_tokens(PROMPT))
    problem = await rig.assign(prompt=entry["ref"])
    if entry["fetch"]:
        assert problem is None and spy.asked == [entry["ref"]]
        assert (await rig.proposal()).round == 1
    else:
        assert problem is not None and problem.status == 422 and spy.asked == []


@CASES
async def test_a_drafter_fetches_committed_tokens_from_trusted_places_only(
    drafter: tuple[DrafterRig, Everywhere], entry: dict[str, Any]
) -> None:
    """R-9-11, D-N7: the verifier's output has them otherwise."""
    rig, spy = drafter
    rig.holds((9, 8), round_=1)
    spy.answer = Response(200, (), encode_tokens((9, 8)))
    assert await rig.assign(committed_tokens=entry["ref"]) is None
    assert spy.asked == ([entry["ref"]] if entry["fetch"] else [])
    assert rig.verifier.unread("GET", ".*") == (0 if entry["fetch"] else 1)
    assert (await rig.proposal()).base == 2
