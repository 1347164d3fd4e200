"""Rows of rule 2 checked in arrays; the plain reference is `protocol.acceptance.check_rows`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from sdcpd.protocol.limits import ROW_SUM_TOLERANCE
from sdcpd.protocol.problems import BadProposal

INLINE_BYTES_MAX = 8 << 20  # about a millisecond; more is checked beside the event loop


async def check_rows(octets: bytes, vocab: int, tokens: Sequence[int]) -> None:
    """Raise BadProposal unless these are rows that the tokens can be drawn from (D-P11)."""
    if len(octets) <= INLINE_BYTES_MAX:
        check(octets, vocab, tokens)
    else:
        await asyncio.to_thread(check, octets, vocab, tokens)


def check(octets: bytes, vocab: int, tokens: Sequence[int]) -> None:
    """As `check_rows`, at once."""
    if len(octets) != 4 * vocab * len(tokens):
        raise BadProposal("q_rows has not one row for each proposed token")
    rows = np.frombuffer(octets, dtype="<f4").reshape(len(tokens), vocab)
    with np.errstate(invalid="ignore", over="ignore"):
        totals = rows.sum(axis=1, dtype=np.float64)
        near = np.abs(totals - 1.0) <= ROW_SUM_TOLERANCE
        # What is not a number is neither near 1 nor at least 0.
        if not (near.all() and (rows.min(axis=1) >= 0).all()):
            raise BadProposal("q_rows has a row that is no distribution")
    for row, token in zip(rows, tokens, strict=True):
        if token >= vocab or not row[token] > 0:
            raise BadProposal("q_rows gives a proposed token no probability")
