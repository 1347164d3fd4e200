"""What people use against a real cluster: whole and streamed texts, stop strings, errors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sdcpd.roles.generation import GenerationError
from tests.clients.of_commands import Curl, Llm
from tests.clients.of_langchain import LangChainChat, LangChainLegacy
from tests.clients.of_litellm import LiteLlm
from tests.clients.of_openai import OpenAiChat, OpenAiCompletions
from tests.clients.said import Client, Wanted
from tests.kit.api import NAME, Scripted, tokenizer
from tests.kit.client_site import site
from tests.kit.dev import Dev

AB = tokenizer().encode("ab").ids


def every_client() -> list[object]:
    """By name; those that take seconds to start or to import are slow."""
    slow = pytest.mark.slow
    quick = {
        "openai chat": OpenAiChat(),
        "openai completions": OpenAiCompletions(),
        "curl chat": Curl(chat=True),
    }
    late = {
        "curl completions": Curl(chat=False),
        "llm chat": Llm(chat=True),
        "llm completions": Llm(chat=False),
        "langchain chat": LangChainChat(),
        "langchain completions": LangChainLegacy(),
        "litellm openai": LiteLlm("openai"),
        "litellm hosted_vllm": LiteLlm("hosted_vllm"),
        "litellm text-completion-openai": LiteLlm("text-completion-openai"),
    }
    return [
        *(pytest.param(client, id=name) for name, client in quick.items()),
        *(pytest.param(client, id=name, marks=slow) for name, client in late.items()),
    ]


clients = pytest.mark.parametrize("client", every_client())


def changed(wanted: Wanted, **options: object) -> Wanted:
    return replace(wanted, options={**wanted.options, **options})


@clients
def test_the_joined_stream_is_the_whole_text(cluster: Dev, client: Client) -> None:
    """Both are what OpenAI's own client gets."""
    wanted = Wanted(cluster.api)
    whole, streamed = client.whole(wanted), client.streamed(wanted)
    assert whole.text and streamed.text == whole.text
    assert streamed.pieces > 1
    reference: Client = OpenAiChat() if client.chat else OpenAiCompletions()
    assert whole.text == reference.whole(wanted).text
    if client.tells_finish:
        assert whole.finish == streamed.finish == "length"


@clients
def test_a_stop_string_cuts_exactly(cluster: Dev, client: Client) -> None:
    wanted = Wanted(cluster.api)
    text = client.whole(wanted).text
    stop = text[len(text) // 2 :][:6]
    for ask in (client.whole, client.streamed):
        found = ask(changed(wanted, stop=stop))
        assert found.text == text[: text.index(stop)]
        if client.tells_finish:
            assert found.finish == "stop"


@clients
def test_a_model_that_is_not_there(cluster: Dev, client: Client) -> None:
    wanted = replace(Wanted(cluster.api), model="gpt-nine")
    for ask in (client.whole, client.streamed):
        with pytest.raises(client.failures, match=r"no model 'gpt-nine' here"):
            ask(wanted)


@clients
def test_a_parameter_that_is_not_served_is_named(cluster: Dev, client: Client) -> None:
    wanted = changed(Wanted(cluster.api), frequency_penalty=0.5)
    for ask in (client.whole, client.streamed):
        with pytest.raises(client.failures, match=r"frequency_penalty = 0\.5 is not served"):
            ask(wanted)


@clients
def test_a_text_that_breaks_off_is_no_text(client: Client) -> None:
    """In the middle of a stream, and before a whole answer."""
    parts = [AB, GenerationError("the session has failed")]
    for ask in (client.whole, client.streamed):
        with site(Scripted(parts=list(parts))) as api:
            wanted = replace(Wanted(api.url), model=NAME)
            with pytest.raises(client.failures, match="the session has failed"):
                ask(wanted)


@pytest.mark.slow
@clients
def test_a_seed_repeats_a_text(cluster: Dev, client: Client) -> None:
    wanted = changed(Wanted(cluster.api), temperature=1.0, seed=7)
    assert client.whole(wanted).text == client.streamed(wanted).text
