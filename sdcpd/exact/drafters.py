"""Drafters that put a verifier to the test: right, wrong and at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from sdcpd.engine.api import Draft, DraftEngine, DraftWork
from sdcpd.engine.without_kv import WithoutKv


class WrongDrafter(WithoutKv):
    """What another drafter proposes, each token off by one: of a right one, nothing is right."""

    def __init__(self, right: DraftEngine) -> None:
        self._right = right
        self.model, self.tokenizer, self.vocab = right.model, right.tokenizer, right.vocab

    async def draft(self, work: DraftWork, *, blocks: Sequence[bytes | memoryview] = ()) -> Draft:
        """See DraftEngine."""
        draft = await self._right.draft(work)
        return replace(draft, tokens=tuple((token + 1) % work.vocab for token in draft.tokens))

    def forget(self, session: bytes) -> None:
        """See DraftEngine."""
        self._right.forget(session)

    async def aclose(self) -> None:
        """The other one belongs to its maker."""


class RandomDrafter(WithoutKv):
    """Tokens at random, the same in every run."""

    model = bytes(32)
    tokenizer: bytes | None = None
    vocab: int | None = None

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    async def draft(self, work: DraftWork, *, blocks: Sequence[bytes | memoryview] = ()) -> Draft:
        """See DraftEngine."""
        return Draft(tuple(self._random.randrange(work.vocab) for _ in range(work.m)))

    def forget(self, session: bytes) -> None:
        """Nothing is kept."""

    async def aclose(self) -> None:
        """Nothing to stop."""
