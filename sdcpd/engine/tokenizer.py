"""Text to tokens and back for one model, its chat template and its limits (no torch)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from sdcpd.engine.api import ModelError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_DEFAULT = 2048


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
        eos = generation.get("eos_token_id", config.get("eos_token_id"))
        ids = list(eos) if isinstance(eos, list) else [] if eos is None else [eos]
        named = tokenizer.token_to_id(_text(extra.get("eos_token")))
        ids += [named] if named is not None and named not in ids else []
        return cls(
            name=name or directory.resolve().name,
            digest=hashlib.sha256(octets).digest(),
            tokenizer=tokenizer,
            eos=tuple(ids),
            context_max=int(config.get("max_position_embeddings", CONTEXT_DEFAULT)),
            vocab=int(config.get("vocab_size", tokenizer.get_vocab_size())),
            template=_template(directory, extra),
            special={key: _text(extra.get(key)) for key in ("bos_token", "eos_token")},
        )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokens of a text; `special` adds what the tokenizer puts around a plain text."""
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special tokens left out."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> str:
        """Render messages by the model's template; raises ChatTemplateError."""
        if self.template is None:
            raise ChatTemplateError(f"model {self.name} has no chat template; use /v1/completions")

        def raise_exception(text: str) -> None:
            raise ChatTemplateError(text)

        # Templates come with model files and may be hostile: they run in a sandbox.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = raise_exception
        try:
            return environment.from_string(self.template).render(
                messages=list(messages), add_generation_prompt=True, **self.special
            )
        except TemplateError as e:
            raise ChatTemplateError(f"the chat template refuses the messages: {e}") from e


class TextStream:
    """Turns tokens that arrive a few at a time into text that never splits a character.

    Decodes from the last place where a character ended, so that a step costs what is new.
    """

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._tokens: list[int] = []
        self._from = 0  # decoding starts here: the text before it is settled
        self._shown = 0  # characters of the decoded tail that were given out

    def add(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        self._tokens += tokens
        return self._take(final=False)

    def finish(self) -> str:
        """What is left when no more tokens come, an unfinished character included."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        text = self._model.decode(self._tokens[self._from :])
        end = len(text)
        if not final:
            while end > 0 and text[end - 1] == REPLACEMENT:
                end -= 1  # octets of a character that is not complete yet
        new = text[self._shown : end]
        self._shown += len(new)
        if end == len(text) and len(self._tokens) - self._from > 16:
            self._rebase()
        return new

    def _rebase(self) -> None:
        """Forget all but a few tokens, which give the tokenizer its context."""
        start = len(self._tokens) - 4
        tail = self._model.decode(self._tokens[start:])
        whole = self._model.decode(self._tokens[self._from :])
        if REPLACEMENT not in tail and whole.endswith(tail):
            self._from, self._shown = start, len(tail)


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


def _text(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
