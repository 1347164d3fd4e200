"""A session's work at the engine: what is drafted now, and what may be next (section 6.2)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sdcpd.engine.api import Draft, DraftEngine, DraftWork, EngineError, Prefix
from sdcpd.protocol.drafter import DrafterSession
from sdcpd.protocol.drafter_io import (
    Assumed,
    AssumeToken,
    Drafted,
    DrafterEvent,
    DraftTokens,
    Prepared,
    PrepareFailed,
    PrepareTokens,
)
from sdcpd.protocol.messages import Rule
from sdcpd.protocol.sparse import SparseRows

Rows = bytes | SparseRows


def draft_work(machine: DrafterSession, draft: DraftTokens, *, vocab: int) -> DraftWork:
    """What a machine asks for, as an engine takes it."""
    scope = machine.assignment.contract.scope or b""
    return DraftWork(
        session=machine.session,
        prefix=Prefix(machine.tokens, draft.length, machine.prompt_length, scope),
        m=draft.m,
        rule=machine.assignment.contract.rule,
        sampling=draft.sampling,
        base=draft.base,
        vocab=vocab,
        after=draft.after,
    )


def drafted(work: int, draft: Draft, *, crowded: bool) -> Drafted:
    """What an engine made, as a machine takes it."""
    token_s = draft.seconds / max(1, len(draft.tokens))
    return Drafted(work, draft.tokens, token_s, rows=bool(draft.q_rows), crowded=crowded)


class Preparing:
    """What an engine does ahead for one session (D-D4); at most one thing at a time."""

    def __init__(
        self,
        machine: DrafterSession,
        *,
        vocab: int,
        engine: DraftEngine,
        spawn: Callable[..., asyncio.Task[Any]],
        crowded: Callable[[], bool],
        step: Callable[[DrafterEvent], None],
    ) -> None:
        """`step` takes the events that come of it."""
        self._machine, self._vocab = machine, vocab
        self._engine, self._spawn = engine, spawn
        self._crowded, self._step = crowded, step
        self._task: asyncio.Task[Any] | None = None
        self._rows: Rows = b""
        self.took = (0.0, 0.0)
        """When what is prepared was begun and done, by the monotonic clock."""

    def run(self, action: AssumeToken | PrepareTokens) -> None:
        """Do what the machine asks for, in a task."""
        self._task = self._spawn(self._run(action), name="prepare")

    def take(self) -> Rows:
        """The rows of what was prepared."""
        rows, self._rows = self._rows, b""
        return rows

    def drop(self) -> None:
        """End the work: the engine leaves it at its next pass."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._rows = b""

    async def _run(self, action: AssumeToken | PrepareTokens) -> None:
        event = await self._event(action)
        self._task = None  # before the step, which may end what has ended
        self._step(event)

    async def _event(self, action: AssumeToken | PrepareTokens) -> DrafterEvent:
        number, assumes = action.draft.work, isinstance(action, AssumeToken)
        work = draft_work(self._machine, action.draft, vocab=self._vocab)
        if assumes and work.rule == Rule.SPECULATIVE_SAMPLING:
            # The likeliest token is assumed: it is right more often than one drawn at random, and
            # what is assumed is not proposed, so that it needs no row.
            work = replace(work, rule=Rule.GREEDY)
        begin = time.monotonic()
        try:
            draft = await self._engine.draft(work)
        except EngineError:
            return PrepareFailed(number)
        if assumes:
            return Assumed(number, draft.tokens[0])
        self._rows, self.took = draft.q_rows or b"", (begin, time.monotonic())
        return Prepared(drafted(number, draft, crowded=self._crowded()))
