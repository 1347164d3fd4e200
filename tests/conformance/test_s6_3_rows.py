"""Section 6.3 step 5: the rows of rule 2 are had and checked before anything is drawn."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from sdcpd.engine.fake import FakeModel
from sdcpd.protocol.messages import Contract, Rule, Sampling, Verdict
from sdcpd.protocol.problems import ProblemDocument
from sdcpd.transport.http import Request, Response
from tests.kit.answers import output_of, refused, state_of, verdict_of
from tests.kit.cluster import ROUTER
from tests.kit.scripted_target import octets_of
from tests.kit.vectors import VECTORS
from tests.kit.verifier_wire import Wire, with_contract

MakeWire = Callable[..., Wire]
RULE2 = VECTORS["rule2"]
CACHE = VECTORS["uris"]["cache_refs"]


def rule2(make_wire: MakeWire, *, vocab: int = 4, seed: int | None = 5) -> Wire:
    sampling = Sampling(seed=seed, temperature_milli=3000)
    members = {"rule": Rule.SPECULATIVE_SAMPLING, "sampling": sampling}
    return make_wire(model=FakeModel(vocab=vocab), members=members)


def uniform(wire: Wire, count: int) -> bytes:
    return octets_of([[1 / wire.model.vocab] * wire.model.vocab] * count)


async def unchanged_by(wire: Wire, answer: object, status: int, suffix: str) -> None:
    """The refusal, and that its round is still to come, with nothing committed."""
    refused(answer, status, suffix)
    state = state_of(await wire.name())
    assert (state.round, state.committed) == (0, 0)
    assert wire.mlc.logs == {} and wire.engine.scored == []
    assert output_of(await wire.output(wait_s=0)).tokens == ()


@pytest.mark.parametrize("entry", RULE2["q_rows_refuse"], ids=lambda e: e["name"])
async def test_rows_that_are_refused(entry: dict[str, Any], make_wire: MakeWire) -> None:
    """R-5.2-17, R-6.3-21, R-6.3-22, R-7-7: whatever the seed and the fault, before any draw."""
    for seed in (0, 1, 2, 3):
        wire = rule2(make_wire, seed=seed)
        await wire.ready()
        q_rows = wire.put("q", bytes.fromhex(entry["q_rows"]))
        answer = await wire.propose(entry["tokens"], q_rows=q_rows)
        await unchanged_by(wire, answer, entry["status"], entry["type"].partition("#")[2])


@pytest.mark.parametrize("entry", RULE2["q_rows_accept"], ids=lambda e: e["name"])
async def test_rows_that_are_accepted(entry: dict[str, Any], make_wire: MakeWire) -> None:
    """R-6.3-21: within the tolerance, and with zeros where nothing is proposed."""
    wire = rule2(make_wire)
    await wire.ready()
    q_rows = wire.put("q", bytes.fromhex(entry["q_rows"]))
    verdict_of(await wire.propose(entry["tokens"], q_rows=q_rows))


async def test_a_late_zero_is_found_whatever_would_be_drawn(make_wire: MakeWire) -> None:
    """R-6.3-21: the first token would be rejected at once, so the last row is never reached."""
    wire = rule2(make_wire)
    await wire.ready()
    scores = wire.model.scores([1, 2, 3])
    worst = scores.index(min(scores))
    rows = [[float(t == worst) for t in range(4)], [0.5, 0.5, 0.0, 0.0]]
    q_rows = wire.put("q", octets_of(rows))
    refused(await wire.propose([worst, 2], q_rows=q_rows), 422, "sdcp-bad-proposal")
    verdict_of(await wire.propose([worst, 1], q_rows=q_rows))


@pytest.mark.parametrize("status", [0, 301, 403, 404, 410, 503])
async def test_rows_that_cannot_be_had(make_wire: MakeWire, status: int) -> None:
    """R-6.3-20, R-6.3-22, R-6.4-19, R-7-3: the round goes on as if it had come right at once."""
    direct = rule2(make_wire)
    await direct.ready()
    rows = uniform(direct, 3)
    wanted = verdict_of(await direct.propose([1, 2, 3], q_rows=direct.put("q", rows)))

    wire = rule2(make_wire)
    await wire.ready()
    q_rows = wire.put("q", rows)
    elsewhere = []

    async def other(request: Request) -> Response:
        elsewhere.append(request)
        return Response(200, (), rows)

    wire.network["https://elsewhere.test/"] = other

    async def answer(request: Request) -> Response | None:
        if "/objects/" not in request.path:
            return None
        return Response(status, (("location", "https://elsewhere.test/q"),))

    wire.mlc.before = answer if status else None
    wire.own_client.unreachable = status == 0
    for _ in range(3):
        problem = await wire.propose([1, 2, 3], q_rows=q_rows)
        refused(problem, 409, "sdcp-q-unavailable")
    wire.own_client.unreachable, wire.mlc.before = False, None
    await unchanged_by(wire, problem, 409, "sdcp-q-unavailable")
    assert elsewhere == [], "redirects are not followed"
    assert await wire.propose([1, 2, 3], q_rows=q_rows) == wanted


@pytest.mark.parametrize("seed", range(8))
async def test_failures_move_no_seeded_value(make_wire: MakeWire, seed: int) -> None:
    """R-6.4-19, R-6.4-13, D-P9: rows that come late, in two rounds: the texts are the same."""
    found = []
    for failures in (0, 3):
        wire = rule2(make_wire, seed=seed)
        await wire.ready()
        rows = uniform(wire, 3)
        for name in ("q1", "q2"):
            for _ in range(failures):
                missing = f"{ROUTER}objects/{wire.log_name}/{name}"
                refused(await wire.propose([1, 2, 3], q_rows=missing), 409, "sdcp-q-unavailable")
            found.append(verdict_of(await wire.propose([1, 2, 3], q_rows=wire.put(name, rows))))
    assert found[:2] == found[2:]


async def test_no_rows_are_rows_that_cannot_be_had(make_wire: MakeWire) -> None:
    """R-6.4-11, R-6.3-22, R-7-3: a rule-2 proposal without q_rows."""
    wire = rule2(make_wire)
    await wire.ready()
    await unchanged_by(wire, await wire.propose([1, 2]), 409, "sdcp-q-unavailable")
    verdict_of(await wire.propose([1, 2], q_rows=wire.put("q", uniform(wire, 2))))


def scoped(wire: Wire) -> Contract:
    return with_contract(
        wire, rule=Rule.SPECULATIVE_SAMPLING, scope=bytes.fromhex(CACHE["scope"]), max_new=64
    )


@pytest.fixture
async def cache_wire(make_wire: MakeWire) -> Wire:
    """A session with the vectors' scope, whose verifier trusts the vectors' MLC."""
    wire = rule2(make_wire)
    objects = wire.verifier._context.objects
    objects._bases = (*objects._bases, CACHE["trusted_base"])
    wire.contract = scoped(wire)
    await wire.ready()
    return wire


@pytest.mark.parametrize("entry", CACHE["cases"], ids=lambda e: e["ref"] or "empty")
async def test_references_as_rows(entry: dict[str, Any], cache_wire: Wire) -> None:
    """R-9-9, R-9-10: what is not in the session's scope of a trusted cache is not asked for."""
    wire = cache_wire
    asked: list[str] = []

    class Everywhere:
        """Answers any URI with good rows."""

        async def request(self, method: str, uri: str, **_: object) -> Response:
            asked.append(uri)
            return Response(200, (("etag", '"o"'),), uniform(wire, 2))

        async def aclose(self) -> None:
            """Nothing to close."""

    inner = wire.own_client.inner
    wire.own_client.inner = Everywhere()  # type: ignore[assignment]
    wire.verifier._context.objects._client = wire.own_client
    answer: Verdict | ProblemDocument
    if entry["fetch"]:
        wire.served()._log._client = inner
        answer = await wire.propose([1, 2], q_rows=entry["ref"])
        verdict_of(answer)
        assert asked == [entry["ref"]]
    else:
        refused(await wire.propose([1, 2], q_rows=entry["ref"]), 409, "sdcp-q-unavailable")
        assert asked == []


async def test_rules_1_and_200_never_fetch_rows(make_wire: MakeWire) -> None:
    """R-6.4-5: q_rows that point nowhere cost nothing and are not asked for (D-P13)."""
    for rule in (Rule.GREEDY, Rule.RACE):
        wire = make_wire(members={"rule": rule, "sampling": Sampling(seed=1)})
        await wire.ready()
        for reference in (f"{ROUTER}objects/x/gone", "https://evil.test/x", "", "nonsense"):
            verdict_of(await wire.propose([1], q_rows=reference, draft_kv=reference))
        assert not any("/objects/" in request.path for request in wire.mlc.requests)


async def test_rows_of_another_length_than_the_vocabulary(make_wire: MakeWire) -> None:
    """R-6.3-21: V is the target's, so rows of five values for four tokens are no rows (D-E6)."""
    wire = rule2(make_wire)
    await wire.ready()
    five = struct.pack("<10f", *[0.2] * 10)
    refused(await wire.propose([1, 2], q_rows=wire.put("q", five)), 422, "sdcp-bad-proposal")
    assert output_of(await wire.output()).tokens == ()
