"""Section 8: what verifier and drafter report of their rounds, scraped after a scripted run (D-X3)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sdcpd.admin import DrafterAdmin, VerifierAdmin
from sdcpd.engine.api import KvUsage
from sdcpd.metrics import Metrics
from sdcpd.protocol.messages import Action, Verdict
from sdcpd.protocol.problems import ProblemDocument
from sdcpd.transport.http import Request
from tests.kit.cluster import cluster
from tests.kit.verifier_machine import contract
from tests.kit.verifier_wire import Wire

Samples = dict[tuple[str, ...], float]


async def scrape(admin: VerifierAdmin | DrafterAdmin) -> Samples:
    """Values by metric name and the label values but the role's, sorted by label."""
    response = await admin.handle(Request("GET", "/metrics", ""))
    assert response.status == 200 and (response.header("content-type") or "").startswith("text/")
    found: Samples = {}
    for family in text_string_to_metric_families(response.body.decode()):
        for sample in family.samples:
            labels = [value for key, value in sorted(sample.labels.items()) if key != "role"]
            found[(sample.name, *labels)] = sample.value
    return found


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    made = Wire()
    made.contract = contract(
        target=made.engine.info.model,
        tokenizer=made.engine.info.tokenizer,
        low_rounds=2,
        fallback=(Action.REDUCE, Action.SELF_DECODE, Action.SWITCH, Action.FAIL),
    )
    await made.ready()
    yield made
    await made.verifier.aclose()


async def propose(wire: Wire, good: int, bad: int) -> Verdict:
    """A proposal of which exactly `good` tokens are right."""
    tokens = wire.good(good + 1)
    wrong = (tokens[-1] + 1) % wire.model.vocab
    found = await wire.propose([*tokens[:good], *[wrong] * bad])
    assert isinstance(found, Verdict) and found.accepted == good
    return found


async def test_a_verifiers_counts_match_a_scripted_run(wire: Wire) -> None:
    """R-8-3: accepted lengths, M, escalations by action, stale bases; all there before the first."""
    admin = VerifierAdmin("v0", wire.verifier, metrics=Metrics("verifier", wire.verifier.rounds))
    before = await scrape(admin)
    others = {"sdcp_tasks", "sdcp_build_info"}
    assert {n for (name, *_), n in before.items() if name not in others} == {0.0}
    assert ("sdcp_proposals_rejected_total", "stale_base") in before
    for good, bad in ((3, 1), (0, 2), (0, 1), (2, 0), (0, 1), (0, 1)):
        await propose(wire, good, bad)
    assert isinstance(await wire.propose([1], base=1), ProblemDocument)
    assert isinstance(await wire.name(), object)
    assert isinstance(await wire.propose([1] * 9), ProblemDocument)
    after = await scrape(admin)
    assert set(after) >= set(before)
    wanted: Samples = {
        ("sdcp_rounds_total", "continue"): 4,
        ("sdcp_rounds_total", "reduce"): 1,
        ("sdcp_rounds_total", "switch"): 1,
        ("sdcp_rounds_total", "finish"): 0,
        ("sdcp_draft_tokens_total",): 11,
        ("sdcp_accepted_tokens_total",): 5,
        ("sdcp_escalations_total", "reduce", "applied"): 1,
        ("sdcp_escalations_total", "switch", "applied"): 1,
        ("sdcp_escalations_total", "self_decode", "skipped"): 1,
        ("sdcp_escalations_total", "self_decode", "applied"): 0,
        ("sdcp_round_draft_tokens_bucket", "1.0"): 3,
        ("sdcp_round_draft_tokens_bucket", "2.0"): 5,
        ("sdcp_round_draft_tokens_bucket", "4.0"): 6,
        ("sdcp_round_draft_tokens_sum",): 11,
        ("sdcp_round_draft_tokens_count",): 6,
        ("sdcp_round_accepted_tokens_bucket", "0.0"): 4,
        ("sdcp_round_accepted_tokens_bucket", "2.0"): 5,
        ("sdcp_round_accepted_tokens_sum",): 5,
        ("sdcp_proposals_rejected_total", "limit"): 1,
        ("sdcp_proposals_rejected_total", "not_assigned"): 1,
        ("sdcp_self_decoded_tokens_total",): 0,
    }
    assert {key: after[key] for key in wanted} == wanted


