"""The acceptance rules and the distributions they work on, in plain Python (Sections 4.1 and 6.4).

These are the references that the engine's tensor code is compared with; they are written to be
read against the draft, in binary64, and are exact. Rows are sequences of V numbers, one for each
token; positions and the index i count from 1, as in the draft (D-A1).
"""

import hmac
import math
import struct
import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sdcpd.protocol.limits import ROW_SUM_TOLERANCE
from sdcpd.protocol.messages import Sampling
from sdcpd.protocol.problems import BadProposal

Row = Sequence[float]
Draw = Callable[[int, int], float]  # draw(i, purpose) is uniform on [0, 1)

PURPOSE_ACCEPT = 0
PURPOSE_ADDITIONAL = 1

_VERIFY_LABEL = b"SDCP-VERIFY-1\x00"
_RACE_LABEL = b"SDCP-RACE-1\x00"
_BINARY32_BYTES = 4
_MASK64 = 2**64 - 1
_TOP_P_ALL_MILLI = 1000


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A rule's result: a, before truncation, and the additional token (Section 6.3 step 7)."""

    accepted: int
    additional: int

    def emitted(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the accepted ones of the proposed tokens and the additional one."""
        return (*tokens[: self.accepted], self.additional)


class Truncation(NamedTuple):
    """The tokens that a round commits, and whether generation ends with them."""

    emitted: tuple[int, ...]
    finished: bool


def truncate(emitted: Sequence[int], base: int, max_new: int, stop: Collection[int]) -> Truncation:
    """Cut at max_new, then after the first stop token, which is itself kept (D-P15)."""
    room = max_new - base
    kept = tuple(emitted[:room])
    for count, token in enumerate(kept, 1):
        if token in stop:
            return Truncation(kept[:count], True)
    return Truncation(kept, len(kept) == room)


# ------------------------------------------------------------------ distributions (D-S1 to D-S7)


def greedy(row: Row) -> int:
    """Return the most probable token; ties go to the smallest identifier."""
    return max(range(len(row)), key=row.__getitem__)


def target_distribution(logits: Row, sampling: Sampling) -> list[float]:
    """Return p: temperature and softmax, then top-k, then top-p, renormalised after each."""
    if sampling.temperature_milli == 0:
        best = greedy(logits)
        return [1.0 if token == best else 0.0 for token in range(len(logits))]
    milli = 1000 if sampling.temperature_milli is None else sampling.temperature_milli
    p = _softmax(logits, milli / 1000)
    # sorted() is stable, so equal probabilities stay in order of identifier (D-S6).
    order = sorted(range(len(p)), key=lambda token: -p[token])
    if sampling.top_k:
        order = order[: sampling.top_k]
        p = _restricted(p, order)
    if sampling.top_p_milli is not None and sampling.top_p_milli < _TOP_P_ALL_MILLI:
        p = _restricted(p, _nucleus(p, order, sampling.top_p_milli / 1000))
    return p


def _softmax(logits: Row, temperature: float) -> list[float]:
    highest = max(logits)
    weights = [math.exp((score - highest) / temperature) for score in logits]
    total = sum(weights)
    return [weight / total for weight in weights]


def _restricted(p: Row, kept: Iterable[int]) -> list[float]:
    tokens = set(kept)
    weights = [x if token in tokens else 0.0 for token, x in enumerate(p)]
    total = sum(weights)
    return [weight / total for weight in weights]


def _nucleus(p: Row, order: Sequence[int], top_p: float) -> Sequence[int]:
    """Return the shortest beginning of `order` whose sum reaches top_p; at least one token."""
    reached = 0.0
    for count, token in enumerate(order, 1):
        reached += p[token]
        if reached >= top_p:
            return order[:count]
    return order


# ------------------------------------------------------------------------------ rules 1 and 2


def rule1(argmax_rows: Sequence[int], tokens: Sequence[int]) -> Acceptance:
    """Greedy: `argmax_rows` are the target's best tokens at positions 1 to M+1 (Section 6.4)."""
    a = 0
    while a < len(tokens) and tokens[a] == argmax_rows[a]:
        a += 1
    return Acceptance(a, argmax_rows[a])


def rule2(
    p_rows: Sequence[Row], q_rows: Sequence[Row], tokens: Sequence[int], draw: Draw
) -> Acceptance:
    """Speculative sampling over M rows q, already checked, and M+1 rows p (Section 6.4).

    Draws in the order of D-A1: tests at i = 1.. until one rejects, then the additional token.
    """
    for a, (p, q, token) in enumerate(zip(p_rows, q_rows, tokens, strict=False)):
        if not draw(a + 1, PURPOSE_ACCEPT) < min(1.0, p[token] / q[token]):
            residual = [max(0.0, x - y) for x, y in zip(p, q, strict=True)]
            # Rounding alone can leave nothing of the residual (D-A5).
            weights = residual if sum(residual) > 0 else p
            return Acceptance(a, draw_from(weights, draw(a + 1, PURPOSE_ADDITIONAL)))
    m = len(tokens)
    return Acceptance(m, draw_from(p_rows[m], draw(m + 1, PURPOSE_ADDITIONAL)))


def draw_from(weights: Row, u: float) -> int:
    """Return the smallest token whose running sum exceeds u times the whole (D-A3)."""
    sums: list[float] = []
    total = 0.0
    for weight in weights:
        total += weight
        sums.append(total)
    for token, reached in enumerate(sums):
        if reached > u * total:
            return token
    return max(token for token, weight in enumerate(weights) if weight > 0)


def verifier_random(seed: int, session: bytes, round: int, i: int, purpose: int) -> float:
    """Return the verifier's value in [0, 1) for a seeded profile (Section 6.4, D-A6)."""
    message = _VERIFY_LABEL + session + struct.pack(">IIB", round, i, purpose)
    octets = hmac.digest(seed.to_bytes(8, "big"), message, "sha256")
    return (int.from_bytes(octets[:7], "big") >> 3) / 2**53


def check_rows(octets: bytes | memoryview, vocab: int, tokens: Sequence[int]) -> list[Row]:
    """Return the M rows of a q_rows object, checked at every position; raises BadProposal (D-P11).

    V is `vocab`. Values are returned as published, not renormalised.
    """
    if len(octets) != _BINARY32_BYTES * vocab * len(tokens):
        raise BadProposal("q_rows has not one row for each proposed token")
    values = array("f", bytes(octets))
    if sys.byteorder == "big":
        values.byteswap()
    rows: list[Row] = [values[k * vocab : (k + 1) * vocab] for k in range(len(tokens))]
    for row, token in zip(rows, tokens, strict=True):
        total = sum(row)
        # A sum is finite exactly if every value is, as V values of binary32 cannot overflow it.
        if not math.isfinite(total) or min(row) < 0 or abs(total - 1.0) > ROW_SUM_TOLERANCE:
            raise BadProposal("q_rows has a row that is no distribution")
        if token >= vocab or not row[token] > 0:
            raise BadProposal("q_rows gives a proposed token no probability")
    return rows


# ------------------------------------------------------------------------ rule 200, race (D-Z7)


def noise_key(seed: int, k: int) -> int:
    """Return K(k), the 64-bit key of the noise at output index k, which counts from 1."""
    octets = hmac.digest(seed.to_bytes(8, "big"), _RACE_LABEL + struct.pack(">I", k), "sha256")
    return int.from_bytes(octets[:8], "big")


def uniform(key: int, t: int) -> float:
    """Return u(k, t) in (0, 1] for token t, equal bit for bit on every machine."""
    z = (key + (t + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    z ^= z >> 31
    return ((z >> 11) + 0.5) / 2**53


def winner(p: Row, seed: int, k: int) -> int:
    """Return the token that wins the race at output index k; ties go to the smaller identifier."""
    key = noise_key(seed, k)
    times = ((-math.log(uniform(key, t)) / x, t) for t, x in enumerate(p) if x > 0)
    return min(times)[1]


def rule200(p_rows: Sequence[Row], tokens: Sequence[int], seed: int, base: int) -> Acceptance:
    """Race: x[i] is accepted if it wins p[i] at index base + i."""
    a = 0
    while True:
        best = winner(p_rows[a], seed, base + a + 1)
        if a == len(tokens) or tokens[a] != best:
            return Acceptance(a, best)
        a += 1
