"""The target model behind `engine.api.TargetEngine`."""

from __future__ import annotations

import torch

from sdcpd.engine.accept import accept
from sdcpd.engine.api import EngineInfo, Prefix, Score, Scored
from sdcpd.engine.kv import SessionKv
from sdcpd.engine.runner import PASS_ROWS_MAX, Feed, Runner
from sdcpd.engine.worker import Worker


class _Job:
    """Feeds a prefix and, when scoring, the proposed tokens after it."""

    def __init__(self, prefix: list[int], scores: int, key: tuple[bytes, int]) -> None:
        self.key = key
        self.result: Scored | None = None
        self._tokens = prefix
        self._scores = scores
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
    def __init__(self, prefix: list[int], key: tuple[bytes, int]) -> None:
        super().__init__(prefix, 0, key)


class _ScoreJob(_Job):
    def __init__(self, prefix: list[int], work: Score) -> None:
        super().__init__(
            prefix + list(work.proposed), len(work.proposed) + 1, (work.session, work.epoch)
        )
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
        kv_octets_max: int,
        rows_max: int = PASS_ROWS_MAX,
    ) -> None:
        self.info = info
        self._begin = _begin(runner)
        self.worker = Worker(runner, rows_max=rows_max, kv_octets_max=kv_octets_max, name="target")

    async def prepare(self, session: bytes, epoch: int, prefix: Prefix) -> None:
        """See TargetEngine."""
        tokens = self._tokens(prefix)[:-1]  # the last token is fed with the first round
        if tokens:
            await self.worker.run(_PrepareJob(tokens, (session, epoch)))

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

    async def aclose(self) -> None:
        """See TargetEngine."""
        await self.worker.aclose()

    def _tokens(self, prefix: Prefix) -> list[int]:
        """A prefix's tokens; an empty prompt is given the model's own beginning (D-O9)."""
        tokens = list(prefix.tokens[: prefix.length])
        return tokens if prefix.prompt else [self._begin, *tokens]


def _begin(runner: Runner) -> int:
    config = runner.model.config
    if config.bos is not None:
        return config.bos
    return config.eos[0] if config.eos else 0
