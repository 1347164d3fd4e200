"""One pass over many sessions in shapes that make every row independent of the others.

Measured on CPU with torch 2.13: a linear layer's row is bit-equal whatever stands beside it if the
row count is a multiple of 16, and an attention row if there are at least 4 query rows.  So each
session's rows are padded to a multiple of 4 and the pass to a multiple of 16.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sdcpd.engine.api import ContextFull
from sdcpd.engine.kv import KEY_BLOCK, SessionKv, padded
from sdcpd.engine.model import LlamaModel, Segment

ROWS_MULTIPLE = 16
SEGMENT_MULTIPLE = 4
PASS_ROWS_MAX = 128  # rows of one pass; beyond it nothing was measured, and latency grows


@dataclass(frozen=True, slots=True)
class Feed:
    """Feed `tokens` after what `kv` holds; the scores of the last `scores` of them are wanted."""

    kv: SessionKv
    tokens: Sequence[int]
    scores: int = 0


class Runner:
    """Prepare, forward, gather: the only code that knows the shapes of a pass."""

    def __init__(self, model: LlamaModel) -> None:
        self.model = model

    def new_kv(self) -> SessionKv:
        """An empty KV of this model."""
        c = self.model.config
        return SessionKv(
            c.layers, c.kv_heads, c.head_dim, dtype=self.model.dtype, device=self.model.device
        )

    def run(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """One pass; returns for each feed its wanted scores [scores, V] in binary32.

        Raises ContextFull before anything is written if a feed does not fit the context.
        """
        tokens: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        wanted: list[int] = []
        limit = self.model.config.context_max
        for feed in feeds:
            start, count = len(feed.kv.tokens), len(feed.tokens)
            if start + count > limit:
                raise ContextFull(
                    f"{start + count} tokens do not fit the model's context of {limit}"
                )
            first, rows = len(tokens), padded(count, SEGMENT_MULTIPLE)
            segments.append(Segment(feed.kv, first, rows, start))
            tokens += [*feed.tokens, *[0] * (rows - count)]
            # Padding rows repeat a legal position; their output and KV are never used.
            positions += [min(start + i, limit - 1) for i in range(rows)]
            wanted += range(first + count - feed.scores, first + count)
            feed.kv.reserve(padded(start + rows, KEY_BLOCK))
        fill = padded(len(tokens), ROWS_MULTIPLE) - len(tokens)
        device = self.model.device
        hidden = self.model.forward(
            torch.tensor(tokens + [0] * fill, device=device),
            torch.tensor(positions + [0] * fill, device=device),
            segments,
        )
        for feed in feeds:
            feed.kv.tokens.extend(feed.tokens)
        return self._scores(hidden, wanted, [feed.scores for feed in feeds])

    def _scores(
        self, hidden: torch.Tensor, wanted: list[int], counts: list[int]
    ) -> list[torch.Tensor]:
        if not wanted:
            return [torch.empty(0)] * len(counts)
        fill = padded(len(wanted), ROWS_MULTIPLE) - len(wanted)
        rows = torch.tensor(wanted + [wanted[0]] * fill, device=hidden.device)
        logits = self.model.logits(hidden[rows])[: len(wanted)]
        return list(logits.split(counts))

    def self_check(self, *, seed: int = 0) -> bool:
        """Whether rows come out bit-equal alone, in pieces, among strangers, at any length.

        The same tokens are fed in whole passes, in uneven chunks and one by one, with and without
        other sessions beside them, over lengths below and above a block of keys.
        """
        chooser = random.Random(seed)
        vocab = self.model.config.vocab
        length = min(KEY_BLOCK + 64, self.model.config.context_max)
        text = [chooser.randrange(vocab) for _ in range(length)]
        tail = length - 24
        for start in (180, tail):
            wanted = self._fed(text, start, [PASS_ROWS_MAX], [24], stranger=0)
            for chunks, pieces, stranger in (
                ([96, 20], [1, 2, 5, 16], 0),
                ([100], [1, 1, 1, 21], 37),
            ):
                if not torch.equal(wanted, self._fed(text, start, chunks, pieces, stranger)):
                    return False
        return True

    def _fed(
        self, text: list[int], start: int, chunks: list[int], pieces: list[int], stranger: int
    ) -> torch.Tensor:
        """Scores of the 24 tokens from `start`, fed in `pieces` after chunks of those sizes."""
        kv, at, turn = self.new_kv(), 0, 0
        while at < start:
            count = min(chunks[turn % len(chunks)], start - at)
            self.run([Feed(kv, text[at : at + count])])
            at, turn = at + count, turn + 1
        rows = []
        for piece in pieces:
            feeds = [Feed(kv, text[at : at + piece], piece)]
            if stranger:
                feeds.insert(0, Feed(self.new_kv(), text[:stranger], 1))
            rows.append(self.run(feeds)[-1])
            at += piece
        return torch.cat(rows)
