"""A draft model behind `engine.api.DraftEngine` (section 6.2)."""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections.abc import Sequence

import torch

from sdcpd.engine.accept import distribution, draw_from, greedy, winner
from sdcpd.engine.api import Draft, DraftWork, EngineInfo, KeepEvicted, KvUsage
from sdcpd.engine.evictions import Evictions
from sdcpd.engine.kv import SessionKv
from sdcpd.engine.kv_blocks import decode_blocks, read_blocks
from sdcpd.engine.kv_memory import KvMemory
from sdcpd.engine.kv_object import KvKind, KvRows
from sdcpd.engine.model import LlamaModel
from sdcpd.engine.runner import PASS_ROWS_MAX, Feed, Runner
from sdcpd.engine.worker import Worker
from sdcpd.protocol.messages import Sampling
from sdcpd.protocol.sparse import SparseRows

ROW_TOKENS_MAX = 64
"""Under rule 2 the drafter samples from its own top 64: any q is exact (D-A9)."""


class _DraftJob:
    """Feeds the prefix, then one token a pass until `m` are drafted."""

    def __init__(
        self,
        work: DraftWork,
        tokens: list[int],
        *,
        model: LlamaModel,
        top_k: int,
        rows: KvRows | None = None,
    ) -> None:
        """`rows` were computed before for the first of `tokens`."""
        self._model = model
        self.key, self.scope = work.session, work.prefix.scope
        self.text = tokens[: len(tokens) - len(work.after)]
        self.positions = len(tokens) + work.m
        self.result: Draft | None = None
        self._work = work
        self._tokens = tokens
        self._top_k = top_k
        self._drafted: list[int] = []
        self._rows: list[torch.Tensor] = []
        self._kv: SessionKv | None = None
        self._loaded = rows
        self._reused = 0
        self._begin = time.perf_counter()

    def begin(self, kv: SessionKv) -> None:
        self._kv = kv
        known, loaded = self._match(len(self._tokens)), self._loaded
        self._reused, kv.adopted = kv.adopted, 0
        if loaded is not None and known < loaded.positions <= len(self._tokens):
            kv.load(self._tokens[: loaded.positions], loaded.keys, loaded.values)
            self._reused = min(loaded.positions, len(self._tokens) - 1)
        if self._match(len(self._tokens)) == len(self._tokens):
            self._match(len(self._tokens) - 1)

    def _match(self, length: int) -> int:
        assert self._kv is not None
        return self._kv.match(self._tokens, length, committed=len(self.text))

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
        self._drafted.append(self._choose(scores[0]))
        if len(self._drafted) < self._work.m:
            return False
        rows = self._sparse() if self._rows else None
        spent = time.perf_counter() - self._begin
        self.result = Draft(tuple(self._drafted), rows, spent, self._reused)
        return True

    def _sparse(self) -> SparseRows:
        places, values = array("I"), array("f")
        for index, row in enumerate(self._rows):
            there = torch.nonzero(row).flatten()
            places.extend((there + index * len(row)).tolist())
            values.extend(row[there].tolist())
        return SparseRows(self._work.vocab, len(self._rows), places, values)

    def _fit(self, scores: torch.Tensor) -> torch.Tensor:
        """Cut or pad a row to the target's V (D-E6)."""
        vocab = self._work.vocab
        if len(scores) >= vocab:
            return scores[:vocab]
        pad = torch.full((vocab - len(scores),), float("-inf"), device=scores.device)
        return torch.cat((scores, pad))

    def _choose(self, scores: torch.Tensor) -> int:
        work, tokens = self._work, self._model.head_tokens
        certain = work.rule == 1 or (work.rule == 200 and work.sampling.temperature_milli == 0)
        if certain and tokens is not None:
            # Of a reduced head what it has rows for is looked at alone, which takes a tenth.
            best = int(tokens[greedy(scores[None])[0]])
            if best < work.vocab:
                return best
        scores = self._fit(self._model.expanded(scores[None])[0])
        if certain:
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
        info: EngineInfo,
        *,
        top_k: int = ROW_TOKENS_MAX,
    ) -> None:
        self._runner = runner
        runner.expands = False
        self.model = info.model
        self.tokenizer: bytes | None = info.tokenizer
        self.vocab: int | None = info.vocab
        self.kv_fingerprint: bytes | None = info.model + info.fingerprint.encode()
        self._kind = KvKind.of(info, runner.pool)
        self._top_k = top_k
        config = runner.model.config
        self._begin = config.bos if config.bos is not None else (config.eos or (0,))[0]
        self._evictions = Evictions(self._kind)
        self._memory = KvMemory(runner.pool, reuse=info.exact, evicted=self._evictions)
        self.worker = Worker(runner, self._memory, rows_max=PASS_ROWS_MAX, name="drafter")

    async def draft(self, work: DraftWork, *, blocks: Sequence[bytes | memoryview] = ()) -> Draft:
        """See DraftEngine."""
        tokens = [*work.prefix.tokens[: work.prefix.length], *work.after]
        if not work.prefix.prompt:
            tokens.insert(0, self._begin)
        rows = None
        if blocks:
            rows = await asyncio.to_thread(decode_blocks, blocks, kind=self._kind)
        result = await self.worker.run(
            _DraftJob(work, tokens, model=self._runner.model, top_k=self._top_k, rows=rows)
        )
        assert isinstance(result, Draft)
        return result

    async def blocks(self, session: bytes, tokens: Sequence[int], first: int) -> list[bytes]:
        """See DraftEngine."""
        return await read_blocks(self.worker, session, self._kind, tokens, first)

    def resident(self, session: bytes) -> bool:
        """See DraftEngine."""
        return session in self._memory

    def on_eviction(self, keep: KeepEvicted) -> None:
        """See DraftEngine."""
        self._evictions.to(keep)

    def kv_usage(self) -> KvUsage | None:
        """See DraftEngine."""
        return self.worker.kv_usage()

    def silence_s(self) -> float:
        """See DraftEngine."""
        return self.worker.silence_s()

    def forget(self, session: bytes) -> None:
        """See DraftEngine."""
        self.worker.forget(session)

    async def aclose(self) -> None:
        """See DraftEngine."""
        await self.worker.aclose()
        await asyncio.to_thread(self._runner.close)
