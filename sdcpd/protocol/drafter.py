"""One session at its drafter: section 6.2 and the reactions of D-D1, as a machine without I/O.

At most one proposal is outstanding (`_Outstanding`), and it is repeated with the same content until
it is answered.  Phases: drafting -> publishing (rule 2) -> proposing -> drafting ..., with
resynchronising in between when the verifier knows more than the drafter.  While the verdict is
awaited the next draft may be prepared (`preparation.py`); whatever but its verdict comes ends that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sdcpd.protocol.contract import contract_digest
from sdcpd.protocol.digest import extend, prefix_digest0
from sdcpd.protocol.drafter_io import (
    Assumed,
    AssumeToken,
    Drafted,
    DrafterAction,
    DrafterEvent,
    DraftFailed,
    DraftTokens,
    DropPrepared,
    FetchOutput,
    NoAnswer,
    OutputArrived,
    Pause,
    Prepared,
    PrepareFailed,
    PrepareTokens,
    ProblemArrived,
    Published,
    PublishFailed,
    PublishRows,
    ReleaseRows,
    SendProposal,
    Stop,
    TakePrepared,
    VerdictArrived,
    Woken,
)
from sdcpd.protocol.messages import Action, Assignment, Output, Sampling, SessionState, Verdict
from sdcpd.protocol.preparation import Payoff, Preparation, Worth
from sdcpd.protocol.problems import ProblemDocument
from sdcpd.protocol.speculation import AlphaEstimate, choose_m

REPEAT_FIRST_S, REPEAT_MAX_S = 0.1, 5.0
ROWS_RETRY_S = 10.0  # how long rows that the verifier can't get are written again (D-D1)
RESYNC_MAX = 3  # in a row (D-D2)


@dataclass(frozen=True, slots=True)
class DrafterSettings:
    """What the operator sets."""

    m: int | None = None
    """A fixed M; None chooses by section 6.2."""
    idle_s: float = 900.0
    """How long an unanswered proposal is repeated (D-D1)."""
    predraft: bool | None = None
    """Whether the next proposal is prepared meanwhile (D-D4); None: where it pays."""


@dataclass(frozen=True, slots=True)
class _Outstanding:
    """The round being drafted or proposed."""

    tokens: tuple[int, ...] = ()
    rows: bool = False
    reference: str | None = None
    redrafted: bool = False
    since: float = 0.0
    repeats: int = 0
    rows_since: float | None = None


class DrafterSession:
    """The session's whole state; `step` is the only way to change it."""

    def __init__(
        self,
        assignment: Assignment,
        *,
        prompt: Sequence[int],
        committed: Sequence[int],
        settings: DrafterSettings,
        verify_s: float,
        payoff: Payoff | None = None,
    ) -> None:
        """`verify_s` is the expected time of a round before one was measured.

        `payoff` is what this drafter's sessions learn together of preparing.  The caller has
        checked the assignment (D-N8), its digest included.
        """
        self.assignment = assignment
        self.session, self.epoch = assignment.session, assignment.epoch
        self.tokens = [*prompt, *committed]
        """Prompt and committed output as far as known; only grows."""
        self.prompt_length = len(prompt)
        self.round = assignment.round
        self.digest = assignment.digest
        self.alpha = AlphaEstimate()
        self.stopped: str | None = None
        self.rounds = self.proposed = self.accepted = 0
        self._settings = settings
        self._m_cap = assignment.m_init
        self._token_s = 0.0
        self._row_s = 0.0  # to publish the row of one token; stays 0 without rows
        self._verify_s = verify_s
        self._round = _Outstanding()
        self._ahead: Preparation | None = None
        self._worth = Worth(settings.predraft, payoff or Payoff())
        self._crowded = False
        self._works = 0
        self._wake: tuple[str, float] | None = None
        self._target: SessionState | None = None  # while resynchronising
        self._resyncs = 0
        self._actions: list[DrafterAction] = []

    @property
    def committed(self) -> int:
        """n as last learned."""
        return len(self.tokens) - self.prompt_length

    @property
    def sampling(self) -> Sampling:
        """The profile of the assignment, else of the contract (D-Y10)."""
        return self.assignment.sampling or self.assignment.contract.sampling or Sampling()

    def start(self, *, now: float) -> list[DrafterAction]:
        """Begin to draft; call once."""
        self._actions = []
        self._next_round(now)
        return self._actions

    def step(self, event: DrafterEvent, *, now: float) -> list[DrafterAction]:
        """Take one event; returns the actions it leads to, in order."""
        self._actions = []
        if self.stopped is not None:
            return self._actions
        match event:
            case Drafted() if event.work == self._works:
                self._drafted(event, now)
            case DraftFailed() if event.work == self._works:
                self._stop(f"drafting failed: {event.reason}", dropped=True)
            case Assumed() if self._prepares(event.work):
                self._assumed(event)
            case Prepared() if self._prepares(event.drafted.work):
                self._prepared(event.drafted, now)
            case PrepareFailed() if self._prepares(event.work):
                self._prepare_failed()
            case Published() if event.work == self._works:
                self._published(event, now)
            case PublishFailed() if event.work == self._works:
                self._rows_again(now, event.reason)
            case VerdictArrived():
                self._verdict(event.verdict, event.round_s, now)
            case ProblemArrived():
                self._spoil_preparation()
                self._problem(event.problem, now)
            case NoAnswer():
                self._spoil_preparation()
                self._again(now, "no answer")
            case OutputArrived():
                self._output(event.output, now)
            case Woken():
                self._woken(now)
        return self._actions

    # ---- a round

    def _next_round(self, now: float) -> None:
        self._round = _Outstanding(since=now)
        self._draft()

    def _limit(self, ahead: int = 0) -> int:
        """How many tokens may be proposed when `ahead` more are committed."""
        left = self.assignment.contract.max_new - self.committed - ahead
        return min(self._m_cap, self.assignment.contract.m_max, left)

    def _choose_m(self, limit: int) -> int:
        """Section 6.2: M is the one that commits most a second, within the limits."""
        token_s = max(self._token_s + self._row_s, 1e-6)
        m = self._settings.m or choose_m(
            self.alpha.value, token_s, max(self._verify_s, 1e-6), limit
        )
        return min(m, limit)

    def _draft(self) -> None:
        self._actions.append(self._work(self._choose_m(max(1, self._limit()))))

    def _work(self, m: int, after: tuple[int, ...] = ()) -> DraftTokens:
        self._works += 1
        base = self.committed + len(after)
        return DraftTokens(self._works, len(self.tokens), base, m, self.sampling, after)

    def _drafted(self, event: Drafted, now: float) -> None:
        self._token_s = _smoothed(self._token_s, event.token_s)
        self._crowded = event.crowded
        self._worth.drafted(now)
        self._round = replace(self._round, tokens=event.tokens, rows=event.rows, since=now)
        self._publish_or_propose(now)

    def _publish_or_propose(self, now: float) -> None:
        if not self._round.rows:
            self._propose(now)
            return
        self._works += 1
        self._actions.append(PublishRows(self._works, self.round + 1, len(self._round.tokens)))

    def _published(self, event: Published, now: float) -> None:
        """What a row costs to write counts as drafting: a slow cache asks for fewer tokens."""
        self._row_s = _smoothed(self._row_s, event.publish_s / len(self._round.tokens))
        self._round = replace(self._round, reference=event.reference)
        self._propose(now)

    def _propose(self, now: float) -> None:
        self._actions.append(
            SendProposal(
                self.round + 1,
                self.committed,
                self.digest,
                self._round.tokens,
                self._round.reference,
            )
        )
        if self._round.repeats == 0:
            self._prepare(now)

    def _verdict(self, verdict: Verdict, round_s: float, now: float) -> None:
        expected = (self.session, self.epoch, self.round + 1)
        if (verdict.session, verdict.epoch, verdict.round) != expected:
            self._stop("the verdict is for another round", dropped=True)
            return
        if not self._take(verdict.emitted, verdict.committed, verdict.digest):
            self._stop("the verdict's digest disagrees with its tokens", dropped=True)
            return
        proposed = len(self._round.tokens)
        accepted = min(verdict.accepted, proposed)
        self.round, self._m_cap, self._resyncs = verdict.round, max(1, verdict.m_cap), 0
        self.rounds += 1
        self.proposed += proposed
        self.accepted += accepted
        if self._round.repeats == 0:
            self.alpha.update(accepted=accepted, proposed=proposed)
            self._verify_s = 0.8 * self._verify_s + 0.2 * round_s if self.rounds > 1 else round_s
        if self._round.rows:
            self._actions.append(ReleaseRows())
        if verdict.action not in (Action.CONTINUE, Action.REDUCE):
            self._stop(f"verdict says {verdict.action.name.lower()}", dropped=False)
        elif self._ahead is not None and self._ahead.confirmed_by(verdict, self._m_cap):
            self._confirmed(self._ahead, now)
        else:
            self._drop_prepared()
            self._next_round(now)

    def _take(self, emitted: Sequence[int], committed: int, digest: bytes) -> bool:
        """Extend the prefix if the digests agree (D-D5)."""
        if committed != self.committed + len(emitted) or extend(self.digest, emitted) != digest:
            return False
        self.tokens.extend(emitted)
        self.digest = digest
        return True

    # ---- the round after it, while its verdict is awaited (D-D4)

    def _prepare(self, now: float) -> None:
        """Look beyond the proposal, where it is allowed, possible and worth it."""
        tokens, stop = self._round.tokens, self.assignment.contract.stop
        limit = self._limit(ahead=len(tokens) + 1)
        if limit < 1 or any(token in stop for token in tokens):
            return  # all accepted would be the end
        m = self._choose_m(limit)
        if self._worth.wanted(
            self.alpha.value, len(tokens), m * self._token_s, crowded=self._crowded, now=now
        ):
            work = self._work(1, after=tokens)
            self._ahead = Preparation(work.work, m, tokens)
            self._actions.append(AssumeToken(work))

    def _prepares(self, work: int) -> bool:
        return self._ahead is not None and self._ahead.work == work

    def _assumed(self, event: Assumed) -> None:
        assert self._ahead is not None, "looked at before"
        if event.token in self.assignment.contract.stop:
            self._drop_prepared()
            return
        after = (*self._ahead.after, event.token)
        work = self._work(self._ahead.m, after=after)
        self._ahead = replace(self._ahead, work=work.work, after=after, assumed=True)
        self._actions.append(PrepareTokens(work))

    def _prepared(self, event: Drafted, now: float) -> None:
        assert self._ahead is not None, "looked at before"
        self._ahead = replace(self._ahead, drafted=event)
        if self._ahead.confirmed:
            self._take_prepared(event, now)

    def _prepare_failed(self) -> None:
        assert self._ahead is not None, "looked at before"
        confirmed = self._ahead.confirmed
        self._drop_prepared()
        if confirmed:
            self._draft()

    def _confirmed(self, ahead: Preparation, now: float) -> None:
        """Use it; one that is not done yet is as far as a new draft would be, or farther."""
        self._round = _Outstanding(since=now)
        if ahead.drafted is not None:
            self._take_prepared(ahead.drafted, now)
        else:
            self._ahead = replace(ahead, confirmed=True)

    def _take_prepared(self, drafted: Drafted, now: float) -> None:
        self._ahead = None
        self._actions.append(TakePrepared())
        self._drafted(drafted, now)

    def _spoil_preparation(self) -> None:
        self._worth.spoiled()
        self._drop_prepared()

    def _drop_prepared(self) -> None:
        if self._ahead is not None:
            self._ahead = None
            self._actions.append(DropPrepared())

    # ---- when things go wrong (D-D1)

    def _problem(self, problem: ProblemDocument, now: float) -> None:
        suffix, status = problem.suffix, problem.status
        if self._target is not None and status < 500 and status != 429:
            self._stop(f"output refused: {problem}", dropped=True)
        elif suffix == "sdcp-stale-base":
            self._resynchronise(problem.session_state, now)
        elif suffix == "sdcp-q-unavailable":
            self._rows_again(now, str(problem))
        elif suffix == "sdcp-limit":
            self._shorten(problem.m_cap, now)
        elif suffix == "sdcp-bad-proposal" and not self._round.redrafted:
            self._round = _Outstanding(redrafted=True, since=now)
            self._draft()
        elif status == 429 or status >= 500:
            self._again(now, str(problem))
        else:
            self._stop(str(problem), dropped=suffix != "sdcp-session-closed")

    def _shorten(self, m_cap: int | None, now: float) -> None:
        """The same round with fewer of the same tokens."""
        have = len(self._round.tokens)
        if have == 1:
            self._stop("even one token is above the limit", dropped=True)
            return
        count = max(1, min(m_cap or have // 2, have - 1))
        self._m_cap = count
        self._round = replace(self._round, tokens=self._round.tokens[:count], reference=None)
        self._publish_or_propose(now)

    def _again(self, now: float, reason: str) -> None:
        """Repeat the identical request later, for as long as a session may be idle."""
        if now - self._round.since > self._settings.idle_s:
            self._stop(f"given up after {self._settings.idle_s:.0f} s: {reason}", dropped=True)
            return
        pause = min(REPEAT_FIRST_S * 2 ** min(self._round.repeats, 16), REPEAT_MAX_S)
        self._round = replace(self._round, repeats=self._round.repeats + 1)
        self._actions.append(Pause(pause))
        self._wake = ("output" if self._target is not None else "proposal", now + pause)

    def _rows_again(self, now: float, reason: str) -> None:
        """Write the same rows under a new name and repeat the round with the same tokens."""
        since = self._round.rows_since if self._round.rows_since is not None else now
        if not self._round.rows or now - since > ROWS_RETRY_S:
            self._stop(f"the draft rows cannot be had: {reason}", dropped=True)
            return
        pause = min(REPEAT_FIRST_S * 2 ** min(self._round.repeats, 16), REPEAT_MAX_S)
        self._round = replace(
            self._round, rows_since=since, repeats=self._round.repeats + 1, reference=None
        )
        self._actions.append(Pause(pause))
        self._wake = ("rows", now + pause)

    def _woken(self, now: float) -> None:
        kind, self._wake = self._wake, None
        match kind:
            case ("proposal", _):
                self._propose(now)
            case ("rows", _):
                self._publish_or_propose(now)
            case ("output", _):
                self._actions.append(FetchOutput(self.committed))

    # ---- resynchronising (D-D2)

    def _resynchronise(self, state: SessionState | None, now: float) -> None:
        self._resyncs += 1
        if state is None or state.epoch != self.epoch or state.committed < self.committed:
            self._stop("the verifier's state is not one to continue from", dropped=True)
        elif self._resyncs > RESYNC_MAX:
            self._stop(f"out of step {RESYNC_MAX} times in a row", dropped=True)
        elif state.committed == self.committed:
            self._target = state
            self._synchronised(now)
        else:
            self._target = state
            self._actions.append(FetchOutput(self.committed))

    def _output(self, output: Output, now: float) -> None:
        target = self._target
        if target is None:
            return
        wanted = target.committed - self.committed
        tokens = output.tokens[:wanted]
        if output.from_ != self.committed or output.epoch != self.epoch or not tokens:
            self._stop("the output does not continue this session", dropped=True)
            return
        self.tokens.extend(tokens)
        self.digest = extend(self.digest, tokens)
        if self.committed < target.committed:
            self._actions.append(FetchOutput(self.committed))
        else:
            self._synchronised(now)

    def _synchronised(self, now: float) -> None:
        target, self._target = self._target, None
        assert target is not None, "only called with a state to arrive at"
        if self.digest != target.digest:
            self._stop("digests disagree after resynchronising", dropped=True)
            return
        self.round = target.round
        if self._round.rows:
            self._actions.append(ReleaseRows())
        self._next_round(now)

    def _stop(self, reason: str, *, dropped: bool) -> None:
        self.stopped = reason
        self._drop_prepared()
        if self._round.rows:
            self._actions.append(ReleaseRows())
        self._actions.append(Stop(reason, dropped))


def _smoothed(known_s: float, measured_s: float) -> float:
    """The exponentially weighted mean of a duration, 0 before the first."""
    return measured_s if known_s == 0 else 0.8 * known_s + 0.2 * measured_s


def check_digest(assignment: Assignment, prompt: Sequence[int], committed: Sequence[int]) -> bool:
    """Whether an assignment's digest is that of its prompt and committed tokens (D-N8)."""
    if len(committed) != assignment.committed:
        return False
    start = prefix_digest0(contract_digest(assignment.contract), prompt)
    return extend(start, committed) == assignment.digest
