"""What requests are taken, refused or ignored, and how a refusal looks."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sdcpd.protocol.messages import Sampling
from sdcpd.roles.api_access import KeysError
from sdcpd.roles.api_bodies import ChatBody, CompletionBody, read_body
from sdcpd.roles.api_errors import ApiError
from sdcpd.roles.api_tokenize import DetokenizeBody, TokenizeBody
from sdcpd.roles.frontend import FrontEnd
from sdcpd.roles.generation import GenerationError, GenerationRequest, GenerationStats
from sdcpd.transport.http import Request, Response
from sdcpd.transport.http1 import StreamingResponse
from tests.kit.api import (
    NAME,
    NO_VERIFIER,
    Api,
    Scripted,
    api_settings,
    events_of,
    served,
    text_model,
    tokenizer,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OUTPUT = f"/v1/sdcp/sessions/{'A' * 22}/output"
USER = [{"role": "user", "content": "Hi"}]
PROMPT = {"prompt": "Hi"}
AB = tokenizer().encode("ab").ids


async def ask(path: str, body: dict[str, Any]) -> GenerationRequest:
    """What the router is asked for."""
    generator = Scripted()
    async with served(generator) as api:
        status, answer = await api.json("POST", path, body=body)
        assert status == 200, answer
    return generator.requests[0]


async def refused(path: str, body: object, *, status: int = 400) -> dict[str, Any]:
    """The error that a body gets."""
    generator = Scripted()
    async with served(generator) as api:
        got, answer = await api.json("POST", path, body=body)
    assert got == status, answer
    assert not generator.requests
    return checked(answer)


def checked(answer: Any) -> dict[str, Any]:
    """The error object, which has the one shape."""
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    return dict(error)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, Sampling(temperature_milli=1000)),
        ({"temperature": None, "top_p": None, "seed": None}, Sampling(temperature_milli=1000)),
        ({"temperature": 0}, Sampling(temperature_milli=0)),
        ({"temperature": 1e-9}, Sampling(temperature_milli=1)),
        ({"temperature": 0.7004, "top_p": 0.95}, Sampling(temperature_milli=700, top_p_milli=950)),
        ({"top_k": 40, "top_p": 1}, Sampling(temperature_milli=1000, top_k=40, top_p_milli=1000)),
        ({"top_k": 0}, Sampling(temperature_milli=1000)),
        ({"top_k": -1, "seed": -1}, Sampling(temperature_milli=1000, seed=2**64 - 1)),
        ({"seed": 2**64 - 1}, Sampling(temperature_milli=1000, seed=2**64 - 1)),
        ({"seed": -(2**63)}, Sampling(temperature_milli=1000, seed=2**63)),
    ],
)
async def test_sampling(given: dict[str, Any], wanted: Sampling) -> None:
    """ux 1.3, D-S1 to D-S4: rounded to 1/1000, a small temperature is not greedy."""
    assert (await ask(CHAT, {"messages": USER} | given)).sampling == wanted


async def test_how_many_tokens() -> None:
    """ux 1.2 row 7: max_completion_tokens wins; chat takes the rest, completions 16."""
    text = text_model()
    chat = await ask(CHAT, {"messages": USER})
    assert chat.max_new == text.context_max - len(chat.prompt)
    assert chat.stop == text.eos
    assert (await ask(COMPLETIONS, PROMPT)).max_new == 16
    assert (await ask(COMPLETIONS, PROMPT | {"max_tokens": 7})).max_new == 7
    both = {"messages": USER, "max_tokens": 7, "max_completion_tokens": 9}
    assert (await ask(CHAT, both)).max_new == 9
    assert (await ask(COMPLETIONS, {"prompt": [1] * 510})).max_new == 2


@pytest.mark.parametrize(
    ("path", "body", "numbers"),
    [
        (COMPLETIONS, {"prompt": [1] * 600}, ("512", "600")),
        (COMPLETIONS, {"prompt": [1] * 512}, ("512", "512")),
        (COMPLETIONS, {"prompt": [1] * 500, "max_tokens": 13}, ("512", "500", "13")),
        (CHAT, {"messages": [{"role": "user", "content": "x " * 20_000}]}, ("512",)),
    ],
)
async def test_too_long_for_the_context(
    path: str, body: dict[str, Any], numbers: tuple[str, ...]
) -> None:
    """ux 1.2 row 14: never cut silently; the error names both numbers."""
    error = await refused(path, body)
    assert error["code"] == "context_length_exceeded"
    assert all(number in error["message"] for number in numbers)


@pytest.mark.parametrize("prompt", ["ab", ["ab"], AB, [AB]])
async def test_forms_of_a_prompt(prompt: object) -> None:
    assert (await ask(COMPLETIONS, {"prompt": prompt})).prompt == tuple(AB)


@pytest.mark.parametrize(
    "prompt",
    [None, "", [], [[]], ["a", 1], [[1], [2, "b"]], [1, "a"], [1.5], [True], {}, 7, [320], [-1]],
)
async def test_prompts_that_are_none(prompt: object) -> None:
    assert (await refused(COMPLETIONS, {"prompt": prompt}))["param"] == "prompt"


async def test_a_chat_is_rendered_by_the_models_template() -> None:
    """ux 1.2 rows 9 and 10: parts, developer, and several system messages, merged first."""
    messages = [
        {"role": "system", "content": "One."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "name": "x"},
        {"role": "developer", "content": [{"type": "text", "text": "Two.", "cache_control": {}}]},
        {"role": "user", "content": "c"},
    ]
    request = await ask(CHAT, {"messages": messages})
    assert text_model().tokenizer.decode(list(request.prompt), skip_special_tokens=False) == (
        "<|im_start|>system\nOne.\n\nTwo.<|im_end|>\n"
        "<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("Hi", "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([*USER, {"role": "assistant", "tool_calls": [{}]}], "messages[1].tool_calls"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
    ],
)
async def test_messages_that_are_refused(messages: object, param: str) -> None:
    assert (await refused(CHAT, {"messages": messages}))["param"] == param


async def test_a_model_without_template_has_no_chat() -> None:
    async with served(Scripted(), text=text_model(template=None)) as api:
        status, answer = await api.json("POST", CHAT, body={"messages": USER})
        assert status == 400
        assert "no chat template" in checked(answer)["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("logit_bias", {"5": 100}),
        ("min_p", 0.05),
        ("best_of", 2),
        ("suffix", "end"),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("functions", [{"name": "f"}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("modalities", ["text", "audio"]),
        ("guided_json", {}),
        ("chat_template", "x"),
        ("min_tokens", 3),
        ("stop_token_ids", [5]),
    ],
)
async def test_known_but_unserved_is_refused_by_name(name: str, value: object) -> None:
    """ux 1.2 rows 11, 19, 21: never ignored."""
    for path, body in ((CHAT, {"messages": USER}), (COMPLETIONS, PROMPT)):
        error = await refused(path, body | {name: value})
        assert error["param"] == name
        assert error["code"] == "unsupported_parameter"


async def test_harmless_values_and_unknown_fields_are_taken() -> None:
    """ux 1.2 row 8 and 1.1: what LangChain, LiteLLM and Open WebUI send by default."""
    harmless = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "n": 1,
        "best_of": 1,
        "logprobs": None,
        "seed": None,
        "stop": None,
        "top_p": 1,
        "logit_bias": {},
        "echo": False,
        "suffix": None,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": None,
        "stream": False,
        "stream_options": None,
        "user": "me",
        "metadata": {"a": 1},
        "reasoning": {"effort": "low"},
        "parallel_tool_calls": False,
        "no such thing": [[[]]],
        "model": None,
    }
    await ask(CHAT, {"messages": USER} | harmless)
    await ask(COMPLETIONS, PROMPT | harmless)
    await ask(CHAT, {"messages": USER, "tools": [{"type": "function"}], "tool_choice": "none"})
    every = dict.fromkeys(CompletionBody.model_fields.keys() | ChatBody.model_fields.keys())
    await ask(COMPLETIONS, every | PROMPT)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 2.1),
        ("temperature", -0.1),
        ("temperature", "1"),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("seed", 1.0),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_completion_tokens", -1),
        ("stop", ["a"] * 5),
        ("stop", ""),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stream", "yes"),
        ("stream_options", []),
        ("speculation", "off"),
        ("model", 7),
    ],
)
async def test_wrong_values_are_refused_by_name(name: str, value: object) -> None:
    assert (await refused(COMPLETIONS, PROMPT | {name: value}))["param"] == name


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt": NaN}',
        b"[" * 100_000,
        b"1" * 5000,
        b'{"prompt": "\\ud83d"}',
        b'{"prompt": "\xed\xa0\xbd"}',
    ],
)
async def test_what_is_no_json_object(body: bytes) -> None:
    assert (await refused(COMPLETIONS, body))["code"] == "invalid_json"


async def test_characters_may_be_escaped() -> None:
    """As Python's json writes an emoji: two halves of a pair."""
    assert "🙂" in text_model().decode((await ask(COMPLETIONS, {"prompt": "🙂"})).prompt)


