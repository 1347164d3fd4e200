"""Traces hang together over roles, hold no text, and cost nobody anything where they fail."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from sdcpd.config import ConfigError, parse_config
from sdcpd.config_places import place_problems
from sdcpd.parts import Instance
from sdcpd.protocol.messages import Sampling
from sdcpd.roles.generation import GenerationRequest
from sdcpd.traces import Place, Tracer, read_traceparent
from tests.kit.api import STORY, Api, Scripted, cluster_api, served, tokenizer
from tests.kit.certs import CertKit
from tests.kit.cluster import Cluster, cluster
from tests.kit.dev import dev

export = pytest.importorskip("sdcpd.traces.export", reason="the extra otel is not installed")

from tests.kit.collector import Collector, Got, collector  # noqa: E402

ROOT = Path(__file__).parents[1]
SCRIPT = tokenizer().encode(STORY).ids
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
SECRET = "the fox is called Reineke"
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": SECRET}],
    "max_tokens": 24,
    "temperature": 0,
}


@pytest.fixture
def sink() -> Iterator[Collector]:
    with collector() as one:
        yield one


@asynccontextmanager
async def traced(
    sink: Collector, *, sample_percent: int = 100, **options: Any
) -> AsyncIterator[tuple[Api, Cluster]]:
    """A cluster whose roles all send to one collector; all has come when this is left."""
    sender = export.Export(sink.endpoint, sample_percent=sample_percent)

    def tracer(role: str, name: str) -> Tracer:
        return sender.tracer(role=role, name=name)

    try:
        async with cluster_api(SCRIPT, tracer=tracer, **options) as one:
            yield one
    finally:
        await sender.aclose()


async def test_one_request_is_one_trace_over_all_roles(sink: Collector) -> None:
    async with traced(sink) as (api, _):
        status, answer = await api.json("POST", CHAT, body=BODY)
    assert status == 200
    (request,) = sink.named("chat lab/tiny")
    assert {one.trace for one in sink.spans} == {request.trace} and request.parent == ""
    rounds, drafts = sink.named("sdcp.round"), sink.named("sdcp.draft")
    assert {one.parent for one in rounds + drafts} == {request.span}
    assert len(rounds) == answer["usage"]["sdcp"]["rounds"] > 1
    for stage in ("sdcp.score", "sdcp.commit"):
        assert [one.parent for one in sink.named(stage)] == [one.span for one in rounds]
    by_id = {one.span: one for one in sink.spans}
    for one in sink.spans:
        assert one.begin_ns <= one.end_ns
        if one.name in ("sdcp.score", "sdcp.commit"):
            above = by_id[one.parent]
            # Clocks are read one after the other, so ends may differ by as much.
            assert above.begin_ns - 10**6 <= one.begin_ns <= one.end_ns <= above.end_ns + 10**6
    assert sink.paths == {"/v1/traces"}


async def test_what_spans_tell(sink: Collector) -> None:
    async with traced(sink) as (api, made):
        _, answer = await api.json("POST", CHAT, body=BODY)
        drafted = made.verifiers["https://v0.test/"].rounds.tokens_proposed
    (request,) = sink.named("chat lab/tiny")
    usage = answer["usage"]
    assert request.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "sdcpd",
        "gen_ai.request.model": "lab/tiny",
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
    }
    assert request.kind == 2 and not request.failed  # a server's
    rounds = sink.named("sdcp.round")
    assert [one.attributes["sdcp.round"] for one in rounds] == [*range(1, len(rounds) + 1)]
    assert sum(one.attributes["sdcp.drafted"] for one in rounds) == drafted
    first = rounds[0].attributes
    assert first["sdcp.accepted"] == first["sdcp.drafted"] > 0
    assert first["sdcp.session"] == answer["id"].removeprefix("chatcmpl-")
    assert (first["sdcp.epoch"], first["sdcp.rule"], first["sdcp.action"]) == (1, 1, "continue")
    assert first["sdcp.drafter"] == "https://d0.test/"
    assert [one.attributes["sdcp.round"] for one in sink.named("sdcp.draft")] == [
        one.attributes["sdcp.round"] for one in rounds
    ]
    told = {(one.resource["sdcp.role"], one.resource["service.instance.id"]) for one in sink.spans}
    assert told == {("router", "r0"), ("verifier", "v0"), ("drafter", "d0")}
    assert {one.resource["service.name"] for one in sink.spans} == {"sdcpd"}


@pytest.mark.parametrize("stream", [False, True])
async def test_no_text_is_in_them(sink: Collector, stream: bool) -> None:
    """Neither the prompt nor what was written nor a key of a client."""
    async with traced(sink) as (api, _):
        field = "authorization: Bearer sk-secret\r\n"
        for path, body in ((CHAT, BODY), (COMPLETIONS, {"prompt": SECRET, "max_tokens": 30})):
            await api.raw("POST", path, body=body | {"stream": stream}, headers=field)
    assert len(sink.named("sdcp.round")) > 2
    assert {"chat lab/tiny", "text_completion lab/tiny"} <= {one.name for one in sink.spans}
    for one in sink.spans:
        told = json.dumps([one.name, one.attributes, one.resource])
        for secret in ("fox", "Reineke", "quick", "brown", "lazy", "sk-secret"):
            assert secret not in told


async def test_a_stream_ends_its_span_when_it_ends(sink: Collector) -> None:
    async with traced(sink) as (api, _):
        usage = (await api.events(CHAT, BODY | {"stream_options": {"include_usage": True}}))[-2]
    (request,) = sink.named("chat lab/tiny")
    wanted = usage["usage"]["completion_tokens"]
    assert request.attributes["gen_ai.usage.output_tokens"] == wanted == 24
    assert request.end_ns >= max(one.end_ns for one in sink.named("sdcp.round"))
    assert "error.type" not in request.attributes


async def test_a_clients_trace_is_gone_on_with(sink: Collector) -> None:
    """And of what its tracestate says nothing goes on."""
    async with traced(sink, sample_percent=0) as (api, made):
        seen = _listen(made)
        fields = f"traceparent: {SAMPLED}\r\ntracestate: vendor=value\r\n"
        await api.raw("POST", CHAT, body=BODY, headers=fields)
    (request,) = sink.named("chat lab/tiny")
    assert (request.trace, request.parent) == (TRACE, PARENT)
    assert {one.trace for one in sink.spans} == {TRACE}
    assert {value for _, _, name, value in seen if name == "traceparent"} == {request.traceparent}
    assert not [name for _, _, name, _ in seen if name == "tracestate"]
    paths = {path.split("/")[1] for _, path, name, _ in seen if name == "traceparent"}
    assert paths == {"sessions", "assignments"}


def _listen(made: Cluster) -> list[tuple[str, str, str, str]]:
    """What roles are asked from here on: who, path, field and its value."""
    seen: list[tuple[str, str, str, str]] = []

    def over(base: str, handle: Any) -> Any:
        async def heard(request: Any) -> Any:
            seen.extend((base, request.path, *field) for field in request.headers)
            return await handle(request)

        return heard

    for base, handle in list(made.network.items()):
        made.network[base] = over(base, handle)
    return seen


async def test_a_parent_that_is_not_sampled_yields_nothing(sink: Collector) -> None:
    async with traced(sink) as (api, made):
        seen = _listen(made)
        await api.raw("POST", CHAT, body=BODY, headers=f"traceparent: {UNSAMPLED}\r\n")
    assert sink.spans == [] and not [one for one in seen if one[2] == "traceparent"]


async def test_a_share_of_the_requests(sink: Collector) -> None:
    async with traced(sink, sample_percent=0) as (api, _):
        await api.raw("POST", CHAT, body=BODY)
    assert sink.spans == []


BAD = [
    "",
    "00",
    SAMPLED.upper(),
    SAMPLED + "-more",
    SAMPLED.replace("00-", "ff-", 1),
    f"00-{'0' * 32}-{PARENT}-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"00-{TRACE}-{PARENT}",
    f"00-{TRACE[:-1]}-{PARENT}-01",
    f"00-{TRACE[:-1]}\u0663-{PARENT}-01",
    f"01-{TRACE}-{PARENT}-01-" + "x" * 5000,
]


@pytest.mark.parametrize("field", BAD, ids=range(len(BAD)))
def test_what_is_no_traceparent_is_none(field: str) -> None:
    assert read_traceparent(field) is None


def test_what_is_one() -> None:
    place = Place(int(TRACE, 16), int(PARENT, 16))
    assert read_traceparent(SAMPLED) == (place, True)
    assert read_traceparent(UNSAMPLED) == (place, False)
    later = f"cc-{TRACE}-{PARENT}-09-more"
    assert read_traceparent(later) == (place, True)
    assert read_traceparent(place.traceparent) == (place, True)
    assert read_traceparent(None) is None


async def test_a_field_that_is_none_begins_a_trace_and_harms_nobody(sink: Collector) -> None:
    """Whether it comes from a client or from a peer."""
    async with traced(sink) as (api, made):
        for base, handle in list(made.network.items()):
            made.network[base] = _with_field(handle, "00-bad")
        for field in ("00-bad", "x" * 4000):
            head = f"traceparent: {field}\r\n"
            status, _ = await api.json("POST", CHAT, body=BODY, headers=head)
            assert status == 200
    assert [one.parent for one in sink.named("chat lab/tiny")] == ["", ""]
    assert {one.name for one in sink.spans} == {"chat lab/tiny"}  # the roles were told nothing


def _with_field(handle: Any, field: str) -> Any:
    async def changed(request: Any) -> Any:
        fields = [one for one in request.headers if one[0] != "traceparent"]
        object.__setattr__(request, "headers", (*fields, ("traceparent", field)))
        return await handle(request)

    return changed


async def test_decoding_without_a_drafter(sink: Collector) -> None:
    async with traced(sink, drafters=0) as (api, made):
        await api.raw("POST", CHAT, body=BODY)
        periods = sum(made.verifiers["https://v0.test/"].rounds.periods.values())
    (request,) = sink.named("chat lab/tiny")
    alone = sink.named("sdcp.self_decode")
    assert len(alone) == periods >= 1 and {one.parent for one in alone} == {request.span}
    assert sum(one.attributes["sdcp.tokens"] for one in alone) == 24
    assert alone[-1].attributes["sdcp.end"] == "finish"
    assert sink.named("sdcp.round") == []


async def test_requests_that_fail(sink: Collector) -> None:
    sender = export.Export(sink.endpoint)
    parts: list[Any] = [[5, 6], asyncio.Event()]
    async with served(Scripted(parts=parts), tracer=sender.tracer(role="router", name="r0")) as api:
        status, _ = await api.json("POST", CHAT, body=BODY | {"max_tokens": 100_000})
        assert status == 400
        reader, writer = await api.open(
            "POST", CHAT, body=json.dumps(BODY | {"stream": True}).encode()
        )
        await reader.readuntil(b"data: ")
        writer.close()  # the client has seen enough
        await writer.wait_closed()
        async with asyncio.timeout(5):
            while len(api.front_end.counts.requests) < 2:
                await asyncio.sleep(0.01)
    await sender.aclose()
    wrong = [(one.failed, one.attributes["error.type"]) for one in sink.named("chat lab/tiny")]
    assert wrong == [(True, "context_length_exceeded"), (True, "client_gone")]


async def test_another_verifier_goes_on_with_the_trace(sink: Collector) -> None:
    """Its opening is told of the same span."""
    sender = export.Export(sink.endpoint)
    async with cluster(drafters=1, verifiers=2) as made:
        for verifier in made.verifiers.values():
            verifier._tracer = sender.tracer(role="verifier", name=verifier.instance)
        place = Place(int(TRACE, 16), int(PARENT, 16))
        task = asyncio.ensure_future(_text(made, place.traceparent))
        async with asyncio.timeout(10):
            while not (busy := [v for v in made.verifiers.values() if v.rounds.rounds.total()]):
                await asyncio.sleep(0)
        made.kill(busy[0].config.base_uri)
        assert await task == made.model.text((1, 2, 3), 300)
    await sender.aclose()
    epochs = {one.attributes["sdcp.epoch"]: one.resource for one in sink.named("sdcp.round")}
    assert len({one["service.instance.id"] for one in epochs.values()}) == len(epochs) == 2
    assert {(one.trace, one.parent) for one in sink.named("sdcp.round")} == {(TRACE, PARENT)}


async def _text(made: Cluster, traceparent: str) -> list[int]:
    profile = Sampling(temperature_milli=0)
    asked = GenerationRequest((1, 2, 3), 300, (), profile, traceparent=traceparent)
    return [token async for part in await made.router.generate(asked) for token in part.tokens]


async def test_a_collector_that_is_away_is_told_of_once(
    sink: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Texts come as before, a return is told of too, and nothing of OpenTelemetry's is logged."""
    monkeypatch.setattr(export, "EVERY_S", 0.01)
    caplog.set_level(logging.INFO)
    sink.answer = 400
    async with traced(sink) as (api, _):
        for _ in range(3):
            before = sink.batches
            status, answer = await api.json("POST", CHAT, body=BODY)
            assert status == 200 and answer["usage"]["completion_tokens"] == 24
            await _until(lambda before=before: sink.batches > before)
        sink.answer = 200
        await api.json("POST", CHAT, body=BODY)
        await _until(lambda: bool(sink.spans))
    said = [one for one in caplog.records if one.name.startswith(("sdcpd.traces", "opentel"))]
    assert [one.levelname for one in said] == ["WARNING", "INFO"]
    assert f"traces are not taken by {sink.endpoint}/v1/traces: " in said[0].getMessage()
    assert "again" in said[1].getMessage()


