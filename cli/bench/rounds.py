"""What verifiers and drafters tell of rounds: by how much their metrics grew meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import click

from cli.asking import metrics_of
from cli.bench.figures import Usage
from cli.errors import CtlError
from cli.exposition import samples

FETCH_S = 5.0
METRICS_BYTES_MAX = 16 << 20
Key = tuple[str, str, str]
"""Name, role, and the stage or result where there is one."""
SHOWN = (
    "sdcp_rounds_total",
    "sdcp_draft_tokens_total",
    "sdcp_accepted_tokens_total",
    "sdcp_prepared_proposals_total",
    "sdcp_kv_adopted_tokens_total",
    "sdcp_round_duration_seconds_sum",
    "sdcp_round_duration_seconds_count",
    "sdcp_draft_token_seconds_sum",
    "sdcp_draft_token_seconds_count",
    "sdcp_proposal_rtt_seconds_sum",
    "sdcp_proposal_rtt_seconds_count",
)


@dataclass
class Sources:
    """Where metrics are read: admin sockets of this host, and ports for monitoring."""

    read: dict[str, Callable[[], str]]
    """By what they are called."""
    failed: dict[str, str] = field(default_factory=dict)
    """Those that could not be read, and why; they are not asked again."""

    @classmethod
    def of(cls, sockets: Sequence[Path], urls: Sequence[str]) -> Sources:
        """All that are named."""
        read: dict[str, Callable[[], str]] = {}
        for socket in sockets:
            read[f"unix:{socket}"] = partial(metrics_of, socket)
        for url in urls:
            read[url] = partial(_fetched, url)
        return cls(read)

    def look(self) -> Counter[Key]:
        """All counters that are of use here, added up over instances."""
        found: Counter[Key] = Counter()
        for name in [one for one in self.read if one not in self.failed]:
            try:
                text = self.read[name]()
            except CtlError as e:
                self.failed[name] = e.message
                continue
            for metric, labels, value in samples(text):
                if metric in SHOWN:
                    part = labels.get("stage") or labels.get("result") or ""
                    found[metric, labels.get("role", ""), part] += value  # type: ignore[assignment]
        return found


def _fetched(url: str) -> str:
    from http.client import HTTPException
    from urllib.request import urlopen

    if not url.startswith(("http://", "https://")):
        raise click.UsageError(f"--metrics {url}: write it as http://gpu1.lab:9464/metrics")
    try:
        with urlopen(url, timeout=FETCH_S) as response:
            return str(response.read(METRICS_BYTES_MAX).decode())
    except (OSError, HTTPException, ValueError) as e:
        raise CtlError(f"{url} tells no metrics: {getattr(e, 'reason', e)}") from e


@dataclass(frozen=True, slots=True)
class Rounds:
    """A round with a drafter, as an average over a point; None: nobody has told it."""

    tokens_per_pass: float | None
    m: float | None
    accepted: float | None
    round_s: float | None
    """From one arrival of text to the next, as a client sees it."""
    target_s: float | None
    """The target's passes in it."""
    drafting_s: float | None
    """Drafting in it that no wait for a verdict hides."""
    waiting_s: float | None
    """For the engine, and for other rounds of the pass."""
    commit_s: float | None
    network_s: float | None
    """Between drafter and verifier: from a proposal to its verdict, less the verifier's time."""
    told: int
    """Rounds that verifiers have told of meanwhile, of whatever client."""

    @property
    def overhead_s(self) -> float | None:
        """Round time less target pass and less drafting."""
        if self.round_s is None or self.target_s is None or self.drafting_s is None:
            return None
        return self.round_s - self.target_s - self.drafting_s


def rounds_of(usage: Usage, grown: Counter[Key]) -> Rounds:
    """From the usage of a point's texts, and what metrics grew by while they were written."""
    m = _by(usage.drafted, usage.rounds)
    total = _mean(grown, "sdcp_round_duration_seconds", "verifier", "total")
    rtt = _mean(grown, "sdcp_proposal_rtt_seconds", "drafter")
    waits = [_mean(grown, "sdcp_round_duration_seconds", "verifier", one) for one in WAITS]
    return Rounds(
        tokens_per_pass=_by(usage.tokens, usage.passes),
        m=m,
        accepted=_by(usage.accepted, usage.rounds),
        round_s=_by(usage.decode_s, usage.later) if usage.rounds else None,
        target_s=_mean(grown, "sdcp_round_duration_seconds", "verifier", "score"),
        drafting_s=_drafting(grown, m),
        waiting_s=None if None in waits else sum(one for one in waits if one is not None),
        commit_s=_mean(grown, "sdcp_round_duration_seconds", "verifier", "commit"),
        network_s=None if rtt is None or total is None else rtt - total,
        told=round(_sum(grown, "sdcp_rounds_total", "verifier")),
    )


WAITS = ("queue", "batch_wait")


def _drafting(grown: Counter[Key], m: float | None) -> float | None:
    """A round's drafting: only of proposals that were not prepared while a verdict was awaited."""
    token_s = _mean(grown, "sdcp_draft_token_seconds", "drafter")
    rounds = _sum(grown, "sdcp_rounds_total", "drafter")
    if not rounds or m is None:
        return None
    prepared = grown["sdcp_prepared_proposals_total", "drafter", "used"]
    return (token_s or 0.0) * m * max(0.0, 1 - prepared / rounds)


def adopted(grown: Counter[Key]) -> int | None:
    """Prompt tokens that verifiers had from a cache; None where none of them is seen."""
    key = ("sdcp_kv_adopted_tokens_total", "verifier", "")
    return round(grown[key]) if key in grown else None


def _sum(grown: Counter[Key], name: str, role: str) -> float:
    return sum(value for key, value in grown.items() if key[:2] == (name, role))


def _mean(grown: Counter[Key], name: str, role: str, part: str = "") -> float | None:
    return _by(grown[f"{name}_sum", role, part], grown[f"{name}_count", role, part])


def _by(value: float, count: float) -> float | None:
    return value / count if count else None
