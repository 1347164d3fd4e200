"""A role's counters as Prometheus text (section 8, D-X3): what there is, and who asks for it.

Roles own their counts; modules here name them and read them when somebody asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from sdcpd.engine.api import KvUsage
from sdcpd.metrics import api, cache, cluster, engine, process, rounds
from sdcpd.metrics.exposition import MEDIA_TYPE, text_of
from sdcpd.metrics.families import Samples
from sdcpd.protocol.histogram import Histogram
from sdcpd.protocol.messages import State
from sdcpd.roles.counts import RoundCounts
from sdcpd.transport.refusals import REASONS, REQUEST_REASONS
from tiers.api import TierStats

if TYPE_CHECKING:
    from sdcpd.roles.api_counts import ApiCounts
    from sdcpd.roles.drafter import Drafter
    from sdcpd.roles.router import Router
    from sdcpd.roles.verifier import Verifier

__all__ = ["MEDIA_TYPE", "Metrics", "text_of_process"]
SOURCES = (
    rounds.samples,
    engine.samples,
    cluster.samples,
    api.samples,
    cache.samples,
    process.samples,
)


class Metrics:
    """What one role shows; what is None is not there, or not known yet."""

    def __init__(self, role: str, rounds: RoundCounts | None = None) -> None:
        """`rounds` are those of a verifier or drafter."""
        self.role, self.rounds = role, rounds
        self.handshake_failures: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        """Connections that were not let in, by reason."""
        self.refused_requests: Counter[str] = Counter(dict.fromkeys(REQUEST_REASONS, 0))
        """Requests that the transport refused, by reason."""
        self.expiries: Callable[[], Mapping[str, float]] | None = None
        """When what TLS goes by expires, by kind, in seconds since the epoch."""
        self.local_requests: Callable[[], int] | None = None
        """Requests for objects that came through shared memory."""
        self.model = ""
        """What the model of a verifier or drafter is called."""
        self.model_load_s: float | None = None
        """How long it took to load."""
        self.kv: Callable[[], KvUsage | None] | None = None
        """How the engine's memory for keys and values is used."""
        self.batches: Callable[[], Histogram | None] | None = None
        """How many rounds the passes of a target had."""
        self.sessions: Callable[[], Counter[State]] | None = None
        """A verifier's sessions by state."""
        self.alpha: Callable[[], float | None] | None = None
        """What a drafter expects of its proposals."""
        self.cache: Callable[[], TierStats] | None = None
        """The process's cache, tier by tier."""
        self.ready: Callable[[], bool] | None = None
        """Whether the instance can serve."""
        self.reloaded: Callable[[], bool] | None = None
        """Whether the last reload of the configuration found nothing wrong."""
        self.router: Router | None = None
        self.api: ApiCounts | None = None

    @classmethod
    def of_verifier(cls, verifier: Verifier) -> Metrics:
        """Those of a verifier."""
        made = cls("verifier", verifier.rounds)
        made.kv, made.sessions = verifier.kv_usage, verifier.session_states
        return made

    @classmethod
    def of_drafter(cls, drafter: Drafter) -> Metrics:
        """Those of a drafter."""
        made = cls("drafter", drafter.rounds)
        made.kv, made.alpha = drafter.kv_usage, drafter.alpha
        return made

    @classmethod
    def of_router(cls, router: Router) -> Metrics:
        """Those of a router; `api` is added once clients are served."""
        made = cls("router")
        made.router = router
        return made

    def refused(self, reason: str) -> None:
        """Count one refusal of the transport, by its word."""
        of_requests = reason in self.refused_requests
        (self.refused_requests if of_requests else self.handshake_failures)[reason] += 1

    def samples(self) -> Samples:
        """All of it as it is now."""
        for source in SOURCES:
            yield from source(self)

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return text_of_process([self])


def text_of_process(roles: Iterable[Metrics]) -> bytes:
    """What the roles of a process show, as one text with each family once."""
    return text_of((one.role, one.samples()) for one in roles)
