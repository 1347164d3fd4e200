"""One session at the router: performs what its machine asks, one call at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from sdcpd.protocol.instances import Board
from sdcpd.protocol.messages import Assignment, InstanceRole, Message, SessionState
from sdcpd.protocol.problems import ProblemDocument
from sdcpd.protocol.router import Phase, RouterSession
from sdcpd.protocol.router_io import (
    Answered,
    AssignDrafter,
    Closed,
    FenceConflict,
    LogRead,
    Moved,
    NameAtVerifier,
    Named,
    Open,
    PostPolicy,
    Progress,
    ReadLog,
    Refused,
    RouterAction,
    RouterEvent,
    Save,
    SaveFailed,
    TokensWritten,
    Unreachable,
    Woken,
    WriteFence,
    WriteTokens,
)
from sdcpd.protocol.uris import join, session_path_id
from sdcpd.roles.calls import BadAnswer, Declined, call, read_answer
from sdcpd.roles.commit_log import CommitLog, LogUnavailable
from sdcpd.roles.objects import ObjectGone, Objects
from sdcpd.roles.router_counts import Assignments, RouterCounts
from sdcpd.roles.target_kv import find_target_kv
from sdcpd.roles.tasks import Tasks
from sdcpd.traces import HEADER
from sdcpd.transport.http import Client, TransportError
from tiers.api import Records, TierError

log = logging.getLogger("sdcpd.router")
OPEN_TIMEOUT_S = 120.0  # the verifier computes the prompt's KV meanwhile (D-F1)
CALL_TIMEOUT_S = 40.0  # PUT drafter waits for a round


@dataclass(frozen=True, slots=True)
class RouteContext:
    """What all sessions of a router share."""

    client: Client
    objects: Objects
    tasks: Tasks
    board: Board
    records: Records | None
    kv_objects: str | None
    """Base URI of the cache in which verifiers' KV is looked for; None: they publish none."""
    closed: Callable[[RoutedSession], None]
    totals: RouterCounts


