"""Several choices and prompts in one request, echo, and what /tokenize says (ux 1.2 rows 12, 19)."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter, defaultdict
from dataclasses import fields
from typing import Any

import pytest

import sdcpd
from sdcpd.engine.tokenizer import TextModel
from sdcpd.protocol.messages import Sampling
from sdcpd.roles.generation import GenerationError, GenerationRequest, Readiness
from tests.kit.api import (
    END,
    NAME,
    STORY,
    Api,
    Scripted,
    cluster_api,
    served,
    text_model,
    tokenizer,
)
from tests.kit.cluster import cluster
from tests.roles.test_frontend_text import byte_fallback_model

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
SCRIPT = tokenizer().encode(STORY).ids
GREEDY = {"temperature": 0, "max_tokens": 24}


class Each:
    """A generator of which each text is a Scripted of its own."""

    def __init__(self, *texts: Scripted) -> None:
        self.texts, self.requests, self.open, self.most = list(texts), [], 0, 0
        self.requests: list[GenerationRequest]

    def readiness(self) -> Readiness:
        return Readiness(True, "ready")

    async def generate(self, request: GenerationRequest) -> Any:
        text = self.texts[len(self.requests)]
        self.requests.append(request)
        self.open += 1
        self.most = max(self.most, self.open)
        found = await text.generate(request)
        self.open -= 1
        return found


def derived(seed: int, choice: int) -> int:
    octets = seed.to_bytes(8, "big") + choice.to_bytes(4, "big")
    return int.from_bytes(hashlib.sha256(octets).digest()[:8], "big")


async def test_n_choices_of_a_chat() -> None:
    """ux 1.3: n sessions, an index and a role each; greedy ones are alike."""
    async with cluster_api(SCRIPT) as (api, cluster), api.client() as client:
        one = await client.chat.completions.create(
            model=NAME, messages=HELLO, temperature=0, max_tokens=24
        )
        answer = await client.chat.completions.create(
            model=NAME, messages=HELLO, temperature=0, max_tokens=24, n=3
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert {choice.message.content for choice in answer.choices} == {
            one.choices[0].message.content
        }
        assert answer.usage and one.usage
        assert answer.usage.prompt_tokens == one.usage.prompt_tokens, "it is one prompt"
        assert answer.usage.completion_tokens == 72
        assert not cluster.router.sessions


async def test_n_choices_in_a_stream() -> None:
    """ux 1.2 rows 13 and 19: role and finish_reason once for each index, one [DONE]."""
    async with cluster_api(SCRIPT) as (api, _):
        body = GREEDY | {"messages": HELLO, "n": 3, "stream_options": {"include_usage": True}}
        *chunks, usage, done = await api.events(CHAT, body)
        assert done == "[DONE]"
        assert usage["usage"]["completion_tokens"] == 72
        assert len({chunk["id"] for chunk in chunks}) == 1
        texts: dict[int, str] = defaultdict(str)
        roles, ends = Counter[int](), Counter[int]()
        for choice in (chunk["choices"][0] for chunk in chunks):
            texts[choice["index"]] += choice["delta"].get("content", "")
            roles[choice["index"]] += "role" in choice["delta"]
            ends[choice["index"]] += choice["finish_reason"] is not None
        assert roles == ends == {0: 1, 1: 1, 2: 1}
        assert len(set(texts.values())) == 1
        assert texts[0]


async def test_each_choice_has_a_seed_of_its_own() -> None:
    """D-Z7: the first has the one that was given, so that n = 1 is its beginning."""
    generator = Each(*(Scripted(parts=[SCRIPT[:3]]) for _ in range(6)))
    async with served(generator) as api:
        body = {"prompt": ["a", "b"], "n": 3, "seed": 5}
        status, answer = await api.json("POST", COMPLETIONS, body=body)
        assert status == 200, answer
    seeds = [request.sampling.seed for request in generator.requests]
    assert seeds == [5, derived(5, 1), derived(5, 2)] * 2
    assert generator.requests[0].sampling == Sampling(temperature_milli=1000, seed=5)


async def test_seeded_choices_are_the_same_texts_again() -> None:
    async with cluster() as c, served(c.router, text=_numbers(c.model.vocab)) as api:
        body = {"prompt": [1, 2, 3], "n": 4, "seed": 11, "max_tokens": 30}
        first, again, alone = [
            (await api.json("POST", COMPLETIONS, body=body | more))[1]["choices"]
            for more in ({}, {}, {"n": 1})
        ]
        assert first == again
        assert len({choice["text"] for choice in first}) == 4
        assert alone[0] == first[0]


def _numbers(vocab: int) -> TextModel:
    model = text_model()
    return TextModel(NAME, model.digest, model.tokenizer, (), 512, vocab, model.template)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (["The quick", "fox"], ["The quick", "fox"]),
        ([[5, 6], [7]], None),
        (["The", [5, 6]], None),
    ],
)
async def test_several_prompts(prompt: list[Any], expected: object) -> None:
    """ux 1.3: texts, token ids and lists of either; an index for each, usage over all."""
    async with cluster_api(SCRIPT) as (api, _):
        answers = [
            (await api.json("POST", COMPLETIONS, body=GREEDY | {"prompt": one}))[1]
            for one in prompt
        ]
        body = GREEDY | {"prompt": prompt}
        status, together = await api.json("POST", COMPLETIONS, body=body)
        assert status == 200
        shown = [choice["text"] for choice in together["choices"]]
        assert shown == [answer["choices"][0]["text"] for answer in answers]
        assert [choice["index"] for choice in together["choices"]] == list(range(len(prompt)))
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert together["usage"][name] == sum(answer["usage"][name] for answer in answers)


async def test_many_prompts_are_not_all_open_at_once() -> None:
    texts = [Scripted(parts=[SCRIPT[n : n + 2]]) for n in range(40)]
    generator = Each(*texts)
    async with served(generator) as api:
        status, answer = await api.json(
            "POST", COMPLETIONS, body={"prompt": ["x"] * 40, "max_tokens": 2}
        )
    assert status == 200
    assert [c["text"] for c in answer["choices"]] == [
        text_model().decode(SCRIPT[n : n + 2]) for n in range(40)
    ]
    assert generator.most <= 8


@pytest.mark.parametrize("stream", [False, True])
async def test_when_one_of_many_fails_all_end(stream: bool) -> None:
    """No part of an answer is passed off as the whole of it, and no session is left behind."""
    never = asyncio.Event()
    texts = [Scripted(parts=[SCRIPT[:2], never]) for _ in range(4)]
    texts[2] = Scripted(parts=[SCRIPT[:2], GenerationError("the session failed")])
    async with served(Each(*texts)) as api:
        body = {"prompt": ["a", "b", "c", "d"], "stream": stream}
        status, _, octets = await api.raw("POST", COMPLETIONS, body=body)
        assert status == (200 if stream else 502)
        assert b"the session failed" in octets
        assert b"[DONE]" not in octets
        async with asyncio.timeout(5):
            for at in (0, 1, 3):
                await texts[at].cancelled.wait()


async def test_a_client_that_goes_ends_all_its_choices() -> None:
    never = asyncio.Event()
    texts = [Scripted(parts=[SCRIPT[:2], never]) for _ in range(12)]
    generator = Each(*texts)
    async with served(generator) as api:
        body = b'{"prompt": ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"]}'
        _, writer = await api.open("POST", COMPLETIONS, body=body)
        async with asyncio.timeout(5):
            while len(generator.requests) < 8:
                await asyncio.sleep(0)
            writer.close()
            for text in texts[:8]:
                await text.cancelled.wait()
    assert len(generator.requests) == 8, "none begins after that"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"n": True}, "n"),
        ({"n": "2"}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 17, "n": 8}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"echo": 1}, "echo"),
    ],
)
async def test_what_is_refused(body: dict[str, Any], param: str) -> None:
    generator = Scripted()
    async with served(generator) as api:
        status, answer = await api.json("POST", COMPLETIONS, body={"prompt": "a"} | body)
    assert status == 400
    assert answer["error"]["param"] == param
    assert not generator.requests


async def test_best_of_may_say_what_n_says() -> None:
    async with cluster_api(SCRIPT) as (api, _):
        body = GREEDY | {"prompt": "a", "n": 2, "best_of": 2}
        assert len((await api.json("POST", COMPLETIONS, body=body))[1]["choices"]) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_first(stream: bool) -> None:
    async with cluster_api(SCRIPT) as (api, _):
        plain = (await api.json("POST", COMPLETIONS, body=GREEDY | {"prompt": "Naïve 🙂"}))[1]
        body = GREEDY | {"prompt": ["Naïve 🙂", "b"], "echo": True, "stop": ["Naïve"]}
        if stream:
            *chunks, _ = await api.events(COMPLETIONS, body)
            texts = {0: "", 1: ""}
            for choice in (chunk["choices"][0] for chunk in chunks):
                texts[choice["index"]] += choice["text"]
        else:
            answer = (await api.json("POST", COMPLETIONS, body=body))[1]
            texts = {choice["index"]: choice["text"] for choice in answer["choices"]}
        text = plain["choices"][0]["text"].partition("Naïve")[0]
        assert texts[0] == "Naïve 🙂" + text, "a stop string in the prompt stops nothing"
        assert texts[1].startswith("b")


async def test_echo_of_a_prompt_alone_opens_no_session() -> None:
    """max_tokens 0, as tools that score texts send it."""
    generator = Scripted()
    async with served(generator) as api:
        body = {"prompt": [[3, 4], [5]], "echo": True, "max_tokens": 0}
        status, answer = await api.json("POST", COMPLETIONS, body=body)
        assert status == 200, answer
        assert [c["text"] for c in answer["choices"]] == [
            text_model().decode([3, 4]),
            text_model().decode([5]),
        ]
        assert {c["finish_reason"] for c in answer["choices"]} == {"length"}
        assert answer["usage"]["prompt_tokens"] == 3
        assert answer["usage"]["completion_tokens"] == 0
        whole = {"prompt": [5] * 512, "echo": True, "max_tokens": 0}
        assert (await api.json("POST", COMPLETIONS, body=whole))[0] == 200
        over = {"prompt": [5] * 513, "echo": True, "max_tokens": 0}
        assert (await api.json("POST", COMPLETIONS, body=over))[0] == 400
    assert not generator.requests


async def _asked(api: Api, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    return await api.json("POST", path, body=body)


async def test_tokenize_and_detokenize() -> None:
    """As a request with the same text or chat would have them."""
    model = text_model()
    async with served(Scripted()) as api:
        status, answer = await _asked(api, "/tokenize", {"prompt": STORY, "model": NAME})
        assert (status, answer["tokens"]) == (200, SCRIPT)
        assert answer["count"] == len(SCRIPT)
        assert answer["max_model_len"] == 512
        assert answer["token_strs"] is None
        back = await _asked(api, "/detokenize", {"tokens": SCRIPT})
        assert back == (200, {"prompt": STORY})
        body = {"messages": HELLO, "return_token_strs": True}
        status, answer = await _asked(api, "/tokenize", body)
        assert answer["tokens"] == model.encode(model.chat_prompt(HELLO), special=False)
        assert len(answer["token_strs"]) == answer["count"]
        end = model.tokenizer.token_to_id(END)
        assert (await _asked(api, "/detokenize", {"tokens": [end]}))[1]["prompt"] == END
        assert (await _asked(api, "/detokenize", {"tokens": []}))[1]["prompt"] == ""
        long = await _asked(api, "/tokenize", {"prompt": STORY * 400})
        assert long[1]["count"] > 512, "what does not fit the context is counted too"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [320]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
async def test_what_they_refuse(path: str, body: dict[str, Any], param: str) -> None:
    async with served(Scripted()) as api:
        status, answer = await _asked(api, path, body)
        assert status == 400
        assert answer["error"]["param"] == param
        assert (await _asked(api, path, body | {"model": "other"}))[0] in (400, 404)


async def test_version_tells_the_version() -> None:
    async with served(Scripted()) as api:
        status, answer = await api.json("GET", "/version")
        assert (status, answer["version"]) == (200, sdcpd.__version__)


# ---- where the prompt ends


async def test_a_character_split_between_prompt_and_text() -> None:
    """The prompt ends within it: it is shown once, by who finishes it."""
    tokens = text_model().encode("The 🙂 fox")
    border = next(at for at in range(len(tokens)) if len(text_model().decode(tokens[:at])) > 4) + 1
    prompt, rest = tokens[:border], tokens[border:]
    assert "\ufffd" in text_model().decode(prompt)
    for echo, expected in ((True, "The 🙂 fox"), (False, "🙂 fox")):
        async with served(Scripted(parts=[[token] for token in rest])) as api:
            body = {"prompt": [prompt], "echo": echo, "max_tokens": len(rest)}
            _, answer = await api.json("POST", COMPLETIONS, body=body)
        assert answer["choices"][0]["text"] == expected


async def test_a_text_goes_on_with_its_space() -> None:
    """Also where the tokenizer drops a space that begins a text: this one does not begin there."""
    model = byte_fallback_model()
    token = model.tokenizer.token_to_id
    script = [token("▁fox"), token("es"), token("▁the")]
    async with served(Scripted(parts=[script]), text=model) as api:
        body = {"prompt": [[token("▁the")]], "max_tokens": 3}
        plain = (await api.json("POST", COMPLETIONS, body=body))[1]["choices"][0]["text"]
        echoed = (await api.json("POST", COMPLETIONS, body=body | {"echo": True}))[1]
    assert plain == " foxes the"
    assert echoed["choices"][0]["text"] == "the foxes the"


async def test_what_can_not_fit_is_refused_without_making_tokens_of_it() -> None:
    """A text of megabytes must cost nobody's time."""
    model = text_model()
    longest = model.octets.longest
    assert longest
    assert model.tokens_min("x" * longest * 3) == 3
    assert byte_fallback_model().tokens_min("x" * 1000) == 0, "a normalizer may shorten texts"
    asked: list[str] = []

    class Counting(TextModel):
        def encode_at(self, text: str) -> tuple[list[int], list[int]]:
            asked.append(text)
            return super().encode_at(text)

    counting = Counting(**{f.name: getattr(model, f.name) for f in fields(TextModel)})
    async with served(Scripted(), text=counting) as api:
        body = {"prompt": "x" * longest * 600}
        status, answer = await api.json("POST", COMPLETIONS, body=body)
        assert status == 400
        assert answer["error"]["code"] == "context_length_exceeded"
        assert "at least 600 tokens" in answer["error"]["message"]
        assert not asked
        messages = [{"role": "user", "content": "x" * longest * 600}]
        status, answer = await api.json("POST", CHAT, body={"messages": messages})
        assert answer["error"]["code"] == "context_length_exceeded"


async def test_under_rejection_no_seed_is_taken() -> None:
    """It would not fix the text; saying nothing would be a promise."""
    async with served(Scripted()) as api:
        headers = "x-sdcp-speculation: rejection\r\n"
        body = {"prompt": "x", "seed": 5}
        status, _, octets = await api.raw("POST", COMPLETIONS, body=body, headers=headers)
        assert status == 400
        assert json.loads(octets)["error"]["param"] == "seed"
