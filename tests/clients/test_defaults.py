"""What clients send unless they are told otherwise is taken, and is what we think it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.clients.of_langchain import LangChainChat, LangChainLegacy
from tests.clients.of_litellm import LiteLlm
from tests.clients.of_openai import OpenAiChat
from tests.clients.said import Client, Said, Wanted
from tests.kit.api import NAME, Scripted, served, tokenizer
from tests.kit.client_site import site

AB = tokenizer().encode("ab").ids
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


def sent(client: Client, **options: Any) -> dict[str, Any]:
    """The body that a client sends; its answer is understood."""
    with site(Scripted(parts=[AB])) as api:
        wanted = replace(Wanted(api.url), prompt="Hi", model=NAME, options=options)
        assert client.whole(wanted).text == "ab"
        streamed = client.streamed(wanted)
    assert (streamed.text, streamed.finish) == ("ab", "length")
    whole, stream = api.bodies
    assert stream["stream"] is True and not whole.get("stream")
    return whole


@pytest.mark.slow
def test_langchain_completions() -> None:
    body = sent(LangChainLegacy())
    assert body["prompt"] == ["Hi"]
    assert body["logprobs"] is None and body["seed"] is None
    assert (body["n"], body["frequency_penalty"], body["presence_penalty"]) == (1, 0, 0)
    assert "stop" not in body or body["stop"] is None


@pytest.mark.slow
def test_langchain_chat_says_max_completion_tokens() -> None:
    body = sent(LangChainChat(), max_tokens=7)
    assert body["max_completion_tokens"] == 7 and "max_tokens" not in body


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "text-completion-openai"])
def test_litellm(provider: str) -> None:
    """With both names of the same thing, and the temperature that aider asks for."""
    client = LiteLlm(provider)
    both = {"max_tokens": 7} | ({"max_completion_tokens": 9} if client.chat else {})
    body = sent(client, temperature=0, **both)
    assert body["temperature"] == 0
    assert {name: body[name] for name in both} == both
    assert ("prompt" in body) != client.chat


def test_openai() -> None:
    assert sent(OpenAiChat()).keys() == {"model", "messages"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(
            CHAT,
            {
                "model": NAME,
                "stream": True,
                "stream_options": {"include_usage": True},
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
                        ],
                    },
                ],
                "reasoning": {"effort": "medium"},
            },
            id="Open WebUI",
        ),
        pytest.param(
            CHAT,
            {"model": NAME, "messages": HI, "temperature": 0, "stream": True},
            id="aider",
        ),
        pytest.param(
            COMPLETIONS,
            {
                "model": NAME,
                "prompt": ["Hi"],
                "max_tokens": 256,
                "temperature": 0.7,
                "top_p": 1,
                "frequency_penalty": 0,
                "presence_penalty": 0,
                "n": 1,
                "best_of": 1,
                "logit_bias": {},
                "logprobs": None,
                "seed": None,
                "stream": True,
            },
            id="LangChain of some years ago",
        ),
    ],
)
async def test_those_that_are_not_installed(path: str, body: dict[str, Any]) -> None:
    """As they have been seen to ask."""
    async with served(Scripted(parts=[AB])) as api:
        *chunks, done = await api.events(path, body)
    assert done == "[DONE]"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    texts = [c["text"] if "text" in c else c["delta"].get("content", "") for c in choices]
    assert Said("".join(texts), choices[-1]["finish_reason"]) == Said("ab", "length")
    assert ("usage" in chunks[-1]) == ("stream_options" in body)
