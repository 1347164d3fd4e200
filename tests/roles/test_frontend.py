"""The API as clients see it: OpenAI's own client and raw sockets, over the real roles."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from sdcpd.protocol.messages import Rule
from sdcpd.protocol.uris import session_path_id
from tests.kit.api import END, FOX, NAME, STORY, Api, ScriptModel, cluster_api, tokenizer
from tests.kit.cluster import Cluster

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
SCRIPT = tokenizer().encode(STORY).ids
END_ID = tokenizer().token_to_id(END)


def expected(cluster: Cluster, api: Api, prompt: list[int], count: int) -> str:
    assert isinstance(cluster.model, ScriptModel)
    return api.text.decode(cluster.model.next(len(prompt), count))


async def sessions_ended(cluster: Cluster) -> None:
    """Wait until nobody works on any session."""
    served = [s for v in cluster.verifiers.values() for s in v.sessions]
    async with asyncio.timeout(2):
        while cluster.router.sessions or not all(s.machine.closed for s in served):
            await asyncio.sleep(0.005)


async def test_models_are_listed_with_their_context() -> None:
    """ux 1.3: the id may hold a slash, plain or encoded."""
    async with cluster_api(SCRIPT) as (api, _), api.client() as client:
        models = [model async for model in client.models.list()]
        assert [model.id for model in models] == [NAME]
        assert models[0].model_dump()["max_model_len"] == 512
        assert (await client.models.retrieve(NAME)).id == NAME
        assert (await api.json("GET", f"/v1/models/{NAME}"))[0] == 200
        with pytest.raises(openai.NotFoundError, match=NAME) as e:
            await client.models.retrieve("other")
        assert e.value.code == "model_not_found"


async def test_completion_is_the_models_text_whole_and_streamed() -> None:
    """ux 1.3: the joined stream is the whole answer, and both are what the target writes."""
    async with cluster_api(SCRIPT) as (api, cluster), api.client() as client:
        prompt = api.text.encode("The quick")
        whole = await client.completions.create(
            model=NAME, prompt="The quick", temperature=0, max_tokens=60
        )
        assert whole.choices[0].text == expected(cluster, api, prompt, 60)
        assert whole.choices[0].finish_reason == "length"
        assert whole.object == "text_completion"
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == len(prompt)
        assert whole.usage.completion_tokens == 60
        assert whole.usage.total_tokens == 60 + len(prompt)
        stream = await client.completions.create(
            model=NAME, prompt="The quick", temperature=0, max_tokens=60, stream=True
        )
        assert "".join([c.choices[0].text async for c in stream]) == whole.choices[0].text
        short = await client.completions.create(model=NAME, prompt=["The"], temperature=0)
        assert short.usage is not None
        assert short.usage.completion_tokens == 16


async def test_chat_whole_and_streamed_says_the_same() -> None:
    async with cluster_api(SCRIPT) as (api, cluster), api.client() as client:
        whole = await client.chat.completions.create(
            model=NAME, messages=HELLO, temperature=0, max_tokens=40
        )
        prompt = api.text.encode(api.text.chat_prompt(HELLO), special=False)
        assert whole.choices[0].message.content == expected(cluster, api, prompt, 40)
        assert whole.choices[0].message.role == "assistant"
        stream = await client.chat.completions.create(
            model=NAME, messages=HELLO, temperature=0, max_tokens=40, stream=True
        )
        deltas = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(deltas) == whole.choices[0].message.content


async def test_the_blocking_client_works_too() -> None:
    def ask(port: int) -> str | None:
        with openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="k") as client:
            answer = client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=5)
            return answer.choices[0].message.content

    async with cluster_api(SCRIPT) as (api, _):
        assert await asyncio.to_thread(ask, api.port)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
async def test_the_shape_of_a_chat_stream(options: dict[str, bool] | None) -> None:
    """ux 1.3: role once and first, one finish_reason, usage only if asked, then [DONE]."""
    async with cluster_api(SCRIPT) as (api, _):
        body = {"messages": HELLO, "max_tokens": 30, "stream_options": options}
        *chunks, done = await api.events(CHAT, body)
        assert done == "[DONE]"
        if options and options["include_usage"]:
            usage = chunks.pop()
            assert usage["choices"] == []
            assert usage["usage"]["completion_tokens"] == 30
        assert all("usage" not in chunk for chunk in chunks)
        assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
        choices = [chunk["choices"][0] for chunk in chunks]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
        assert choices[-1]["delta"] == {}


async def test_the_fields_of_a_stream() -> None:
    async with cluster_api(SCRIPT) as (api, _):
        _, fields, octets = await api.raw(
            "POST", CHAT, body={"messages": HELLO, "stream": True, "max_tokens": 3}
        )
        assert fields["content-type"].startswith("text/event-stream")
        assert fields["cache-control"] == "no-cache"
        assert fields["x-accel-buffering"] == "no"
        assert f'"chatcmpl-{fields["x-request-id"]}"'.encode() in octets


async def test_no_chunk_splits_a_character() -> None:
    """ux 1.2 row 5: one token a round, so that every character of several octets is in parts."""
    async with cluster_api(SCRIPT, drafters=0) as (api, cluster):
        count = 2 * len(SCRIPT)
        body = {"prompt": [1], "max_tokens": count, "temperature": 0}
        *chunks, _ = await api.events(COMPLETIONS, body)
        pieces = [chunk["choices"][0]["text"] for chunk in chunks]
        assert "".join(pieces) == expected(cluster, api, [1], count)
        assert "中" in "".join(pieces)
        assert not [piece for piece in pieces if "\N{REPLACEMENT CHARACTER}" in piece]


async def test_a_character_cut_by_max_tokens_is_shown_as_such() -> None:
    """ux 1.3: the tail at max_new is not lost."""
    async with cluster_api(tokenizer().encode("🙂").ids) as (api, _):
        body: dict[str, Any] = {"prompt": [1] * 4, "max_tokens": 6, "temperature": 0}
        _, whole = await api.json("POST", COMPLETIONS, body=body)
        assert whole["choices"][0]["text"] == "🙂\N{REPLACEMENT CHARACTER}"
        *chunks, _ = await api.events(COMPLETIONS, body)
        assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]


FOX_SCRIPT = tokenizer().encode(FOX).ids


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ("own fox", "The quick br", "stop"),
        (["own fax", "azy d"], "The quick brown fox jumps over the l", "stop"),
        ("brown dog", FOX, "length"),
        (["dog. The"], FOX, "length"),
        ([], FOX, "length"),
    ],
)
async def test_stop_strings_cut_exactly(stop: object, text: str, reason: str) -> None:
    """ux 1.2 row 6: over token borders, and a false alarm is not lost."""
    async with cluster_api(FOX_SCRIPT) as (api, cluster):
        body = {
            "prompt": [1] * len(FOX_SCRIPT),
            "max_tokens": len(FOX_SCRIPT),
            "temperature": 0,
            "stop": stop,
        }
        _, whole = await api.json("POST", COMPLETIONS, body=body)
        assert whole["choices"][0]["text"] == text
        assert whole["choices"][0]["finish_reason"] == reason
        *chunks, done = await api.events(COMPLETIONS, body)
        assert done == "[DONE]"
        assert "".join(c["choices"][0]["text"] for c in chunks) == text
        assert chunks[-1]["choices"][0]["finish_reason"] == reason
        await sessions_ended(cluster)


async def test_a_stop_string_ends_the_session_and_the_count() -> None:
    """ux 1.3: no token after the stop string is shown or counted, and the verifier stops."""
    async with cluster_api(FOX_SCRIPT, pass_time_s=0.002) as (api, cluster):
        start = [1] * len(FOX_SCRIPT)
        body = {"prompt": start, "max_tokens": 450, "temperature": 0, "stop": "quick"}
        status, whole = await api.json("POST", COMPLETIONS, body=body)
        assert status == 200
        needed = next(
            n for n in range(100) if "quick" in api.text.decode(FOX_SCRIPT[:n])
        )  # tokens up to the end of the stop string
        assert whole["usage"]["completion_tokens"] == needed
        details = whole["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] <= needed
        await sessions_ended(cluster)
        assert (
            sum(s.machine.committed for v in cluster.verifiers.values() for s in v.sessions) < 450
        )


async def test_the_models_own_end_is_not_shown() -> None:
    """eos is a stop token of the contract: finish_reason "stop", not in text or usage."""
    script = [*FOX_SCRIPT, END_ID]
    async with cluster_api(script) as (api, _):
        body = {"prompt": [1] * len(script), "max_tokens": 200, "temperature": 0}
        _, whole = await api.json("POST", COMPLETIONS, body=body)
        assert whole["choices"][0] == {
            "index": 0,
            "text": FOX,
            "logprobs": None,
            "finish_reason": "stop",
        }
        assert whole["usage"]["completion_tokens"] == len(FOX_SCRIPT)
        _, on = await api.json("POST", COMPLETIONS, body=body | {"ignore_eos": True})
        assert on["usage"]["completion_tokens"] == 200
        assert END not in on["choices"][0]["text"]


async def test_usage_says_what_speculation_did() -> None:
    """ux SHOULD: drafted tokens kept and dropped; usage.sdcp."""
    async with cluster_api(SCRIPT) as (api, _):
        body = {"prompt": [1], "max_tokens": 64, "temperature": 0}
        _, fast = await api.json("POST", COMPLETIONS, body=body)
        sdcp = fast["usage"]["sdcp"]
        assert sdcp["rounds"] > 0
        assert sdcp["tokens_per_pass"] > 1
        assert fast["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
        for options in (
            {"body": body | {"speculation": False}},
            {"body": body, "headers": "X-SDCP-Speculation: off\r\n"},
        ):
            _, slow = await api.json("POST", COMPLETIONS, **options)  # type: ignore[arg-type]
            assert slow["choices"][0]["text"] == fast["choices"][0]["text"]
            assert slow["usage"]["sdcp"] == {
                "rounds": 0,
                "tokens_per_pass": 1.0,
                "self_decoded": 64,
            }


@pytest.mark.parametrize(
    ("word", "temperature", "rule"),
    [
        ("rejection", 0.9, Rule.SPECULATIVE_SAMPLING),
        ("rejection", 0, Rule.GREEDY),
        ("on", 0.9, Rule.RACE),
    ],
)
async def test_the_rule_of_a_sampled_text_is_asked_for(
    word: str, temperature: float, rule: Rule
) -> None:
    """D-Z7: where the operator leaves the choice."""
    async with cluster_api(SCRIPT) as (api, cluster):
        body = {"prompt": [1], "max_tokens": 8, "temperature": temperature}
        header = f"X-SDCP-Speculation: {word}\r\n"
        status, answer = await api.json("POST", COMPLETIONS, body=body, headers=header)
        assert status == 200, answer
        (routed,) = cluster.router._ended.values()
        assert routed.machine.contract.rule == rule


async def test_a_word_that_is_no_way_to_speculate() -> None:
    async with cluster_api(SCRIPT) as (api, _):
        body = {"prompt": [1], "max_tokens": 8}
        header = "X-SDCP-Speculation: maybe\r\n"
        status, answer = await api.json("POST", COMPLETIONS, body=body, headers=header)
        assert status == 400 and "on, off or rejection" in answer["error"]["message"]


async def test_a_seed_repeats_a_text() -> None:
    """ux 1.3: negative and 64-bit seeds; D-Z7 makes the text the seed's alone."""
    mixed = [*SCRIPT[:3], *range(40)]
    async with cluster_api(mixed) as (api, _), api.client() as client:
        for seed in (-1, 2**63, 2**64 - 1):
            texts = [
                (
                    await client.completions.create(
                        model=NAME, prompt="x", seed=seed, temperature=2, max_tokens=30
                    )
                )
                .choices[0]
                .text
                for _ in range(2)
            ]
            assert texts[0] == texts[1]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_ends_the_session(stream: bool) -> None:
    """ux 1.2 row 4: the verifier stops working for nobody."""
    async with cluster_api(SCRIPT, pass_time_s=0.01, drafters=0) as (api, cluster):
        body = {"prompt": [1], "max_tokens": 500, "stream": stream}
        _, writer = await api.open("POST", COMPLETIONS, body=json.dumps(body).encode())
        async with asyncio.timeout(2):
            while not any(s.machine.committed for s in cluster.router.sessions):
                await asyncio.sleep(0.005)
        writer.transport.abort()
        await sessions_ended(cluster)
        assert cluster.verifiers["https://v0.test/"].rounds.self_decoded < 400


