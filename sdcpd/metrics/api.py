"""Metrics of the client API, which are its router's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdcpd.metrics.families import Samples, counter, gauge, histogram

if TYPE_CHECKING:
    from sdcpd.metrics import Metrics

ROLES = ("router",)
REQUESTS = counter(
    "sdcp_api_requests",
    "Requests of clients by resource and status; 499: the client left first. A stream counts when "
    "it begins.",
    "route",
    "code",
    roles=ROLES,
)
FIRST_TOKEN_S = histogram(
    "sdcp_api_time_to_first_token_seconds",
    "From a request to the first token of its text, streamed or not.",
    roles=ROLES,
)
PER_TOKEN_S = histogram(
    "sdcp_api_time_per_output_token_seconds",
    "From a text's first token to its end, by the tokens after the first.",
    roles=ROLES,
)
REQUEST_S = histogram(
    "sdcp_api_request_duration_seconds",
    "From a request to the end of its text; of texts that began.",
    roles=ROLES,
)
PROMPT = counter("sdcp_api_prompt_tokens", "Tokens of clients' prompts.", roles=ROLES)
COMPLETION = counter(
    "sdcp_api_completion_tokens",
    "Tokens of texts as `usage` tells them: without those behind a stop.",
    roles=ROLES,
)
QUEUE = gauge("sdcp_api_queue_depth", "Texts that wait for their session to open.", roles=ROLES)


def samples(metrics: Metrics) -> Samples:
    """All of them that a role has."""
    counts = metrics.api
    if counts is None:
        return
    for (route, status), count in sorted(counts.requests.items()):
        yield REQUESTS(count, route, str(status))
    yield FIRST_TOKEN_S(counts.first_token_s)
    yield PER_TOKEN_S(counts.per_token_s)
    yield REQUEST_S(counts.request_s)
    yield PROMPT(counts.prompt_tokens)
    yield COMPLETION(counts.completion_tokens)
    yield QUEUE(counts.waiting())
