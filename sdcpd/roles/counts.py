"""What a role counts of its rounds, for people and for monitoring (section 8, D-X3)."""

from __future__ import annotations

from collections import Counter

from sdcpd.protocol.histogram import Histogram
from sdcpd.protocol.messages import Action, Verdict
from sdcpd.protocol.verifier_io import PERIOD_ENDS

ESCALATIONS = (Action.REDUCE, Action.SWITCH, Action.SELF_DECODE, Action.FAIL)
OUTCOMES = ("finish", "fail", "cancelled")
"""How a session can end; cancelled: for want of a client, or because it had enough."""
STAGES = ("queue", "batch_wait", "fetch_q", "score", "commit", "total")
STAGE_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0, 2.0)
DRAFT_TOKEN_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25)


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


class VerifierCounts(RoundCounts):
    """What a verifier counts beside its rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.periods: Counter[str] = Counter(dict.fromkeys(PERIOD_ENDS, 0))
        """Self-decoding periods by why they ended."""
        self.ended: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        """Sessions that ended here; those that were fenced go on elsewhere, and are none."""
        self.fenced = 0
        """Rounds whose record the log refused for ever."""
        self.stages = {stage: Histogram(STAGE_S) for stage in STAGES}
        """What rounds with a proposal took; nothing of those that came to no verdict."""

    def end(self, reason: str) -> None:
        """Count a session's end by the machine's word for it."""
        if reason in ("fenced", "superseded by a higher epoch"):
            return
        self.ended[reason if reason in ("finish", "cancelled") else "fail"] += 1


class DrafterCounts(RoundCounts):
    """What a drafter counts beside its rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.token_s = Histogram(DRAFT_TOKEN_S)
        """What each proposal took to draft, a token of it."""
        self.rtt_s = Histogram(STAGE_S)
        """From a proposal to its verdict."""
