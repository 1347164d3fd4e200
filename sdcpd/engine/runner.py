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
from sdcpd.engine.kv import SessionKv
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


def padded(count: int, multiple: int) -> int:
    """`count` rounded up to a multiple."""
    return (count + multiple - 1) // multiple * multiple


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
            feed.kv.reserve(padded(start + rows, 64))
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
        """Whether rows come out bit-equal alone, in blocks, and among strangers.

        The same 48 tokens are fed at once, in uneven pieces, and beside other sessions.
        """
        chooser = random.Random(seed)
        vocab = self.model.config.vocab
        text = [chooser.randrange(vocab) for _ in range(48)]
        strange = [chooser.randrange(vocab) for _ in range(37)]

        def fed(pieces: Sequence[int], stranger: int) -> torch.Tensor:
            kv, rows, at = self.new_kv(), [], 0
            for piece in pieces:
                feeds = [Feed(kv, text[at : at + piece], piece)]
                if stranger:
                    feeds.insert(0, Feed(self.new_kv(), strange[:stranger], 1))
                rows.append(self.run(feeds)[-1])
                at += piece
            return torch.cat(rows)

        reference = fed([48], 0)
        others = (
            fed([16, 1, 5, 1, 9, 16], 0),
            fed([1] * 8 + [40], 0),
            fed([30, 2, 16], 37),
            fed([13, 35], 5),
        )
        return all(torch.equal(reference, other) for other in others)