async def test_a_body_is_json_whatever_its_type_says() -> None:
    """As `curl -d` sends it."""
    async with served(Scripted()) as api:
        form = "Content-Type: application/x-www-form-urlencoded\r\n"
        assert (await api.json("POST", COMPLETIONS, body=PROMPT, headers=form))[0] == 200


async def test_the_models_name_is_checked() -> None:
    error = await refused(CHAT, {"messages": USER, "model": "gpt-4o"}, status=404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert NAME in error["message"]
    async with served(Scripted(), model_name="alias") as api:
        for name, status in (("alias", 200), (NAME, 404)):
            body = {"messages": USER, "model": name}
            assert (await api.json("POST", CHAT, body=body))[0] == status


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/index.html", 404, None),
        ("POST", "/v1/embeddings", 404, None),
        ("GET", "/v1/models/", 404, None),
        ("GET", "/v1/models/x/y", 404, None),
        ("GET", CHAT, 405, "POST, OPTIONS"),
        ("DELETE", "/v1/models", 405, "GET, HEAD, OPTIONS"),
        ("POST", f"/v1/models/{NAME}", 405, "GET, HEAD, OPTIONS"),
        ("CONNECT", "h:1", 404, None),
    ],
)
async def test_paths_and_methods_that_are_not_there(
    method: str, path: str, status: int, allow: str | None
) -> None:
    async with served(Scripted()) as api:
        got, fields, body = await api.raw(method, path)
        assert (got, fields.get("allow")) == (status, allow)
        assert fields["content-type"] == "application/json"
        checked(json.loads(body))


