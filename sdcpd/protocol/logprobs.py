"""Log-probabilities between a router and its verifiers (private use, D-Z5).

A row is about one token: (its own, token, its, token, its, ..), where the pairs are the tokens that
the target found most probable, the best first.  Values are of the target's distribution at
temperature 1, whatever the profile, and travel as whole micronats below 0, for no message of the
protocol has floating-point numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sdcpd.protocol.fields import (
    Invalid,
    Table,
    array_of,
    octets,
    optional,
    required,
    uint,
    uint_between,
    uints,
)
from sdcpd.protocol.limits import DIGEST_BYTES, SCOPE_BYTES
from sdcpd.protocol.messages import Message

ALTERNATIVES_MAX = 20
MICRONATS_MAX = 9_999_000_000
"""Nobody needs to know how much less probable than exp(-9999) a token was."""

Row = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsRequest(Message):
    """Body of POST logprobs: how probable are tokens[from_:], each after those before it?

    from_ is at least 1, for the first token comes after nothing.
    """

    target: bytes
    tokens: tuple[int, ...]
    from_: int
    alternatives: int
    scope: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsAnswer(Message):
    """A row for each token asked about."""

    rows: tuple[Row, ...]


def logprob_row(scores: Sequence[float], token: int, alternatives: int) -> Row:
    """The row of a token that was chosen by these scores; the plain reference of the engine's."""
    highest = max(scores)
    total = highest + math.log(sum(math.exp(score - highest) for score in scores))
    micronats = [round(min(MICRONATS_MAX, 1e6 * max(0.0, total - score))) for score in scores]
    best = sorted(range(len(scores)), key=lambda one: -scores[one])[:alternatives]
    return (micronats[token], *(value for one in best for value in (one, micronats[one])))


def row(value: object) -> Row:
    """Read one row."""
    values = uints(value)
    if len(values) % 2 != 1:
        raise Invalid("is not a row")
    return values


rows = array_of(row)
TABLES: dict[type[Message], Table[Any]] = {
    LogprobsRequest: Table(
        LogprobsRequest,
        required("target", octets(DIGEST_BYTES)),
        required("tokens", uints),
        required("from", uint, attribute="from_"),
        required("alternatives", uint_between(0, ALTERNATIVES_MAX)),
        optional("scope", octets(SCOPE_BYTES)),
    ),
    LogprobsAnswer: Table(LogprobsAnswer, required("rows", rows)),
}
