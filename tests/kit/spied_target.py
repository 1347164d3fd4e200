"""A real target whose passes are looked at."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sdcpd.engine.api import Prefix, Score
from sdcpd.engine.kv_memory import KvMemory
from sdcpd.engine.runner import Feed
from sdcpd.engine.target import LlamaTarget
from sdcpd.protocol.messages import Sampling

GREEDY = Sampling(temperature_milli=0)
PROMPT = [3 + i * 7 % 150 for i in range(90)]


class Spied:
    """A target with all that its passes were fed and gave."""

    def __init__(self, target: LlamaTarget) -> None:
        self.target = target
        self.fed = 0
        self.scores: list[torch.Tensor] = []
        # What one session may have of another is looked at elsewhere (test_kv_memory.py).
        target.worker._memory = KvMemory(target.worker._memory.pool, reuse=False)
        self._run = target.worker._runner.run
        target.worker._runner.run = self._spy  # type: ignore[method-assign]

    def _spy(self, feeds: Sequence[Feed]) -> Sequence[torch.Tensor]:
        self.fed += sum(len(feed.tokens) for feed in feeds)
        found = self._run(feeds)
        self.scores += [scores for scores in found if len(scores)]
        return found

    async def round(
        self, session: bytes, tokens: list[int], *proposed: int
    ) -> tuple[int, int, torch.Tensor]:
        """What one round finds, and the scores it was found by."""
        prefix = Prefix(tokens, len(tokens), len(PROMPT))
        found = await self.target.score(Score(session, 1, prefix, proposed, 1, GREEDY, 0))
        return found.accepted, found.additional, self.scores[-1]
