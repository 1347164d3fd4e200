"""KV in blocks that later texts with the same beginning are spared (roles/prefix_kv.py).

A block is the rows of KV_BLOCK_TOKENS positions, laid out as the octet string of a KV object
(kv_object.py) and without a header: its name says what it is of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from itertools import takewhile

import numpy as np
import torch

from sdcpd.engine.api import KV_BLOCK_TOKENS
from sdcpd.engine.kv import SessionKv
from sdcpd.engine.kv_object import KvKind, KvRows, laid_out, stored_as
from sdcpd.engine.worker import Worker


async def read_blocks(
    worker: Worker, key: Hashable, kind: KvKind, tokens: Sequence[int], first: int
) -> list[bytes]:
    """The blocks of a session's `tokens` from `first` on, as far as it has them.

    What was drafted and rejected still has its rows until the next pass: rows of other tokens than
    these are not given. Raises EngineError.
    """

    def copy(kv: SessionKv) -> KvRows:
        count = max(kv.agreed(tokens) // KV_BLOCK_TOKENS - first, 0)
        return KvRows(*kv.rows(count * KV_BLOCK_TOKENS, start=first * KV_BLOCK_TOKENS))

    # The thread that passes wait for only copies; the octets are made beside it.
    copied = await worker.read(key, copy)
    if copied is None or not copied.positions:
        return []
    return await asyncio.to_thread(encode_blocks, kind, copied)


def encode_blocks(kind: KvKind, rows: KvRows) -> list[bytes]:
    """Rows cut into blocks, each laid out as an object's octet string, without a header."""
    stored = laid_out(kind, rows)
    starts = range(0, rows.positions - KV_BLOCK_TOKENS + 1, KV_BLOCK_TOKENS)
    return [stored[:, :, :, at : at + KV_BLOCK_TOKENS].tobytes() for at in starts]


def decode_blocks(blocks: Sequence[bytes | memoryview], *, kind: KvKind) -> KvRows | None:
    """The rows of consecutive blocks, up to the first of a wrong size; None if there are none."""
    good = list(takewhile(lambda one: len(one) == kind.octets(KV_BLOCK_TOKENS), blocks))
    if not good:
        return None
    positions = len(good) * KV_BLOCK_TOKENS
    shape = (kind.layers, 2, kind.heads, positions, kind.head_dim)
    own = np.empty(shape, dtype=stored_as(kind.dtype).newbyteorder("="))
    for number, octets in enumerate(good):
        at = number * KV_BLOCK_TOKENS
        part = np.frombuffer(octets, dtype=stored_as(kind.dtype))
        whole = part.reshape(*shape[:3], KV_BLOCK_TOKENS, kind.head_dim)
        own[:, :, :, at : at + KV_BLOCK_TOKENS] = whole
    both = torch.from_numpy(own).view(kind.dtype)
    return KvRows(both[:, 0], both[:, 1])
