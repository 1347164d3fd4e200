"""What the front end counts of its clients' requests and texts, for monitoring."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from contextvars import ContextVar

from sdcpd.protocol.histogram import Histogram
from sdcpd.roles.api_answers import Piece
from sdcpd.roles.api_choices import Choices
from sdcpd.roles.api_text import Run
from sdcpd.roles.api_trace import RequestTrace

FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
PER_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
GONE = 499
"""Stands for the status of a request whose client left before it was answered."""

_arrived: ContextVar[float] = ContextVar("arrived")


class ApiCounts:
    """Counters since the start."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """By route and status; a stream counts when it begins."""
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        """From a request to the first token of its text, streamed or not."""
        self.per_token_s = Histogram(PER_TOKEN_S)
        """Between a text's first token and its end, for each token after the first."""
        self.request_s = Histogram(REQUEST_S)
        """From a request to the end of its text, whichever that was."""
        self.prompt_tokens = self.completion_tokens = 0
        self.waiting: Callable[[], int] = lambda: 0
        """How many texts wait for their session to open now."""

    def arrived(self) -> None:
        """A request begins in this task."""
        _arrived.set(time.monotonic())

    def answered(self, route: str, status: int) -> None:
        """A request was answered, or its client has gone."""
        self.requests[(route, status)] += 1


class CountedChoices(Choices):
    """Choices whose tokens and times are counted as they come."""

    def __init__(
        self,
        begins: Sequence[Callable[[], Run]],
        counts: ApiCounts,
        *,
        prompt_tokens: int,
        trace: RequestTrace | None = None,
    ) -> None:
        """`prompt_tokens`: of all prompts of the request, as its usage tells them."""
        super().__init__(begins)
        self._prompt_tokens, self._trace = prompt_tokens, trace
        self._counts = counts
        self._begin = _arrived.get(time.monotonic())
        self._first: dict[int, float] = {}  # by choice: when its first token came
        self._seen = [0] * len(begins)
        counts.prompt_tokens += prompt_tokens

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece | None], None]:
        """See Choices."""
        try:
            async with aclosing(super().pieces()) as pieces:
                async for index, piece in pieces:
                    self._count(index, ended=piece is None)
                    yield index, piece
        finally:
            for index in range(len(self._seen)):  # what came last of one that was cut short
                self._count(index, ended=False)
            self._counts.request_s.add(time.monotonic() - self._begin)
            if self._trace is not None:
                self._trace.used(self._prompt_tokens, sum(self._seen))

    def _count(self, index: int, *, ended: bool) -> None:
        run, counts = self.runs[index], self._counts
        if run is None:
            return
        tokens = run.completion_tokens
        counts.completion_tokens += tokens - self._seen[index]
        self._seen[index] = tokens
        if tokens and index not in self._first:
            now = time.monotonic()
            if not self._first:
                counts.first_token_s.add(now - self._begin)
            self._first[index] = now
        if ended and tokens > 1:
            counts.per_token_s.add((time.monotonic() - self._first[index]) / (tokens - 1))
