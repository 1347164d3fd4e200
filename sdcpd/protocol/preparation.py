"""The next proposal, prepared while the verdict on this one is awaited (section 6.2, D-D4).

First the additional token is assumed that follows if all proposed tokens are accepted; then the
next proposal is drafted after it.  It is used if the verdict commits exactly those tokens, and
nothing of it leaves the drafter before.

No rule's output is biased by that, rule 2's included.  What is assumed is known before the first
prepared token is drawn, and whether the preparation is used depends on it, the verdict and limits,
never on a prepared token.  Those are drawn, with randomness of their own, from the very rows that a
draft after the verdict would draw from: given that they are used, they are distributed as its
tokens are.  What is discarded is not looked at again.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdcpd.protocol.drafter_io import Drafted
from sdcpd.protocol.messages import Verdict

CHANCE_MIN = 0.25
"""Rarer hits do not pay: a miss may hold up the draft that is then needed by most of a pass, and
takes computing time from whoever shares the machine; a hit saves the passes of one draft."""
DRAFT_MIN_S = 0.0005
"""What is drafted faster than the engine is asked twice (n-gram look-up) is not worth hiding."""
TRIALS = 8  # rounds of either kind before one is preferred
TRY_EVERY = 16  # how often the other one is tried then: what is faster may change
MEMORY_ROUNDS = 32  # a round's time loses 1/e of its weight after so many more of its kind
SHARE_MAX = 3.0  # a round that took longer says more of the machine than of what was tried


@dataclass(frozen=True, slots=True)
class Preparation:
    """How far the preparation of one session has come."""

    work: int
    """What the engine is doing, or did last."""
    m: int
    after: tuple[int, ...]
    """The outstanding proposal's tokens, and the assumed one behind them once it is known."""
    assumed: bool = False
    drafted: Drafted | None = None
    confirmed: bool = False
    """The verdict was the assumed one; only the engine is waited for."""

    def confirmed_by(self, verdict: Verdict, m_cap: int) -> bool:
        """Whether the next proposal is this one: all accepted, and what was assumed (D-D4)."""
        m = self.m if self.drafted is None else len(self.drafted.tokens)
        return (
            self.assumed
            and verdict.accepted == len(self.after) - 1
            and verdict.emitted == self.after
            and m <= m_cap
        )


class Payoff:
    """Whether preparing saves time where this drafter runs; what its sessions have measured.

    Beside a device of its own a drafter loses nothing by a preparation in vain.  Where it shares
    cores with the verifier, each one slows the verdict down, perhaps by more than a hit saves; no
    figure known beforehand tells the two apart.  So rounds are made with and without, and compared.
    """

    def __init__(self) -> None:
        self._rounds = {True: 0, False: 0}
        self._mean = {True: 0.0, False: 0.0}
        self._choices = 0

    def choose(self) -> bool:
        """Whether the next round has a preparation: what is faster, now and then the other."""
        self._choices += 1
        if min(self._rounds.values()) < TRIALS:
            return self._rounds[True] <= self._rounds[False]
        faster = self._mean[True] <= self._mean[False]
        return faster if self._choices % TRY_EVERY else not faster

    def took(self, prepared: bool, share: float) -> None:
        """A round took this share of what its session's rounds take."""
        self._rounds[prepared] += 1
        weight = max(1 / self._rounds[prepared], 1 / MEMORY_ROUNDS)
        self._mean[prepared] += weight * (min(share, SHARE_MAX) - self._mean[prepared])


class Worth:
    """Whether a session's next round has a preparation, and how long its rounds take."""

    def __init__(self, setting: bool | None, payoff: Payoff) -> None:
        """`setting` is what the operator wants, None for what saves time."""
        self._setting, self._payoff = setting, payoff
        self._round_s = 0.0
        self._begun: tuple[bool, float] | None = None
        """Of the round that is being measured: whether it has one, and since when it lasts."""

    def wanted(
        self, alpha: float, proposed: int, draft_s: float, *, crowded: bool, now: float
    ) -> bool:
        """Whether to prepare beside a proposal that is sent now.

        `alpha` is the chance of each of the `proposed` tokens, and about that of the assumed one;
        `draft_s` is what the next draft takes; `crowded` says that it would delay other sessions'.
        """
        if self._setting is not None:
            return self._setting
        self._begun = None
        if crowded or draft_s < DRAFT_MIN_S or alpha ** (proposed + 1) < CHANCE_MIN:
            return False
        chosen = self._payoff.choose()
        self._begun = (chosen, now)
        return chosen

    def drafted(self, now: float) -> None:
        """The next proposal is there: that was a round."""
        if self._begun is None:
            return
        (prepared, since), self._begun = self._begun, None
        spent_s = max(now - since, 1e-6)
        self._round_s = spent_s if not self._round_s else 0.9 * self._round_s + 0.1 * spent_s
        self._payoff.took(prepared, spent_s / self._round_s)

    def spoiled(self) -> None:
        """The round goes on in another way: its time says nothing."""
        self._begun = None