class RoutedSession:
    """The machine, its commit log, and those who wait for it to move or to end."""

    def __init__(
        self, machine: RouterSession, *, context: RouteContext, traceparent: str = ""
    ) -> None:
        """`traceparent` goes along with all that is asked of verifiers and drafters."""
        self.machine = machine
        self._headers = ((HEADER, traceparent),) if traceparent else ()
        self.label = session_path_id(machine.session)
        self.failed: ProblemDocument | None = None
        self.place: tuple[str, int] | None = None
        """Verifier and epoch that serve the session, once it is open."""
        self.cancelled = False
        """Whether it was ended early, for want of a client or by an operator."""
        self.cancelled_by_operator = False
        self.readers = 0
        """Clients that have come back to it and read; it goes on for them."""
        self._context = context
        self._log = CommitLog(context.client, machine.commit_log, enforcing=True)
        self._verifier: str | None = None  # on whose account the session is
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._todo: deque[RouterAction] = deque()
        self._saving = False
        self._leased: list[str] = []  # objects that nobody else will release
        self._failovers = 0  # of the machine's, those that are counted
        self._assignments = Assignments(context.totals, restored=machine.restarted)

    def start(self) -> None:
        """Open the session."""
        self._perform(self.machine.start(now=time.monotonic()))

    def step(self, event: RouterEvent) -> None:
        """Feed the machine and perform what it asks for."""
        self._perform(self.machine.step(event, now=time.monotonic()))

    async def wait_for_change(self) -> None:
        """Wait until the session has moved or ended."""
        await self._changed.wait()

    async def cancel(self, *, by_operator: bool = False) -> None:
        """End the session; one that is still being opened ends as soon as it is open."""
        self.cancelled = True
        self.cancelled_by_operator |= by_operator
        if self.place is None or self.machine.closed:
            return
        await self._end_at_verifier(*self.place)
        self.step(Progress(self.machine.committed, closed=True))

    async def _end_at_verifier(self, verifier: str, epoch: int) -> None:
        """Ask the verifier to end it, or fence where that can't be asked (D-Z2)."""
        try:
            uri = join(verifier, f"sessions/{self.label}")
            await call(self._context.client, "DELETE", uri, timeout_s=5.0)
            return
        except (Declined, TransportError) as e:
            log.info("session %s: cancelled by fence: %s", self.label, e)
        try:
            summary = await self._log.read()
            await self._log.fence(max(epoch, summary.highest_epoch) + 1, etag=self._log.etag)
        except LogUnavailable as e:
            log.warning("session %s: could not be cancelled: %s", self.label, e)

    async def rest(self, from_: int) -> tuple[int, ...]:
        """Committed tokens from index `from_`, read from the log; raises LogUnavailable."""
        tokens = (await self._log.read()).tokens[from_:]
        self._log.drop_content()
        return tokens

    def close(self) -> None:
        """Stop the timer; called when the router stops."""
        if self._timer is not None:
            self._timer.cancel()

    def _perform(self, actions: list[RouterAction]) -> None:
        for action in actions:  # choices count at once, or a burst would make the same one
            if isinstance(action, Named):
                self._account(action)
            elif isinstance(action, Open):
                self._count_verifier(action.verifier)
                self._context.totals.failovers += self.machine.failovers - self._failovers
                self._failovers = self.machine.failovers
        self._todo.extend(action for action in actions if not isinstance(action, Named))
        if not self._saving:
            self._go_on()
        self._arm()

    def _go_on(self) -> None:
        """Perform what is to be done, in order; nothing before what it relies on is stored."""
        while self._todo:
            action = self._todo.popleft()
            if not isinstance(action, Save):
                self._perform_one(action)
            elif self._context.records is not None:
                self._saving = True
                self._spawn(self._save(action, self._context.records))
                return

    async def _save(self, action: Save, records: Records) -> None:
        try:
            if action.record is None:
                await records.delete(self.machine.session)
            else:
                await records.put(self.machine.session, action.record.encode())
        except TierError as e:
            if action.record is None:
                # A restart would find the session, learn that it has ended, and try again.
                log.warning("session %s: its record is still there: %s", self.label, e)
            else:
                log.error("session %s would not survive a restart: %s", self.label, e)
                self._not_saved(str(e))
        finally:
            self._saving = False
        self._go_on()

    def _not_saved(self, reason: str) -> None:
        """What the machine says to it comes first: it may end the session before it begins."""
        if self.machine.closed:
            return
        actions = self.machine.step(SaveFailed(reason), now=time.monotonic())
        if self.machine.closed:
            self._todo.clear()  # what relied on the record, an opening
        self._todo.extendleft(reversed(actions))

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.machine.deadline()
        if deadline is not None:
            delay = max(0.0, deadline - time.monotonic())
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay, lambda: self.step(Woken()))

    def _perform_one(self, action: RouterAction) -> None:
        match action:
            case Open():
                uri = join(action.verifier, "sessions")
                self._send(action.call, "POST", uri, action.message, OPEN_TIMEOUT_S)
            case PostPolicy():
                uri = join(action.verifier, f"sessions/{self.label}/policy")
                self._send(action.call, "POST", uri, action.message, CALL_TIMEOUT_S)
            case NameAtVerifier():
                uri = join(action.verifier, f"sessions/{self.label}/drafter")
                self._send(action.call, "PUT", uri, action.message, CALL_TIMEOUT_S)
            case AssignDrafter():
                uri = join(action.message.drafter, "assignments")
                self._send(action.call, "POST", uri, action.message, CALL_TIMEOUT_S)
            case ReadLog():
                self._spawn(self._read_log(action.call))
            case WriteFence():
                self._spawn(self._write_fence(action))
            case WriteTokens():
                self._spawn(self._write_tokens(action))
            case Moved():
                self._moved(action)
            case Closed():
                self._ended(action)

    def _spawn(self, coroutine: object) -> None:
        self._context.tasks.spawn(coroutine, name=f"session {self.label}")  # type: ignore[arg-type]

    def _send(self, number: int, method: str, uri: str, message: Message, timeout_s: float) -> None:
        self._spawn(self._exchange(number, method, uri, message, timeout_s))

    async def _exchange(
        self, number: int, method: str, uri: str, message: Message, timeout_s: float
    ) -> None:
        try:
            response = await call(
                self._context.client,
                method,
                uri,
                message=message,
                headers=self._headers,
                timeout_s=timeout_s,
            )
            state = read_answer(SessionState, response) if response.body else None
        except Declined as e:
            log.warning("session %s: %s %s: %s", self.label, method, uri, e)
            self.step(Refused(number, e.problem))
        except (TransportError, BadAnswer) as e:
            log.warning("session %s: %s %s: %s", self.label, method, uri, e)
            self.step(Unreachable(number, str(e)))
        else:
            if isinstance(message, Assignment) and method == "POST":
                self._assignments.taken(message)
            self.step(Answered(number, state))

    async def _read_log(self, number: int) -> None:
        try:
            summary = await self._log.read()
        except LogUnavailable as e:
            self.step(Unreachable(number, str(e)))
            return
        self.step(LogRead(number, summary, self._log.etag))

    async def _write_fence(self, action: WriteFence) -> None:
        try:
            written = await self._log.fence(action.epoch, etag=action.etag)
        except LogUnavailable as e:
            self.step(Unreachable(action.call, str(e)))
            return
        self.step(Answered(action.call) if written else FenceConflict(action.call))

    async def _write_tokens(self, action: WriteTokens) -> None:
        """Drafters can read output instead, so a cache that fails is no failure (D-N7)."""
        machine = self.machine
        reference = target_kv = None
        try:
            tokens = (await self._log.read()).tokens[: action.committed]
            if len(tokens) == action.committed:
                reference = await self._context.objects.write_tokens(
                    machine.session, machine.contract.scope, tokens
                )
                self._leased.append(reference)
                if machine.closed:
                    self._release()
        except (LogUnavailable, ObjectGone, TransportError) as e:
            log.info("session %s: committed tokens not written: %s", self.label, e)
        base = self._context.kv_objects
        if reference is not None and base is not None and machine.phase is Phase.SAVING:
            target_kv = await find_target_kv(
                self._context.objects,
                base,
                machine.session,
                scope=machine.contract.scope,
                prompt=machine.prompt,
            )
        self.step(TokensWritten(action.call, reference, target_kv))

    def _moved(self, action: Moved) -> None:
        if self.place not in (None, (action.verifier, action.epoch)):
            log.warning(
                "session %s: goes on at %s, epoch %d", self.label, action.verifier, action.epoch
            )
        self.place = (action.verifier, action.epoch)
        self._wake()
        if self.cancelled:
            self._spawn(self.cancel())

    def _account(self, action: Named) -> None:
        board = self._context.board
        if action.previous is not None:
            board.assigned(action.previous, InstanceRole.DRAFTER, -1)
        if action.drafter is not None:
            board.assigned(action.drafter, InstanceRole.DRAFTER, 1)

    def _count_verifier(self, verifier: str | None) -> None:
        """Counted from its choice on, so that a burst of sessions spreads (D-R6)."""
        if verifier == self._verifier:
            return
        for base, change in ((self._verifier, -1), (verifier, 1)):
            if base is not None:
                self._context.board.assigned(base, InstanceRole.VERIFIER, change)
        self._verifier = verifier

    def _ended(self, action: Closed) -> None:
        self.failed = action.failed
        self._context.totals.end(self.machine, cancelled=self.cancelled)
        self._count_verifier(None)
        self._log.drop_content()
        self._release()
        self._wake()
        self._context.closed(self)

    def _release(self) -> None:
        """What was written for the session is for nobody any more (D-M12)."""
        leased, self._leased = self._leased, []
        for reference in leased:
            self._spawn(self._context.objects.release(reference))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def stale_output(self) -> None:
        """Count output that no longer counts."""
        self._context.totals.stale_outputs += 1

    @property
    def waiting_for_drafter(self) -> bool:
        """Whether a fresh drafter would be named at once."""
        return self.machine.phase is Phase.WAITING
