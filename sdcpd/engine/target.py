"""The target model behind `engine.api.TargetEngine`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace

from sdcpd.engine.api import EngineInfo, KeepEvicted, KvUsage, Prefix, Score, Scored
from sdcpd.engine.batching import WINDOW_SHARE, BatchWindow
from sdcpd.engine.evictions import Evictions
from sdcpd.engine.kv import SessionKv
from sdcpd.engine.kv_blocks import decode_blocks, read_blocks
from sdcpd.engine.kv_memory import KvMemory
from sdcpd.engine.kv_object import KvKind, KvRows, decode_kv, encode_kv
from sdcpd.engine.rows import check_rows
from sdcpd.engine.runner import PASS_ROWS_MAX, Runner
from sdcpd.engine.target_jobs import LogprobsJob, PrepareJob, ScoreJob
from sdcpd.engine.worker import Worker
from sdcpd.protocol.histogram import Histogram
from sdcpd.protocol.logprobs import Row

ROOM_WITHIN_S = 10.0  # how long a new session waits for memory before it is told to come again


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
        job = PrepareJob((session, epoch), tokens[:-1], prefix.scope, rows)
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
        ticket = self.worker.submit(ScoreJob(self._tokens(work.prefix), work), is_round=True)
        result = await ticket.future
        assert isinstance(result, Scored)
        return replace(result, queue_s=ticket.queue_s, batch_wait_s=ticket.batch_wait_s)

    def batches(self) -> Histogram | None:
        """See TargetEngine."""
        return self.worker.batches

    async def logprobs(
        self, tokens: Sequence[int], from_: int, alternatives: int, *, scope: bytes = b""
    ) -> tuple[Row, ...]:
        """See TargetEngine."""
        key = (secrets.token_bytes(16), 0)  # of no session
        job = LogprobsJob(key, tokens, from_, scope, alternatives)
        try:
            return tuple(await self.worker.run(job, room_within_s=ROOM_WITHIN_S))
        finally:
            self.worker.forget(key)

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
