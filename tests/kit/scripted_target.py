"""Targets whose distributions and pace a test gives."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Sequence

from sdcpd.engine.api import Score, Scored
from sdcpd.engine.fake import FakeModel, FakeTarget
from sdcpd.protocol.acceptance import Acceptance, check_rows, greedy, rule1, rule2, rule200
from sdcpd.protocol.messages import Rule


class RowsModel(FakeModel):
    """Scores by position: `rows` after a prompt of that length; the last one goes on."""

    def __init__(self, rows: Sequence[Sequence[float]], *, prompt: int = 3) -> None:
        super().__init__(vocab=len(rows[0]))
        self.begin(rows, prompt)

    def begin(self, rows: Sequence[Sequence[float]], length: int) -> None:
        """Give the rows after a prefix of that length."""
        self._rows, self._length = rows, length

    def scores(self, prefix: Sequence[int]) -> list[float]:
        """The row of that position."""
        return list(self._rows[min(len(prefix) - self._length, len(self._rows) - 1)])


class GatedTarget(FakeTarget):
    """Passes wait at a gate that tests open."""

    def __init__(self, model: FakeModel) -> None:
        super().__init__(model)
        self.gate = asyncio.Event()

    async def score(self, work: Score) -> Scored:
        """Score once the gate is open."""
        found = await super().score(work)
        await self.gate.wait()
        return found


class ExactTarget(FakeTarget):
    """Takes the model's scores for the distribution p itself: no softmax and no profile."""

    def _accept(self, rows: list[list[float]], work: Score) -> Acceptance:
        if work.rule == Rule.GREEDY:
            return rule1([greedy(row) for row in rows], work.proposed)
        if work.rule == Rule.RACE:
            assert work.sampling.seed is not None, "a rule-200 profile always has a seed"
            return rule200(rows, work.proposed, work.sampling.seed, work.base)
        assert work.draw is not None, "rule 2 draws random values"
        q = check_rows(work.q_rows, self.model.vocab, work.proposed) if work.q_rows else []
        return rule2(rows, q, work.proposed, work.draw)


def one_hot(token: int, vocab: int) -> list[float]:
    """All mass on one token."""
    return [float(other == token) for other in range(vocab)]


def log_row(p: Sequence[float]) -> list[float]:
    """Scores of which a distribution is the softmax."""
    return [math.log(x) if x > 0 else -math.inf for x in p]


def octets_of(rows: Sequence[Sequence[float]]) -> bytes:
    """A q_rows object."""
    return b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows)
