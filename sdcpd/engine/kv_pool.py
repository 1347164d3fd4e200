"""The memory for keys and values of all sessions of a model: one budget in blocks of positions.

Keys and values are [layers, kv_heads, positions, head_dim]; a block is KV_BLOCK_TOKENS positions of
all layers.  A session has a table of blocks (kv.py).  Blocks that follow each other are read where
they lie; a table in pieces is gathered for each pass, so whoever allocates looks for runs.  Blocks
are counted by those that use them: sessions whose texts begin alike may share them.

What is read may reach into blocks of others, up to a whole number of attended keys: those are
masked, and since no row that is not finite is ever written, what is masked adds nothing.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import torch

from sdcpd.engine.api import KV_BLOCK_TOKENS
from sdcpd.engine.device import to_device

KEYS_BEYOND = 512  # positions behind the last block, so that whole key blocks can be read there


class KvFull(Exception):
    """There are not as many free blocks as asked for."""


class KvPool:
    """Blocks, and how many use each; used by the engine's thread alone."""

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        octets_max: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers, self.kv_heads, self.head_dim = layers, kv_heads, head_dim
        self.heads_stored = kv_heads
        """Of the rows that `get` gives and `put` takes."""
        self.dtype, self.device = dtype, device
        self.block_octets = 2 * layers * kv_heads * head_dim * dtype.itemsize * KV_BLOCK_TOKENS
        self.blocks = octets_max // self.block_octets
        positions = self.blocks * KV_BLOCK_TOKENS + KEYS_BEYOND
        shape = (layers, kv_heads, positions, head_dim)
        self.keys, self.values = (_zeros(shape, dtype, device) for _ in range(2))
        self._users = np.zeros(self.blocks, dtype=np.int32)
        self.free = self.blocks

    @property
    def tokens_max(self) -> int:
        """Positions that fit in all."""
        return self.blocks * KV_BLOCK_TOKENS

    @property
    def nowhere(self) -> int:
        """A position that is nobody's, for rows that fill a pass up."""
        return self.tokens_max + KEYS_BEYOND - 1

    # ---- blocks

    def allocate(self, count: int, *, after: int | None = None) -> list[int]:
        """Take free blocks, if possible those behind `after` and in one run; raises KvFull."""
        if count > self.free:
            raise KvFull(f"{count} blocks of keys and values are wanted, {self.free} are free")
        taken: list[int] = []
        at = self.blocks if after is None else after + 1
        while len(taken) < count and at < self.blocks and not self._users[at]:
            taken.append(at)
            at += 1
        self._use(taken)
        while len(taken) < count:
            more = self._in_largest_gap(count - len(taken))
            self._use(more)
            taken += more
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Count one more user of blocks that are in use."""
        np.add.at(self._users, np.asarray(blocks, dtype=np.intp), 1)

    def release(self, blocks: Sequence[int]) -> None:
        """Count one user less; a block without users is free."""
        for block in blocks:
            self._users[block] -= 1
            assert self._users[block] >= 0, "released more often than taken"
            self.free += not self._users[block]

    def is_shared(self, block: int) -> bool:
        """Whether more than one uses a block."""
        return bool(self._users[block] > 1)

    def is_used(self, block: int) -> bool:
        """Whether anybody uses a block."""
        return bool(self._users[block])

    def longest_run(self) -> int:
        """How many free blocks follow each other at most."""
        return max((length for _, length in self._gaps()), default=0)

    def _use(self, blocks: Sequence[int]) -> None:
        self._users[blocks] = 1
        self.free -= len(blocks)

    def _in_largest_gap(self, count: int) -> list[int]:
        start, length = max(self._gaps(), key=lambda gap: gap[1])
        if start and length > 2 * count:
            start += (length - count) // 2  # whoever ends before this gap may grow into it
        return list(range(start, start + min(count, length)))

    def _gaps(self) -> Iterable[tuple[int, int]]:
        used = np.concatenate(([True], self._users > 0, [True]))
        edges = np.flatnonzero(np.diff(used))
        return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]

    # ---- rows

    def read(self, layer: int, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv_heads, place.length, head_dim] of a layer."""
        keys, values = self.keys[layer], self.values[layer]
        if len(place.runs) == 1:
            (part,) = place.runs
            return keys[:, part], values[:, part]
        return (
            torch.cat([keys[:, part] for part in place.runs], dim=1),
            torch.cat([values[:, part] for part in place.runs], dim=1),
        )

    def copy(self, blocks: Sequence[int], to: Sequence[int]) -> None:
        """Copy the rows of blocks into others, which are none of them."""
        for rows in (self.keys, self.values):
            for old, new in zip(blocks, to, strict=True):
                rows[:, :, _part(new)] = rows[:, :, _part(old)]

    def get(
        self, table: Sequence[int], positions: int, start: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of keys and values [layers, kv_heads, n, head_dim] of a table's positions."""
        at = pool_positions(table, start, positions).to(self.device)
        return self.keys.index_select(2, at), self.values.index_select(2, at)

    def put(
        self, table: Sequence[int], keys: torch.Tensor, values: torch.Tensor, start: int = 0
    ) -> None:
        """Fill a table's positions from `start` on with rows [layers, kv_heads, n, head_dim]."""
        at = pool_positions(table, start, keys.shape[2]).to(self.device)
        self.keys.index_copy_(2, at, to_device(keys, self.device))
        self.values.index_copy_(2, at, to_device(values, self.device))


Runs = list[tuple[slice, slice]]
Slots: TypeAlias = torch.Tensor | Runs
"""Where rows belong: pool positions [n] of the first n rows, or runs of rows and of positions."""


def write(
    place: tuple[torch.Tensor, torch.Tensor, Slots], keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Put rows [R, kv_heads, head_dim] into a layer's keys and values.

    Rows of no place fill a pass up and are not written.
    """
    to_keys, to_values, slots = place
    if isinstance(slots, torch.Tensor):
        count = len(slots)
        to_keys.index_copy_(1, slots, keys[:count].transpose(0, 1))
        to_values.index_copy_(1, slots, values[:count].transpose(0, 1))
        return
    for rows, positions in slots:  # on a CPU a fraction of the time of what is above
        to_keys[:, positions] = keys[rows].transpose(0, 1)
        to_values[:, positions] = values[rows].transpose(0, 1)


def runs_of(
    table: Sequence[int], start: int, count: int, *, first: int
) -> list[tuple[slice, slice]]:
    """The runs of a table's positions from `start` on; `first` is the first of their rows."""
    runs: Runs = []
    at, end = start, start + count
    while at < end:
        block, offset = divmod(at, KV_BLOCK_TOKENS)
        place = table[block] * KV_BLOCK_TOKENS + offset
        upto = min(end, (block + 1) * KV_BLOCK_TOKENS)
        row = first + at - start
        if runs and runs[-1][1].stop == place:
            before = runs.pop()
            row, place = before[0].start, before[1].start
        length = first + upto - start - row
        runs.append((slice(row, row + length), slice(place, place + length)))
        at = upto
    return runs


class Place:
    """Where a table's positions up to a length are read: the runs of positions in the pool."""

    __slots__ = ("runs",)

    def __init__(self, table: Sequence[int], length: int) -> None:
        """What is beyond the table's end is read behind its last block: it is masked."""
        self.runs: list[slice] = []
        used = table[: -(-length // KV_BLOCK_TOKENS)]
        first, left = used[0], length
        for block, following in zip(used, (*used[1:], -1), strict=True):
            if following == block + 1:
                continue
            count = (block + 1 - first) * KV_BLOCK_TOKENS
            count = left if following < 0 else count
            self.runs.append(slice(first * KV_BLOCK_TOKENS, first * KV_BLOCK_TOKENS + count))
            first, left = following, left - count


def pool_positions(table: Sequence[int], start: int, count: int) -> torch.Tensor:
    """Pool positions [count] of a table's positions from `start` on."""
    at = torch.arange(start, start + count)
    blocks = torch.tensor(table, dtype=torch.int64)
    return blocks[at // KV_BLOCK_TOKENS] * KV_BLOCK_TOKENS + at % KV_BLOCK_TOKENS


def _part(block: int) -> slice:
    return slice(block * KV_BLOCK_TOKENS, (block + 1) * KV_BLOCK_TOKENS)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Mapped memory is taken, a small page at a time, when it is first written; torch would write it
    # all now, and numpy have it in pages so large that a few tokens take hundreds of MiB.
    size = max(1, int(np.prod(shape)) * dtype.itemsize)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype, count=int(np.prod(shape))).view(shape)
