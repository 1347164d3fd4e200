"""Sampling profiles by round (Section 6.6)."""

from sdcpd.protocol.limits import POLICIES_MAX
from sdcpd.protocol.messages import Contract, Policy, Rule, Sampling, SessionState
from sdcpd.protocol.problems import Malformed, StaleBase, TooManyRequests

_DEFAULTS = Sampling()


class PolicyTable:
    """The policies accepted for one session, and the profile that each round has.

    Policies are kept after their round has come, so that a repeated one is recognised (D-Y5).
    """

    def __init__(self, contract: Contract) -> None:
        self._rule = contract.rule
        self._first = contract.sampling or _DEFAULTS
        self._by_round: dict[int, Sampling] = {}

    def accept(
        self, policy: Policy, current_round: int, *, state: SessionState | None = None
    ) -> bool:
        """Take a policy for later rounds; False if it is the repetition of one that was taken.

        `current_round` is the last completed round (D-Y1); `state` goes into the problem. Raises
        StaleBase if from_round has come (D-Y2), Malformed if rule 200 would lose its seed (D-Z7),
        TooManyRequests if too many wait for their rounds.
        """
        if self._rule == Rule.RACE and policy.sampling.seed is None:
            raise Malformed("policy sampling has no seed, which rule 200 requires")
        if self._by_round.get(policy.from_round) == policy.sampling:
            return False
        if policy.from_round <= current_round:
            raise StaleBase("from_round is not above the current round", session_state=state)
        if policy.from_round not in self._by_round:
            self._make_room(current_round)
        self._by_round[policy.from_round] = policy.sampling
        return True

    def profile(self, round_: int) -> Sampling:
        """Return the profile in force at a round, whole, with no merging (D-Y3, D-Y4)."""
        begun = [first for first in self._by_round if first <= round_]
        return self._by_round[max(begun)] if begun else self._first

    def changed(self, round_: int) -> bool:
        """Tell whether a policy, and not the contract, gives the profile of a round (D-Y10)."""
        return any(first <= round_ for first in self._by_round)

    def _make_room(self, current_round: int) -> None:
        """Forget the oldest policy that a later one has replaced, if the table is full."""
        if len(self._by_round) < POLICIES_MAX:
            return
        begun = sorted(first for first in self._by_round if first <= current_round)
        if len(begun) < 2:
            raise TooManyRequests("too many policies wait for their rounds", retry_after_s=1.0)
        del self._by_round[begun[0]]