async def test_what_never_becomes_a_request_has_the_shape_too() -> None:
    async with served(Scripted()) as api:
        status, answer = await api.json("POST", COMPLETIONS, body=b"x" * 2_000_000)
        assert status == 413
        assert checked(answer)["code"] == "body_too_large"
        status, answer = await api.json("GE T", "/")
        assert status == 400
        checked(answer)


# ---- how texts begin and end


async def test_failures_before_a_text_has_begun() -> None:
    """ux finding 5: 503 with Retry-After where that helps, never a 409."""
    cases = [(NO_VERIFIER, 503, "1"), (GenerationError("refused by its contract"), 502, None)]
    for error, status, retry in cases:
        async with served(Scripted(opening=error)) as api:
            for stream in (True, False):
                got, fields, body = await api.raw(
                    "POST", COMPLETIONS, body=PROMPT | {"stream": stream}
                )
                assert (got, fields.get("retry-after")) == (status, retry)
                assert checked(json.loads(body))["message"] == str(error)


async def test_a_bug_is_500_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with served(Scripted(opening=RuntimeError("a bug"))) as api:
        status, answer = await api.json("POST", COMPLETIONS, body=PROMPT)
        assert status == 500
        assert "a bug" not in checked(answer)["message"]
    async with served(Scripted(parts=[AB, RuntimeError("a bug")])) as api:
        _, _, octets = await api.raw("POST", COMPLETIONS, body=PROMPT | {"stream": True})
        assert "a bug" not in octets.decode()
        assert events_of(octets)[-1]["error"]["code"] == "sdcp_session_failed"
    assert caplog.text.count("RuntimeError: a bug") >= 2


