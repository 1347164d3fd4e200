"""One session at its router: sections 6.1, 6.5 and 6.9 as a machine without I/O.

    OPENING -> (POLICY) -> NAMING -> TOKENS -> ASSIGNING -> RUNNING
                              ^         drafter lost, event   |
                              +-------- WAITING <-------------+
    any -> FENCING -> OPENING      the verifier is lost (D-F2, in exactly its order)
    any -> CLOSED

One call is in flight at a time.  What happens meanwhile is remembered (`_rename`) and acted on when
the call is done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from sdcpd.protocol.commit_log import LogSummary
from sdcpd.protocol.contract import contract_digest
from sdcpd.protocol.digest import prefix_digest0
from sdcpd.protocol.instances import Board
from sdcpd.protocol.messages import (
    Action,
    Assignment,
    Contract,
    InstanceRole,
    Policy,
    Resume,
    Sampling,
    SessionOpen,
    SessionState,
    State,
)
from sdcpd.protocol.problems import ProblemDocument
from sdcpd.protocol.router_io import (
    Answered,
    AssignDrafter,
    ChangePolicy,
    Closed,
    DrafterLost,
    EventArrived,
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
    VerifierAppeared,
    VerifierLost,
    Woken,
    WriteFence,
    WriteTokens,
)
from sdcpd.protocol.router_record import SessionRecord

M_INIT_DEFAULT = 4  # D-R6
FAILURES_MAX = 3  # requests without an answer before a verifier counts as lost (D-F1)
RESTATED_MAX = 3  # calls repeated at once with the verifier's values
OPENING_TROUBLE_S = 30.0  # errors all the way for so long: the client is told (D-R3)
TROUBLE_S = 300.0  # the same for a session that has been served
GRACE_DOUBLINGS_MAX = 3  # of switch_grace, while drafters drop the session without any progress


class Phase(Enum):
    """Which call is in flight, or what the session waits for."""

    OPENING = "opening"
    POLICY = "policy"
    NAMING = "naming"
    TOKENS = "tokens"
    ASSIGNING = "assigning"
    WAITING = "waiting"
    RUNNING = "running"
    READING = "reading"
    FENCING = "fencing"
    REREADING = "rereading"
    SAVING = "saving"
    NO_VERIFIER = "no verifier"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """What the operator sets; durations in seconds."""

    switch_grace_s: float | None = 2.0
    progress_s: float = 15.0
    failover_after_s: float = 2.0
    """Over how long requests to a verifier fail before it counts as lost (D-F1)."""

    @property
    def retry_s(self) -> float:
        """Between two tries of a call."""
        return self.failover_after_s / FAILURES_MAX


NAMING = (Phase.NAMING, Phase.TOKENS, Phase.ASSIGNING)
FAILING_OVER = (Phase.READING, Phase.FENCING, Phase.REREADING, Phase.SAVING, Phase.NO_VERIFIER)


class RouterSession:
    """The session's whole state at the router; `step` is the only way to change it."""

    def __init__(
        self,
        *,
        session: bytes,
        contract: Contract,
        prompt: tuple[int, ...],
        commit_log: str,
        verifier: str,
        board: Board,
        settings: RouterSettings,
        drafter_wanted: bool = True,
        logprobs: int | None = None,
    ) -> None:
        """`logprobs`: how many alternatives to each token are wanted; for the first client alone,
        so that a restarted router does not ask for them.
        """
        self.session, self.contract, self.prompt = session, contract, prompt
        self.commit_log = commit_log
        self.epoch = 1
        self.verifier = verifier
        self.drafter: str | None = None
        self.phase = Phase.OPENING
        self.profile: Sampling | None = None  # set once a policy has changed it
        self.committed = 0
        self.failovers = 0
        self.ended: Action | None = None
        """Finish or fail, once the verifier has told."""
        self.fenced_at: int | None = None
        """The epoch of a fence that this router never wrote, where that has ended the session."""
        self.restarted = False
        """Whether a router before this one had it open."""
        self._board, self._settings = board, settings
        self._drafter_wanted, self._logprobs = drafter_wanted, logprobs
        self._state = SessionState(
            session=session,
            epoch=1,
            round=0,
            committed=0,
            digest=prefix_digest0(contract_digest(contract), prompt),
        )
        self._resume: Resume | None = None
        self._log: LogSummary | None = None
        self._call = 0
        self._retry: tuple[float, Callable[[float], None]] | None = None
        self._failures = 0
        self._restated = 0
        self._opened = False
        self._trouble_since: float | None = None  # errors without end, and since when
        self._trouble = ""
        self._policy_due = False
        self._counted: str | None = None  # the drafter on whose account the session is
        self._fruitless = 0  # times in a row that a drafter was lost before any progress
        self._candidate: str | None = None
        self._excluded: set[str] = set()
        self._rename: tuple[str | None, bool] | None = None  # (drafter to avoid, grace over)
        self._grace_until: float | None = None
        self._named_at = 0
        self._acted: set[tuple[int, int, int]] = set()
        self._progress_at: float | None = None
        self._progress_s = settings.progress_s
        self._saved: SessionRecord | None = None
        self._preferred: str | None = None  # the drafter that a restarted router had named
        self._actions: list[RouterAction] = []

    @classmethod
    def restored(
        cls, record: SessionRecord, *, board: Board, settings: RouterSettings
    ) -> RouterSession:
        """A session that this router had open before it was restarted (D-F5).

        `start` opens it again with the same content, which changes nothing where it is open (D-O1).
        """
        machine = cls(
            session=record.session,
            contract=record.contract,
            prompt=record.prompt,
            commit_log=record.commit_log,
            verifier=record.verifier,
            board=board,
            settings=settings,
            drafter_wanted=record.drafter_wanted,
        )
        machine.epoch, machine.profile = record.epoch, record.profile
        machine._resume, machine._preferred = record.resume, record.drafter
        machine._saved, machine._opened = record, True
        machine.restarted = True
        return machine

    # ---- what others read

    @property
    def closed(self) -> bool:
        """Whether nothing more will be done for the session."""
        return self.phase is Phase.CLOSED

    def deadline(self) -> float | None:
        """When `Woken` is due, None if time alone changes nothing."""
        if self.phase is Phase.CLOSED:
            return None
        times = []
        if self._retry is not None:
            times.append(self._retry[0])
        if self._grace_until is not None and self.phase is Phase.WAITING:
            times.append(self._grace_until)
        if self.phase is Phase.RUNNING and self._progress_at is not None and self.drafter:
            times.append(self._progress_at + self._progress_s)
        return min(times) if times else None

    # ---- the machine

    def start(self, *, now: float) -> list[RouterAction]:
        """Open the session at its verifier; call once."""
        self._actions = []
        if self._saved is not None and self._saved.failing_over:
            self._fail_over(now)  # where it was when the router stopped
        else:
            self._open(now)
        return self._saved_first()

    def step(self, event: RouterEvent, *, now: float) -> list[RouterAction]:
        """Take one event; returns the actions it leads to, in order."""
        self._actions = []
        if self.phase is Phase.CLOSED:
            return self._actions
        match event:
            case EventArrived():
                self._event(event, now)
            case DrafterLost():
                if event.drafter in (self.drafter, self._candidate):
                    self._drafter_lost(event.drafter, now)
            case VerifierLost():
                self._verifier_lost(event, now)
            case VerifierAppeared():
                self._verifier_appeared(event.verifier, now)
            case Progress():
                self._progress(event, now)
            case ChangePolicy():
                self._change_policy(event, now)
            case Woken():
                self._woken(now)
            case SaveFailed():
                self._save_failed(event.reason)
            case _:
                if event.call == self._call:
                    self._result(event, now)
        return self._saved_first()

    def _saved_first(self) -> list[RouterAction]:
        """The actions of this step, after what a restarted router must know of them (D-F5)."""
        if self.phase is Phase.CLOSED:
            return [Save(None), *self._actions]
        known = self._saved.drafter if self._saved else None
        record = SessionRecord(
            session=self.session,
            contract=self.contract,
            prompt=self.prompt,
            commit_log=self.commit_log,
            epoch=self.epoch,
            verifier=self.verifier,
            drafter=self._candidate if self.phase in NAMING else known,
            drafter_wanted=self._drafter_wanted,
            profile=self.profile,
            resume=self._resume,
            failing_over=self.phase in FAILING_OVER,
        )
        if record == self._saved:
            return self._actions
        self._saved = record
        return [Save(record), *self._actions]

    def _save_failed(self, reason: str) -> None:
        """A session that would not survive the router is not begun; one that runs goes on."""
        if not self._opened:
            self._close(ProblemDocument(status=503, detail=f"the session cannot be kept: {reason}"))

    def _result(self, event: RouterEvent, now: float) -> None:
        match event:
            case Answered():
                self._failures = self._restated = 0
                self._answered(event.state, now)
            case Refused():
                self._refused(event.problem, now)
            case Unreachable():
                self._unreachable(event.reason, now)
            case LogRead():
                self._log_read(event, now)
            case FenceConflict():
                self.epoch -= 1  # not ours: should it stand in the log, another router wrote it
                self._fail_over(now)
            case TokensWritten():
                self._tokens_written(event, now)

    def _new_call(self, phase: Phase) -> int:
        self.phase = phase
        self._call += 1
        self._retry = None
        return self._call

    # ---- opening

    def _open(self, now: float) -> None:
        fresh = self._board.choose_drafter(self.contract, now=now) is not None
        at_once = self.profile is None and not (self._drafter_wanted and fresh)
        message = SessionOpen(
            session=self.session,
            epoch=self.epoch,
            contract=self.contract,
            prompt=self.prompt,
            commit_log=self.commit_log,
            resume=self._resume,
            self_decode_after_ms=0 if at_once else None,
            logprobs=self._logprobs,
        )
        self._actions.append(Open(self._new_call(Phase.OPENING), self.verifier, message))

    def _answered(self, state: SessionState | None, now: float) -> None:
        if state is not None:
            self._state = state
            self.committed = max(self.committed, state.committed)
        match self.phase:
            case Phase.OPENING:
                self._progress_at, self._opened = now, True
                self._actions.append(Moved(self.verifier, self.epoch))
                if self._ended_there():
                    self.ended = Action.FAIL if self._state.state == State.FAILED else Action.FINISH
                    self._close(None)
                elif self.profile is not None:
                    self._post_policy()
                else:
                    self._name_next(now)
            case Phase.POLICY if self._policy_due:
                self._post_policy()
            case Phase.POLICY:
                self._name_next(now)
            case Phase.NAMING:
                self._named(now)
            case Phase.ASSIGNING:
                self._assigned(now)
            case Phase.FENCING:
                self._actions.append(ReadLog(self._new_call(Phase.REREADING)))

    def _ended_there(self) -> bool:
        """Whether what was opened again had come to its end: no event will tell.

        `state` has these values at verifiers of this project alone (D-O11), which their statuses
        show; others answer 410 to the drafter's naming.
        """
        status = self._board.status(self.verifier, InstanceRole.VERIFIER)
        ours = status is not None and status.vocab is not None
        over = self._state.state in (State.FINISHED, State.FAILED)
        return (ours and over) or self._state.committed >= self.contract.max_new

    def _name_next(self, now: float) -> None:
        avoid, grace = self._rename or (None, False)
        self.phase = Phase.WAITING
        self._need_drafter(avoid, now, grace=grace)

    def _post_policy(self) -> None:
        assert self.profile is not None, "there is a changed profile to post"
        self._policy_due = False
        message = Policy(
            session=self.session, from_round=self._state.round + 1, sampling=self.profile
        )
        self._actions.append(PostPolicy(self._new_call(Phase.POLICY), self.verifier, message))

    # ---- naming a drafter

    def _need_drafter(self, avoid: str | None, now: float, *, grace: bool) -> None:
        """A drafter is to be named; not `avoid`, if there is another or after the grace (D-R4)."""
        if self.phase not in (Phase.WAITING, Phase.RUNNING):
            self._rename = (avoid, grace)
            return
        self._rename = None
        if not self._drafter_wanted:
            self._settled(Phase.RUNNING)
            return
        self._drop_drafter()
        if self.committed > self._named_at:
            self._excluded.clear()
            self._fruitless = 0
        exclude = self._excluded | ({avoid} if avoid else set())
        choice = self._choose_drafter(now, exclude)
        if choice is None and grace:
            choice = self._board.choose_drafter(self.contract, now=now)
        if choice is None:
            self._wait_for_drafter(avoid, now)
            return
        self._grace_until = None
        self._candidate, self._preferred = choice, None
        self._count(choice)
        message = self._assignment(choice, None)
        self._actions.append(NameAtVerifier(self._new_call(Phase.NAMING), self.verifier, message))

    def _choose_drafter(self, now: float, exclude: set[str]) -> str | None:
        fresh = [d.base for d in self._board.drafters(self.contract, now=now)]
        if self._preferred in fresh and self._preferred not in exclude:
            return self._preferred
        return next((base for base in fresh if base not in exclude), None)

    def _wait_for_drafter(self, avoid: str | None, now: float) -> None:
        self._settled(Phase.WAITING)
        self._retry = None
        self._candidate = avoid
        grace = self._settings.switch_grace_s
        if self._grace_until is None and (avoid or self._excluded) and grace is not None:
            self._grace_until = now + grace * 2 ** min(
                max(0, self._fruitless - 1), GRACE_DOUBLINGS_MAX
            )
        if self._policy_due:
            self._post_policy()

    def _settled(self, phase: Phase) -> None:
        """All calls have succeeded."""
        self.phase = phase
        self._trouble_since = None

    def _drop_drafter(self) -> None:
        self.drafter = None
        self._count(None)

    def _count(self, drafter: str | None) -> None:
        """A drafter's account begins with its choice, so that a burst of sessions spreads."""
        if self._counted is not None:
            self._actions.append(Named(None, self._counted))
        if drafter is not None:
            self._actions.append(Named(drafter, None))
        self._counted = drafter

    def _drafter_lost(self, drafter: str, now: float) -> None:
        if self.committed <= self._named_at:
            # It has not got the session on: others first, and less eagerly each time, so that the
            # verifier's own decoding has its turn (D-R9).
            self._excluded.add(drafter)
            self._fruitless += 1
        self._need_drafter(drafter, now, grace=False)

    def _verifier_lost(self, event: VerifierLost, now: float) -> None:
        if self.phase in FAILING_OVER or event.verifier != self.verifier:
            return
        if event.epoch in (None, self.epoch):
            self._fail_over(now)

    def _verifier_appeared(self, verifier: str, now: float) -> None:
        """Open the session again, as a router before this one did: that tells if it is there."""
        if verifier == self.verifier and self.phase in (Phase.WAITING, Phase.RUNNING):
            self._preferred = self.drafter or self._preferred
            self._open(now)

    def _assignment(self, drafter: str, committed_tokens: str | None) -> Assignment:
        status = self._board.status(self.verifier, InstanceRole.VERIFIER)
        return Assignment(
            session=self.session,
            epoch=self.epoch,
            contract=self.contract,
            verifier=self.verifier,
            drafter=drafter,
            prompt=self.prompt,
            round=self._state.round,
            sampling=self.profile,
            committed=self._state.committed,
            digest=self._state.digest,
            committed_tokens=committed_tokens,
            m_init=min(self.contract.m_max, M_INIT_DEFAULT),
            vocab=status.vocab if status else None,
        )

    def _named(self, now: float) -> None:
        """The verifier's answer is what the assignment carries (D-N1)."""
        self._named_at = self._state.committed
        if self._state.committed == 0:
            self._assign(None, now)
        else:
            self._actions.append(WriteTokens(self._new_call(Phase.TOKENS), self._state.committed))

    def _assign(self, committed_tokens: str | None, now: float) -> None:
        assert self._candidate is not None, "a drafter was named"
        if not self._board.fresh(self._candidate, InstanceRole.DRAFTER, now=now):
            self._drafter_refused(now)  # never to an expired instance (section 6.1)
            return
        message = self._assignment(self._candidate, committed_tokens)
        self._actions.append(AssignDrafter(self._new_call(Phase.ASSIGNING), message))

    def _assigned(self, now: float) -> None:
        self._settled(Phase.RUNNING)
        self.drafter, self._candidate = self._candidate, None
        self._progress_at = now
        if self._policy_due:
            self._post_policy()
        elif self._rename is not None:
            avoid, grace = self._rename
            self._need_drafter(avoid, now, grace=grace)

    def _tokens_written(self, event: TokensWritten, now: float) -> None:
        reference = event.reference
        if self.phase is Phase.TOKENS:
            self._assign(reference, now)
        elif self.phase is Phase.SAVING and reference is None:
            self._trouble = "the committed tokens cannot be written to the cache"
            self._later(self._save, now)
        elif self.phase is Phase.SAVING:
            self._reopen(reference, now, target_kv=event.target_kv)

    # ---- answers that are errors, and no answers

    def _refused(self, problem: ProblemDocument, now: float) -> None:
        status, suffix = problem.status, problem.suffix
        self._trouble = str(problem)
        if status in (429, 503) or (status >= 500 and self.phase is Phase.ASSIGNING):
            if self.phase is Phase.OPENING and status == 429:
                self._try_another_verifier(now)
            self._later(self._again, now)
            return
        if status >= 500:
            self._unreachable(str(problem), now)
            return
        match self.phase:
            case Phase.ASSIGNING:
                self._drafter_refused(now)
            case Phase.OPENING if suffix in ("sdcp-stale-base", "sdcp-stale-epoch"):
                if self._trouble_since is None:
                    self._trouble_since = now
                    self._fail_over(now)
                else:
                    self._later(self._fail_over, now)
            case Phase.NAMING if suffix == "sdcp-stale-base" and problem.session_state is not None:
                # Another make of verifier checks the values: repeat with its own (D-N1).
                self._state = problem.session_state
                self._restate(self._rename_candidate, now)
            case Phase.NAMING if status == 403:
                self._drafter_refused(now)
            case Phase.POLICY if suffix == "sdcp-stale-base" and problem.session_state is not None:
                self._state = problem.session_state
                self._restate(lambda _: self._post_policy(), now)
            case Phase.NAMING | Phase.POLICY if status == 404 or suffix == "sdcp-stale-epoch":
                self._fail_over(now)
            case Phase.NAMING | Phase.POLICY if status == 410:
                self._close(None)
            case _:
                self._close(problem)

    def _restate(self, what: Callable[[float], None], now: float) -> None:
        """At once with the verifier's values; with a pace if that does not help."""
        self._restated += 1
        if self._restated > RESTATED_MAX:
            self._later(what, now)
        else:
            what(now)

    def _try_another_verifier(self, now: float) -> None:
        """429 is a definite no: the session is not open there, so no fence is needed."""
        other = self._board.choose_verifier(
            now=now, exclude={self.verifier}, target=self.contract.target
        )
        self.verifier = other or self.verifier

    def _drafter_refused(self, now: float) -> None:
        """Delivery failed: another drafter, starting again with PUT (D-N10)."""
        refused, self._candidate = self._candidate, None
        if refused is not None:
            self._excluded.add(refused)
        self.phase = Phase.WAITING
        self._need_drafter(refused, now, grace=False)

    def _rename_candidate(self, now: float) -> None:
        assert self._candidate is not None, "a drafter was being named"
        if not self._board.fresh(self._candidate, InstanceRole.DRAFTER, now=now):
            self._drafter_refused(now)
            return
        message = self._assignment(self._candidate, None)
        self._actions.append(NameAtVerifier(self._new_call(Phase.NAMING), self.verifier, message))

    def _unreachable(self, reason: str, now: float) -> None:
        self._failures += 1
        self._trouble = reason
        if self.phase is Phase.ASSIGNING:
            self._failures = 0
            self._drafter_refused(now)
        elif (
            self.phase in (Phase.OPENING, Phase.POLICY, Phase.NAMING)
            and self._failures >= FAILURES_MAX
        ):
            self._failures = 0
            self._trouble_since = now if self._trouble_since is None else self._trouble_since
            self._fail_over(now)
        else:
            self._later(self._again, now)

    def _later(self, what: Callable[[float], None], now: float) -> None:
        """Try again after a while, but not for ever: then the client is told."""
        self._call += 1  # whatever still comes of the last call no longer matters
        if self._trouble_since is None:
            self._trouble_since = now
        if now - self._trouble_since >= (TROUBLE_S if self._opened else OPENING_TROUBLE_S):
            self._close(ProblemDocument(status=503, detail=self._trouble))
            return
        self._retry = (now + self._settings.retry_s, what)

    def _again(self, now: float) -> None:
        """Repeat the call of this phase with the same content."""
        match self.phase:
            case Phase.OPENING:
                self._open(now)
            case Phase.POLICY:
                self._post_policy()
            case Phase.NAMING:
                self._rename_candidate(now)
            case Phase.ASSIGNING:
                self._drafter_refused(now)
            case Phase.READING | Phase.FENCING | Phase.REREADING:
                self._fail_over(now)
            case Phase.NO_VERIFIER:
                tokens = self._resume.committed_tokens if self._resume else None
                target_kv = self._resume.target_kv if self._resume else None
                self._reopen(tokens, now, target_kv=target_kv)

    # ---- failover, exactly D-F2

    def _fail_over(self, now: float) -> None:
        self._drop_drafter()
        self._rename = None
        self._grace_until = None
        self._actions.append(ReadLog(self._new_call(Phase.READING)))

    def _log_read(self, event: LogRead, now: float) -> None:
        self._log = event.log
        if self.phase is Phase.READING:
            if event.log.highest_epoch > self.epoch:
                # Never written here: another router has taken over (D-F1), or a person has.
                self.fenced_at = event.log.highest_epoch
                self._close(None)
                return
            self.epoch = max(self.epoch, event.log.highest_epoch) + 1
            self._actions.append(WriteFence(self._new_call(Phase.FENCING), self.epoch, event.etag))
        elif self.phase is Phase.REREADING:
            if event.log.last_valid is not None:
                self._save(now)
            else:
                self._reopen(None, now)

    def _save(self, now: float) -> None:
        assert self._log is not None and self._log.last_valid is not None, "there are tokens"
        committed = self._log.last_valid.committed
        self._actions.append(WriteTokens(self._new_call(Phase.SAVING), committed))

    def _reopen(
        self, committed_tokens: str | None, now: float, *, target_kv: str | None = None
    ) -> None:
        last = self._log.last_valid if self._log else None
        self._resume = None
        if last is not None and committed_tokens is not None:
            self._resume = Resume(
                round=last.round,
                committed=last.committed,
                digest=last.digest,
                committed_tokens=committed_tokens,
                target_kv=target_kv,
            )
            self.committed = max(self.committed, last.committed)
        verifier = self._board.choose_verifier(
            now=now, exclude={self.verifier}, target=self.contract.target
        )
        if verifier is None:
            self._trouble = "no verifier of the session's model is there"
            self.phase = Phase.NO_VERIFIER
            self._later(self._again, now)
            return
        self.verifier = verifier
        self.failovers += 1
        self._open(now)

    # ---- what others tell

    def _event(self, event: EventArrived, now: float) -> None:
        """React once per (epoch, kind, committed) (D-V3, D-V5)."""
        key = (self.epoch, event.kind, event.committed)
        if key in self._acted or event.kind in (Action.CONTINUE, Action.REDUCE):
            return
        self._acted.add(key)
        if self.phase is Phase.OPENING:
            # The event has overtaken the answer: the session is open.
            if event.kind in (Action.SWITCH, Action.SELF_DECODE):
                return  # a drafter is named as soon as that comes
            self._actions.append(Moved(self.verifier, self.epoch))
        self.committed = max(self.committed, event.committed)
        if event.kind not in (Action.SWITCH, Action.SELF_DECODE):
            self.ended = Action.FINISH if event.kind == Action.FINISH else Action.FAIL
            self._close(None)
        elif event.committed < self._named_at:
            return  # a drafter was named after that
        else:
            avoid = self.drafter if event.kind == Action.SWITCH else None
            self._need_drafter(avoid, now, grace=False)

    def _progress(self, event: Progress, now: float) -> None:
        if event.closed:
            self.ended = event.finish
            self._close(None)
        elif event.committed > self.committed or self._progress_at is None:
            self.committed = max(self.committed, event.committed)
            self._progress_at = now
            if self.phase is not Phase.OPENING and self.phase not in FAILING_OVER:
                self._trouble_since = None

    def _change_policy(self, event: ChangePolicy, now: float) -> None:
        self.profile = event.sampling
        if self.phase in (Phase.RUNNING, Phase.WAITING):
            self._post_policy()
        else:
            # Posted after opening, or as soon as the call in flight is done.
            self._policy_due = self.phase is not Phase.OPENING and self.phase not in FAILING_OVER

    def _woken(self, now: float) -> None:
        if self._retry is not None and now >= self._retry[0]:
            what, self._retry = self._retry[1], None
            what(now)
        elif self.phase is Phase.WAITING:
            over = self._grace_until is not None and now >= self._grace_until
            if over:
                self._excluded.clear()
                self._grace_until = None
            self._need_drafter(None if over else self._candidate, now, grace=over)
        elif (
            self.phase is Phase.RUNNING
            and self.drafter is not None
            and self._progress_at is not None
            and now >= self._progress_at + self._progress_s
        ):
            # No new output: name a drafter again, less eagerly each time (D-F1).
            self._progress_s *= 2
            self._progress_at = now
            self._need_drafter(self.drafter, now, grace=True)

    def _close(self, failed: ProblemDocument | None) -> None:
        self._drop_drafter()
        self.phase = Phase.CLOSED
        self._retry = self._grace_until = None
        # Ended sessions are remembered for late events; what is large is not needed for that.
        self.prompt, self._resume, self._log = (), None, None
        self._actions.append(Closed(failed))
