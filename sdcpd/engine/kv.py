"""The key and value rows that a session's tokens left behind, and which tokens those were."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sdcpd.engine.api import KV_BLOCK_TOKENS
from sdcpd.engine.kv_pool import KvPool

ROOM_TO_GROW = 1.5  # times its size, of the place that a session moves to


def padded(count: int, multiple: int) -> int:
    """`count` rounded up to a multiple."""
    return (count + multiple - 1) // multiple * multiple


class SessionKv:
    """KV of one session in a pool's blocks: `tokens[i]` produced the rows at position i.

    Rows beyond `len(tokens)` are rubbish left by rejected tokens; attention masks them and the next
    feed overwrites them.  Rolling back is therefore forgetting, not copying.
    """

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool
        self.table: list[int] = []
        """The pool's blocks that hold positions 0 to 63, 64 to 127, and so on."""
        self.tokens: list[int] = []
        self.links: list[bytes] = []
        """Names of the first blocks, those that others may begin with (kv_memory.py)."""
        self.adopted = 0
        """How many tokens it began with that were another's."""
        self._agreed = 0

    @property
    def octets(self) -> int:
        """Memory of the blocks in use, in octets; shared ones count for each."""
        return len(self.table) * self.pool.block_octets

    def wants(self, positions: int) -> int:
        """How many blocks `reserve` of so many positions would take."""
        return max(0, -(-positions // KV_BLOCK_TOKENS) - len(self.table))

    def reserve(self, positions: int) -> None:
        """Make room for that many positions; contents are kept. Raises KvFull."""
        more = self.wants(positions)
        if not more:
            return
        if not self.table or not self._moved(more):
            after = self.table[-1] if self.table else None
            self.table += self.pool.allocate(more, after=after)

    def _moved(self, more: int) -> bool:
        """Whether the session, which can't grow where it is, has moved to where it can."""
        pool, old, whole = self.pool, self.table, len(self.table) + more
        follows = old[-1] + 1
        fits = follows + more <= pool.blocks and not any(
            pool.is_used(block) for block in range(follows, follows + more)
        )
        if fits or any(map(pool.is_shared, old)) or pool.longest_run() < whole * ROOM_TO_GROW:
            return False
        self.table = pool.allocate(whole)
        pool.copy(old, self.table[: len(old)])
        pool.release(old)
        return True

    def shared_from(self, start: int) -> int:
        """How many blocks from position `start` on `own` would copy."""
        blocks = self.table[max(0, start) // KV_BLOCK_TOKENS :]
        return sum(map(self.pool.is_shared, blocks))

    def own(self, start: int) -> None:
        """Have blocks of its own from position `start` on, where rows are to be written.

        Raises KvFull.
        """
        for at in range(start // KV_BLOCK_TOKENS, len(self.table)):
            if self.pool.is_shared(block := self.table[at]):
                self.table[at] = self.pool.allocate(1)[0]
                self.pool.copy([block], [self.table[at]])
                self.pool.release([block])

    def adopt(self, other: SessionKv, blocks: int, *, share: bool) -> None:
        """Begin, empty, with the first `blocks` blocks of another session's text.

        They are shared, or copied to where this session may grow. Raises KvFull.
        """
        assert not self.table and not self.tokens, "only a session that has nothing adopts"
        theirs = other.table[:blocks]
        if share:
            self.pool.share(theirs)
            self.table = list(theirs)
        else:
            self.table = self.pool.allocate(blocks)
            self.pool.copy(theirs, self.table)
        self.tokens = other.tokens[: blocks * KV_BLOCK_TOKENS]
        self.adopted = len(self.tokens)
        self._agreed = 0

    def shorten(self, blocks: int) -> None:
        """Keep the first `blocks` blocks alone."""
        self.pool.release(self.table[blocks:])
        del self.table[blocks:], self.tokens[blocks * KV_BLOCK_TOKENS :]
        self._agreed = min(self._agreed, len(self.tokens))

    def free(self) -> None:
        """Give all blocks back; the session has no tokens then."""
        self.pool.release(self.table)
        self.table, self.tokens, self._agreed = [], [], 0

    def rows(self, positions: int, *, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of the keys and values [layers, heads, n, dim] of positions from `start` on."""
        count = max(0, min(positions, len(self.table) * KV_BLOCK_TOKENS - start))
        return self.pool.get(self.table, count, start)

    def load(self, tokens: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Begin anew with `tokens`, the first of those whose rows these are. Raises KvFull."""
        positions, known = len(tokens), self.agreed(tokens)  # those are there, shared perhaps
        self.reserve(positions)
        self.own(known)
        part = slice(known, positions)
        self.pool.put(self.table, keys[:, :, part], values[:, :, part], start=known)
        self.tokens[:] = tokens
        self._agreed = 0

    def agreed(self, tokens: Sequence[int]) -> int:
        """How many of the first `tokens` these rows are of; changes nothing."""
        pairs = zip(self.tokens, tokens, strict=False)
        differ = (at for at, (own, other) in enumerate(pairs) if own != other)
        return next(differ, min(len(self.tokens), len(tokens)))

    def match(self, prefix: Sequence[int], length: int, *, committed: int | None = None) -> int:
        """Roll back to the longest beginning shared with `prefix[:length]`; returns its length.

        A session's prefix only grows, so what agreed once is not compared again, up to `committed`
        where what is beyond it may be taken back.
        """
        position = min(self._agreed, len(self.tokens), length)
        end = min(len(self.tokens), length)
        while position < end and self.tokens[position] == prefix[position]:
            position += 1
        del self.tokens[position:]
        self._agreed = position if committed is None else min(position, committed)
        return position