async def test_a_text_that_fails_in_the_middle() -> None:
    """ux finding 6: an error event and no [DONE]; whole answers are a 502."""
    generator = Scripted(parts=[AB, GenerationError("the session failed")])
    async with served(generator) as api, api.client() as client:
        _, _, octets = await api.raw("POST", COMPLETIONS, body=PROMPT | {"stream": True})
        text, error = events_of(octets)
        assert text["choices"][0]["text"] == "ab"
        assert checked(error)["code"] == "sdcp_session_failed"
        await generator.cancelled.wait()
        with pytest.raises(openai.APIStatusError) as e:
            await client.completions.create(model=NAME, prompt="Hi")
        assert (e.value.status_code, e.value.code) == (502, "sdcp_session_failed")


async def test_silence_is_filled_with_comments() -> None:
    """ux 1.2 row 17: while the session opens, and between tokens; clients don't mind."""
    opening, more = asyncio.Event(), asyncio.Event()
    generator = Scripted(opening=opening, parts=[AB, more, AB])
    async with served(generator, sse_ping_s=0.01) as api, api.client() as client:
        body = json.dumps(PROMPT | {"stream": True}).encode()
        reader, writer = await api.open("POST", COMPLETIONS, body=body)
        await reader.readuntil(b": ping\n\n")
        opening.set()
        await reader.readuntil(b'"ab"')
        await reader.readuntil(b": ping\n\n")
        more.set()
        assert b"[DONE]" in await reader.read()
        writer.close()
        opening.clear()
        more.clear()
        asyncio.get_running_loop().call_later(0.05, opening.set)
        asyncio.get_running_loop().call_later(0.1, more.set)
        stream = await client.completions.create(model=NAME, prompt="Hi", stream=True)
        assert "".join([c.choices[0].text async for c in stream]) == "abab"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stage", ["opening", "pinging", "text"])
async def test_a_client_that_goes_at_any_stage_cancels(stream: bool, stage: str) -> None:
    """ux 1.2 row 4: also a session that is still being opened is ended, once it is open."""
    never = asyncio.Event()
    generator = Scripted(parts=[AB, never], opening=None if stage == "text" else asyncio.Event())
    async with served(generator, sse_ping_s=0.01 if stage == "pinging" else 5.0) as api:
        body = json.dumps(PROMPT | {"stream": stream}).encode()
        reader, writer = await api.open("POST", COMPLETIONS, body=body)
        while not generator.requests:
            await asyncio.sleep(0)
        if stream and stage != "opening":
            await reader.readuntil(b": ping" if stage == "pinging" else b"ab")
        writer.transport.abort()
        if isinstance(generator.opening, asyncio.Event):
            await asyncio.sleep(0.02)  # so that the front end has noticed, in either order
            assert not generator.cancelled.is_set()
            generator.opening.set()
        await asyncio.wait_for(generator.cancelled.wait(), 2)


