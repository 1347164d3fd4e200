"""The acceptance rules on tensors; the plain references are in `protocol.acceptance`.

Probabilities are binary64 from the model's binary32 scores (D-S7).
"""

from __future__ import annotations

import torch

from sdcpd.engine.api import Draw, Score, Scored
from sdcpd.protocol.acceptance import noise_key
from sdcpd.protocol.messages import Sampling

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def greedy(scores: torch.Tensor) -> torch.Tensor:
    """Most probable token of each row [R, V] -> [R]; ties to the smallest (rule 1, D-C11).

    torch.argmax gives the first of equal values, as its documentation says.
    """
    return scores.argmax(dim=-1)


def distribution(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Target distribution p [V] of one row of scores (section 4.1, D-S1 to D-S6)."""
    temperature = 1000 if sampling.temperature_milli is None else sampling.temperature_milli
    if temperature == 0:
        p = torch.zeros(scores.shape[-1], dtype=torch.float64, device=scores.device)
        p[greedy(scores[None])[0]] = 1.0
        return p
    p = torch.softmax(scores.double() / (temperature / 1000), dim=-1)
    if sampling.top_k and sampling.top_k < len(p):
        order = torch.sort(p, descending=True, stable=True).indices
        p[order[sampling.top_k :]] = 0.0
        p = p / p.sum()
    if sampling.top_p_milli is not None and sampling.top_p_milli < 1000:
        ordered, order = torch.sort(p, descending=True, stable=True)
        reached = torch.cumsum(ordered, dim=0) >= sampling.top_p_milli / 1000
        keep = int(reached.int().argmax()) + 1 if bool(reached.any()) else len(p)
        p[order[keep:]] = 0.0
        p = p / p.sum()
    return p


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of two's-complement 64-bit integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniforms(key: int, tokens: torch.Tensor) -> torch.Tensor:
    """u(k, t) of D-Z7 for each token; integer arithmetic modulo 2^64, so the same everywhere."""
    x = (tokens + 1) * _signed(_GOLDEN) + _signed(key)
    x = (x ^ _shift(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX_2)
    x = x ^ _shift(x, 31)
    return (_shift(x, 11).double() + 0.5) / float(1 << 53)


def winner(p: torch.Tensor, seed: int, k: int) -> int:
    """The token that wins the race for output index k (D-Z7)."""
    tokens = torch.nonzero(p > 0).flatten()
    times = -torch.log(uniforms(noise_key(seed, k), tokens)) / p[tokens]
    return int(tokens[times == times.min()].min())


def draw_from(weights: torch.Tensor, u: float) -> int:
    """Inverse CDF in token order over unnormalised weights (D-A3)."""
    running = torch.cumsum(weights, dim=0)
    index = int(torch.searchsorted(running, u * float(running[-1]), right=True))
    if index < len(weights):
        return index
    return int(torch.nonzero(weights > 0).max())


def rows_tensor(q_rows: bytes | memoryview, vocab: int) -> torch.Tensor:
    """Dense binary32 rows [M, V] of a q_rows object that was checked before (D-P11)."""
    count = len(q_rows) // (4 * vocab)
    return torch.frombuffer(bytearray(q_rows), dtype=torch.float32).view(count, vocab)


def _rejection(scores: torch.Tensor, work: Score, draw: Draw) -> Scored:
    assert work.q_rows is not None or not work.proposed, "rule 2 rows are obtained before scoring"
    rows = rows_tensor(work.q_rows, scores.shape[-1]) if work.q_rows else None
    for index, token in enumerate(work.proposed):
        assert rows is not None
        p, q = distribution(scores[index], work.sampling), rows[index].to(scores.device).double()
        if draw(index + 1, 0) < min(1.0, float(p[token]) / float(q[token])):
            continue
        residual = torch.clamp(p - q, min=0.0)
        weights = residual if float(residual.sum()) > 0 else p
        return Scored(index, draw_from(weights, draw(index + 1, 1)))
    last = len(work.proposed)
    return Scored(last, draw_from(distribution(scores[last], work.sampling), draw(last + 1, 1)))


def _race(scores: torch.Tensor, work: Score, seed: int) -> Scored:
    for index, token in enumerate(work.proposed):
        best = winner(distribution(scores[index], work.sampling), seed, work.base + index + 1)
        if best != token:
            return Scored(index, best)
    last = len(work.proposed)
    p = distribution(scores[last], work.sampling)
    return Scored(last, winner(p, seed, work.base + last + 1))


def _greedy(scores: torch.Tensor, proposed: tuple[int, ...]) -> Scored:
    best = greedy(scores).tolist()
    accepted = 0
    while accepted < len(proposed) and proposed[accepted] == best[accepted]:
        accepted += 1
    return Scored(accepted, best[accepted])


def accept(scores: torch.Tensor, work: Score) -> Scored:
    """Apply the contract's rule to scores [M + 1, V] (section 6.4, D-Z7)."""
    if work.rule == 1 or (work.rule == 200 and work.sampling.temperature_milli == 0):
        return _greedy(scores, work.proposed)
    if work.rule == 200:
        assert work.sampling.seed is not None, "a rule-200 profile always has a seed"
        return _race(scores, work, work.sampling.seed)
    assert work.draw is not None, "rule 2 draws random values"
    return _rejection(scores, work, work.draw)
