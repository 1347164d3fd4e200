"""Metrics of rounds: those of this project, and vLLM's names for what its boards show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sdcpd.metrics.families import DRAFTING, Samples, counter, gauge, histogram
from sdcpd.protocol.histogram import Histogram
from sdcpd.protocol.problems import PROBLEMS_BY_SUFFIX
from sdcpd.roles.counts import ESCALATIONS, DrafterCounts, RoundCounts, VerifierCounts

if TYPE_CHECKING:
    from sdcpd.metrics import Metrics

LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
POSITIONS = 16  # that are told one by one; those behind them together

ROUNDS = counter("sdcp_rounds", "Verdicts by action.", "action", roles=DRAFTING)
DRAFTED = counter("sdcp_draft_tokens", "Tokens proposed.", roles=DRAFTING)
ACCEPTED = counter(
    "sdcp_accepted_tokens",
    "Proposed tokens accepted; divided by sdcp_rounds_total, the mean accepted length.",
    roles=DRAFTING,
)
ROUND_DRAFTED = histogram("sdcp_round_draft_tokens", "M of each round.", roles=DRAFTING)
ROUND_ACCEPTED = histogram("sdcp_round_accepted_tokens", "a of each round.", roles=DRAFTING)
POSITION = counter(
    "sdcp_position_accepted",
    "Rounds that accepted the token at a position, 1 to 16; 17+ counts the tokens behind them.",
    "position",
    roles=DRAFTING,
)
ESCALATED = counter(
    "sdcp_escalations",
    "Escalations by action: applied, or skipped where self-decoding was not permitted.",
    "action",
    "result",
    roles=DRAFTING,
)
REJECTED = counter(
    "sdcp_proposals_rejected",
    "Proposals refused, by the problem's name, else its HTTP status (status_503).",
    "reason",
    roles=DRAFTING,
)
PREPARED = counter(
    "sdcp_prepared_proposals",
    "Proposals prepared before the verdict that they need, by what became of them.",
    "result",
    roles=DRAFTING,
)
ALONE = counter("sdcp_self_decoded_tokens", "Tokens decoded without a drafter.", roles=DRAFTING)
PERIODS = counter(
    "sdcp_self_decode_periods",
    "Periods of decoding without a drafter, by why they ended.",
    "end",
    roles=("verifier",),
)
FENCED = counter(
    "sdcp_commit_fenced",
    "Rounds discarded because the commit log was fenced: this verifier had been taken for lost.",
    roles=("verifier",),
)
STAGES = histogram(
    "sdcp_round_duration_seconds",
    "What rounds with a verdict took: waiting for the engine (queue) and for others of the pass "
    "(batch_wait), fetching rows (fetch_q), the passes (score), the log (commit), and all (total).",
    "stage",
    roles=("verifier",),
)
TOKEN_S = histogram(
    "sdcp_draft_token_seconds",
    "Time to draft a token, of each proposal that was not prepared ahead.",
    roles=("drafter",),
)
RTT = histogram("sdcp_proposal_rtt_seconds", "From a proposal to its verdict.", roles=("drafter",))
ALPHA = gauge(
    "sdcp_drafter_alpha",
    "Estimated chance that a proposed token is accepted, over the sessions at hand.",
    roles=("drafter",),
)
VLLM_DRAFTS = counter(
    "vllm:spec_decode_num_drafts",
    "vLLM's name and meaning: proposals verified.",
    "model_name",
    roles=("verifier",),
)
VLLM_DRAFTED = counter(
    "vllm:spec_decode_num_draft_tokens",
    "vLLM's name and meaning: tokens proposed.",
    "model_name",
    roles=("verifier",),
)
VLLM_ACCEPTED = counter(
    "vllm:spec_decode_num_accepted_tokens",
    "vLLM's name and meaning: proposed tokens accepted, without the target's own (bonus) token.",
    "model_name",
    roles=("verifier",),
)
VLLM_POSITION = counter(
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "vLLM's name and meaning: proposals that accepted the token at a position, the first being 0.",
    "model_name",
    "position",
    roles=("verifier",),
)


def samples(metrics: Metrics) -> Samples:
    """All of them that a role has."""
    counts = metrics.rounds
    if counts is None:
        return
    yield from _of_rounds(counts)
    if isinstance(counts, VerifierCounts):
        yield from (PERIODS(count, end) for end, count in counts.periods.items())
        yield FENCED(counts.fenced)
        yield from (STAGES(times, stage) for stage, times in counts.stages.items())
        yield from _of_vllm(counts, metrics.model)
    if isinstance(counts, DrafterCounts):
        yield TOKEN_S(counts.token_s)
        yield RTT(counts.rtt_s)
        if metrics.alpha is not None and (alpha := metrics.alpha()) is not None:
            yield ALPHA(alpha)


def _of_rounds(counts: RoundCounts) -> Samples:
    yield from (ROUNDS(count, one.name.lower()) for one, count in counts.rounds.items())
    yield DRAFTED(counts.tokens_proposed)
    yield ACCEPTED(counts.tokens_accepted)
    yield ROUND_DRAFTED(Histogram.of(LENGTHS, counts.proposed))
    yield ROUND_ACCEPTED(Histogram.of(LENGTHS, counts.accepted))
    for position in range(1, POSITIONS + 1):
        yield POSITION(accepted_at(counts.accepted, position), str(position))
    behind = sum(max(0, a - POSITIONS) * count for a, count in counts.accepted.items())
    yield POSITION(behind, f"{POSITIONS + 1}+")
    for action in ESCALATIONS:
        yield ESCALATED(counts.rounds[action], action.name.lower(), "applied")
    yield ESCALATED(counts.skipped, "self_decode", "skipped")
    yield ALONE(counts.self_decoded)
    yield PREPARED(counts.prepared_used, "used")
    yield PREPARED(counts.prepared_discarded, "discarded")
    for suffix in sorted({*PROBLEMS_BY_SUFFIX, *counts.rejected}):
        yield REJECTED(counts.rejected[suffix], _label(suffix))


def _of_vllm(counts: RoundCounts, model: str) -> Samples:
    yield VLLM_DRAFTS(sum(counts.proposed.values()), model)
    yield VLLM_DRAFTED(counts.tokens_proposed, model)
    yield VLLM_ACCEPTED(counts.tokens_accepted, model)
    for position in range(max([POSITIONS, *counts.proposed])):
        yield VLLM_POSITION(accepted_at(counts.accepted, position + 1), model, str(position))


def accepted_at(accepted: Mapping[int, int], position: int) -> int:
    """Rounds in which at least so many tokens were accepted."""
    return sum(count for a, count in accepted.items() if a >= position)


def _label(suffix: str) -> str:
    return suffix.removeprefix("sdcp-").replace("-", "_").replace(" ", "_")
