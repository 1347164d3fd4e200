"""Log-probabilities and rounds as clients see them (ux 1.2 rows 11 and 12, peers 3.1 no. 5)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcpd.protocol.logprobs import Row, logprob_row
from sdcpd.roles.api_answers import Piece
from sdcpd.roles.api_tokens import Rounds
from tests.kit.api import (
    END,
    NAME,
    NO_VERIFIER,
    STORY,
    Scripted,
    cluster_api,
    served,
    text_model,
    tokenizer,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
SCRIPT = tokenizer().encode(STORY).ids
MODEL = text_model()
END_ID = tokenizer().token_to_id(END)
GREEDY = {"temperature": 0, "max_tokens": 40}


def logprob(token: int) -> float:
    """What the scripted generator says of a token."""
    return -token / 100


def joined(entries: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(bytes(one["bytes"]) for one in entries)


async def chat_stream(parts: list[Any], **body: Any) -> tuple[str, list[dict[str, Any]]]:
    """Text and entries of a stream, each chunk's entries checked to begin in its text."""
    async with served(Scripted(parts=parts)) as api:
        *chunks, _ = await api.events(CHAT, {"messages": HELLO, "logprobs": True} | body)
    text, entries = "", []
    for choice in (chunk["choices"][0] for chunk in chunks):
        text += choice["delta"].get("content", "")
        if choice["logprobs"] is not None:
            entries += choice["logprobs"]["content"]
    return text, entries


async def test_a_chats_logprobs_are_the_targets() -> None:
    """Compared with the model's own scores, over drafted rounds; and no 0.0 for all."""
    async with cluster_api(SCRIPT) as (api, cluster), api.client() as client:
        answer = await client.chat.completions.create(
            model=NAME, messages=HELLO, logprobs=True, top_logprobs=3, **GREEDY
        )
        prompt = api.text.encode(api.text.chat_prompt(HELLO), special=False)
        found = answer.choices[0].logprobs
        assert found and found.content and answer.usage
        assert len(found.content) == answer.usage.completion_tokens == 40
        tokens = list(prompt)
        for one in found.content:
            scores = cluster.model.scores(tokens)
            token = max(range(len(scores)), key=scores.__getitem__)
            row = logprob_row(scores, token, 3)
            assert one.logprob == pytest.approx(-row[0] / 1e6, abs=1e-9)
            assert bytes(one.bytes or b"") == api.text.octets[token]
            assert [t.logprob for t in one.top_logprobs] == [-v / 1e6 for v in row[2::2]]
            assert one.top_logprobs[0].token == one.token
            tokens.append(token)
        text = b"".join(bytes(one.bytes or b"") for one in found.content)
        assert text.decode(errors="ignore").startswith(
            (answer.choices[0].message.content or "")[:20]
        )


@pytest.mark.parametrize("size", [1, 3, len(SCRIPT)])
async def test_streamed_they_come_with_their_text(size: int) -> None:
    """Also where a character is split over tokens, or over rounds."""
    parts = [SCRIPT[at : at + size] for at in range(0, len(SCRIPT), size)]
    text, entries = await chat_stream(parts, top_logprobs=2)
    assert text == STORY
    assert joined(entries).decode() == STORY
    assert [one["logprob"] for one in entries] == [logprob(token) for token in SCRIPT]
    assert all(len(one["top_logprobs"]) == 2 for one in entries)
    split = [one for one in entries if one["token"].startswith("\\x")]
    assert split, "parts of a character are shown as octets"


@pytest.mark.parametrize("size", [1, 2, len(SCRIPT)])
async def test_no_token_behind_a_stop_string_has_one(size: int) -> None:
    """peers 3.1 no. 5: entries are of the text that is shown, and of nothing after it."""
    parts = [SCRIPT[at : at + size] for at in range(0, len(SCRIPT), size)]
    text, entries = await chat_stream(parts, stop=["own fox"])
    assert text == "The quick br"
    shown = joined(entries).decode()
    assert shown.startswith(text)
    assert len(joined(entries[:-1])) < len(text), "the last one begins in the text"


async def test_what_was_held_back_comes_in_the_end() -> None:
    tokens = MODEL.encode("The quick br")
    text, entries = await chat_stream([tokens], stop=["brown"])
    assert text == "The quick br"
    assert len(entries) == len(tokens)


async def test_a_stop_token_has_none() -> None:
    text, entries = await chat_stream([[*SCRIPT[:4], END_ID]])
    assert text == MODEL.decode(SCRIPT[:4])
    assert len(entries) == 4


async def completion(parts: list[Any], **body: Any) -> Any:
    async with served(Scripted(parts=parts)) as api:
        status, answer = await api.json("POST", COMPLETIONS, body=body)
        assert status == 200, answer
    return answer["choices"][0]


