"""The key and value rows that a session's tokens left behind, and which tokens those were."""

from __future__ import annotations

from collections.abc import Sequence

import torch

KEY_BLOCK = 512
"""Attended key length is padded to a multiple of this.

torch's CPU attention works through keys 512 at a time, and a product over fewer of them may add
up in another order (seen in binary32 at 256 against 320 keys).  With whole blocks every row meets
the same shapes, however long its session has become.
"""


def padded(count: int, multiple: int) -> int:
    """`count` rounded up to a multiple."""
    return (count + multiple - 1) // multiple * multiple


class SessionKv:
    """KV of one session: `tokens[i]` produced the rows at position i.

    Rows beyond `len(tokens)` are rubbish left by padding or by rejected tokens; attention masks
    them and the next feed overwrites them.  Rolling back is therefore forgetting, not copying.
    """

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = (layers, kv_heads, 0, head_dim)
        self.keys = torch.zeros(self._shape, dtype=dtype, device=device)
        self.values = torch.zeros(self._shape, dtype=dtype, device=device)
        self.tokens: list[int] = []
        self._agreed = 0

    @property
    def octets(self) -> int:
        """Memory taken, in octets."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def reserve(self, positions: int) -> None:
        """Make room for that many positions; contents are kept."""
        have = self.keys.shape[2]
        if positions <= have:
            return
        want = max(padded(positions, KEY_BLOCK), min(2 * have, have + 4 * KEY_BLOCK))
        layers, heads, _, dim = self._shape
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = torch.zeros((layers, heads, want, dim), dtype=old.dtype, device=old.device)
            new[:, :, :have] = old
            setattr(self, name, new)

    def rows(self, positions: int, *, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of the keys and values [layers, heads, n, dim] of positions from `start` on."""
        part = slice(start, start + positions)
        return self.keys[:, :, part].clone(), self.values[:, :, part].clone()

    def load(self, tokens: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Begin anew with `tokens`, the first of those whose rows these are."""
        positions = len(tokens)
        self.reserve(positions)
        self.keys[:, :, :positions] = keys[:, :, :positions]
        self.values[:, :, :positions] = values[:, :, :positions]
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