async def test_stale_bases_are_counted(wire: Wire) -> None:
    """R-8-3: by the verifier that refuses and the drafter that is refused."""
    await propose(wire, 1, 0)
    assert isinstance(await wire.propose([1], base=0), ProblemDocument)
    after = await scrape(
        VerifierAdmin("v0", wire.verifier, metrics=Metrics("verifier", wire.verifier.rounds))
    )
    assert after[("sdcp_proposals_rejected_total", "stale_base")] == 1


async def test_what_is_decoded_alone_is_counted() -> None:
    """R-8-3: self-decoded tokens; both sides of a run with a drafter agree."""
    async with cluster(drafters=0) as made:
        await made.text(count=7)
        (verifier,) = made.verifiers.values()
        alone = await scrape(
            VerifierAdmin("v0", verifier, metrics=Metrics("verifier", verifier.rounds))
        )
    assert alone[("sdcp_self_decoded_tokens_total",)] == 7
    async with cluster(noise=0.2) as made:
        await made.text(count=40)
        (verifier,), (drafter,) = made.verifiers.values(), made.drafters.values()
        v, d = (
            await scrape(
                VerifierAdmin("v0", verifier, metrics=Metrics("verifier", verifier.rounds))
            ),
            await scrape(DrafterAdmin("d0", drafter, metrics=Metrics("drafter", drafter.rounds))),
        )
    for name in ("sdcp_draft_tokens_total", "sdcp_accepted_tokens_total"):
        assert v[(name,)] == d[(name,)] > 0
    rounds = v[("sdcp_round_draft_tokens_count",)]
    # The last round may commit fewer tokens than it accepted: max_new cuts it.
    committed = v[("sdcp_accepted_tokens_total",)] + rounds + v[("sdcp_self_decoded_tokens_total",)]
    assert committed >= 40
    assert verifier.rounds.mean_accepted == v[("sdcp_accepted_tokens_total",)] / rounds


async def test_what_became_of_prepared_proposals_is_counted() -> None:
    """R-8-3, D-D4: each once, at the drafter, in the metrics and in its status."""
    async with cluster(drafters=0) as made:
        drafter = made.add_drafter(noise=0.1, predraft=True)
        await made.ready()
        await made.text(count=60)
        admin = DrafterAdmin("d0", drafter, metrics=Metrics("drafter", drafter.rounds))
        found, status = await scrape(admin), await admin.status({})
    used = found[("sdcp_prepared_proposals_total", "used")]
    discarded = found[("sdcp_prepared_proposals_total", "discarded")]
    assert used > 0 and discarded > 0
    assert used + discarded <= sum(drafter.rounds.rounds.values())
    counts = status["counts"]
    assert (counts["prepared_used"], counts["prepared_discarded"]) == (used, discarded)


async def test_how_the_memory_for_kv_is_used_is_told(wire: Wire) -> None:
    """Before it is full; a role without such a memory says nothing of it."""
    metrics = Metrics("verifier", wire.verifier.rounds)
    admin = VerifierAdmin("v0", wire.verifier, metrics=metrics)
    assert not any(name[0].startswith("sdcp_kv_") for name in await scrape(admin))
    metrics.kv = lambda: KvUsage(4096, 640, 2, 3, 128)
    found = await scrape(admin)
    assert found[("sdcp_kv_capacity_tokens",)] == 4096 and found[("sdcp_kv_used_tokens",)] == 640
    assert found[("sdcp_kv_waiting",)] == 2
    assert found[("sdcp_kv_evictions_total",)] == 3
    assert found[("sdcp_kv_adopted_tokens_total",)] == 128
