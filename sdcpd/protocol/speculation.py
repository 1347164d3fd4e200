"""Speculation control: low rounds, the escalation ladder, m_cap, and the drafter's choice of M.

Sections 6.2 and 6.5 as pure functions of what a round was like; `Control` is all the state there
is of it, one value per session, unchanged by self-decoded rounds (D-K4) and, but for m_cap, by a
change of drafter (D-K5).
"""

from dataclasses import dataclass, replace

from sdcpd.protocol.messages import Action, Contract

_ALPHA_START = 0.7
_ALPHA_PRIOR_TOKENS = 8.0  # the starting value weighs like this many tested tokens
_ALPHA_MEMORY_TOKENS = 64.0  # a tested token loses 1/e of its weight after this many more


def is_low(a: int, m: int, low_ratio: int | None) -> bool:
    """Tell whether a round with `a` of `m` tokens accepted is low; low_ratio in percent.

    Without a ratio only a = 0 is low (Section 6.5.2).
    """
    return 100 * a < low_ratio * m if low_ratio else a == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What control made of a round.

    `low` is the verdict's member, c after the round (D-K3); `round_low` says whether this round
    was low; `applied` is the ladder's action, if it was consulted; `skipped` counts the entries
    passed over; `exhausted` says that fail was applied because none was left.
    """

    action: Action
    low: int
    round_low: bool
    applied: Action | None = None
    skipped: int = 0
    exhausted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The counters of Section 6.5.2 and the speculation limit.

    c counts consecutive low rounds, g consecutive rounds that are not, j is the position in the
    fallback list, m_cap the largest M of the next round.
    Invariant: 1 <= m_cap <= m_max, and c < low_rounds unless generation has ended.
    """

    c: int = 0
    g: int = 0
    j: int = 0
    m_cap: int = 1

    def assigned(self, contract: Contract, m_init: int) -> "Control":
        """Return the control after a new assignment, which sets m_cap alone (D-N2)."""
        return replace(self, m_cap=max(1, min(m_init, contract.m_max)))

    def after_round(
        self,
        contract: Contract,
        *,
        accepted: int,
        proposed: int,
        finished: bool,
        load: int,
        lower: bool = False,
    ) -> tuple["Control", Decision]:
        """Return the control after a verified round, and what its verdict says.

        `accepted` is a before truncation (D-P14), `load` the verifier's, in percent (D-P22);
        `lower` asks to lower m_cap by one because long proposals are costly now (D-K2).
        """
        low = is_low(accepted, proposed, contract.low_ratio)
        counted = self._counted(contract, low=low)
        if finished:
            # Finish comes first: the ladder is not consulted and c stays (D-K1).
            return counted, Decision(action=Action.FINISH, low=counted.c, round_low=low)
        if counted.c < contract.low_rounds:
            m_cap = self._next_m_cap(contract, low=low, lower=lower)
            decision = Decision(action=Action.CONTINUE, low=counted.c, round_low=low)
            return replace(counted, m_cap=m_cap), decision
        return counted._escalated(contract, load=load, lower=lower)

    def _counted(self, contract: Contract, *, low: bool) -> "Control":
        if low:
            return replace(self, c=self.c + 1, g=0)
        g = self.g + 1
        return replace(self, c=0, g=g, j=0 if g >= contract.low_rounds else self.j)

    def _next_m_cap(self, contract: Contract, *, low: bool, lower: bool) -> int:
        if lower:
            return max(1, self.m_cap - 1)
        return self.m_cap if low else min(contract.m_max, self.m_cap + 1)

    def _escalated(
        self, contract: Contract, *, load: int, lower: bool
    ) -> tuple["Control", Decision]:
        """Apply the next permitted entry of the ladder; only self_decode is skipped (D-K10)."""
        rest = contract.fallback[self.j :]
        skipped = 0
        while skipped < len(rest) and not _permitted(rest[skipped], contract, load=load):
            skipped += 1
        exhausted = skipped == len(rest)
        action = Action.FAIL if exhausted else Action(rest[skipped])
        m_cap = self._next_m_cap(contract, low=True, lower=lower)
        if action is Action.REDUCE:
            m_cap = max(1, self.m_cap // 2)  # the halving is exact, whatever the load (D-K2)
        after = Control(c=0, g=self.g, j=self.j + skipped + (not exhausted), m_cap=m_cap)
        return after, Decision(
            action=action,
            low=0,
            round_low=True,
            applied=action,
            skipped=skipped,
            exhausted=exhausted,
        )


def _permitted(entry: int, contract: Contract, *, load: int) -> bool:
    if entry != Action.SELF_DECODE:
        return True
    return contract.self_load is not None and load <= contract.self_load


def choose_m(alpha: float, t_draft_s: float, t_verify_s: float, m_limit: int) -> int:
    """Return the M that commits most tokens a second, by the rule of Section 6.2.

    `alpha` is the chance that a token is accepted, `t_draft_s` the time to draft one token and
    `t_verify_s` that of a verification. Ties go to the smaller M (D-D6).
    """
    best_m, best_rate = 1, -1.0
    for m in range(1, m_limit + 1):
        # alpha = 1 would divide by zero; the sum of the series is then its length.
        expected = m + 1.0 if alpha == 1 else (1 - alpha ** (m + 1)) / (1 - alpha)
        rate = expected / (m * t_draft_s + t_verify_s)
        if rate > best_rate:
            best_m, best_rate = m, rate
    return best_m


class AlphaEstimate:
    """The exponentially weighted estimate of the chance that a token is accepted (Section 6.2).

    It weighs tokens, not rounds: a round tests its accepted tokens and the one rejected, and says
    nothing of those behind it, so a ratio a/M would put alpha too low for long proposals.
    """

    def __init__(self, start: float = _ALPHA_START) -> None:
        self._accepted = start * _ALPHA_PRIOR_TOKENS
        self._tested = _ALPHA_PRIOR_TOKENS

    @property
    def value(self) -> float:
        """The present estimate, from 0 to 1."""
        return min(1.0, self._accepted / self._tested)

    def update(self, *, accepted: int, proposed: int) -> float:
        """Take in one verdict and return the new estimate."""
        tested = accepted + (accepted < proposed)
        kept = (1.0 - 1.0 / _ALPHA_MEMORY_TOKENS) ** tested
        self._accepted = self._accepted * kept + accepted
        self._tested = self._tested * kept + tested
        return self.value
