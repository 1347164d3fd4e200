"""`sdcpctl verify-exact`: engines of an operator's own weights, through the whole matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from sdcpd.engine.api import KV_BLOCK_TOKENS, DraftEngine, ModelError
from sdcpd.engine.load import load_drafter, load_twins
from sdcpd.engine.model_config import read_config
from sdcpd.engine.model_settings import ModelSettings
from sdcpd.engine.ngram import NgramDrafter
from sdcpd.engine.tokenizer import TextModel
from sdcpd.exact.drafters import RandomDrafter, WrongDrafter
from sdcpd.exact.matrix import Matrix, Outcome, cases

RANDOM_SEED = 7


@dataclass(frozen=True, slots=True)
class Held:
    """An outcome held against the text of the target alone."""

    outcome: Outcome
    wanted: tuple[int, ...]

    @property
    def same(self) -> bool:
        """Whether the text is that one."""
        return self.outcome.tokens == self.wanted

    @property
    def parts_at(self) -> int | None:
        """The first token that differs, counted from 0; None where none does."""
        pairs = enumerate(zip(self.outcome.tokens, self.wanted, strict=False))
        shorter = min(len(self.outcome.tokens), len(self.wanted))
        return None if self.same else next((at for at, (a, b) in pairs if a != b), shorter)


def _check(prompt_tokens: int, tokens: int, context_max: int) -> None:
    """Whether a text of that length can be written and its prompt reused; raises ModelError."""
    if prompt_tokens <= KV_BLOCK_TOKENS:
        raise ModelError(
            f"the prompt has {prompt_tokens} tokens, and KV of it is kept and found again only "
            f"from {KV_BLOCK_TOKENS + 1} on; give a longer one"
        )
    if prompt_tokens + tokens > context_max:
        raise ModelError(
            f"the prompt has {prompt_tokens} tokens, and {tokens} more go beyond the model's "
            f"context of {context_max}; ask for fewer"
        )


async def verify(
    directory: Path,
    drafter: Path | None,
    *,
    device: str,
    dtype: str,
    tokens: int,
    ms: Sequence[int],
    prompt: str,
    report: Callable[[str], None],
    told: Callable[[Held], None],
) -> list[Held]:
    """Run every case and tell of each; raises ModelError."""
    read_config(directory)  # what is wrong with the directory itself is said first
    text = TextModel.load(directory)
    settings = ModelSettings(directory, device=device, dtype=dtype)
    async with AsyncExitStack() as stack:
        target, perfect = load_twins(settings, report=report)
        stack.push_async_callback(target.aclose)
        stack.push_async_callback(perfect.aclose)
        drafters: dict[str, DraftEngine] = {
            "perfect": perfect,
            "wrong": WrongDrafter(perfect),
            "random": RandomDrafter(RANDOM_SEED),
            "n-gram": NgramDrafter(),
        }
        if drafter is not None:
            drafters["model"] = load_drafter(
                ModelSettings(drafter, device=device, dtype=dtype), report=report
            )
            stack.push_async_callback(drafters["model"].aclose)
        ids = text.encode(prompt)
        _check(len(ids), tokens, target.info.context_max)
        matrix = Matrix(target, drafters, prompt=ids, tokens=tokens)
        found: list[Held] = []
        wanted: dict[str, tuple[int, ...]] = {}
        async for outcome in matrix.run(list(cases(list(drafters), list(ms)))):
            first = wanted.setdefault(outcome.case.sampling, outcome.tokens)
            found.append(Held(outcome, first))
            told(found[-1])
        return found
