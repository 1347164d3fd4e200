"""What the target's thread is given to do: prefills, rounds, and what texts' tokens are worth."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from sdcpd.engine.accept import accept
from sdcpd.engine.api import Score, Scored
from sdcpd.engine.kv import SessionKv
from sdcpd.engine.kv_object import KvRows
from sdcpd.engine.logprobs import logprob_rows
from sdcpd.engine.runner import Feed
from sdcpd.protocol.logprobs import Row

log = logging.getLogger("sdcpd.engine")


class TargetJob:
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


class PrepareJob(TargetJob):
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


class ScoreJob(TargetJob):
    def __init__(self, prefix: list[int], work: Score) -> None:
        super().__init__(
            (work.session, work.epoch), prefix, work.prefix.scope, proposed=work.proposed
        )
        self._scores = len(work.proposed) + 1
        self._work = work

    def take(self, scores: torch.Tensor, pass_s: float) -> bool:
        if self.rows_left:
            return False
        work, found = self._work, accept(scores, self._work)
        rows: tuple[Row, ...] = ()
        if work.logprobs is not None:
            tokens = (*work.proposed[: found.accepted], found.additional)
            rows = logprob_rows(scores, tokens, work.logprobs)
        self.result = Scored(found.accepted, found.additional, pass_s, rows)
        return True


class LogprobsJob(TargetJob):
    """Feeds a text and keeps what each row from token `from_ - 1` on makes of the next."""

    def __init__(
        self,
        key: tuple[bytes, int],
        tokens: Sequence[int],
        from_: int,
        scope: bytes,
        alternatives: int,
    ) -> None:
        super().__init__(key, list(tokens[:-1]), scope)
        self._all, self._first, self._alternatives = tokens, from_ - 1, alternatives
        self.result: tuple[Row, ...] = ()

    def begin(self, kv: SessionKv) -> None:
        super().begin(kv)
        kv.match(self._tokens, min(self._first, len(kv.tokens)))

    def feed(self, rows: int) -> Feed:
        assert self._kv is not None
        at = len(self._kv.tokens)
        wanted = max(0, at + rows - max(at, self._first))
        return Feed(self._kv, self._tokens[at : at + rows], wanted)

    def take(self, scores: torch.Tensor, pass_s: float) -> bool:
        first = self._first + len(self.result) + 1
        tokens = self._all[first : first + len(scores)]
        self.result += logprob_rows(scores, tokens, self._alternatives)
        return self.rows_left == 0