async def test_the_legacy_object() -> None:
    """Lists of one length; the token itself is always among its alternatives."""
    choice = await completion([SCRIPT[:8]], prompt="x", logprobs=2)
    found = choice["logprobs"]
    assert found.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(values) for values in found.values()} == {8}
    assert "".join(found["tokens"]) == choice["text"]
    assert found["token_logprobs"] == [logprob(token) for token in SCRIPT[:8]]
    offsets = [len(MODEL.decode(SCRIPT[:n])) for n in range(8)]
    assert found["text_offset"] == offsets
    for own, value, best in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert best[own] == value
        assert len(best) == 3
    none = await completion([SCRIPT[:8]], prompt="x", logprobs=0)
    assert none["logprobs"]["top_logprobs"] is None
    assert len(none["logprobs"]["tokens"]) == 8
    assert (await completion([SCRIPT[:8]], prompt="x", logprobs=None))["logprobs"] is None
    assert (await completion([SCRIPT[:8]], prompt="x", logprobs=False))["logprobs"] is None


@pytest.mark.parametrize("ends", [False, True])
async def test_echo_scores_the_prompt(ends: bool) -> None:
    """ux 1.2 row 12: null for the first token; an entry for each token asked for, as
    lm-evaluation-harness counts them, even if that is the end of the text."""
    prompt = SCRIPT[:6]
    part = [END_ID if ends else SCRIPT[6]]
    choice = await completion([part], prompt=[prompt], logprobs=1, echo=True, max_tokens=1)
    found = choice["logprobs"]
    assert {len(values) for values in found.values()} == {7}
    assert found["token_logprobs"] == [None, *map(logprob, [*prompt[1:], *part])]
    assert found["top_logprobs"][0] is None
    assert found["text_offset"] == [len(MODEL.decode(SCRIPT[:n])) for n in range(7)]
    assert choice["text"] == MODEL.decode(SCRIPT[: 6 if ends else 7])
    assert choice["finish_reason"] == ("stop" if ends else "length")
    alone = await completion([], prompt=[prompt], logprobs=1, echo=True, max_tokens=0)
    assert alone["logprobs"]["token_logprobs"] == found["token_logprobs"][:6]


async def test_echo_scores_what_the_model_thinks_of_it() -> None:
    """Over the real roles: of each token given those before it, greedy or not."""
    async with cluster_api(SCRIPT) as (api, cluster):
        prompt = [*SCRIPT[:5], 9, *SCRIPT[6:9]]
        body = GREEDY | {"prompt": prompt, "logprobs": 1, "echo": True, "max_tokens": 1}
        _, answer = await api.json("POST", COMPLETIONS, body=body)
        found = answer["choices"][0]["logprobs"]
        for at in range(1, len(prompt)):
            row = logprob_row(cluster.model.scores(prompt[:at]), prompt[at], 1)
            assert found["token_logprobs"][at] == -row[0] / 1e6
            assert max(found["top_logprobs"][at].values()) == -row[2] / 1e6
        assert not cluster.router.sessions


async def test_offsets_are_places_in_the_text_that_was_sent() -> None:
    """Also where it has special tokens, which the text of tokens has not."""
    prompt = "<|im_start|>Naïve 🙂<|im_end|> fox"
    tokens = MODEL.encode(prompt)
    choice = await completion([SCRIPT[:3]], prompt=prompt, logprobs=0, echo=True)
    offsets = choice["logprobs"]["text_offset"]
    text = choice["text"]
    assert text == prompt + MODEL.decode(SCRIPT[:3])
    for at, token in enumerate([*tokens, *SCRIPT[:3]]):
        octets = MODEL.octets[token]
        whole = text[offsets[at] :].encode()
        assert whole.startswith(octets) or not _is_text(octets), (at, octets)
    assert offsets[len(tokens)] == len(prompt)


def _is_text(octets: bytes) -> bool:
    try:
        octets.decode()
    except UnicodeDecodeError:
        return False
    return True


async def test_a_prompt_is_scored_once_for_all_its_choices() -> None:
    class Counting(Scripted):
        scored = 0

        async def logprobs(self, tokens: Sequence[int], alternatives: int) -> tuple[Row, ...]:
            Counting.scored += 1
            return await super().logprobs(tokens, alternatives)

    async with served(Counting()) as api:
        body = {"prompt": [SCRIPT[:9], SCRIPT[:5]], "n": 8, "logprobs": 1, "echo": True}
        status, answer = await api.json("POST", COMPLETIONS, body=body | {"max_tokens": 0})
    assert status == 200
    assert len(answer["choices"]) == 16
    assert Counting.scored == 2
    assert answer["usage"]["prompt_tokens"] == 14


