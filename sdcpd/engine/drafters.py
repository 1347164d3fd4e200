"""A draft model behind `engine.api.DraftEngine` (section 6.2)."""

from __future__ import annotations

import secrets
import time

import torch

from sdcpd.engine.accept import distribution, draw_from, greedy, pack_rows, winner
from sdcpd.engine.api import Draft, DraftWork
from sdcpd.engine.kv import SessionKv
from sdcpd.engine.runner import PASS_ROWS_MAX, Feed, Runner
from sdcpd.engine.worker import Worker
from sdcpd.protocol.messages import Sampling

ROW_TOKENS_MAX = 64
"""Under rule 2 the drafter samples from its own top 64: any q is exact (D-A9)."""


class _DraftJob:
    """Feeds the prefix, then one token a pass until `m` are drafted."""

    def __init__(self, work: DraftWork, tokens: list[int], *, top_k: int) -> None:
        self.key = work.session
        self.result: Draft | None = None
        self._work = work
        self._tokens = tokens
        self._top_k = top_k
        self._drafted: list[int] = []
        self._rows: list[torch.Tensor] = []
        self._kv: SessionKv | None = None
        self._begin = time.perf_counter()

    def begin(self, kv: SessionKv) -> None:
        self._kv = kv
        if kv.match(self._tokens, len(self._tokens)) == len(self._tokens):
            kv.match(self._tokens, len(self._tokens) - 1)

    @property
    def rows_left(self) -> int:
        assert self._kv is not None
        return len(self._tokens) + len(self._drafted) - len(self._kv.tokens)

    def feed(self, rows: int) -> Feed:
        assert self._kv is not None
        at, left = len(self._kv.tokens), self.rows_left
        text = self._tokens + self._drafted
        return Feed(self._kv, text[at : at + rows], 1 if rows == left else 0)

    def take(self, scores: torch.Tensor, pass_s: float) -> bool:
        if self.rows_left:
            return False
        self._drafted.append(self._choose(self._fit(scores[0])))
        if len(self._drafted) < self._work.m:
            return False
        rows = pack_rows(torch.stack(self._rows)) if self._rows else None
        self.result = Draft(tuple(self._drafted), rows, time.perf_counter() - self._begin)
        return True

    def _fit(self, scores: torch.Tensor) -> torch.Tensor:
        """Cut or pad a row to the target's V (D-E6)."""
        vocab = self._work.vocab
        if len(scores) >= vocab:
            return scores[:vocab]
        pad = torch.full((vocab - len(scores),), float("-inf"), device=scores.device)
        return torch.cat((scores, pad))

    def _choose(self, scores: torch.Tensor) -> int:
        work = self._work
        if work.rule == 1 or (work.rule == 200 and work.sampling.temperature_milli == 0):
            return int(greedy(scores[None])[0])
        if work.rule == 200:
            assert work.sampling.seed is not None, "a rule-200 profile always has a seed"
            k = work.base + len(self._drafted) + 1
            return winner(distribution(scores, work.sampling), work.sampling.seed, k)
        top_k = min(work.sampling.top_k or self._top_k, self._top_k)
        profile = Sampling(
            temperature_milli=work.sampling.temperature_milli,
            top_k=top_k,
            top_p_milli=work.sampling.top_p_milli,
        )
        row = distribution(scores, profile).float()
        self._rows.append(row)
        # Its own generator, never the verifier's derivation (section 6.4, D-A7).
        return draw_from(row.double(), secrets.randbits(53) / (1 << 53))


class ModelDrafter:
    """Drafts with a small model of the target's tokenizer."""

    def __init__(
        self,
        runner: Runner,
        *,
        model: bytes,
        tokenizer: bytes,
        vocab: int,
        kv_octets_max: int,
        top_k: int = ROW_TOKENS_MAX,
    ) -> None:
        self.model = model
        self.tokenizer: bytes | None = tokenizer
        self.vocab: int | None = vocab
        self._top_k = top_k
        config = runner.model.config
        self._begin = config.bos if config.bos is not None else (config.eos or (0,))[0]
        self.worker = Worker(
            runner, rows_max=PASS_ROWS_MAX, kv_octets_max=kv_octets_max, name="drafter"
        )

    async def draft(self, work: DraftWork) -> Draft:
        """See DraftEngine."""
        tokens = list(work.prefix.tokens[: work.prefix.length])
        if not work.prefix.prompt:
            tokens.insert(0, self._begin)
        result = await self.worker.run(_DraftJob(work, tokens, top_k=self._top_k))
        assert isinstance(result, Draft)
        return result

    def forget(self, session: bytes) -> None:
        """See DraftEngine."""
        self.worker.forget(session)

    async def aclose(self) -> None:
        """See DraftEngine."""
        await self.worker.aclose()
