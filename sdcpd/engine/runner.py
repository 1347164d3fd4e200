"""One pass over many sessions in shapes that make every row independent of the others.

A linear layer's row is bit-equal whatever stands beside it if the number of rows is a multiple of
`Shape.rows`, and an attention row if keys come in certain lengths (attention.py).
What suffices depends on the device, the type and the libraries: `self_check` finds it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sdcpd.engine.api import ContextFull
from sdcpd.engine.attention import Attention, Segment
from sdcpd.engine.compiled import CompiledModel
from sdcpd.engine.kv import SessionKv, padded
from sdcpd.engine.kv_pool import KvPool, pool_positions, runs_of
from sdcpd.engine.model import LlamaModel
from sdcpd.engine.parallel import Followers, SharedPool

PASS_ROWS_MAX = 128  # rows of one pass; beyond it nothing was measured, and latency grows
KV_OCTETS = 64 << 20  # where nobody says how much


class Shape(NamedTuple):
    """What passes are like.

    The rows of a pass are a multiple of `rows`, or the first of `buckets` that is enough; `keys`
    are the lengths that short texts attend.
    """

    rows: int
    keys: tuple[int, ...] = ()
    buckets: tuple[int, ...] = ()

    def padded(self, rows: int) -> int:
        """The rows of a pass for so many."""
        fitting = (bucket for bucket in self.buckets if rows <= bucket)
        return next(fitting, padded(rows, self.rows))


SHAPES = (Shape(4, (128, 384)), Shape(4), Shape(16))
"""From the cheapest to the safest.  With torch 2.13 on CPU the first holds in bfloat16 and in
binary32: products over 256 keys, or 768, would add up in another order than over those."""


@dataclass(frozen=True, slots=True)
class Feed:
    """Feed `tokens` after what `kv` holds; the scores of the last `scores` of them are wanted."""

    kv: SessionKv
    tokens: Sequence[int]
    scores: int = 0


STATIC_SHAPES = (Shape(16, buckets=(16, 32, 64, 128)), Shape(128, buckets=(128,)))
"""Of compiled passes: libraries may choose their kernels by the number of rows, and if they do so
visibly, there is but one number."""


class Runner:
    """Prepare, forward, gather: the only code that knows the shapes of a pass."""

    def __init__(
        self,
        model: LlamaModel,
        *,
        kv_octets_max: int = KV_OCTETS,
        shape: Shape = SHAPES[-1],
        followers: Followers | None = None,
        backend: str | None = None,
    ) -> None:
        """`followers`: the other processes of the model, which are told of each pass.

        `backend` of torch.compile, if passes are to be compiled.
        """
        self.model, self.shape, self._followers = model, shape, followers
        c = model.config
        options: dict[str, Any] = {
            "layers": c.layers,
            "kv_heads": c.kv_heads,
            "head_dim": c.head_dim,
            "octets_max": kv_octets_max,
            "dtype": model.dtype,
            "device": model.device,
        }
        self.pool = (
            KvPool(**options)
            if followers is None
            else SharedPool(followers, model.shard, **options)
        )
        self.compiled = (
            CompiledModel(model, self.pool, backend=backend) if backend is not None else None
        )
        self.shapes = SHAPES if backend is None else STATIC_SHAPES
        self.expands = True
        """Whether scores are of all tokens, where the head is of a part of them."""
        self.context_max = min(c.context_max, self.pool.tokens_max)

    def close(self) -> None:
        """End the other processes of the model."""
        if self._followers is not None:
            self._followers.close()

    def warm_up(self) -> None:
        """Compile what will be used, so that no session waits for it."""
        for rows in self.shape.buckets:
            kv = self.new_kv()
            self.run([Feed(kv, [0] * min(rows, self.context_max), 1)])
            kv.free()

    def new_kv(self) -> SessionKv:
        """An empty KV of this model."""
        return SessionKv(self.pool)

    def run(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """One pass; returns for each feed its wanted scores [scores, V] in binary32.

        Raises ContextFull before anything is written if a feed does not fit the context, and KvFull
        if there is no room for one.
        """
        tokens: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        wanted: list[int] = []
        for feed in feeds:
            start, count = len(feed.kv.tokens), len(feed.tokens)
            if start + count > self.context_max:
                raise ContextFull(
                    f"{start + count} tokens do not fit the model's context of {self.context_max}"
                )
            feed.kv.reserve(start + count)
            feed.kv.own(start)
            segments.append(Segment(len(tokens), count, start, tuple(feed.kv.table)))
            tokens += feed.tokens
            positions += range(start, start + count)
            wanted += range(len(tokens) - feed.scores, len(tokens))
        if self._followers is not None:
            parts = [(one.first, one.rows, one.start, one.table) for one in segments]
            self._followers.tell("forward", tokens, positions, parts, self.shape)
        hidden = self.forward(tokens, positions, segments)
        found = self._scores(hidden, wanted, [feed.scores for feed in feeds])
        for feed in feeds:
            feed.kv.tokens.extend(feed.tokens)
        return found

    def forward(
        self, tokens: list[int], positions: list[int], segments: Sequence[Segment]
    ) -> torch.Tensor:
        """Hidden states of a pass's rows, in this process's part of the model."""
        device, model = self.model.device, self.model
        fill = [0] * (self.shape.padded(len(tokens)) - len(tokens))
        attention = Attention(model.config, self.pool, segments, short_keys=self.shape.keys)
        if self.compiled is not None:
            slots = torch.cat([pool_positions(one.table, one.start, one.rows) for one in segments])
            everywhere = slots.tolist() + [self.pool.nowhere] * len(fill)
            return self.compiled.forward(tokens + fill, positions + fill, everywhere, attention)
        runs = [
            run
            for one in segments
            for run in runs_of(one.table, one.start, one.rows, first=one.first)
        ]
        return model.forward(
            torch.tensor(tokens + fill, device=device),
            torch.tensor(positions + fill, device=device),
            runs,
            attention,
            self.pool,
        )

    def _scores(
        self, hidden: torch.Tensor, wanted: list[int], counts: list[int]
    ) -> list[torch.Tensor]:
        if not wanted:
            return [torch.empty(0)] * len(counts)
        fill = self.shape.padded(len(wanted)) - len(wanted)
        rows = torch.tensor(wanted + [wanted[0]] * fill, device=hidden.device)
        logits = self.model.logits(hidden.index_select(0, rows))[: len(wanted)]
        if self.expands:
            logits = self.model.expanded(logits)
        return list(logits.split(counts))
