"""Attention over the pool's blocks, a session at a time, in shapes that keep rows independent.

Measured on CPU with torch 2.13: a row's bits do not depend on how many rows are beside it if there
are a multiple of QUERY_ROWS, nor on how many masked keys follow its own, if attended keys
come in whole blocks of KEY_BLOCK, which is how torch works through them.  Some lengths below one
block do as well (`short_keys`): the start-up self-check finds out whether they do here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sdcpd.engine.kv import padded
from sdcpd.engine.kv_pool import KvPool, Place
from sdcpd.engine.model_config import ModelConfig

QUERY_ROWS = 4
KEY_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `[first, first + rows)` of a pass are positions `[start, start + rows)` of a table."""

    first: int
    rows: int
    start: int
    table: tuple[int, ...]


class Attention:
    """What the layers of one pass share: where keys lie, and which of them each row may see."""

    def __init__(
        self,
        config: ModelConfig,
        pool: KvPool,
        segments: Sequence[Segment],
        *,
        short_keys: Sequence[int],
    ) -> None:
        self._config, self._pool, self._segments = config, pool, segments
        # One key head is shown as many: with one, several threads work through it another way, in
        # which bits of rows depend on how many there are (seen in bfloat16 and binary16).
        alone = config.kv_heads == 1
        self._key_heads = max(2, config.heads) if alone else config.kv_heads
        self._group = 1 if alone else config.heads // config.kv_heads
        lengths = [_key_length(one.start + one.rows, short_keys) for one in segments]
        self._places = [
            Place(one.table, length) for one, length in zip(segments, lengths, strict=True)
        ]
        self._masks = {
            window: [
                self._mask(one, length, window)
                for one, length in zip(segments, lengths, strict=True)
            ]
            for window in set(config.windows)
        }

    def layer(
        self, index: int, queries: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Queries [R, heads, head_dim] -> what they see [R, heads * head_dim], in `out` if given.

        Rows of no session see nothing of use.
        """
        c = self._config
        seen = queries.new_zeros(len(queries), c.heads * c.head_dim) if out is None else out
        masks = self._masks[c.windows[index]]
        for segment, place, mask in zip(self._segments, self._places, masks, strict=True):
            part = queries[segment.first : segment.first + segment.rows]
            keys, values = self._pool.read(index, place)
            seen[segment.first : segment.first + segment.rows] = self._one(part, keys, values, mask)
        return seen

    def _one(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        c, rows = self._config, len(queries)
        # The queries of a group share their key head: the group is laid out as more rows.
        asked = queries.transpose(0, 1).reshape(-1, self._group * rows, c.head_dim)
        if c.kv_heads == 1:
            shown = (self._key_heads, -1, -1)
            asked, keys, values = asked.expand(shown), keys.expand(shown), values.expand(shown)
        if len(mask) > self._group * rows:
            asked = F.pad(asked, (0, 0, 0, len(mask) - self._group * rows))
        found = F.scaled_dot_product_attention(
            asked[None], keys[None], values[None], attn_mask=mask, scale=c.attention_scale
        )[0, : c.heads, : self._group * rows]
        return found.reshape(c.heads, rows, c.head_dim).transpose(0, 1).reshape(rows, -1)

    def _mask(self, segment: Segment, length: int, window: int | None) -> torch.Tensor:
        """Additive causal mask [group * rows, padded to a multiple of QUERY_ROWS, length]."""
        device = self._pool.device
        keys = torch.arange(length, device=device)
        queries = torch.arange(segment.start, segment.start + segment.rows, device=device)
        mask = torch.zeros(segment.rows, length, dtype=self._pool.dtype, device=device)
        mask.masked_fill_(keys[None, :] > queries[:, None], float("-inf"))
        if window is not None:
            mask.masked_fill_(keys[None, :] <= queries[:, None] - window, float("-inf"))
        mask = mask.repeat(self._group, 1)
        missing = -len(mask) % QUERY_ROWS
        return F.pad(mask, (0, 0, 0, missing)) if missing else mask


def _key_length(positions: int, short_keys: Sequence[int]) -> int:
    fitting = (length for length in short_keys if positions <= length)
    return next(fitting, padded(positions, KEY_BLOCK))