async def test_too_many_waiting_texts_are_told_to_come_back() -> None:
    opening = asyncio.Event()
    generator = Scripted(opening=opening)
    async with served(generator, max_queue=1) as api:
        first = asyncio.ensure_future(api.json("POST", COMPLETIONS, body=PROMPT))
        while not generator.requests:
            await asyncio.sleep(0)
        status, fields, body = await api.raw("POST", COMPLETIONS, body=PROMPT)
        assert (status, fields["retry-after"]) == (429, "1")
        assert checked(json.loads(body))["type"] == "rate_limit_error"
        opening.set()
        assert (await first)[0] == 200
        assert (await api.json("POST", COMPLETIONS, body=PROMPT))[0] == 200


async def test_drafted_tokens_after_the_cut_count_as_rejected() -> None:
    stats = GenerationStats(rounds=2, drafted=9, accepted=8, committed=10)
    generator = Scripted(parts=[AB * 5], stats=stats)
    async with served(generator) as api:
        _, answer = await api.json("POST", COMPLETIONS, body=PROMPT | {"stop": "b"})
        counted = answer["usage"]["completion_tokens"]
        assert answer["choices"][0]["text"] == "a"
        assert counted == (1 if len(AB) == 1 else 2)
        assert answer["usage"]["completion_tokens_details"] == {
            "accepted_prediction_tokens": counted,
            "rejected_prediction_tokens": 9 - counted,
        }
        assert answer["usage"]["sdcp"]["tokens_per_pass"] == 5.0
        await generator.cancelled.wait()


async def test_lines_of_events_end_only_where_they_should() -> None:
    """Some clients take U+2028 and U+0085 for the end of a line."""
    text = "a\x85b\u2028c\u2029\r\n\x0bd"
    async with served(Scripted(parts=[tokenizer().encode(text).ids])) as api:
        _, _, octets = await api.raw("POST", COMPLETIONS, body=PROMPT | {"stream": True})
        lines = [line for line in octets.decode().splitlines() if line]
        assert all(line.startswith("data: ") for line in lines)
        assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["text"] == text


# ---- who may ask


def key_file(path: Path, **keys: str) -> Path:
    lines = [f"{n}:sha256:{hashlib.sha256(k.encode()).hexdigest()}" for n, k in keys.items()]
    path.write_text("# keys\n\n" + "\n".join(lines) + "\n")
    return path


def bearer(key: str) -> str:
    return f"Authorization: Bearer {key}\r\n"


async def test_keys_guard_everything_but_health(tmp_path: Path) -> None:
    """ux 1.2 row 16: denied by default, unknown paths too."""
    keys = key_file(tmp_path / "keys", alice="sk-one", bob="sk-zwölf")
    async with served(Scripted(), keys_file=keys) as api:
        for path in ("/health", "/ready"):
            assert (await api.raw("GET", path))[0] == 200
        assert (await api.raw("OPTIONS", CHAT))[0] == 204
        for headers in ("", bearer("sk-two"), "Authorization: Basic eDp5\r\n", bearer("")):
            for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("GET", "/nowhere")):
                status, fields, body = await api.raw(method, path, headers=headers)
                assert status == 401
                assert fields["www-authenticate"].startswith("Bearer")
                assert checked(json.loads(body))["code"] == "invalid_api_key"
        for key in ("sk-one", "sk-zwölf"):
            assert (await api.raw("GET", "/v1/models", headers=bearer(key)))[0] == 200
        async with api.client(api_key="sk-one") as client:
            assert [m.id async for m in client.models.list()] == [NAME]


async def test_keys_are_read_again_when_the_file_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = key_file(tmp_path / "keys", alice="one")
    async with served(Scripted(), keys_file=keys) as api:

        async def status(key: str) -> int:
            return (await api.raw("GET", "/v1/models", headers=bearer(key)))[0]

        assert (await status("one"), await status("two")) == (200, 401)
        key_file(keys, bob="two", carol="three")
        assert (await status("one"), await status("two")) == (401, 200)
        keys.write_text("nonsense")
        assert await status("two") == 200
        assert "expected name:sha256:hex" in caplog.text
        os.unlink(keys)
        assert await status("two") == 200