async def test_a_session_that_fails_in_a_stream_is_an_error_event() -> None:
    """ux 1.3: no [DONE] and no finish_reason after it, so that no client takes it for success."""
    async with cluster_api(SCRIPT, pass_time_s=0.01) as (api, cluster), api.client() as client:
        with pytest.raises(openai.APIError) as e:
            stream = await client.chat.completions.create(
                model=NAME, messages=HELLO, stream=True, max_tokens=400
            )
            async for chunk in stream:
                assert chunk.choices[0].finish_reason is None
                if chunk.choices[0].delta.content:
                    for session in cluster.router.sessions:
                        await session.cancel()
        assert e.value.code == "sdcp_session_failed"


async def test_no_verifier_is_503_with_retry_after() -> None:
    """ux 1.3: never a 409; clients are told when to come back."""
    async with cluster_api(SCRIPT) as (api, cluster):
        cluster.kill("https://v0.test/")
        async with asyncio.timeout(3):
            while cluster.router.readiness().ready:
                await asyncio.sleep(0.02)
        for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO})):
            for stream in (True, False):
                status, fields, octets = await api.raw("POST", path, body=body | {"stream": stream})
                assert status == 503
                assert fields["retry-after"] == "1"
                assert json.loads(octets)["error"]["type"] == "server_error"
        status, fields, octets = await api.raw("GET", "/ready")
        assert (status, fields["retry-after"]) == (503, "2")
        assert "verifier" in json.loads(octets)["error"]["message"]
        assert (await api.json("GET", "/health"))[0] == 200


async def test_x_request_id_is_the_session() -> None:
    async with cluster_api(SCRIPT) as (api, cluster):
        _, fields, octets = await api.raw("POST", COMPLETIONS, body={"prompt": "x"})
        ended = [session_path_id(session) for session in cluster.router._ended]
        assert fields["x-request-id"] in ended
        assert json.loads(octets)["id"] == f"cmpl-{fields['x-request-id']}"
