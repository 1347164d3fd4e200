"""Rows of rule 2 checked in arrays; the plain reference is `protocol.acceptance.check_rows`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sdcpd.protocol.limits import ROW_SUM_TOLERANCE
from sdcpd.protocol.problems import BadProposal

QUICK_MARGIN = 5e-4
INLINE_BYTES_MAX = 8 << 20  # about a millisecond; more is checked beside the event loop


async def check_rows(octets: bytes | memoryview, vocab: int, tokens: Sequence[int]) -> None:
    """Raise BadProposal unless these are rows that the tokens can be drawn from (D-P11)."""
    if len(octets) <= INLINE_BYTES_MAX:
        check(octets, vocab, tokens)
    else:
        await asyncio.to_thread(check, octets, vocab, tokens)


def check(octets: bytes | memoryview, vocab: int, tokens: Sequence[int]) -> None:
    """As `check_rows`, at once."""
    if len(octets) != 4 * vocab * len(tokens):
        raise BadProposal("q_rows has not one row for each proposed token")
    rows = np.frombuffer(octets, dtype="<f4").reshape(len(tokens), vocab)
    if not _distributions(rows):
        raise BadProposal("q_rows has a row that is no distribution")
    for row, token in zip(rows, tokens, strict=True):
        if token >= vocab or not row[token] > 0:
            raise BadProposal("q_rows gives a proposed token no probability")


def _distributions(rows: npt.NDArray[np.float32]) -> bool:
    with np.errstate(invalid="ignore", over="ignore"):
        if not (rows.min(axis=1) >= 0).all():  # nor is what is not a number
            return False
        # In binary32 a fifth of the time, and wrong by less than the margin for what is near 1.
        quick = np.abs(rows @ np.ones(rows.shape[1], dtype=np.float32) - 1.0)
        if (quick <= ROW_SUM_TOLERANCE - QUICK_MARGIN).all():
            return True
        totals = rows.sum(axis=1, dtype=np.float64)
        return bool((np.abs(totals - 1.0) <= ROW_SUM_TOLERANCE).all())