@pytest.mark.parametrize(
    "text", ["alice:one", "alice:sha256:00", ":sha256:" + "0" * 64, "a:sha256:x"]
)
def test_a_file_of_keys_that_is_wrong_stops_the_start(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    with pytest.raises(KeysError, match="No such file"):
        FrontEnd(Scripted(), text_model(), api_settings(keys_file=path))
    path.write_text(text)
    with pytest.raises(KeysError, match="keys:1: expected name:sha256:hex"):
        FrontEnd(Scripted(), text_model(), api_settings(keys_file=path))


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("app.localhost:1", True),
        ("127.0.0.1", True),
        ("127.9.9.9:80", True),
        ("[::1]:8000", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("10.0.0.1:8000", False),
        ("[fe80::1]", False),
        ("127.0.0.1.evil.example", False),
    ],
)
async def test_foreign_names_of_a_loopback_listener(host: str, allowed: bool) -> None:
    """ux 1.2 row 18: DNS rebinding."""
    for loopback_only, status in ((True, 200 if allowed else 403), (False, 200)):
        async with served(Scripted(), hosts_loopback_only=loopback_only) as api:
            got, _, body = await api.raw("GET", "/v1/models", headers=f"Host: {host}\r\n")
            assert got == status
            if got == 403:
                checked(json.loads(body))


ORIGIN = "https://chat.example"


async def preflight(api: Api, origin: str) -> dict[str, str]:
    headers = (
        f"Origin: {origin}\r\nAccess-Control-Request-Method: POST\r\n"
        "Access-Control-Request-Headers: authorization, x-stainless-os\r\n"
    )
    status, fields, body = await api.raw("OPTIONS", CHAT, headers=headers)
    assert (status, body) == (204, b"")
    return fields


async def test_pages_of_allowed_origins_may_ask(tmp_path: Path) -> None:
    """ux 1.2 row 18: the preflight needs no key, and errors can be read too."""
    keys = key_file(tmp_path / "keys", alice="one")
    async with served(Scripted(), cors_origins=(ORIGIN,), keys_file=keys) as api:
        fields = await preflight(api, ORIGIN)
        assert fields["access-control-allow-origin"] == ORIGIN
        assert "POST" in fields["access-control-allow-methods"]
        assert fields["access-control-allow-headers"] == "authorization, x-stainless-os"
        foreign = await preflight(api, "https://evil.example")
        assert not [name for name in foreign if name.startswith("access-control")]
        origin = f"Origin: {ORIGIN}\r\n"
        for headers, status in ((origin, 401), (origin + bearer("one"), 200)):
            for stream in (False, True):
                got, fields, _ = await api.raw(
                    "POST", COMPLETIONS, body=PROMPT | {"stream": stream}, headers=headers
                )
                assert got == status
                assert fields["access-control-allow-origin"] == ORIGIN
                assert fields["vary"] == "origin"


async def test_pages_of_other_origins_may_not() -> None:
    """A page may send a plain POST anywhere without asking; the text would be generated."""
    async with served(Scripted()) as api:
        own = f"http://127.0.0.1:{api.port}"
        for origin, status in (("https://evil.example", 403), ("null", 403), (own, 200)):
            headers = f"Origin: {origin}\r\nContent-Type: text/plain\r\n"
            got, fields, _ = await api.raw("POST", COMPLETIONS, body=PROMPT, headers=headers)
            assert got == status
            assert "access-control-allow-origin" not in fields
    async with served(Scripted(), cors_origins=("*",)) as api:
        headers = "Origin: https://any.example\r\n"
        assert (await api.raw("POST", COMPLETIONS, body=PROMPT, headers=headers))[0] == 200


# ---- anything at all

