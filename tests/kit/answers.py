"""What a test expects of an answer: the message, or the problem document."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sdcpd.protocol.messages import Output, SessionState, Verdict
from sdcpd.protocol.problems import ProblemDocument

PATIENCE_S = 20.0
# The test's own time limit is no bound: while a loop spins, its signal may arrive in code of the
# loop that swallows it.


def refused(answer: object, status: int, suffix: str | None = None) -> ProblemDocument:
    """The answer as a problem of that status and type."""
    assert isinstance(answer, ProblemDocument), answer
    assert (answer.status, answer.suffix) == (status, suffix), answer
    return answer


def verdict_of(answer: object) -> Verdict:
    """The answer as a verdict."""
    assert isinstance(answer, Verdict), answer
    return answer


def state_of(answer: object) -> SessionState:
    """The answer as a session-state."""
    assert isinstance(answer, SessionState), answer
    return answer


def output_of(answer: object) -> Output:
    """The answer as output."""
    assert isinstance(answer, Output), answer
    return answer


async def until(condition: Callable[[], object]) -> None:
    """Let the others run until something is so; what never comes fails the test."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)
