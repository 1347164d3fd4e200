"""A front end's side of section 6.7: every committed token once, whatever happens (D-G9)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import anyio

from sdcpd.protocol.logprobs import Row
from sdcpd.protocol.messages import Action, Output
from sdcpd.protocol.router import FAILURES_MAX
from sdcpd.protocol.router_io import Progress, VerifierLost
from sdcpd.protocol.uris import join
from sdcpd.roles.calls import BadAnswer, Declined, call, read_answer
from sdcpd.roles.commit_log import LogUnavailable
from sdcpd.roles.generation import GenerationError, GenerationStats, Tokens
from sdcpd.roles.logprobs import LogprobSource
from sdcpd.roles.router_session import RoutedSession
from sdcpd.transport.http import Client, TransportError

log = logging.getLogger("sdcpd.front_end")
POLL_S = 10.0
FAILED = "the session failed at its verifier"
ENDED_BY_OPERATOR = (
    "the session was ended by an operator of this service; what was committed until then was"
    " delivered"
)
FENCED = (
    "the session was ended by a fence in its commit log, at epoch {epoch}, which another router or"
    " sdcpctl log fence wrote; what was committed until then was delivered, ask again for more"
)
CANCELLED = (
    "the session was ended before its text was complete, because its client had gone or had enough;"
    " what was committed until then was delivered"
)


class _OutputLost(GenerationError):
    """The session has ended, and its verifier no longer has the output."""


class Told:
    """The log-probabilities of a text's tokens, where its verifier has told them or not.

    One that has taken the session over knows none of what the one before it has committed.
    """

    def __init__(self, source: LogprobSource, prompt: Sequence[int], alternatives: int) -> None:
        self._source, self._tokens, self._alternatives = source, list(prompt), alternatives

    async def rows(
        self, tokens: Sequence[int], told: tuple[Row, ...] | None, verifier: str
    ) -> tuple[Row, ...]:
        """A row for each of the text's next tokens; raises GenerationError."""
        first = len(self._tokens)
        self._tokens += tokens
        if told is not None and len(told) == len(tokens):
            return told
        return await self._source.rows(self._tokens, first, self._alternatives, first=verifier)


