"""The target model behind `engine.api.TargetEngine`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import torch

from sdcpd.engine.accept import accept
from sdcpd.engine.api import EngineInfo, KeepEvicted, KvUsage, Prefix, Score, Scored
from sdcpd.engine.batching import WINDOW_SHARE, BatchWindow
from sdcpd.engine.evictions import Evictions
from sdcpd.engine.kv import SessionKv
from sdcpd.engine.kv_blocks import decode_blocks, read_blocks
from sdcpd.engine.kv_memory import KvMemory
from sdcpd.engine.kv_object import KvKind, KvRows, decode_kv, encode_kv
from sdcpd.engine.rows import check_rows
from sdcpd.engine.runner import PASS_ROWS_MAX, Feed, Runner
from sdcpd.engine.worker import Worker

log = logging.getLogger("sdcpd.engine")
ROOM_WITHIN_S = 10.0  # how long a new session waits for memory before it is told to come again


class _Job:
    """Feeds a prefix and, when scoring, the proposed tokens after it."""

    def __init__(
        self, key: tuple[bytes, int], text: list[int], scope: bytes, proposed: Sequence[int] = ()
    ) -> None:
        self.key, self.text, self.scope = key, text, scope
        self.positions = len(text) + len(proposed)
        self.result: Any = None
        self._tokens = [*text, *proposed] if proposed else text
        self._scores = 0
        self._kv: SessionKv | None = None

    def begin(self, kv: SessionKv) -> None:
        self._kv = kv
        known = kv.match(self._tokens, len(self._tokens))
        if self._scores and known > len(self._tokens) - self._scores:
            # The wanted scores were computed before but not kept: feed those tokens again.
            kv.match(self._tokens, len(self._tokens) - self._scores)

    @property
    def rows_left(self) -> int:
        assert self._kv is not None
        return len(self._tokens) - len(self._kv.tokens)

    def feed(self, rows: int) -> Feed:
        assert self._kv is not None
        at = len(self._kv.tokens)
        left = len(self._tokens) - at
        final = rows == left
        if not final:
            # All wanted scores must lie in the last chunk; plan() splits only what is longer.
            rows = min(rows, left - self._scores)
        return Feed(self._kv, self._tokens[at : at + rows], self._scores if final else 0)

    def take(self, scores: torch.Tensor, pass_s: float) -> bool:
        return self.rows_left == 0


class _PrepareJob(_Job):
    """Feeds what `rows`, computed before for the first tokens, do not cover."""

    def __init__(
        self, key: tuple[bytes, int], text: list[int], scope: bytes, rows: KvRows | None
    ) -> None:
        super().__init__(key, text, scope)
        self._rows = rows
        self.result = 0  # how many tokens need not be computed, nor were for this session

    def begin(self, kv: SessionKv) -> None:
        super().begin(kv)
        self.result, kv.adopted = kv.adopted, 0
        rows = self._rows
        if rows is not None and rows.positions > len(kv.tokens):
            positions = min(rows.positions, len(self._tokens))
            kv.load(self._tokens[:positions], rows.keys, rows.values)
            self.result = positions
            log.info("KV of %d positions loaded", rows.positions)


class _ScoreJob(_Job):
    def __init__(self, prefix: list[int], work: Score) -> None:
        super().__init__(
            (work.session, work.epoch), prefix, work.prefix.scope, proposed=work.proposed
        )
        self._scores = len(work.proposed) + 1
        self._work = work

    def take(self, scores: torch.Tensor, pass_s: float) -> bool:
        if self.rows_left:
            return False
        found = accept(scores, self._work)
        self.result = Scored(found.accepted, found.additional, pass_s)
        return True


class LlamaTarget:
    """Scores proposals of many sessions in shared passes."""

    def __init__(
        self,
        runner: Runner,
        info: EngineInfo,
        *,
        rows_max: int = PASS_ROWS_MAX,
        window: float = WINDOW_SHARE,
    ) -> None:
        """`window`: how long passes wait for rounds that are due, as a share of their time."""
        self.info, self._runner = info, runner
        self._begin = _begin(runner)
        self._kind = KvKind.of(info, runner.pool)
        # Where rows depend on what stands beside them, KV of another text would change output.
        self._evictions = Evictions(self._kind)
        self._memory = KvMemory(runner.pool, reuse=info.exact, evicted=self._evictions)
        self.worker = Worker(
            runner, self._memory, rows_max=rows_max, window=BatchWindow(window), name="target"
        )

    async def prepare(
        self,
        session: bytes,
        epoch: int,
        prefix: Prefix,
        *,
        kv: bytes | None = None,
        blocks: Sequence[bytes | memoryview] = (),
    ) -> int:
        """See TargetEngine."""
        tokens = self._tokens(prefix)
        rows = None
        if kv is not None:
            rows = await asyncio.to_thread(decode_kv, kv, kind=self._kind, tokens=tokens)
        if rows is None and blocks:
            rows = await asyncio.to_thread(decode_blocks, blocks, kind=self._kind)
        # The last token is fed with the first round, whether an object has its rows or not.
        if len(tokens) == 1:
            return 0
        job = _PrepareJob((session, epoch), tokens[:-1], prefix.scope, rows)
        return int(await self.worker.run(job, room_within_s=ROOM_WITHIN_S))

    def resident(self, session: bytes, epoch: int) -> bool:
        """See TargetEngine."""
        return (session, epoch) in self._memory

    def on_eviction(self, keep: KeepEvicted) -> None:
        """See TargetEngine."""
        self._evictions.to(keep)

    def kv_usage(self) -> KvUsage | None:
        """See TargetEngine."""
        return self.worker.kv_usage()

    async def blocks(
        self, session: bytes, epoch: int, tokens: Sequence[int], first: int
    ) -> list[bytes]:
        """See TargetEngine."""
        return await read_blocks(self.worker, (session, epoch), self._kind, tokens, first)

    async def export(self, session: bytes, epoch: int, tokens: int) -> bytes | None:
        """See TargetEngine."""

        def copy(kv: SessionKv) -> tuple[Sequence[int], KvRows] | None:
            if not 0 < tokens <= len(kv.tokens):
                return None
            return kv.tokens[:tokens], KvRows(*kv.rows(tokens))

        # The thread that passes wait for only copies; the octets are made beside it.
        copied = await self.worker.read((session, epoch), copy)
        return None if copied is None else await asyncio.to_thread(encode_kv, self._kind, *copied)

    def kv_octets(self, tokens: int) -> int:
        """See TargetEngine."""
        return self._kind.octets(tokens)

    async def check_rows(self, octets: bytes | memoryview, tokens: Sequence[int]) -> None:
        """See TargetEngine."""
        await check_rows(octets, self.info.vocab, tokens)

    async def score(self, work: Score) -> Scored:
        """See TargetEngine."""
        result = await self.worker.run(_ScoreJob(self._tokens(work.prefix), work))
        assert isinstance(result, Scored)
        return result

    def forget(self, session: bytes, epoch: int) -> None:
        """See TargetEngine."""
        self.worker.forget((session, epoch))

    def pass_s(self) -> float:
        """See TargetEngine."""
        return self.worker.pass_s

    def silence_s(self) -> float:
        """See TargetEngine."""
        return self.worker.silence_s()

    async def aclose(self) -> None:
        """See TargetEngine."""
        await self.worker.aclose()
        await asyncio.to_thread(self._runner.close)

    def _tokens(self, prefix: Prefix) -> list[int]:
        """A prefix's tokens; an empty prompt is given the model's own beginning (D-O9)."""
        tokens = list(prefix.tokens[: prefix.length])
        return tokens if prefix.prompt else [self._begin, *tokens]


def _begin(runner: Runner) -> int:
    config = runner.model.config
    if config.bos is not None:
        return config.bos
    return config.eos[0] if config.eos else 0
