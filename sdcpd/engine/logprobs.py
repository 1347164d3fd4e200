"""How probable tokens were under the target at temperature 1, as rows of `protocol.logprobs`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sdcpd.protocol.logprobs import MICRONATS_MAX, Row

ROWS_AT_ONCE = 16  # turned into binary64, of a large vocabulary some MB each


def logprob_rows(scores: torch.Tensor, tokens: Sequence[int], alternatives: int) -> tuple[Row, ...]:
    """A row for each token, of which scores [R, V] has the row that it was chosen from."""
    found: list[Row] = []
    for first in range(0, len(tokens), ROWS_AT_ONCE):
        some = tokens[first : first + ROWS_AT_ONCE]
        found += _rows(scores[first : first + len(some)], some, alternatives)
    return tuple(found)


def _rows(scores: torch.Tensor, tokens: Sequence[int], alternatives: int) -> list[Row]:
    exact = scores.double()
    totals = torch.logsumexp(exact, dim=-1, keepdim=True)
    index = torch.tensor(list(tokens), device=scores.device)[:, None]
    own = _micronats(totals - exact.gather(-1, index))
    best, ids = torch.topk(exact, min(alternatives, exact.shape[-1]), dim=-1)
    others = _micronats(totals - best)
    return [
        (mine[0], *(value for pair in zip(names, values, strict=True) for value in pair))
        for mine, names, values in zip(own, ids.tolist(), others, strict=True)
    ]


def _micronats(nats: torch.Tensor) -> list[list[int]]:
    # A sum that is rounded may lie a little below its largest term.
    whole = (nats * 1e6).clamp(min=0.0, max=float(MICRONATS_MAX)).round().long()
    return [[int(value) for value in row] for row in whole.tolist()]