async def _until(so: Any) -> None:
    async with asyncio.timeout(10):
        while not so():
            await asyncio.sleep(0.01)


async def test_a_collector_with_https(tmp_path: Path) -> None:
    """Its certificate is held against the authority that is configured."""
    kit = CertKit(tmp_path)
    leaf = kit.leaf()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(leaf.crt_path, leaf.key_path)
    with collector(context) as sink:
        sender = export.Export(sink.endpoint, ca=kit.ca)
        _tell(sender.tracer(role="router", name="r0"))
        await sender.aclose()
    assert len(sink.spans) == 1


def test_an_answer_without_an_end_is_given_up(sink: Collector) -> None:
    sink.endless = True
    with export._Session() as session, pytest.raises(requests.ConnectionError, match="not end"):
        session.post(f"{sink.endpoint}/v1/traces", data=b"", timeout=5)


async def test_the_end_waits_for_no_collector(
    sink: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left has its two seconds, which are less here."""
    monkeypatch.setattr(export, "CLOSE_S", 0.2)
    endpoint = sink.endpoint
    sink.answer = 503  # with which it would be tried again and again
    sender = export.Export(endpoint)
    _tell(sender.tracer(role="router", name="r0"))
    begin = time.monotonic()
    await sender.aclose()
    assert time.monotonic() - begin < export.SEND_S / 2


async def test_more_than_can_wait_is_dropped_and_told_of_once(
    sink: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(export, "SPANS_MAX", 8)
    monkeypatch.setattr(export, "BATCH_SPANS", 8)
    sender = export.Export(sink.endpoint)
    monkeypatch.setattr(sender._sender, "export", lambda spans: time.sleep(0.01))
    tracer = sender.tracer(role="router", name="r0")
    for _ in range(100):
        _tell(tracer)
    await sender.aclose()
    said = [one.getMessage() for one in caplog.records]
    assert len(said) == 1 and "lower [traces] sample" in said[0]


def _tell(tracer: Tracer) -> None:
    place = tracer.begin(None)
    assert place is not None
    tracer.told("sdcp.round", place, begin=0.0, end=0.0, attributes={})


OFF = """
import sys
import sdcpd.__main__, sdcpd.daemon, sdcpd.engines, sdcpd.roles.frontend, sdcpd.roles.router
import sdcpd.roles.drafter, sdcpd.roles.verifier
from sdcpd.config import parse_config
from sdcpd.parts import Instance, Parts
parts = Parts(parse_config("", name="f.toml"))
assert parts.tracer(Instance("router", "r0")) is None
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""


def test_nothing_of_opentelemetry_is_imported_without_a_collector() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OFF], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_a_collector_without_the_extra_is_a_problem_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = '[traces]\nendpoint = "http://127.0.0.1:4318"\n'
    assert parse_config(text, name="f.toml").traces.endpoint == "http://127.0.0.1:4318"
    monkeypatch.setattr("sdcpd.config_checks.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        parse_config(text, name="f.toml")
    assert caught.value.problems == [
        "f.toml:2: traces.endpoint needs a package that is not installed: pip install 'sdcpd[otel]'"
    ]


def test_the_authority_of_a_collector() -> None:
    with pytest.raises(ConfigError, match=r"traces\.ca is of no use without an endpoint"):
        parse_config('[traces]\nendpoint = "http://a:1"\nca = "/ca.crt"\n', name="f.toml")
    config = parse_config(
        '[traces]\nendpoint = "https://a:1/otlp/"\nca = "/nowhere/{name}.crt"\n', name="f.toml"
    )
    assert config.traces.endpoint == "https://a:1/otlp"
    (problem,) = place_problems(config, [Instance("router", "r0")])
    assert problem.startswith("traces.ca /nowhere/r0.crt cannot be read: No such file")


@pytest.mark.parametrize(
    "value", ["127.0.0.1:4318", "grpc://a:4317", "http://u:pass@a:1", "http://"]
)
def test_what_is_no_collector(value: str) -> None:
    with pytest.raises(ConfigError, match="must be a URL without user") as caught:
        parse_config(f'[traces]\nendpoint = "{value}"\n', name="f.toml")
    assert "pass@" not in str(caught.value)


@pytest.mark.slow
def test_processes_of_a_cluster(
    sink: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sdcpd dev` with a collector: what the processes send makes one trace."""
    monkeypatch.setenv("SDCPD__TRACES__ENDPOINT", sink.endpoint)
    with dev(tmp_path / "state") as running:
        body = {"prompt": "The ocean at night", "max_tokens": 48, "temperature": 0}
        fields = {"content-type": "application/json", "traceparent": SAMPLED}
        request = urllib.request.Request(
            f"{running.api}/completions", json.dumps(body).encode(), fields
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            usage = json.load(answer)["usage"]
        said = running.stop()  # what is left is sent at the end
    assert "Traceback" not in said
    (root,) = (one for one in sink.spans if one.parent == PARENT)
    assert root.trace == TRACE and root.name.startswith("text_completion ")
    rounds = [one for one in sink.named("sdcp.round") if one.trace == TRACE]
    assert len(rounds) == usage["sdcp"]["rounds"] > 1
    assert {one.parent for one in rounds} == {root.span}
    assert _below(sink.named("sdcp.commit"), rounds) and _below(sink.named("sdcp.score"), rounds)
    drafts = [one for one in sink.named("sdcp.draft") if one.trace == TRACE]
    assert {one.parent for one in drafts} == {root.span}


def _below(spans: list[Got], rounds: list[Got]) -> bool:
    return {one.parent for one in spans} >= {one.span for one in rounds}
