"""The output of sessions for clients that come back to them, from wherever it is still to be had.

A session that the router knows is read as its first client reads it.  One that ended before the
router was restarted has its commit log, and its verifier still tells how it ended (D-G6, D-H12).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from sdcpd.protocol.commit_log import LogSummary
from sdcpd.protocol.instances import Board
from sdcpd.protocol.limits import OUTPUT_TOKENS_MAX
from sdcpd.protocol.messages import Action, InstanceRole, Output
from sdcpd.protocol.uris import join, session_path_id
from sdcpd.roles.calls import BadAnswer, Declined, call, read_answer
from sdcpd.roles.commit_log import CommitLog, LogUnavailable
from sdcpd.roles.generation import GenerationError, Tokens, closing_parts
from sdcpd.roles.output_reader import OutputReader
from sdcpd.roles.router_session import RoutedSession
from sdcpd.transport.http import Client, TransportError
from tiers.api import Records, TierError

ASK_TIMEOUT_S = 2.0  # of a question that costs a verifier nothing
RETRY_AFTER_S = 1.0
YOUNG_S = 3.0  # since its start, in which a router may not know its verifiers yet (D-R1)
UNFINISHED = (
    "the session failed, or was ended before its text was complete; all that it had committed was"
    " delivered"
)


class KnownOutput:
    """What a session of this router commits, which goes on for as long as it is read here."""

    def __init__(self, routed: RoutedSession, reader: OutputReader) -> None:
        self._routed, self._reader = routed, reader

    @property
    def stop(self) -> tuple[int, ...]:
        """See SessionOutput."""
        return self._routed.machine.contract.stop

    async def __aiter__(self) -> AsyncIterator[Tokens]:
        """See SessionOutput."""
        self._routed.readers += 1
        try:
            async with closing_parts(aiter(self._reader)) as parts:
                async for part in parts:
                    yield part
        finally:
            self._routed.readers -= 1


@dataclass(frozen=True, slots=True)
class LoggedOutput:
    """What the commit log of a session holds that is over; `finish` None: nobody knows how."""

    tokens: tuple[int, ...]
    finish: Action | None
    stop: tuple[int, ...] | None = None

    async def __aiter__(self) -> AsyncIterator[Tokens]:
        """See SessionOutput."""
        first, size = 0, OUTPUT_TOKENS_MAX
        while first + size < len(self.tokens):
            yield Tokens(self.tokens[first : first + size], finished=False)
            first += size
        yield Tokens(self.tokens[first:], finished=self.finish is Action.FINISH)
        if self.finish is Action.FAIL:
            raise GenerationError(UNFINISHED)


@dataclass(frozen=True, slots=True)
class Traces:
    """Where sessions have left something that the router does not remember."""

    client: Client
    board: Board
    records: Records | None
    base_uri: str
    since: float
    """When the router was started, in monotonic seconds."""

    async def output(self, session: bytes) -> LoggedOutput | None:
        """What such a session committed; None if it has no log.

        Raises GenerationError where the log can't be read now, where nobody can have told yet how
        it ended, and for a session that is open at another router, which alone knows where it goes
        on.
        """
        label = session_path_id(session)
        log = CommitLog(self.client, join(self.base_uri, f"logs/{label}"))
        try:
            # First who is open: whoever is not any more has its whole log then.
            others = await self.records.keys_of_all() if self.records is not None else ()
            summary = await log.read()
        except (LogUnavailable, TierError) as e:
            raise GenerationError(str(e), retry_after_s=RETRY_AFTER_S) from e
        if log.etag is None:
            return None
        if session in others:
            raise GenerationError(
                f"session {label} is open at another router of this cluster; ask there for its"
                " output",
                retry_after_s=RETRY_AFTER_S,
            )
        finish = await self._finish(label, summary)
        if finish is None and time.monotonic() < self.since + YOUNG_S:
            raise GenerationError(
                f"how session {label} ended is not known yet: the router has just been started",
                retry_after_s=RETRY_AFTER_S,
            )
        return LoggedOutput(summary.tokens, finish)

    async def _finish(self, label: str, log: LogSummary) -> Action | None:
        """How it ended, as the verifier tells that served it last, if it is still there."""
        now, role = time.monotonic(), InstanceRole.VERIFIER
        bases = [
            one.base
            for one in self.board.all()
            if one.status.role == role and self.board.fresh(one.base, role, now=now)
        ]
        told = await asyncio.gather(*(self._told(base, label, log) for base in bases))
        return next((finish for finish in told if finish is not None), None)

    async def _told(self, verifier: str, label: str, log: LogSummary) -> Action | None:
        uri = join(verifier, f"sessions/{label}/output?from={len(log.tokens)}")
        headers = (("prefer", "wait=0"),)
        try:
            response = await call(self.client, "GET", uri, headers=headers, timeout_s=ASK_TIMEOUT_S)
            output = read_answer(Output, response)
        except (Declined, TransportError, BadAnswer):
            return None  # most never had it
        # One that was fenced may have ended the session in its own way, which does not count.
        if not output.final or output.epoch < log.highest_epoch:
            return None
        return Action.FINISH if output.finish == Action.FINISH else Action.FAIL
