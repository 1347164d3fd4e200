"""From tokens to text: characters, stop strings, chat templates; properties over any split."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from sdcpd.engine.api import ModelError
from sdcpd.engine.tokenizer import REPLACEMENT, ChatTemplateError, TextModel, TextStream
from sdcpd.roles.api_stop import StopCutter
from tests.kit.api import STORY, text_model, tokenizer

TEXT = text_model()


def streamed(model: TextModel, tokens: list[int]) -> list[str]:
    stream = TextStream(model)
    return [*[stream.add(token) for token in tokens], stream.finish()]


@given(st.text(max_size=60))
@settings(deadline=None)
def test_any_text_comes_out_of_the_stream_as_it_went_in(text: str) -> None:
    """ux 1.2 row 5: no piece but the last has an unfinished character."""
    pieces = streamed(TEXT, TEXT.encode(text))
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert not [piece for piece in pieces if REPLACEMENT in piece]


@given(st.lists(st.integers(0, TEXT.vocab - 1), max_size=80))
@settings(deadline=None)
def test_any_tokens_make_the_text_that_decoding_them_whole_makes(tokens: list[int]) -> None:
    assert "".join(streamed(TEXT, tokens)) == TEXT.decode(tokens)


def test_a_model_that_writes_the_replacement_character_is_not_held_up() -> None:
    """It looks like an unfinished character, and could be held back for ever."""
    tokens = TEXT.encode(REPLACEMENT) * 100
    pieces = streamed(TEXT, tokens)
    assert "".join(pieces) == REPLACEMENT * 100
    assert len(pieces[-1]) <= 8


def byte_fallback_model() -> TextModel:
    """As Llama 2 and its kind: "▁" for spaces, octets as tokens, a leading space dropped."""
    words = ["<unk>", "<s>", "▁the", "▁fox", "es", "▁", "x"]
    vocab = {word: index for index, word in enumerate(words)}
    vocab |= {f"<0x{octet:02X}>": len(words) + octet for octet in range(256)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.add_special_tokens(["<s>"])
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return replace(TEXT, tokenizer=made, vocab=made.get_vocab_size())


def test_spaces_and_octets_of_the_other_kind_of_tokenizer() -> None:
    model = byte_fallback_model()
    token = model.tokenizer.token_to_id
    octets = [token(f"<0x{octet:02X}>") for octet in "中é🙂中".encode()]
    tokens = [token("<s>"), token("▁the"), token("▁fox"), token("es"), *octets, token("▁the")]
    tokens = tokens * 3
    pieces = streamed(model, tokens)
    assert "".join(pieces) == model.decode(tokens)
    assert pieces[2] == " fox"
    assert not [piece for piece in pieces if REPLACEMENT in piece]


def cut(strings: list[str], pieces: list[str]) -> tuple[str, bool]:
    cutter = StopCutter(strings)
    text = "".join(cutter.add(piece) for piece in pieces)
    return text + cutter.finish(), cutter.hit


def split(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


words = st.text("ab🙂", max_size=12)


@given(
    words, st.lists(st.text("ab🙂", min_size=1, max_size=4), max_size=4), st.lists(st.integers())
)
def test_any_split_of_a_text_is_cut_alike(text: str, strings: list[str], places: list[int]) -> None:
    """ux 1.2 row 6, against the plain definition: the first to be complete, then the longest."""
    ends = [
        (end, -len(s)) for s in strings for end in range(len(text) + 1) if text[:end].endswith(s)
    ]
    wanted = (text, False)
    if ends:
        end, size = min(ends)
        wanted = (text[: end + size], True)
    assert cut(strings, split(text, places)) == wanted


def test_text_is_held_back_only_while_a_stop_string_may_begin() -> None:
    cutter = StopCutter(["own fox", "xyz"])
    assert cutter.add("The quick br") == "The quick br"
    assert cutter.add("own f") == ""
    assert cutter.add("ax") == "own fa"
    assert cutter.add("y") == ""
    assert cutter.finish() == "xy"


def test_nothing_comes_after_a_stop_string() -> None:
    cutter = StopCutter(["b"])
    assert cutter.add("abc") == "a"
    assert cutter.add("d") == cutter.finish() == ""


# ---- templates and model directories


def chat(template: str) -> str:
    return replace(TEXT, template=template).chat_prompt([{"role": "user", "content": "<é>"}])


def test_templates_have_what_models_use() -> None:
    assert chat("{{ messages[0].content | tojson }}") == '"<é>"'
    assert chat("{% for m in messages %}{% break %}{% endfor %}x") == "x"
    assert len(chat("{{ strftime_now('%Y') }}")) == 4


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('only users') }}",
        "{{ messages[5].content }}",
        "{{ 1 + 'a' }}",
        "{% if %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_templates_that_refuse_break_or_attack(template: str) -> None:
    """ux 1.2 row 22: templates come with model files and run in a sandbox."""
    with pytest.raises(ChatTemplateError):
        chat(template)


def directory(path: Path, **config: object) -> Path:
    made = Tokenizer.from_str(tokenizer().to_str())
    made.enable_truncation(4)
    made.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_model_directory_is_read(tmp_path: Path) -> None:
    """ux 1.2 row 14: what a tokenizer file says of truncation must not shorten prompts."""
    path = directory(tmp_path, vocab_size=400, max_position_embeddings=1024, eos_token_id=0)
    (path / "generation_config.json").write_text('{"eos_token_id": null}')
    (path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    (path / "chat_template.jinja").write_text("{{ eos_token }}")
    model = TextModel.load(path)
    assert (model.vocab, model.context_max, model.name) == (400, 1024, tmp_path.name)
    assert model.eos == (0, model.tokenizer.token_to_id("<|im_end|>"))
    assert model.chat_prompt([]) == "<|im_end|>"
    assert model.decode(model.encode(STORY)) == STORY


def test_a_model_directory_that_is_no_good(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        TextModel.load(tmp_path)
    with pytest.raises(ModelError, match="vocab_size is 'x'"):
        TextModel.load(directory(tmp_path, vocab_size="x"))
    (tmp_path / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(ModelError, match="not a tokenizer"):
        TextModel.load(tmp_path)
