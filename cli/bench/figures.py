"""What measurements come to: quantiles, rates, spreads, and whether speculation helps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

from cli.bench.client import Text
from cli.bench.load import Block

SHARES = (0.5, 0.95, 0.99)
PAIRS_MIN = 3  # fewer pairs of blocks have no spread that says anything


def quantile(values: Sequence[float], share: float) -> float | None:
    """The least value that at least such a share of them does not exceed; None of none."""
    if not values:
        return None
    found = sorted(values)
    # The product of a share and a count may be a hair above the whole number that it is.
    return found[max(0, math.ceil(share * len(found) - 1e-9) - 1)]


@dataclass(frozen=True, slots=True)
class Spread:
    """Values of several blocks: their median, and between which they lie."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None of none."""
        return cls(median(values), min(values), max(values)) if values else None


class Verdict(Enum):
    """What a point says of speculation."""

    HELPS = "helps"
    HURTS = "hurts"
    NO_DIFFERENCE = "makes no difference that this run can show"
    UNKNOWN = "cannot be judged"


def verdict(ratios: Sequence[float]) -> Verdict:
    """Of the pairs of a point: all must say the same, and be at least PAIRS_MIN."""
    if len(ratios) < PAIRS_MIN:
        return Verdict.UNKNOWN
    if min(ratios) > 1:
        return Verdict.HELPS
    return Verdict.HURTS if max(ratios) < 1 else Verdict.NO_DIFFERENCE


def tokens_per_s(block: Block) -> float:
    """Tokens of a block that came while its load was whole, a second.

    The API counts tokens of whole texts; where a text goes on behind the end, those before it have
    the share of its characters that came by then.
    """
    seconds = block.end_s - block.begin_s
    tokens = sum(one.tokens * _share(one, block.end_s) for one in whole(block.texts))
    return tokens / seconds if 0 < seconds < math.inf else 0.0


def whole(texts: Iterable[Text]) -> list[Text]:
    """Those that did not fail."""
    return [one for one in texts if one.failure is None]


def first_token_s(text: Text) -> float | None:
    """From when it was due to its first text; None where it had none that could be shown."""
    return text.arrivals[0][0] - text.due_s if text.arrivals else None


def per_token_s(text: Text) -> float | None:
    """From its first arrival to its last, by the tokens that came after the first arrival.

    The first round of a text may bring several, which must not count as if they had taken time.
    """
    if len(text.arrivals) < 2:
        return None
    later = text.tokens * (1 - _share(text, text.arrivals[0][0]))
    return (text.end_s - text.arrivals[0][0]) / later


def _share(text: Text, until_s: float) -> float:
    """The share of a text that had come by then."""
    if not text.arrivals or text.end_s <= until_s:
        return 1.0
    come = sum(count for at, count in text.arrivals if at <= until_s)
    return come / sum(count for _, count in text.arrivals)


@dataclass(frozen=True, slots=True)
class Usage:
    """What the usage of texts tells of their rounds, added up."""

    texts: int = 0
    """Those whose usage tells it."""
    tokens: int = 0
    rounds: int = 0
    """With a proposal."""
    self_decoded: int = 0
    drafted: int = 0
    accepted: int = 0
    decode_s: float = 0.0
    """Between first and last arrivals."""
    later: int = 0
    """Passes after each text's first arrival."""

    @property
    def passes(self) -> int:
        """Of the target: one a round, one a token decoded without a drafter."""
        return self.rounds + self.self_decoded


def usage_of(texts: Iterable[Text]) -> Usage:
    """Add up; texts of an API that tells nothing of speculation count for nothing."""
    made = Usage()
    for one in whole(texts):
        own, details = one.usage.get("sdcp"), one.usage.get("completion_tokens_details") or {}
        if not isinstance(own, dict):
            continue
        rounds, alone = int(own.get("rounds", 0)), int(own.get("self_decoded", 0))
        accepted = int(details.get("accepted_prediction_tokens", 0))
        timed = len(one.arrivals) > 1
        made = Usage(
            texts=made.texts + 1,
            tokens=made.tokens + one.tokens,
            rounds=made.rounds + rounds,
            self_decoded=made.self_decoded + alone,
            accepted=made.accepted + accepted,
            drafted=made.drafted + accepted + int(details.get("rejected_prediction_tokens", 0)),
            decode_s=made.decode_s + (one.end_s - one.arrivals[0][0] if timed else 0.0),
            later=made.later + (max(0, rounds + alone - 1) if timed else 0),
        )
    return made