names = st.sampled_from(
    sorted(
        CompletionBody.model_fields.keys()
        | ChatBody.model_fields.keys()
        | {"n", "logprobs", "tools", "role", "content", "type", "text", "x"}
    )
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(["user", "text", "Hi", NAME, "none"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=5),
    max_leaves=12,
)
bodies = st.one_of(
    st.binary(max_size=40),
    values.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(names, values, max_size=6).map(lambda v: json.dumps(PROMPT | v).encode()),
    st.dictionaries(names, values, max_size=6).map(
        lambda v: json.dumps({"messages": USER} | v).encode()
    ),
)
fields = st.lists(
    st.tuples(
        st.sampled_from(["authorization", "origin", "x-sdcp-speculation", "content-type", "host"]),
        st.text(st.characters(min_codepoint=33, max_codepoint=255), max_size=20),
    ),
    max_size=3,
)


async def drained(response: Response | StreamingResponse) -> bytes:
    if isinstance(response, Response):
        return response.body
    octets = b""
    try:
        while True:
            octets += await response.body.__anext__()
    except StopAsyncIteration:
        await response.body.aclose()
    return octets


def test_any_request_is_answered_in_shape(tmp_path: Path) -> None:
    """Bodies, paths and fields of every kind get 2xx or 4xx, and errors have the one shape."""
    keys = key_file(tmp_path / "keys", alice="one")
    with asyncio.Runner() as runner:

        async def make(**changes: Any) -> FrontEnd:
            generator = Scripted(parts=[AB])
            return FrontEnd(generator, text_model(), api_settings(**changes))

        open_to_all = runner.run(make())
        keyed = runner.run(make(keys_file=keys, cors_origins=("*",)))

        @settings(max_examples=250, deadline=None)
        @given(
            st.sampled_from([open_to_all, keyed]),
            st.sampled_from(["POST", "POST", "POST", "GET", "HEAD", "OPTIONS", "PUT"]),
            st.sampled_from(
                [CHAT, COMPLETIONS, CHAT, COMPLETIONS, OUTPUT, "/v1/models/%ff", "/ready", "/é"]
            ),
            bodies,
            fields,
        )
        def check(
            front_end: FrontEnd, method: str, path: str, body: bytes, extra: list[tuple[str, str]]
        ) -> None:
            host = dict(extra).get("host", "localhost")
            request = Request(method, path, "", tuple(extra), body, authority=host)
            response = runner.run(front_end.handle(request))
            octets = runner.run(drained(response))
            assert 200 <= response.status < 300 or 400 <= response.status < 500
            if response.status >= 400:
                checked(json.loads(octets))

        check()


@given(st.text(max_size=30), st.sampled_from(["stop", "model", "prompt", "user"]))
def test_any_text_is_a_value_or_an_error(text: str, name: str) -> None:
    if name == "stop" and not text:
        return
    body = read_body(CompletionBody, json.dumps({name: text}).encode())
    assert getattr(body, name, None) in (None, text, [text])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [1] * 100_000}, "messages[0]"),
        (CHAT, {"messages": USER * 4097}, "messages"),
        ("/tokenize", {"messages": [None] * 100_000}, "messages[0]"),
        ("/tokenize", {"prompt": "x" * ((1 << 20) + 1)}, "prompt"),
        ("/detokenize", {"tokens": ["a"] * 100_000}, "tokens[0]"),
        (COMPLETIONS, {"prompt": [[3]] * 100_000}, "prompt"),
    ],
)
async def test_of_many_faults_the_first_is_told(
    path: str, body: dict[str, Any], param: str
) -> None:
    """An error for each of a million elements would hold everybody up."""
    kinds = {CHAT: ChatBody, COMPLETIONS: CompletionBody, "/tokenize": TokenizeBody}
    with pytest.raises(ApiError) as e:
        read_body(kinds.get(path, DetokenizeBody), json.dumps(body).encode())
    assert e.value.param == param
    cause = e.value.__cause__
    assert not isinstance(cause, ValidationError) or cause.error_count() == 1