class OutputReader:
    """One text being generated; see `generation.Generation`."""

    def __init__(
        self,
        session: RoutedSession,
        *,
        client: Client,
        pause_s: float,
        from_: int = 0,
        told: Told | None = None,
    ) -> None:
        """`pause_s` is what lies between two attempts at a verifier (D-F1).

        `told`, where log-probabilities are wanted, is of a text that is read from its beginning.
        """
        self._session, self._client, self._told = session, client, told
        self._pause_s = pause_s
        self._read = from_
        self._epoch = 0
        self._earlier = GenerationStats()
        self._latest = GenerationStats()
        self._done = False

    @property
    def session(self) -> bytes:
        """The session's identifier."""
        return self._session.machine.session

    @property
    def stats(self) -> GenerationStats:
        """Over all verifiers that served the session."""
        a, b = self._earlier, self._latest
        return GenerationStats(
            rounds=a.rounds + b.rounds,
            drafted=a.drafted + b.drafted,
            accepted=a.accepted + b.accepted,
            self_decoded=a.self_decoded + b.self_decoded,
            committed=self._read,
        )

    async def cancel(self) -> None:
        """End the session early, unless somebody has come back to it."""
        if self._done:
            return
        self._done = True
        if not self._session.readers:
            await self._session.cancel()

    async def __aiter__(self) -> AsyncIterator[Tokens]:
        """Yield committed tokens as they come; raises GenerationError if the session fails."""
        try:
            async for part in self._from_verifiers():
                yield part
        except _OutputLost as lost:
            rest = await self._with_logprobs(await self._from_log(lost), None)
            if rest.tokens or rest.finished:
                yield rest
            if not rest.finished:
                raise GenerationError(self._why_ended()) from lost

    async def _from_verifiers(self) -> AsyncIterator[Tokens]:
        failures = 0
        while not self._done:
            verifier, epoch = await self._place()
            try:
                output = await self._get_unless_moved(verifier, epoch)
            except (Declined, TransportError, BadAnswer) as e:
                if isinstance(e, Declined) and e.problem.status != 500:
                    failures = 0
                    await self._refused(e, verifier, epoch)
                    continue
                failures += 1
                if failures >= FAILURES_MAX:
                    failures = 0
                    self._lost(verifier, str(e), epoch)
                await self._moved_or_paused(verifier, epoch)
                continue
            failures = 0
            if output is None:
                continue
            if output.epoch < self._epoch or output.from_ != self._read:
                # From a verifier that has lost its authority.
                self._session.stale_output()
                await self._moved_or_paused(verifier, epoch)
                continue
            self._take(output)
            finished = output.final and output.finish == Action.FINISH
            if output.tokens or finished:
                part = Tokens(output.tokens, finished=finished, parts=output.parts or ())
                yield await self._with_logprobs(part, output.logprobs)
            if output.final and not finished:
                raise GenerationError(self._why_ended())  # after what it had committed (D-G6)

    async def _with_logprobs(self, part: Tokens, told: tuple[Row, ...] | None) -> Tokens:
        if self._told is None:
            return part
        rows = await self._told.rows(part.tokens, told, self._session.machine.verifier)
        return replace(part, logprobs=rows)

    async def opened(self) -> None:
        """Wait until the session is open; raises GenerationError if it can't be."""
        await self._place()

    async def _get_unless_moved(self, verifier: str, epoch: int) -> Output | None:
        """Output, or None if the session goes on elsewhere: a frozen verifier answers no poll."""
        poll = asyncio.ensure_future(self._get(verifier))
        try:
            while not poll.done():
                changed = asyncio.ensure_future(self._session.wait_for_change())
                try:
                    await asyncio.wait({poll, changed}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
                if not poll.done() and self._session.place != (verifier, epoch):
                    return None
            return poll.result()
        finally:
            poll.cancel()

    async def _get(self, verifier: str) -> Output:
        uri = join(verifier, f"sessions/{self._session.label}/output?from={self._read}")
        response = await call(
            self._client,
            "GET",
            uri,
            headers=(("prefer", f"wait={POLL_S:.0f}"),),
            timeout_s=POLL_S + 10,
        )
        return read_answer(Output, response)

    def _take(self, output: Output) -> None:
        if output.epoch > self._epoch:
            self._earlier, self._latest = self.stats, GenerationStats()
            self._epoch = output.epoch
        self._read += len(output.tokens)
        self._latest = GenerationStats(
            rounds=output.rounds or 0,
            drafted=output.drafted or 0,
            accepted=output.accepted or 0,
            self_decoded=output.self_decoded or 0,
        )
        if output.final:
            self._done = True
        finish = Action.FINISH if output.finish == Action.FINISH else Action.FAIL
        self._session.step(
            Progress(self._read, closed=output.final, finish=finish if output.final else None)
        )

    async def _place(self) -> tuple[str, int]:
        session = self._session
        while session.place is None or session.machine.closed:
            if session.machine.closed:
                self._check_failed()
                break
            await session.wait_for_change()
        assert session.place is not None, "a session that never opened has failed"
        return session.place

    def _check_failed(self) -> None:
        failed = self._session.failed
        if failed is not None:
            raise GenerationError(f"the session could not be served: {failed}")
        if self._session.place is None and self._session.machine.ended is not None:
            # It ended while a restarted router had not found its verifier again.
            raise _OutputLost("its verifier was not reached again")
        if self._session.place is None:
            raise GenerationError("the session was ended before it began")

    async def _from_log(self, lost: _OutputLost) -> Tokens:
        """What a text still has in its log that ended before all was read, by a fence or not."""
        ended, fenced_at = self._session.machine.ended, self._session.machine.fenced_at
        if ended is None and fenced_at is None and not self._session.cancelled:
            raise lost
        tokens = await self._rest(lost)
        if self._read + len(tokens) < self._session.machine.committed:
            raise lost
        self._read += len(tokens)
        self._done = True
        return Tokens(tokens, finished=ended == Action.FINISH)

    async def _rest(self, lost: _OutputLost) -> tuple[int, ...]:
        """Read it there; the store is asked again as a verifier is."""
        failures = 0
        while True:
            try:
                return await self._session.rest(self._read)
            except LogUnavailable as e:
                failures += 1
                if failures >= FAILURES_MAX:
                    raise GenerationError(f"{lost}; {e}") from e
                await anyio.sleep(self._pause_s)

    def _why_ended(self) -> str:
        """What to say of a session that has ended without having finished."""
        if (epoch := self._session.machine.fenced_at) is not None:
            return FENCED.format(epoch=epoch)
        if self._session.cancelled_by_operator:
            return ENDED_BY_OPERATOR
        return CANCELLED if self._session.cancelled else FAILED

    def _lost(self, verifier: str, reason: str, epoch: int) -> None:
        if self._session.machine.closed:
            raise _OutputLost(f"the output was lost: {reason}")
        self._session.step(VerifierLost(verifier, reason, epoch))

    async def _refused(self, error: Declined, verifier: str, epoch: int) -> None:
        problem = error.problem
        if self._session.machine.closed and problem.status in (404, 409, 410):
            raise _OutputLost(f"the output was lost: {problem}")
        if problem.status in (404, 409, 410) and self._session.place == (verifier, epoch):
            self._lost(verifier, str(problem), epoch)
        elif problem.status not in (404, 409, 410, 429) and problem.status < 500:
            raise GenerationError(f"the verifier refuses the output: {problem}")
        await self._moved_or_paused(verifier, epoch)

    async def _moved_or_paused(self, verifier: str, epoch: int) -> None:
        """Go on when the session moves or ends, or after the pause."""
        session, closed = self._session, self._session.machine.closed
        with anyio.move_on_after(self._pause_s):
            while session.place == (verifier, epoch) and session.machine.closed == closed:
                await session.wait_for_change()
