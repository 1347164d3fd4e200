"""One session at its verifier: sections 6.3, 6.5, 6.6 and 6.7 as a machine without I/O.

Everything that changes a session's state is in this file.  Rules:

1. One piece of work at a time.  A session is idle, or it works on one round: fetching rows, scoring
   or appending (`Phase`).  Requests that need an idle session wait in `_waiting`, in order.
2. Nothing is visible before it is durable.  Tokens, digest, round, counters and verdict change in
   `_commit` alone, which runs when the shell reports the append (D-P19).
3. A refused request changes nothing (D-P9).
4. Time and randomness are arguments; `deadline()` says when `Tick` is due.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sdcpd.protocol.acceptance import Acceptance, truncate, verifier_random
from sdcpd.protocol.commit_log import CommitRecord
from sdcpd.protocol.contract import contract_digest
from sdcpd.protocol.digest import PrefixChain, extend, prefix_digest0
from sdcpd.protocol.messages import (
    Action,
    Assignment,
    Contract,
    Event,
    Output,
    Rule,
    SessionState,
    State,
    Verdict,
)
from sdcpd.protocol.policy import PolicyTable
from sdcpd.protocol.problems import (
    BadContract,
    BadProposal,
    InternalError,
    LimitExceeded,
    NotAssigned,
    Problem,
    QUnavailable,
    SessionClosed,
    StaleBase,
    StaleEpoch,
    Unavailable,
    Unprocessable,
)
from sdcpd.protocol.speculation import Control, Decision
from sdcpd.protocol.uris import base_uri_equal
from sdcpd.protocol.verifier_io import (
    Abandon,
    Append,
    Appended,
    AppendFenced,
    AppendStalled,
    Cancel,
    Ended,
    FetchRows,
    NameDrafter,
    OutputChanged,
    PeriodDone,
    Propose,
    Refuse,
    Reply,
    RoundDone,
    RoundScored,
    RowsReady,
    ScoreFailed,
    ScoreRound,
    SendEvent,
    SetPolicy,
    Superseded,
    Tick,
    VerifierAction,
    VerifierEvent,
    WithdrawEvents,
)
from sdcpd.protocol.verifier_state import Assigned, Parts, Period, Phase, VerifierSettings, Work

FENCED = (
    "the session's commit log was fenced: this verifier commits to it and answers for it no more"
)
OUTPUT_TOKENS_MAX = 4096  # of one output message (D-G7)
ALONE_AGAIN_S = 0.5  # before self-decoding that was not permitted or failed is tried again


class VerifierSession:
    """The session's whole state; `step` is the only way to change it."""

    def __init__(
        self,
        *,
        session: bytes,
        epoch: int,
        contract: Contract,
        prompt: Sequence[int],
        vocab: int,
        settings: VerifierSettings,
        entropy: Callable[[], float],
        now: float,
        round_: int = 0,
        committed: Sequence[int] = (),
    ) -> None:
        self.session, self.epoch, self.contract = session, epoch, contract
        self.contract_digest = contract_digest(contract)
        self.prompt_length = len(prompt)
        self.tokens = [*prompt, *committed]
        """Prompt and output; only grows."""
        self.chain = PrefixChain(prefix_digest0(self.contract_digest, prompt), committed)
        self.round = round_
        self.verdicts: dict[int, Verdict] = {}
        self.fenced = False
        self.end_reason: str | None = None
        self.ended_at: float | None = None
        self.rounds = self.drafted = self.accepted = self.self_decoded = 0
        self._parts = Parts()
        self._state = State.WAITING
        self._vocab, self._settings, self._entropy = vocab, settings, entropy
        self._policies = PolicyTable(contract)
        self._control = Control(m_cap=contract.m_max)
        self._limit = contract.m_max  # what proposals are held to (D-P7, D-N2)
        self._assigned: Assigned | None = None
        self._period: Period | None = None
        self._phase = Phase.IDLE
        self._work: Work | None = None
        self._works = 0
        self._same_round: list[Propose] = []  # wait for the round at hand (D-P3)
        self._waiting: list[Propose | NameDrafter | SetPolicy] = []
        self._cancelled = False
        self._active_at = now
        self._undrafted_since = now
        self._alone_at = now  # not before that (`self_decode_after_s` may be 0)
        self._quiet_since: float | None = None
        self._gap_longest_s = 0.0
        self._actions: list[VerifierAction] = []
        if self._reached_end():
            self._end(State.FINISHED, "finish", now)
            self._actions.clear()

    # ---- what others read

    @property
    def committed(self) -> int:
        """n, the number of committed output tokens."""
        return len(self.tokens) - self.prompt_length

    @property
    def drafter(self) -> str | None:
        """Base URI of the drafter named last."""
        return self._assigned.drafter if self._assigned else None

    @property
    def busy(self) -> bool:
        """Whether a round is being worked on."""
        return self._phase is not Phase.IDLE

    @property
    def closed(self) -> bool:
        """Whether the session has finished or failed."""
        return self._state in (State.FINISHED, State.FAILED)

    @property
    def state(self) -> State:
        """As a session-state tells it."""
        return self._state

    def state_message(self) -> SessionState:
        """The session-state of this moment (D-O11, D-O12)."""
        return SessionState(
            session=self.session,
            epoch=self.epoch,
            round=self.round,
            committed=self.committed,
            digest=self.chain.digest,
            state=self._state,
        )

    def output(self, from_: int) -> Output | None:
        """Committed tokens from index `from_`, None if there are none yet (section 6.7).

        Raises StaleEpoch when fenced (D-P18).
        """
        if self.fenced:
            raise self._stale_epoch()
        part = self.tokens[self.prompt_length + from_ :][:OUTPUT_TOKENS_MAX]
        last = from_ + len(part) >= self.committed
        if not part and not self.closed:
            return None
        final = self.closed and last
        finish = Action.FINISH if self._state is State.FINISHED else Action.FAIL
        return Output(
            session=self.session,
            epoch=self.epoch,
            from_=from_,
            tokens=tuple(part),
            final=final,
            finish=finish if final else None,
            rounds=self.rounds,
            drafted=self.drafted,
            accepted=self.accepted,
            self_decoded=self.self_decoded,
            parts=self._parts.after(from_) if part else None,
        )

    def deadline(self) -> float | None:
        """When `Tick` is due, None if time alone changes nothing."""
        if self.closed or self.fenced or self._phase is not Phase.IDLE:
            return None
        times = [self._active_at + self._settings.idle_s]
        if self._may_self_decode() and self._period is None:
            after = self._settings.self_decode_after_s
            silence = self._settings.drafter_silence_s
            if self._assigned is None or self._assigned.suspended:
                if after is not None:
                    times.append(max(self._undrafted_since + after, self._alone_at))
            elif silence is not None and self._quiet_since is not None:
                times.append(self._quiet_since + max(silence, 4 * self._gap_longest_s))
        return min(times)

    # ---- the machine

    def step(self, event: VerifierEvent, *, now: float) -> list[VerifierAction]:
        """Take one event; returns the actions it leads to, in order."""
        self._actions = []
        load = event.load if isinstance(event, Appended | Tick) else 0
        match event:
            case Propose() | NameDrafter() | SetPolicy():
                self._request(event, now)
            case Cancel():
                self._cancelled = True
                self._actions.append(Reply(event.request, None))
                if self._phase is Phase.IDLE:
                    self._after_round(now, load)
            case Abandon():
                self._abandon(event.request)
            case Superseded():
                self._lose("superseded by a higher epoch", now)
            case Tick():
                self._tick(load, now)
            case _:
                self._result(event, load, now)
        return self._actions

    def _result(self, event: VerifierEvent, load: int, now: float) -> None:
        """The shell's work for the round at hand has come to something."""
        work = self._work
        if work is None or getattr(event, "work", None) != work.number:
            return  # work of an earlier authority, discarded with it
        match event:
            case RowsReady(rows=bytes() | memoryview() as rows):
                self._score(work, rows)
            case RowsReady():
                self._give_up(event.problem or QUnavailable("the rows cannot be had"), now)
            case ScoreFailed():
                if event.fatal:
                    self._end(State.FAILED, event.reason, now)
                    self._actions.append(OutputChanged())
                self._give_up(InternalError(event.reason), now)
            case RoundScored():
                self._scored(work, Acceptance(event.accepted, event.additional))
            case Appended():
                self._commit(work, event, now)
            case AppendStalled():
                work.stalled = True
                self._refuse_waiting(self._log_silent())
            case AppendFenced():
                self._lose("fenced", now)

    # ---- requests

    def _request(self, event: Propose | NameDrafter | SetPolicy, now: float) -> None:
        try:
            match event:
                case Propose():
                    self._propose(event, now)
                case NameDrafter():
                    self._name(event, now)
                case SetPolicy():
                    self._set_policy(event)
        except Problem as problem:
            self._actions.append(Refuse(event.request, problem))

    def _propose(self, event: Propose, now: float) -> None:
        """The checks of D-P1, in its order."""
        p, assigned = event.proposal, self._assigned
        if assigned is None or not (
            event.is_instance(assigned.drafter) and base_uri_equal(p.drafter, assigned.drafter)
        ):
            raise NotAssigned(self._assigned_text(p.round))
        if p.epoch != self.epoch or self.fenced:
            raise self._stale_epoch()
        if (verdict := self.verdicts.get(p.round)) is not None:
            self._actions.append(Reply(event.request, verdict))
            return
        if self._work is not None and self._work.propose and self._work.round == p.round:
            self._wait_for_round(event)
            return
        if self.closed:
            raise SessionClosed("the session has ended")
        if assigned.suspended:
            raise NotAssigned("the assignment is suspended until the router names a drafter")
        if self._phase is not Phase.IDLE:
            self._end_period_by_drafter()
            self._hold(event)
            return
        try:
            self._begin_round(event, now)
        except Problem:
            self._answered(now)
            raise

    def _begin_round(self, event: Propose, now: float) -> None:
        p = event.proposal
        if (p.base, p.base_digest, p.round) != (self.committed, self.chain.digest, self.round + 1):
            raise StaleBase(
                "the proposal does not extend the committed prefix",
                session_state=self.state_message(),
            )
        if len(p.tokens) > (limit := min(self.contract.m_max, self._limit)):
            raise LimitExceeded(f"{len(p.tokens)} tokens, at most {limit}", m_cap=limit)
        if any(token >= self._vocab for token in p.tokens):
            raise BadProposal("a proposed token is beyond the vocabulary")
        if self._quiet_since is not None:
            self._gap_longest_s = max(self._gap_longest_s, now - self._quiet_since)
        if self.contract.rule == Rule.SPECULATIVE_SAMPLING and p.q_rows is None:
            raise QUnavailable("rule 2 needs q_rows")
        self._active_at, self._quiet_since = now, None
        self._end_period("drafter")
        self._state = State.ASSIGNED
        work = self._new_work(event)
        if self.contract.rule == Rule.SPECULATIVE_SAMPLING:
            assert p.q_rows is not None, "checked above"
            self._phase = Phase.FETCHING
            self._actions.append(FetchRows(work.number, p.q_rows, p.tokens))
        else:
            self._score(work, None)

    def _name(self, event: NameDrafter, now: float) -> None:
        """PUT drafter: errors in the order of D-N5, then D-N2 and D-N3."""
        a = event.assignment
        if a.epoch != self.epoch or self.fenced:
            raise self._stale_epoch()
        if self._phase is not Phase.IDLE and not self.closed:
            if self._period is not None and not self._assigned_already(a):
                self._period.ending = True
            self._hold(event)
            return
        if self.closed:
            raise SessionClosed("the session has ended")
        if contract_digest(a.contract) != self.contract_digest:
            raise BadContract("the contract is not the one the session was opened with")
        if a.m_init < 1:
            raise Unprocessable("m_init is 0; at least 1 is needed")
        self._assign(a, now)
        self._actions.append(Reply(event.request, self.state_message()))

    def _assign(self, a: Assignment, now: float) -> None:
        if self._assigned_already(a):
            return
        old, m_init = self._assigned, min(a.m_init, self.contract.m_max)
        same = old is not None and base_uri_equal(old.drafter, a.drafter)
        self._control = self._control.assigned(self.contract, a.m_init)
        # The same drafter may still go by the limit of its last verdict (D-N2).
        self._limit = max(m_init, self._limit) if same else m_init
        self._assigned = Assigned(a.drafter, a.m_init)
        self._end_period("drafter")
        self._state = State.ASSIGNED
        self._active_at = self._quiet_since = now
        self._actions.append(WithdrawEvents())

    def _assigned_already(self, a: Assignment) -> bool:
        """Whether it is the active assignment once more: that changes nothing (D-N2)."""
        old = self._assigned
        return (
            old is not None
            and not old.suspended
            and old.m_init == a.m_init
            and base_uri_equal(old.drafter, a.drafter)
        )

    def _set_policy(self, event: SetPolicy) -> None:
        if self.fenced:
            raise self._stale_epoch()
        if self.closed:
            raise SessionClosed("the session has ended")
        if self._phase is not Phase.IDLE:
            self._hold(event)
            return
        self._policies.accept(event.policy, self.round, state=self.state_message())
        self._actions.append(Reply(event.request, self.state_message()))

    def _hold(self, event: Propose | NameDrafter | SetPolicy) -> None:
        if self._work is not None and self._work.stalled:
            raise self._log_silent()
        self._waiting.append(event)

    def _wait_for_round(self, event: Propose) -> None:
        if self._work is not None and self._work.stalled:
            raise self._log_silent()
        self._same_round.append(event)

    def _abandon(self, request: int) -> None:
        self._waiting = [event for event in self._waiting if event.request != request]
        self._same_round = [event for event in self._same_round if event.request != request]
        problem = Unavailable("the round is taking too long", retry_after_s=1)
        self._actions.append(Refuse(request, problem))

    # ---- a round

    def _new_work(self, propose: Propose | None) -> Work:
        self._works += 1
        self._work = Work(self._works, self.round + 1, propose)
        return self._work

    def _score(self, work: Work, rows: bytes | memoryview | None) -> None:
        self._phase = Phase.SCORING
        sampling = self._policies.profile(work.round)
        seed, round_ = sampling.seed, work.round

        def draw(i: int, purpose: int) -> float:
            if seed is None:
                return self._entropy()
            return verifier_random(seed, self.session, round_, i, purpose)

        self._actions.append(
            ScoreRound(
                work.number,
                work.propose.proposal.tokens if work.propose else (),
                len(self.tokens),
                self.committed,
                self.contract.rule,
                sampling,
                draw,
                rows,
            )
        )

    def _scored(self, work: Work, acceptance: Acceptance) -> None:
        proposed = work.propose.proposal.tokens if work.propose else ()
        emitted, work.finished = truncate(
            acceptance.emitted(proposed),
            base=self.committed,
            max_new=self.contract.max_new,
            stop=self.contract.stop,
        )
        work.acceptance = acceptance
        work.record = CommitRecord(
            epoch=self.epoch,
            round=work.round,
            emitted=emitted,
            committed=self.committed + len(emitted),
            digest=extend(self.chain.digest, emitted),
        )
        self._phase = Phase.APPENDING
        self._actions.append(Append(work.number, work.record))

    def _commit(self, work: Work, event: Appended, now: float) -> None:
        """The record is durable: everything of the round becomes visible at once (D-P19)."""
        record, acceptance = work.record, work.acceptance
        assert record is not None and acceptance is not None, "only a scored round is appended"
        self.tokens.extend(record.emitted)
        self.chain.append(record.emitted)
        self.round = work.round
        self._active_at = now
        self._phase, self._work = Phase.IDLE, None
        if work.propose is None:
            self._committed_alone(work, now)
        else:
            self._committed_proposal(work, work.propose, record, acceptance, event, now)
        self._actions.append(OutputChanged())
        self._after_round(now, event.load)

    def _committed_alone(self, work: Work, now: float) -> None:
        self.self_decoded += 1
        self._parts.add(self.committed, 0)
        self._actions.append(RoundDone(None, 0))
        if self._period is not None and self._period.left is not None:
            self._period.left -= 1
        if work.finished:
            self._end(State.FINISHED, "finish", now)

    def _committed_proposal(
        self,
        work: Work,
        propose: Propose,
        record: CommitRecord,
        acceptance: Acceptance,
        event: Appended,
        now: float,
    ) -> None:
        proposed = len(propose.proposal.tokens)
        self._control, decision = self._control.after_round(
            self.contract,
            accepted=acceptance.accepted,
            proposed=proposed,
            finished=work.finished,
            load=event.load,
            lower=event.lower,
        )
        self._limit = self._control.m_cap
        verdict = Verdict(
            session=self.session,
            epoch=self.epoch,
            round=work.round,
            accepted=acceptance.accepted,
            emitted=record.emitted,
            committed=record.committed,
            digest=record.digest,
            action=decision.action,
            m_cap=self._limit,
            low=decision.low,
            load=event.load,
        )
        self.verdicts[work.round] = verdict
        self.rounds += 1
        self.drafted += proposed
        self.accepted += acceptance.accepted
        rejected = propose.proposal.tokens[acceptance.accepted :]
        self._parts.add(self.committed, acceptance.accepted, *rejected)
        self._answered(now)
        for waiter in [propose, *self._same_round]:
            self._actions.append(Reply(waiter.request, verdict))
        self._same_round = []
        self._actions.append(RoundDone(verdict, proposed, decision.skipped))
        self._escalate(decision, now)

    def _escalate(self, decision: Decision, now: float) -> None:
        """The effects of a verdict's action on the session (section 6.5.2)."""
        match decision.action:
            case Action.FINISH:
                self._end(State.FINISHED, "finish", now)
            case Action.FAIL:
                self._end(State.FAILED, "escalation exhausted", now)
            case Action.SWITCH:
                self._suspend(now)
                self._actions.append(SendEvent(self._event(Action.SWITCH)))
            case Action.SELF_DECODE:
                self._suspend(now)
                self._period = Period(self.contract.self_max, silent=False)
                self._state = State.SELF_DECODING

    def _suspend(self, now: float) -> None:
        assert self._assigned is not None, "a round has a drafter"
        self._assigned.suspended = True
        self._state = State.WAITING
        self._undrafted_since = now
        self._quiet_since = None

    def _give_up(self, problem: Problem, now: float) -> None:
        """The round ends without a verdict; what waited for it is taken on its own (D-P3)."""
        assert self._work is not None
        work = self._work
        self._phase, self._work = Phase.IDLE, None
        self._answered(now)
        if work.propose is None:
            # Self-decoding could not go on: wait as if the period had ended, then try again.
            silent = self._period is not None and self._period.silent
            self._end_period("error")
            if not self.closed:
                self._state = State.ASSIGNED if silent else State.WAITING
            self._undrafted_since = now
            self._alone_at = now + ALONE_AGAIN_S
        else:
            self._actions.append(Refuse(work.propose.request, problem))
        self._waiting[:0] = self._same_round
        self._same_round = []
        self._after_round(now, 0)

    def _after_round(self, now: float, load: int) -> None:
        """At a round boundary: cancellation, then what waits, then the next token alone."""
        if self._cancelled and not self.closed and not self.fenced:
            self._end(State.FAILED, "cancelled", now)
            self._actions.append(OutputChanged())
        while self._waiting and self._phase is Phase.IDLE:
            self._request(self._waiting.pop(0), now)
        if self._phase is Phase.IDLE and self._period is not None and not self.closed:
            self._next_alone(load, now)

    # ---- self-decoding

    def _may_self_decode(self) -> bool:
        return self.contract.self_load is not None and self.contract.self_max != 0

    def _next_alone(self, load: int, now: float) -> None:
        """The next token of a period, or its end (D-K8)."""
        period, self_load = self._period, self.contract.self_load
        assert period is not None
        loaded = self_load is None or load > self_load
        if not (period.ending or period.left == 0 or loaded):
            self._score(self._new_work(None), None)
            return
        self._end_period("drafter" if period.ending else "load" if loaded else "self_max")
        self._undrafted_since = now
        if period.silent:
            self._state = State.ASSIGNED
            self._quiet_since = now
        else:
            self._state = State.WAITING
        if not period.ending:
            self._actions.append(SendEvent(self._event(Action.SELF_DECODE)))

    def _end_period(self, end: str) -> None:
        if self._period is not None:
            self._period = None
            self._actions.append(PeriodDone(end))

    def _end_period_by_drafter(self) -> None:
        if self._period is not None and self._period.silent:
            self._period.ending = True

    def _tick(self, load: int, now: float) -> None:
        due = self.deadline()
        if due is None or now < due:
            return
        if now >= self._active_at + self._settings.idle_s:
            self._end(State.FAILED, "idle", now)
            self._actions.append(OutputChanged())
            return
        assert self.contract.self_load is not None, "the deadline was for self-decoding"
        silent = self._assigned is not None and not self._assigned.suspended
        if load > self.contract.self_load:
            # Not permitted now; look again after the same time.
            self._undrafted_since = now
            self._alone_at = now + ALONE_AGAIN_S
            self._quiet_since = now if silent else None
            return
        self._period = Period(self.contract.self_max, silent=silent)
        self._state = State.SELF_DECODING
        self._next_alone(load, now)

    # ---- ends

    def _reached_end(self) -> bool:
        if self.committed >= self.contract.max_new:
            return True
        return self.committed > 0 and self.tokens[-1] in self.contract.stop

    def _end(self, state: State, reason: str, now: float) -> None:
        self._state, self.end_reason, self.ended_at = state, reason, now
        self._end_period("finish" if state is State.FINISHED else "fail")
        kind = Action.FINISH if state is State.FINISHED else Action.FAIL
        self._actions.append(SendEvent(self._event(kind)))
        self._actions.append(Ended(reason))

    def _lose(self, reason: str, now: float) -> None:
        """Authority is lost: discard the round, release nothing more (D-P18)."""
        self.fenced, self.end_reason, self.ended_at = True, reason, now
        self._refuse_waiting(self._stale_epoch())
        self._phase, self._work = Phase.IDLE, None
        self._end_period("fenced")
        self._actions += [WithdrawEvents(), OutputChanged(), Ended(reason)]

    def _refuse_waiting(self, problem: Problem) -> None:
        requests = [event.request for event in [*self._same_round, *self._waiting]]
        if self._work is not None and self._work.propose is not None:
            requests.insert(0, self._work.propose.request)
        self._same_round, self._waiting = [], []
        self._actions += [Refuse(request, problem) for request in requests]

    # ---- small things

    def _answered(self, now: float) -> None:
        if self._assigned is not None and not self._assigned.suspended:
            self._quiet_since = now

    def _event(self, kind: Action) -> Event:
        return Event(
            session=self.session,
            epoch=self.epoch,
            kind=kind,
            committed=self.committed,
            digest=self.chain.digest,
        )

    def _stale_epoch(self) -> StaleEpoch:
        if self.fenced:
            return StaleEpoch(FENCED)
        return StaleEpoch(f"the session's epoch is {self.epoch}")

    def _log_silent(self) -> Unavailable:
        return Unavailable("the commit log is not answering", retry_after_s=1)

    def _assigned_text(self, round_: int) -> str:
        if self._assigned is None:
            return f"round {round_}: no drafter is named for the session yet"
        return f"round {round_} is assigned to {self._assigned.drafter}"
