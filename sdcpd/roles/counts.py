"""What a role counts of its rounds, for people and for monitoring (section 8, D-X3)."""

from __future__ import annotations

from collections import Counter

from sdcpd.protocol.messages import Action, Verdict

ESCALATIONS = (Action.REDUCE, Action.SWITCH, Action.SELF_DECODE, Action.FAIL)


class RoundCounts:
    """Counters since the start; every name is there from the beginning, with value 0."""

    def __init__(self) -> None:
        self.rounds: Counter[Action] = Counter(dict.fromkeys(Action, 0))
        """Verdicts by action."""
        self.proposed: Counter[int] = Counter()
        """Rounds by M, the number of proposed tokens."""
        self.accepted: Counter[int] = Counter()
        """Rounds by a, the number of accepted tokens."""
        self.skipped = 0
        """Entries of the ladder that were skipped: self-decoding, when it is not permitted."""
        self.self_decoded = 0
        self.rejected: Counter[str] = Counter()
        """Proposals answered with an error, by the problem's suffix, else by its status."""
        self.prepared_used = self.prepared_discarded = 0
        """Proposals that a drafter prepared while it awaited the verdict before (D-D4)."""

    @property
    def tokens_proposed(self) -> int:
        """All tokens proposed."""
        return sum(m * rounds for m, rounds in self.proposed.items())

    @property
    def tokens_accepted(self) -> int:
        """All proposed tokens that were accepted."""
        return sum(a * rounds for a, rounds in self.accepted.items())

    @property
    def mean_accepted(self) -> float:
        """Mean accepted length: proposed tokens accepted in a round."""
        rounds = sum(self.rounds.values())
        return self.tokens_accepted / rounds if rounds else 0.0

    def count(self, verdict: Verdict, proposed: int, *, skipped: int = 0) -> None:
        """Count one round with a verdict."""
        self.rounds[verdict.action] += 1
        self.proposed[proposed] += 1
        self.accepted[verdict.accepted] += 1
        self.skipped += skipped

    def reject(self, suffix: str | None, status: int) -> None:
        """Count a proposal that was refused."""
        self.rejected[suffix or f"status {status}"] += 1

    def count_prepared(self, used: bool) -> None:
        """Count a prepared proposal once it is known whether it is one."""
        if used:
            self.prepared_used += 1
        else:
            self.prepared_discarded += 1

    def as_json(self) -> dict[str, int]:
        """The totals, as the admin socket shows them."""
        return {
            "rounds": sum(self.rounds.values()),
            "drafted": self.tokens_proposed,
            "accepted": self.tokens_accepted,
            "self_decoded": self.self_decoded,
            "stale_base": self.rejected["sdcp-stale-base"],
            "prepared_used": self.prepared_used,
            "prepared_discarded": self.prepared_discarded,
            **{f"action_{action.name.lower()}": n for action, n in self.rounds.items() if n},
        }
