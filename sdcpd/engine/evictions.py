"""The KV of sessions that had to make room for others, on its way to whoever keeps it."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable

from sdcpd.engine.api import KV_BLOCK_TOKENS, KeepEvicted
from sdcpd.engine.kv import SessionKv
from sdcpd.engine.kv_blocks import encode_blocks
from sdcpd.engine.kv_object import KvKind, KvRows

PENDING_MAX = 4  # copies in memory at once; what comes beyond them is computed again, should it be


class Evictions:
    """Called on the engine's thread, hands over in an event loop."""

    def __init__(self, kind: KvKind) -> None:
        self._kind = kind
        self._keep: KeepEvicted | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: set[asyncio.Future[None]] = set()
        self._copies = 0

    def to(self, keep: KeepEvicted) -> None:
        """Hand over to `keep`, in the running event loop."""
        self._keep, self._loop = keep, asyncio.get_running_loop()

    def __call__(self, key: Hashable, kv: SessionKv) -> None:
        """Copy what is settled of a session's KV, which is about to be freed."""
        count = min(len(kv.links), len(kv.tokens) // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS
        if self._loop is None or not count or self._copies >= PENDING_MAX:
            return
        tokens, rows = kv.tokens[:count], KvRows(*kv.rows(count))
        self._copies += 1
        try:
            self._loop.call_soon_threadsafe(self._begin, key, tokens, rows)
        except RuntimeError:  # the process ends
            self._copies -= 1

    def _begin(self, key: Hashable, tokens: list[int], rows: KvRows) -> None:
        task = asyncio.ensure_future(self._hand_over(key, tokens, rows))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def _hand_over(self, key: Hashable, tokens: list[int], rows: KvRows) -> None:
        assert self._keep is not None, "the loop is known only with it"
        try:
            blocks = await asyncio.to_thread(encode_blocks, self._kind, rows)
        finally:
            self._copies -= 1
        self._keep(key, tokens, blocks)
