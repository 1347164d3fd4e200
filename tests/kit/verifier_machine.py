"""Drives one verifier session machine by hand: fake model, log in a list, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sdcpd.engine.fake import FakeModel
from sdcpd.protocol.acceptance import (
    check_rows,
    greedy,
    rule1,
    rule2,
    rule200,
    target_distribution,
)
from sdcpd.protocol.commit_log import CommitRecord
from sdcpd.protocol.messages import (
    Assignment,
    Contract,
    Event,
    InstanceRole,
    Message,
    Policy,
    Proposal,
    Rule,
    Sampling,
    Status,
    Verdict,
)
from sdcpd.protocol.problems import Problem, QUnavailable
from sdcpd.protocol.verifier import VerifierSession
from sdcpd.protocol.verifier_io import (
    Append,
    Appended,
    AppendFenced,
    FetchRows,
    NameDrafter,
    Propose,
    Refuse,
    Reply,
    RoundScored,
    RowsReady,
    ScoreRound,
    SendEvent,
    SetPolicy,
    Tick,
    VerifierAction,
    VerifierEvent,
)
from sdcpd.protocol.verifier_state import VerifierSettings

SESSION = bytes(range(16))
D0, D1 = "https://d0.test/", "https://d1.test/"
STATUS = Status(instance="d0", role=InstanceRole.DRAFTER, load=0, queue=0, ttl_ms=1000)


def contract(**changes: object) -> Contract:
    """A contract with sensible members, some of them changed."""
    members: dict[str, object] = {
        "target": bytes(32),
        "tokenizer": bytes(32),
        "rule": Rule.GREEDY,
        "m_max": 8,
        "max_new": 64,
        "stop": (),
        "low_rounds": 3,
        "fallback": (1, 2, 3, 5),
        **changes,
    }
    return Contract(**members)  # type: ignore[arg-type]


@dataclass
class Driver:
    """Performs the machine's actions at once unless `hold` names them."""

    contract: Contract = field(default_factory=contract)
    model: FakeModel = field(default_factory=FakeModel)
    prompt: tuple[int, ...] = (1, 2, 3)
    settings: VerifierSettings = field(default_factory=lambda: VerifierSettings(0.5, 3.0))
    load: int = 0
    hold: set[type[VerifierAction]] = field(default_factory=set)
    fenced: bool = False
    now: float = 100.0
    rows: dict[str, bytes] = field(default_factory=dict)
    log: list[CommitRecord] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    answers: dict[int, Message | Problem | None] = field(default_factory=dict)
    held: list[VerifierAction] = field(default_factory=list)
    requests: int = 0

    def __post_init__(self) -> None:
        self.machine = VerifierSession(
            session=SESSION,
            epoch=1,
            contract=self.contract,
            prompt=self.prompt,
            vocab=self.model.vocab,
            settings=self.settings,
            entropy=lambda: 0.5,
            now=self.now,
        )

    # ---- requests

    def name(self, drafter: str = D0, *, m_init: int = 4, **changes: object) -> object:
        """PUT drafter."""
        members: dict[str, object] = {
            "session": SESSION,
            "epoch": 1,
            "contract": self.contract,
            "verifier": "https://v0.test/",
            "drafter": drafter,
            "prompt": self.prompt,
            "round": 0,
            "committed": 0,
            "digest": bytes(32),
            "m_init": m_init,
            **changes,
        }
        assignment = Assignment(**members)  # type: ignore[arg-type]
        return self.ask(lambda n: NameDrafter(n, assignment))

    def propose(self, tokens: Sequence[int], *, client: str = D0, **changes: object) -> object:
        """POST proposals, right in every respect that `changes` does not change."""
        members: dict[str, object] = {
            "session": SESSION,
            "epoch": 1,
            "round": self.machine.round + 1,
            "drafter": client,
            "base": self.machine.committed,
            "base_digest": self.machine.chain.digest,
            "tokens": tuple(tokens),
            "status": STATUS,
            **changes,
        }
        proposal = Proposal(**members)  # type: ignore[arg-type]
        return self.ask(lambda n: Propose(n, proposal, lambda base: base == client))

    def policy(self, from_round: int, **sampling: int) -> object:
        """POST policy."""
        policy = Policy(session=SESSION, from_round=from_round, sampling=Sampling(**sampling))
        return self.ask(lambda n: SetPolicy(n, policy))

    def ask(self, event: object) -> object:
        """The answer, or None if it is still to come."""
        self.requests += 1
        number = self.requests
        self.feed(event(number))  # type: ignore[operator]
        return self.answers.get(number)

    def good(self, count: int) -> list[int]:
        """The next `count` tokens that the target itself would write."""
        return self.model.text(self.machine.tokens, count)

    def bad(self, count: int) -> list[int]:
        """Tokens of which the first is wrong."""
        right = self.good(1)[0]
        return [(right + 1) % self.model.vocab] * count

    # ---- the machine

    def feed(self, event: VerifierEvent) -> None:
        """Feed an event and everything that follows from it."""
        todo = [event]
        while todo:
            for action in self.machine.step(todo.pop(0), now=self.now):
                if type(action) in self.hold:
                    self.held.append(action)
                elif (result := self._perform(action)) is not None:
                    todo.append(result)

    def release(self) -> None:
        """Perform what was held; what follows from it is held again."""
        held, self.held = self.held, []
        for action in held:
            if (result := self._perform(action)) is not None:
                self.feed(result)

    def tick(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self.feed(Tick(self.load))

    def _perform(self, action: VerifierAction) -> VerifierEvent | None:
        match action:
            case Reply():
                self.answers.setdefault(action.request, action.message)
            case Refuse():
                self.answers.setdefault(action.request, action.problem)
            case ScoreRound():
                return self._score(action)
            case Append():
                if self.fenced:
                    return AppendFenced(action.work)
                self.log.append(action.record)
                return Appended(action.work, self.load)
            case FetchRows():
                return self._fetch(action)
            case SendEvent():
                self.events.append(action.event)
            case _:
                pass
        return None

    def _fetch(self, action: FetchRows) -> RowsReady:
        octets = self.rows.get(action.reference)
        if octets is None:
            return RowsReady(action.work, None, QUnavailable("not there"))
        try:
            check_rows(octets, self.model.vocab, action.tokens)
        except Problem as problem:
            return RowsReady(action.work, None, problem)
        return RowsReady(action.work, octets)

    def _score(self, action: ScoreRound) -> RoundScored:
        tokens = self.machine.tokens[: action.length]
        scores = [
            self.model.scores([*tokens, *action.tokens[:i]]) for i in range(len(action.tokens) + 1)
        ]
        if action.rule == Rule.GREEDY:
            found = rule1([greedy(row) for row in scores], action.tokens)
        else:
            p = [target_distribution(row, action.sampling) for row in scores]
            if action.rule == Rule.RACE:
                assert action.sampling.seed is not None
                found = rule200(p, action.tokens, action.sampling.seed, action.base)
            else:
                q = (
                    check_rows(action.q_rows, self.model.vocab, action.tokens)
                    if action.q_rows
                    else []
                )
                found = rule2(p, q, action.tokens, action.draw)
        return RoundScored(action.work, found.accepted, found.additional)


def verdict(answer: object) -> Verdict:
    """The answer as a verdict."""
    assert isinstance(answer, Verdict), answer
    return answer
