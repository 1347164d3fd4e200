"""Text to tokens and back for one model, its chat template and its limits (no torch)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Encoding, Tokenizer

from sdcpd.engine.api import ModelError
from sdcpd.engine.token_octets import TokenOctets

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_DEFAULT = 2048
# Octets of an unfinished character decode as U+FFFD: at most 3, with byte fallback also those of
# the character before. More than that are text: the model writes U+FFFD, or what is no UTF-8.
HELD_MAX = 8
WINDOW_MAX, WINDOW_KEPT = 64, 32  # each character that is held has at most 4 tokens


class ChatTemplateError(Exception):
    """The model's chat template does not take these messages; the text says why."""


@dataclass(frozen=True)
class TextModel:
    """What a front end needs of a model directory; weights are not read."""

    name: str
    digest: bytes
    """Of tokenizer.json (D-C9)."""
    tokenizer: Tokenizer
    eos: tuple[int, ...]
    context_max: int
    vocab: int
    template: str | None
    special: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path, *, name: str = "") -> TextModel:
        """Read tokenizer.json, config.json and the chat template; raises ModelError."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"model directory {directory}: tokenizer.json is missing; "
                "expected a Hugging Face directory with config.json and tokenizer.json"
            )
        octets = path.read_bytes()
        try:
            tokenizer = Tokenizer.from_str(octets.decode("utf-8"))
        except Exception as e:  # the library raises bare Exception
            raise ModelError(f"{path}: not a tokenizer ({e}); fetch the file again") from e
        config = _json(directory / "config.json", needed=True)
        extra = _json(directory / "tokenizer_config.json", needed=False)
        generation = _json(directory / "generation_config.json", needed=False)
        tokenizer.no_truncation()  # a prompt that is too long must be seen, not cut
        tokenizer.no_padding()
        eos = generation.get("eos_token_id")
        eos = config.get("eos_token_id") if eos is None else eos
        ids = list(eos) if isinstance(eos, list) else [] if eos is None else [eos]
        named = tokenizer.token_to_id(_text(extra.get("eos_token")))
        ids += [named] if named is not None and named not in ids else []
        return cls(
            name=name or directory.resolve().name,
            digest=hashlib.sha256(octets).digest(),
            tokenizer=tokenizer,
            eos=tuple(ids),
            context_max=_count(config, "max_position_embeddings", CONTEXT_DEFAULT),
            vocab=_count(config, "vocab_size", tokenizer.get_vocab_size()),
            template=_template(directory, extra),
            special={key: _text(extra.get(key)) for key in ("bos_token", "eos_token")},
        )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokens of a text; `special` adds what the tokenizer puts around a plain text."""
        return list(self._encoded(text, special).ids)

    def encode_at(self, text: str) -> tuple[list[int], list[int]]:
        """Tokens of a text, and at which of its characters each begins."""
        found = self._encoded(text, True)
        return list(found.ids), [begin for begin, _ in found.offsets]

    def tokens_min(self, text: str) -> int:
        """How many tokens a text has at least, as far as its length alone tells."""
        longest = self.octets.longest
        return -(-len(text.encode()) // longest) if longest else 0

    def _encoded(self, text: str, special: bool) -> Encoding:
        # A batch of one: for a single text the library keeps the interpreter's lock all the while.
        (found,) = self.tokenizer.encode_batch([text], add_special_tokens=special)
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special tokens left out."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def decode_all(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special tokens as they are written."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> str:
        """Render messages by the model's template; raises ChatTemplateError."""
        try:
            return self._compiled_template.render(
                messages=list(messages), add_generation_prompt=True, **self.special
            )
        except ChatTemplateError:
            raise
        except Exception as e:  # a template may compute, so it may fail with anything
            raise ChatTemplateError(f"the chat template refuses the messages: {e}") from e

    @cached_property
    def octets(self) -> TokenOctets:
        """What single tokens stand for."""
        return TokenOctets(self.tokenizer)

    @cached_property
    def _compiled_template(self) -> Template:
        if self.template is None:
            raise ChatTemplateError(f"model {self.name} has no chat template; use /v1/completions")
        # Templates come with model files and may be hostile: they run in a sandbox.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse_messages
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(self.template)
        except TemplateError as e:
            raise ChatTemplateError(f"the chat template of {self.name} is broken: {e}") from e


class TextStream:
    """Turns tokens that come one by one into text, of which no piece splits a character.

    Decodes a short window: the tokens since the last place where a character was known to end,
    and those of the step before, which tell the decoder that it is not at the start of a text.
    """

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._window: list[int] = []
        self._shown = 0  # characters of the decoded window that were given out
        self._context = 0  # tokens of the window that were complete before

    def go_on_after(self, tokens: Sequence[int]) -> None:
        """Begin behind other tokens, whose text is known, and which may end within a character."""
        for token in tokens[-WINDOW_KEPT:]:
            self.add(token)

    def add(self, token: int) -> str:
        """The text that this token completes; may be empty."""
        self._window.append(token)
        text = self._model.decode(self._window)
        held = min(len(text) - len(text.rstrip(REPLACEMENT)), HELD_MAX)
        new = text[self._shown : len(text) - held]
        self._shown = max(self._shown, len(text) - held)
        if held == 0:
            self._move(len(self._window) - self._context, held)
        elif len(self._window) > WINDOW_MAX:
            self._move(WINDOW_KEPT, held)
        return new

    def finish(self) -> str:
        """What is left when no more tokens come, an unfinished character included."""
        new = self._model.decode(self._window)[self._shown :]
        self._window, self._shown, self._context = [], 0, 0
        return new

    def _move(self, kept: int, held: int) -> None:
        """Forget all tokens but the last `kept`, unless those are no text."""
        window = self._window[-kept:]
        if text := self._model.decode(window):
            self._window, self._context = window, kept
            self._shown = max(0, len(text) - held)


def _refuse_messages(text: str) -> None:
    raise ChatTemplateError(text)


def _to_json(value: object, indent: int | None = None) -> str:
    """As templates expect it: jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _template(directory: Path, extra: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    template = extra.get("chat_template")
    if isinstance(template, list):
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _json(path: Path, *, needed: bool) -> dict[str, Any]:
    if not path.is_file():
        if needed:
            raise ModelError(
                f"model directory {path.parent}: {path.name} is missing; "
                "expected a Hugging Face directory with config.json and tokenizer.json"
            )
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as e:
        raise ModelError(f"{path}: not readable as JSON ({e}); fetch the file again") from e
    return value if isinstance(value, dict) else {}


def _count(config: dict[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key} is {value!r}; expected a whole number above 0")
    return value


def _text(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