async def test_no_answer_is_without_end() -> None:
    async with served(Scripted()) as api:
        body = {"prompt": [[5] * 500] * 120, "logprobs": 20, "echo": True, "max_tokens": 0}
        status, answer = await api.json("POST", COMPLETIONS, body=body)
        assert status == 400
        assert "1260000 log-probabilities" in answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_nobody_can_score_now(stream: bool) -> None:
    """503 with Retry-After, as for any text that can't be begun."""

    class Unready(Scripted):
        async def logprobs(self, tokens: Sequence[int], alternatives: int) -> tuple[Row, ...]:
            raise NO_VERIFIER

    async with served(Unready()) as api:
        body = {"prompt": "x y", "logprobs": 1, "echo": True, "max_tokens": 0, "stream": stream}
        status, fields, _ = await api.raw("POST", COMPLETIONS, body=body)
        assert (status, fields["retry-after"]) == (503, "1")
        body["max_tokens"] = 1
        status, fields, _ = await api.raw("POST", COMPLETIONS, body=body | {"stream": False})
        assert (status, fields["retry-after"]) == (503, "1")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"logprobs": 1}, "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"logprobs": 1.5}, "logprobs"),
        (COMPLETIONS, {"top_logprobs": 2}, "top_logprobs"),
    ],
)
async def test_what_is_refused(path: str, body: dict[str, Any], param: str) -> None:
    async with served(Scripted()) as api:
        given = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
        status, answer = await api.json("POST", path, body=given | body)
    assert status == 400
    assert answer["error"]["param"] == param


# ---- rounds


async def test_a_stream_tells_its_rounds_where_asked() -> None:
    """Accepted and own texts are the whole text; rejected ones are not in it."""
    for noise, speculation in ((0.0, True), (0.0, False)):
        async with cluster_api(SCRIPT) as (api, _):
            options = {"include_speculation": True, "include_usage": True}
            body = GREEDY | {"messages": HELLO, "stream_options": options}
            *chunks, usage, _ = await api.events(CHAT, body | {"speculation": speculation})
        rounds = [one for chunk in chunks for one in chunk.get("sdcp", {}).get("rounds", [])]
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
        assert "".join(one["accepted"] + one["own"] for one in rounds) == text, noise
        alone = [one["self_decoded"] for one in rounds]
        assert sum(alone) == usage["usage"]["sdcp"]["self_decoded"]
        assert len(alone) - sum(alone) == usage["usage"]["sdcp"]["rounds"]


async def test_nobody_is_told_of_rounds_who_has_not_asked() -> None:
    async with cluster_api(SCRIPT) as (api, _):
        chunks = await api.events(CHAT, GREEDY | {"messages": HELLO})
        assert not any("sdcp" in chunk for chunk in chunks[:-1])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12), st.data())
@settings(deadline=None)
def test_rounds_in_any_grouping(made: list[tuple[int, int]], data: st.DataObject) -> None:
    """(accepted, rejected) a round, read in any grouping, parts known or forgotten."""
    parts, count = [], 0
    for accepted, rejected in made:
        count += accepted + 1
        parts.append((count, accepted, *[5] * rejected))
    texts = [f"{at} " for at in range(count)]
    ends = [0, *sorted(data.draw(st.sets(st.sampled_from([p[0] for p in parts] or [0])))), count]
    known = parts[data.draw(st.integers(0, len(parts))) :]
    rounds, found = Rounds(MODEL), []
    for first, last in pairwise(ends):
        rounds.add(texts[first:last], [p for p in known if first < p[0] <= last])
        found += rounds.release(sum(map(len, texts[:last])), ended=False)
    assert "".join(one.accepted + one.own for one in found) == "".join(texts)
    told = [one for one in found if one.accepted or one.rejected or one.self_decoded]
    assert len(told) == len(known)
    for one, (_, accepted, *rejected) in zip(told, known, strict=True):
        assert one.accepted.count(" ") == accepted
        assert one.own.count(" ") == 1
        assert one.self_decoded == (not accepted and not rejected)
        assert one.rejected == MODEL.decode(rejected)


@pytest.mark.parametrize("size", [1, 2, len(SCRIPT)])
async def test_rounds_end_with_their_text(size: int) -> None:
    """Nothing of a stop string is told; what was accepted before it stays accepted."""
    ends = [*range(4, len(SCRIPT), 4), len(SCRIPT)]
    generator = Scripted(parts=[SCRIPT[at : at + size] for at in range(0, len(SCRIPT), size)])
    generator.rounds = [(end, 3, 5) for end in ends]
    options = {"include_speculation": True}
    body = {"messages": HELLO, "stop": ["own fox"], "stream_options": options}
    async with served(generator) as api:
        *chunks, _ = await api.events(CHAT, body)
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    told = [one for chunk in chunks for one in chunk.get("sdcp", {}).get("rounds", [])]
    assert text == "The quick br"
    assert "".join(one["accepted"] + one["own"] for one in told) == text
    if size == len(SCRIPT):
        whole = MODEL.decode(SCRIPT[:3])
        assert told[0]["accepted"] == whole[: len(text)]


def test_pieces_add_up() -> None:
    piece = Piece("a")
    piece.add(Piece("b"))
    assert piece.text == "ab"
    assert not Piece("")
