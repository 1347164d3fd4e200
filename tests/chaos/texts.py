"""The texts that clients ask for, and what each is when nothing disturbs it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

from tests.chaos.instances import Process

PROMPTS = (
    "The ocean at night",
    "Once upon a time",
    "A little dog named Max",
    "In the morning the sun",
    "Lily and her mother went to the park.",
    "There was a big red ball in the garden, and",
)
LENGTHS = (60, 100, 160)


@dataclass(frozen=True, slots=True)
class Text:
    """One request; `rule` is that of the draft, or 200."""

    prompt: str
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    rule: int = 1

    @property
    def body(self) -> dict[str, Any]:
        """Of `POST /v1/completions`; end tokens are ignored, so that lengths are known."""
        body: dict[str, Any] = {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "ignore_eos": True,
        }
        return body if self.seed is None else body | {"seed": self.seed}

    @property
    def headers(self) -> dict[str, str]:
        """Which rule is to be used where it is not the router's choice."""
        return {"x-sdcp-speculation": "rejection"} if self.rule == 2 else {}


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """What a text is, as ids and as characters."""

    ids: tuple[int, ...]
    text: str


def make_texts(seed: int) -> list[Text]:
    """Greedy ones, sampled ones under rule 200, and a few under rule 2."""
    chooser = random.Random(seed)
    texts = [Text(one, chooser.choice(LENGTHS)) for one in PROMPTS]
    texts += [
        Text(one, chooser.choice(LENGTHS), 0.9, seed=chooser.randrange(1 << 32), rule=200)
        for one in PROMPTS
    ]
    return texts + [Text(one, chooser.choice(LENGTHS), 0.9, rule=2) for one in PROMPTS[:2]]


async def undisturbed(router: Process, texts: list[Text]) -> dict[Text, Undisturbed]:
    """Each text whose ids are determined, as the whole cluster writes it in peace."""
    known = [text for text in texts if text.rule != 2]
    answers = await asyncio.gather(*(router.ask("POST", "/generate", one.body) for one in known))
    assert None not in answers, "the router does not write"
    return {
        text: Undisturbed(tuple(answer["tokens"]), answer["text"])
        for text, answer in zip(known, answers, strict=True)
    }
