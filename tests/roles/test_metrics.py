"""What monitoring is told of a cluster is what the cluster did."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sdcpd.certificates import expiries
from sdcpd.engine.api import Scored
from sdcpd.metrics import Metrics
from sdcpd.metrics.rounds import accepted_at
from sdcpd.protocol.histogram import Histogram
from sdcpd.protocol.messages import Sampling
from sdcpd.roles.commit_log import CommitLog
from sdcpd.roles.counts import STAGES, DrafterCounts
from sdcpd.roles.generation import GenerationError, GenerationRequest
from sdcpd.roles.overview import STATES
from sdcpd.roles.round_times import RoundTimes
from sdcpd.roles.router_counts import Assignments, RouterCounts
from sdcpd.transport.tls import TlsIdentity
from tests.kit.api import STORY, Api, Scripted, cluster_api, served, text_model
from tests.kit.certs import CertKit
from tests.kit.cluster import ROUTER, Cluster, cluster
from tests.kit.metrics import Scrape, metrics_of, scrape
from tiers.api import Key, entry_of
from tiers.host import OBJECT_BYTES, HostTier
from tiers.stack import TierStack

SCRIPT = text_model().encode(STORY)
GREEDY = Sampling(temperature_milli=0)


def body(prompt: str = "The fox", **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 12, "temperature": 0, **more}


async def told(api: Api, made: Cluster) -> Scrape:
    """Once nothing is going on: sessions end after their clients have their texts."""
    verifiers = made.verifiers.values()
    while made.router.sessions or any(one.session_states() for one in verifiers):
        await asyncio.sleep(0)
    return scrape(metrics_of(made, api.front_end))


async def test_clients_tokens_and_answers_are_counted() -> None:
    async with cluster_api(SCRIPT) as (api, made):
        usages = []
        for more in ({}, {"n": 3}, {"prompt": ["The", "dog over"]}):
            status, answer = await api.json("POST", "/v1/completions", body=body(**more))
            assert status == 200, answer
            usages.append(answer["usage"])
        chat = {"messages": [{"role": "user", "content": "A fox?"}], "max_tokens": 9}
        streamed = chat | {"stream_options": {"include_usage": True}, "temperature": 0}
        usages.append((await api.events("/v1/chat/completions", streamed))[-2]["usage"])
        assert (await api.raw("POST", "/v1/completions", body={"prompt": ""}))[0] == 400
        assert (await api.raw("GET", "/v1/models/lab/tiny"))[0] == 200
        assert (await api.raw("GET", "/v1/models/other"))[0] == 404
        assert (await api.raw("GET", "/secret/7f3a"))[0] == 404
        seen = await told(api, made)
    assert seen.by("sdcp_api_requests_total", "route", code="200") == {
        "/v1/completions": 3,
        "/v1/chat/completions": 1,
        "/v1/models/{model}": 1,
    }
    assert seen("sdcp_api_requests_total", route="/v1/completions", code="400") == 1
    assert seen("sdcp_api_requests_total", route="/v1/models/{model}", code="404") == 1
    assert seen("sdcp_api_requests_total", route="other", code="404") == 1
    for name in ("prompt", "completion"):
        assert seen(f"sdcp_api_{name}_tokens_total") == sum(u[f"{name}_tokens"] for u in usages)
    assert seen("sdcp_api_time_to_first_token_seconds_count") == 4  # requests
    assert seen("sdcp_api_time_per_output_token_seconds_count") == 7  # texts
    assert seen("sdcp_api_request_duration_seconds_count") == 4
    assert seen("sdcp_api_time_to_first_token_seconds_sum") > 0
    assert seen("sdcp_api_queue_depth") == 0
    rounds = sum(usage["sdcp"]["rounds"] for usage in usages)
    assert seen("sdcp_rounds_total", role="verifier") == rounds > 0
    assert seen("sdcp_sessions_total", role="router", finish="finish") == 7
    assert seen("sdcp_sessions_total", role="verifier", finish="finish") == 7
    assert seen("sdcp_sessions", role="router") == seen("sdcp_sessions", role="verifier") == 0
    assert seen("sdcp_assignments_total", reason="new") == 7


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_counted_as_that(stream: bool) -> None:
    async with cluster_api(SCRIPT, pass_time_s=0.005) as (api, made):
        asked = body(max_tokens=400, stream=stream)
        octets = json.dumps(asked).encode()
        reader, writer = await api.open("POST", "/v1/completions", body=octets)
        if stream:
            await reader.readuntil(b"data: ")
        while not any(one.machine.committed > 1 for one in made.router.sessions):
            await asyncio.sleep(0)
        meanwhile = scrape(metrics_of(made, api.front_end))
        writer.close()
        await writer.wait_closed()
        seen = await told(api, made)
    assert meanwhile("sdcp_sessions", role="router", state="running") == 1
    assert meanwhile("sdcp_sessions", role="verifier", state="assigned") == 1
    assert 0 < meanwhile("sdcp_drafter_alpha") <= 1
    code = "200" if stream else "499"
    assert seen.by("sdcp_api_requests_total", "code") == {code: 1}
    for role in ("router", "verifier"):
        ends = seen.by("sdcp_sessions_total", "finish", role=role)
        assert ends == {"finish": 0, "fail": 0, "cancelled": 1}
    assert 0 < seen("sdcp_api_completion_tokens_total") < 400
    assert seen("sdcp_api_request_duration_seconds_count") == 1


async def test_texts_that_wait_to_begin_are_the_queue() -> None:
    generator = Scripted([(1, 2)], opening=asyncio.Event())
    async with served(generator) as api:
        asked = asyncio.ensure_future(api.raw("POST", "/v1/completions", body=body()))
        while not generator.requests:
            await asyncio.sleep(0)
        metrics = Metrics("router")
        metrics.api = api.front_end.counts
        assert scrape([metrics])("sdcp_api_queue_depth") == 1
        assert isinstance(generator.opening, asyncio.Event)
        generator.opening.set()
        assert (await asked)[0] == 200
        assert scrape([metrics])("sdcp_api_queue_depth") == 0


async def test_rounds_positions_and_vllms_names_agree() -> None:
    async with cluster(noise=0.2) as made:
        for _ in range(3):
            await made.text(count=60)
        seen = scrape(metrics_of(made))
        (verifier,) = made.verifiers.values()
    accepted = seen("sdcp_accepted_tokens_total", role="verifier")
    assert accepted == verifier.rounds.tokens_accepted > 0
    positions = seen.by("sdcp_position_accepted_total", "position", role="verifier")
    assert list(positions) == [*map(str, range(1, 17)), "17+"]
    assert sum(positions.values()) == accepted
    assert positions["1"] == sum(n for a, n in verifier.rounds.accepted.items() if a)
    assert list(positions.values())[:16] == sorted(list(positions.values())[:16], reverse=True)
    vllm = "vllm:spec_decode_num"
    assert seen(f"{vllm}_drafts_total") == seen("sdcp_rounds_total", role="verifier")
    assert seen(f"{vllm}_draft_tokens_total") == seen("sdcp_draft_tokens_total", role="verifier")
    assert seen(f"{vllm}_accepted_tokens_total") == accepted
    theirs = seen.by(f"{vllm}_accepted_tokens_per_pos_total", "position")
    assert theirs["0"] == positions["1"] and sum(theirs.values()) == accepted
    stages = seen.by("sdcp_round_duration_seconds_count", "stage")
    rounds = seen("sdcp_rounds_total", role="verifier")
    # The fake engine has neither queue nor batches, and rule 1 no rows.
    ours = {"score": rounds, "commit": rounds, "total": rounds}
    assert stages == dict.fromkeys(STAGES, 0) | ours
    assert seen("sdcp_proposal_rtt_seconds_count") == rounds
    assert 0 < seen("sdcp_draft_token_seconds_count") <= rounds


def test_positions_behind_the_sixteenth_are_together() -> None:
    counts = DrafterCounts()
    metrics = Metrics("drafter", counts)
    counts.accepted.update({3: 5, 16: 2, 20: 3})
    positions = scrape([metrics]).by("sdcp_position_accepted_total", "position")
    assert (positions["3"], positions["4"], positions["16"], positions["17+"]) == (10, 5, 5, 12)
    assert sum(positions.values()) == counts.tokens_accepted
    assert accepted_at({3: 5}, 4) == 0


async def test_rows_of_rule_2_are_a_stage() -> None:
    async with cluster(sampling_rule="rejection", trust_drafters=True) as made:
        await made.text(temperature_milli=1000)
        seen = scrape(metrics_of(made))
    fetched = seen("sdcp_round_duration_seconds_count", stage="fetch_q")
    assert fetched == seen("sdcp_round_duration_seconds_count", stage="total") > 0


async def test_a_failover_is_counted_once_and_the_session_finishes() -> None:
    async with cluster(verifiers=2) as made:
        for one in made.verifiers.values():
            one._engine._pass_time_s = 0.01  # type: ignore[attr-defined]
        reader = await made.router.generate(GenerationRequest((1, 2, 3), 60, (), GREEDY))
        tokens: list[int] = []
        async for part in reader:
            if len(tokens) < 10 <= len(tokens) + len(part.tokens):
                place = made.router.sessions[0].place
                assert place is not None
                made.kill(place[0])
            tokens += part.tokens
        seen = scrape([Metrics.of_router(made.router)])
    assert seen("sdcp_failovers_total") == 1
    assignments = seen.by("sdcp_assignments_total", "reason")
    assert assignments["new"] == 1 and assignments["failover"] == 1
    ends = seen.by("sdcp_sessions_total", "finish")
    assert ends == {"finish": 1, "fail": 0, "cancelled": 0}
    states = seen.by("sdcp_instances", "state", role="verifier")
    assert list(states) == list(STATES) and sum(states.values()) == 2
    assert states["expired"] == 1 == states["ready"]


async def test_a_verifier_that_was_fenced_says_so() -> None:
    """Its round is discarded; the session is none that has ended there."""
    async with cluster() as made:
        (verifier,) = made.verifiers.values()
        verifier._engine._pass_time_s = 0.01  # type: ignore[attr-defined]
        reader = await made.router.generate(GenerationRequest((1, 2, 3), 4000, (), GREEDY))
        parts = aiter(reader)
        await anext(parts)
        (name,) = made.mlc.logs
        await fence(made, name)
        with pytest.raises(GenerationError):
            async for _ in parts:
                continue
        seen = scrape(metrics_of(made))
    assert seen("sdcp_commit_fenced_total") == 1
    assert seen("sdcp_sessions_total", role="verifier") == 0
    assert seen.by("sdcp_sessions_total", "finish", role="router")["fail"] == 1


async def fence(made: Cluster, name: str) -> None:
    """As another router would."""
    log = CommitLog(made.client("router", "r0", ROUTER), f"{ROUTER}logs/{name}", enforcing=True)
    while True:
        summary = await log.read()
        if await log.fence(summary.highest_epoch + 7, etag=log.etag):
            return


async def test_why_periods_of_decoding_alone_ended() -> None:
    async with cluster(drafters=0) as made:
        await made.text(count=7)
        seen = scrape(metrics_of(made))
        assert seen("sdcp_self_decoded_tokens_total", role="verifier") == 7
        assert seen.by("sdcp_self_decode_periods_total", "end")["finish"] == 1
        (verifier,) = made.verifiers.values()
        verifier._engine._pass_time_s = 0.01  # type: ignore[attr-defined]
        text = asyncio.ensure_future(made.text(count=200))
        while not verifier.session_states().total():
            await asyncio.sleep(0)
        while verifier.rounds.self_decoded < 12:
            await asyncio.sleep(0)
        made.add_drafter()
        await text
        seen = scrape(metrics_of(made))
    ends = seen.by("sdcp_self_decode_periods_total", "end")
    assert (ends["finish"], ends["drafter"]) == (1, 1) and sum(ends.values()) == 2


async def test_two_instances_of_one_name_do_not_spoil_the_text() -> None:
    """A series that is there twice makes a scraper refuse all of them."""
    async with cluster(drafters=2) as made:
        for one in made.router.board.all():
            object.__setattr__(one.status, "instance", f"same.{one.status.instance[-8:]}")
        seen = scrape([Metrics.of_router(made.router)])
        loads = seen.by("sdcp_instance_load_ratio", "instance", role="drafter")
        assert len(loads) == 2 and all(name.startswith("same.") for name in loads)
        assert list(seen.by("sdcp_instance_load_ratio", "instance", role="verifier")) == ["same"]


async def test_tiers_tell_hits_leases_and_what_they_let_go() -> None:
    one = len(b"x" * 100) + OBJECT_BYTES
    tier = TierStack([HostTier(2 * one), HostTier(one)])
    metrics = Metrics("router")
    metrics.cache = tier.stats
    entry = entry_of(b"x" * 100, media_type="application/octet-stream")
    await tier.put(Key("s", "leased"), entry, lease_s=60)
    for number in range(4):
        await tier.put(Key("s", f"k{number}"), entry, lease_s=0)
    await tier.settled()
    assert await tier.get(Key("s", "leased")) is not None
    assert await tier.get(Key("s", "none")) is None
    rows = Key("s", "q_rows.one.two")
    assert await tier.get(rows) is None
    seen = scrape([metrics])
    asked = {"tier": "1 host", "kind": "other"}
    assert seen("sdcp_cache_requests_total", **asked, result="hit") == 1
    assert seen("sdcp_cache_requests_total", **asked, result="miss") == 1
    asked["kind"] = "q_rows"
    assert seen("sdcp_cache_requests_total", **asked, result="miss") == 1
    assert seen("sdcp_cache_transfer_bytes_total", tier="1 host", direction="read") == 100
    assert seen("sdcp_cache_transfer_bytes_total", tier="1 host", direction="written") == 500
    assert seen("sdcp_cache_request_duration_seconds_count", tier="1 host", op="put") == 5
    assert seen("sdcp_cache_leases", tier="1 host") == 1
    assert seen("sdcp_cache_leases", tier="2 host") == 0
    assert seen("sdcp_cache_evictions_total", tier="1 host", reason="room") == 3
    assert seen("sdcp_cache_bytes", tier="1 host") == 2 * one
    assert seen("sdcp_cache_capacity_bytes", tier="2 host") == one
    await tier.aclose()


def test_stages_of_a_round_that_was_given_up_do_not_count() -> None:
    stages = {stage: Histogram((1.0,)) for stage in STAGES}
    times = RoundTimes(stages)
    times.begun(1, proposal=True)
    times.took(1, "fetch_q", 0.5)
    times.begun(2, proposal=True)
    times.took(1, "commit", 0.5)  # late, of the one before
    times.scored(2, Scored(1, 2, queue_s=0.25, batch_wait_s=0.125), 1.375)
    times.over()
    times.over()
    times.begun(3, proposal=False)
    times.took(3, "commit", 0.5)
    times.over()
    counts = {stage: times.count for stage, times in stages.items()}
    assert counts == dict.fromkeys(STAGES, 0) | dict.fromkeys(
        ("queue", "batch_wait", "score", "total"), 1
    )
    assert stages["score"].total == 1.0 and stages["queue"].total == 0.25


def test_a_histogram_counts_up_to_its_bounds() -> None:
    made = Histogram((1, 2, 4))
    for value in (0, 1, 1.5, 2, 4, 5):
        made.add(value)
    assert (made.counts, made.count, made.total) == ([2, 2, 1, 1], 6, 13.5)
    same = Histogram.of((1, 2, 4), {0: 1, 2: 3, 9: 1})
    assert (same.counts, same.count, same.total) == ([1, 3, 0, 1], 5, 15)


def test_why_a_drafter_was_named() -> None:
    def reasons(*named: tuple[str, int], restored: bool = False) -> list[str]:
        counts = RouterCounts()
        assignments, found = Assignments(counts, restored=restored), []
        for drafter, epoch in named:
            before = counts.assignments.copy()
            assignments.taken(SimpleNamespace(drafter=drafter, epoch=epoch))  # type: ignore[arg-type]
            found += list((counts.assignments - before).elements())
        return found

    assert reasons(("a", 1), ("b", 1), ("b", 1), ("b", 2)) == [
        "new",
        "switch",
        "resume",
        "failover",
    ]
    assert reasons(("a", 2)) == ["failover"]  # its first verifier was lost before it had one
    assert reasons(("a", 3), ("b", 3), restored=True) == ["resume", "switch"]


def test_what_expires_is_told_by_kind(tmp_path: Path) -> None:
    kit = CertKit(tmp_path)
    leaf = kit.leaf()
    plain = TlsIdentity(ca=kit.ca, cert=leaf.crt_path, key=leaf.key_path)
    assert list(expiries(plain)) == ["certificate", "authority"]
    crl = kit.revoke(kit.leaf("drafter", "d0"))
    identity = TlsIdentity(ca=kit.ca, cert=leaf.crt_path, key=leaf.key_path, crl=crl)
    found = expiries(identity)
    assert found["certificate"] == identity.not_after.timestamp()
    assert found["revocations"] < found["certificate"] < found["authority"]
    metrics = Metrics("router")
    metrics.expiries = lambda: expiries(identity)
    name = "sdcp_tls_certificate_expiry_timestamp_seconds"
    assert scrape([metrics]).by(name, "kind") == found
