"""Sections 6.1, 6.5 and 6.9 at the router's machine."""

from __future__ import annotations

import pytest

from sdcpd.protocol.commit_log import CommitRecord, FenceRecord, read_log
from sdcpd.protocol.instances import Board, Permitted
from sdcpd.protocol.messages import (
    Action,
    InstanceRole,
    Rule,
    Sampling,
    SessionState,
    Status,
)
from sdcpd.protocol.problems import Forbidden, ProblemDocument
from sdcpd.protocol.router import Phase, RouterSession, RouterSettings
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
    TokensWritten,
    Unreachable,
    VerifierLost,
    Woken,
    WriteFence,
    WriteTokens,
)
from tests.kit.verifier_machine import SESSION, contract

V0, V1, D0, D1 = "https://v0/", "https://v1/", "https://d0/", "https://d1/"
DIGEST = b"\x05" * 32


def status(name: str, role: InstanceRole, **changes: object) -> Status:
    members: dict[str, object] = {
        "instance": name,
        "role": role,
        "load": 0,
        "queue": 0,
        "ttl_ms": 1_000_000,
        "rules": (1, 2, 200),
        "vocab": 99,
        **changes,
    }
    return Status(**members)  # type: ignore[arg-type]


class Rig:
    """A machine, its board, and a clock."""

    def __init__(self, *, drafters: int = 1, verifiers: int = 1, **settings: float | None) -> None:
        self.now = 0.0
        self.board = Board({}, trust_all=True)
        for base in (V0, V1)[:verifiers]:
            self.board.report(base, status(base, InstanceRole.VERIFIER), now=0.0)
        for base in (D0, D1)[:drafters]:
            self.board.report(base, status(base, InstanceRole.DRAFTER), now=0.0)
        self.machine = RouterSession(
            session=SESSION,
            contract=contract(),
            prompt=(1, 2),
            commit_log="https://r/logs/x",
            verifier=V0,
            board=self.board,
            settings=RouterSettings(**settings),  # type: ignore[arg-type]
        )
        self.last = self.machine.start(now=0.0)

    def feed(self, event: RouterEvent) -> list[RouterAction]:
        self.last = self.machine.step(event, now=self.now)
        return self.last

    def only(self, kind: type) -> object:
        """The one call asked for last."""
        found = [a for a in self.last if isinstance(a, kind)]
        assert len(found) == 1, self.last
        return found[0]

    def answer(self, *, round_: int = 0, committed: int = 0) -> list[RouterAction]:
        """The call in flight succeeds."""
        state = SessionState(
            session=SESSION,
            epoch=self.machine.epoch,
            round=round_,
            committed=committed,
            digest=DIGEST,
        )
        return self.feed(Answered(self.machine._call, state))

    def run(self) -> None:
        """Up to RUNNING with the first drafter."""
        self.answer()
        self.answer()
        self.feed(Answered(self.machine._call))
        assert self.machine.phase is Phase.RUNNING

    def log(self, *records: CommitRecord | FenceRecord, etag: str = "t") -> list[RouterAction]:
        return self.feed(LogRead(self.machine._call, read_log(records), etag))


def record(round_: int, epoch: int = 1) -> CommitRecord:
    return CommitRecord(
        epoch=epoch, round=round_, emitted=(7,) * 2, committed=2 * round_, digest=DIGEST
    )


def test_open_name_assign_in_this_order() -> None:
    """R-3-1, R-6.1-1, R-6.1-12, R-6.1-13: the assignment carries the verifier's answer."""
    rig = Rig()
    opened = rig.only(Open)
    assert isinstance(opened, Open) and opened.message.epoch == 1 and opened.message.resume is None
    rig.answer()
    assert isinstance(rig.only(Moved), Moved)
    rig.only(NameAtVerifier)
    rig.answer(round_=5, committed=9)
    rig.only(WriteTokens)
    rig.feed(TokensWritten(rig.machine._call, "https://r/objects/x"))
    assign = rig.only(AssignDrafter)
    assert isinstance(assign, AssignDrafter)
    message = assign.message
    assert (message.round, message.committed, message.digest) == (5, 9, DIGEST)
    assert (message.drafter, message.committed_tokens, message.vocab) == (
        D0,
        "https://r/objects/x",
        99,
    )
    rig.feed(Answered(rig.machine._call))
    assert rig.machine.drafter == D0


def test_put_refused_as_stale_is_repeated_with_the_verifiers_values() -> None:
    """R-6.1-13, D-N1"""
    rig = Rig()
    rig.answer()
    found = SessionState(session=SESSION, epoch=1, round=4, committed=6, digest=DIGEST)
    problem = ProblemDocument(status=409, suffix="sdcp-stale-base", session_state=found)
    rig.feed(Refused(rig.machine._call, problem))
    again = rig.only(NameAtVerifier)
    assert isinstance(again, NameAtVerifier) and again.message.round == 4


def test_without_drafters_the_session_waits_for_the_first() -> None:
    """R-6.1-27, D-R3, D-Z6: opened at once, decoding alone at once."""
    rig = Rig(drafters=0)
    opened = rig.only(Open)
    assert isinstance(opened, Open) and opened.message.self_decode_after_ms == 0
    rig.answer()
    assert rig.machine.phase is Phase.WAITING
    rig.board.report(D0, status("d0", InstanceRole.DRAFTER), now=0.0)
    rig.feed(Woken())
    rig.only(NameAtVerifier)


@pytest.mark.parametrize("answer", ["refused", "unreachable"])
def test_failed_delivery_picks_another(answer: str) -> None:
    """D-N10"""
    rig = Rig(drafters=2)
    rig.answer()
    rig.answer()
    number = rig.machine._call
    if answer == "refused":
        rig.feed(Refused(number, ProblemDocument(status=422)))
    else:
        rig.feed(Unreachable(number, "gone"))
    name = rig.only(NameAtVerifier)
    assert isinstance(name, NameAtVerifier) and name.message.drafter == D1


def test_switch_takes_another_drafter() -> None:
    """R-6.5.2-18, R-6.5.2-32: once for an event, however often it comes."""
    rig = Rig(drafters=2)
    rig.run()
    rig.feed(EventArrived(Action.SWITCH, 4))
    name = rig.only(NameAtVerifier)
    assert isinstance(name, NameAtVerifier) and name.message.drafter == D1
    assert rig.feed(EventArrived(Action.SWITCH, 4)) == []


def test_switch_with_no_other_waits_and_takes_the_same() -> None:
    """D-R4: none before switch_grace, the same one after it."""
    rig = Rig(switch_grace_s=2.0)
    rig.run()
    rig.feed(EventArrived(Action.SWITCH, 4))
    assert rig.machine.phase is Phase.WAITING and rig.machine.deadline() == 2.0
    rig.now = 1.5
    rig.feed(Woken())
    assert rig.machine.phase is Phase.WAITING and rig.machine.deadline() == 2.0
    rig.now = 2.0
    rig.feed(Woken())
    name = rig.only(NameAtVerifier)
    assert isinstance(name, NameAtVerifier) and name.message.drafter == D0


def test_self_decode_event_names_any_drafter() -> None:
    """R-6.5.2-33"""
    rig = Rig()
    rig.run()
    rig.feed(EventArrived(Action.SELF_DECODE, 4))
    rig.only(NameAtVerifier)


@pytest.mark.parametrize("kind", [Action.FINISH, Action.FAIL])
def test_end_events_release(kind: Action) -> None:
    """D-V5, R-5.2-4"""
    rig = Rig()
    rig.run()
    rig.feed(EventArrived(kind, 4))
    assert isinstance(rig.last[-1], Closed) and rig.machine.closed


def test_lost_drafter_is_replaced() -> None:
    """R-6.9-1, R-6.9-2"""
    rig = Rig(drafters=2)
    rig.run()
    rig.feed(DrafterLost(D0))
    name = rig.only(NameAtVerifier)
    assert isinstance(name, NameAtVerifier) and name.message.drafter == D1


def test_no_progress_names_again_less_eagerly() -> None:
    """D-F1"""
    rig = Rig(progress_s=15.0)
    rig.run()
    rig.feed(Progress(4, False))
    rig.now = 15.0
    rig.feed(Woken())
    rig.only(NameAtVerifier)
    rig.answer()
    rig.feed(Answered(rig.machine._call))
    assert rig.machine.deadline() == 45.0


@pytest.mark.parametrize("after_s", [2.0, 30.0])
def test_how_long_requests_must_fail_is_configured(after_s: float) -> None:
    """R-6.9-16, D-F1: the third failure in a row, a third of the time apart."""
    rig = Rig(verifiers=2, failover_after_s=after_s)
    for failures in (1, 2):
        rig.feed(Unreachable(rig.machine._call, "refused"))
        assert not [a for a in rig.last if isinstance(a, ReadLog)]
        assert rig.machine.deadline() == pytest.approx(failures * after_s / 3)
        rig.now = rig.machine.deadline() or 0.0
        rig.feed(Woken())
        rig.only(Open)
    rig.feed(Unreachable(rig.machine._call, "refused"))
    rig.only(ReadLog)


def test_failover_in_exactly_its_order() -> None:
    """R-6.9-4, R-6.9-5, R-6.9-6, R-6.9-8, D-F2: read, fence, read again, tokens, open, name, assign."""
    rig = Rig(verifiers=2)
    rig.run()
    rig.feed(VerifierLost(V0, "gone"))
    rig.only(ReadLog)
    rig.log(record(1), etag="a")
    fence = rig.only(WriteFence)
    assert fence == WriteFence(rig.machine._call, 2, "a")
    rig.feed(Answered(rig.machine._call))
    rig.only(ReadLog)
    # A commit had slipped in before the fence: it counts.
    rig.log(record(1), record(2), FenceRecord(epoch=2))
    tokens = rig.only(WriteTokens)
    assert isinstance(tokens, WriteTokens) and tokens.committed == 4
    rig.feed(TokensWritten(rig.machine._call, "https://r/objects/t"))
    opened = rig.only(Open)
    assert isinstance(opened, Open) and opened.verifier == V1 and opened.message.epoch == 2
    resume = opened.message.resume
    assert resume is not None
    assert (resume.round, resume.committed, resume.digest) == (2, 4, DIGEST)
    assert resume.committed_tokens == "https://r/objects/t"
    rig.answer(round_=2, committed=4)
    name = rig.only(NameAtVerifier)
    assert isinstance(name, NameAtVerifier) and name.message.epoch == 2
    rig.answer(round_=2, committed=4)
    rig.feed(TokensWritten(rig.machine._call, "https://r/objects/t"))
    assign = rig.only(AssignDrafter)
    assert isinstance(assign, AssignDrafter)
    assert (assign.message.epoch, assign.message.verifier) == (2, V1)
    assert (assign.message.round, assign.message.committed) == (2, 4)


def test_fence_conflict_reads_again() -> None:
    """D-F2 step 2, D-M9"""
    rig = Rig(verifiers=2)
    rig.run()
    rig.feed(VerifierLost(V0, "gone"))
    rig.log(etag="a")
    rig.feed(FenceConflict(rig.machine._call))
    rig.only(ReadLog)


def test_an_epoch_that_is_not_ours_lets_the_session_go() -> None:
    """D-F1: another router has taken over."""
    rig = Rig(verifiers=2)
    rig.run()
    rig.feed(VerifierLost(V0, "409"))
    rig.log(record(1), FenceRecord(epoch=5))
    assert isinstance(rig.last[-1], Closed) and rig.machine.fenced_at == 5


def test_failure_before_any_commit() -> None:
    """R-6.9-15, D-F3"""
    rig = Rig(verifiers=2)
    for _ in range(3):
        rig.feed(Unreachable(rig.machine._call, "refused"))
        rig.now += 1.0
        rig.feed(Woken())
    rig.log(etag="a")
    rig.feed(Answered(rig.machine._call))
    rig.log(FenceRecord(epoch=2))
    opened = rig.only(Open)
    assert isinstance(opened, Open) and opened.message.epoch == 2 and opened.message.resume is None


@pytest.mark.parametrize(
    "problem",
    [ProblemDocument(status=404), ProblemDocument(status=409, suffix="sdcp-stale-epoch")],
)
def test_forgotten_and_fenced_sessions_fail_over(problem: ProblemDocument) -> None:
    """R-6.9-16"""
    rig = Rig(verifiers=2)
    rig.answer()
    rig.feed(Refused(rig.machine._call, problem))
    rig.only(ReadLog)


@pytest.mark.parametrize("code", [429, 503])
def test_busy_is_not_a_failure(code: int) -> None:
    """R-6.9-16: the same call again, later."""
    rig = Rig(verifiers=2)
    rig.answer()
    rig.feed(Refused(rig.machine._call, ProblemDocument(status=code)))
    assert rig.last == []
    rig.now = 1.0
    rig.feed(Woken())
    rig.only(NameAtVerifier)


def test_policy_is_posted_again_before_naming() -> None:
    """R-6.6-1, R-6.6-6, R-6.6-8, D-Y8"""
    rig = Rig(verifiers=2)
    rig.run()
    rig.feed(ChangePolicy(Sampling(temperature_milli=500)))
    posted = rig.only(PostPolicy)
    assert isinstance(posted, PostPolicy) and posted.message.from_round == 1
    rig.answer(round_=3, committed=6)
    rig.feed(VerifierLost(V0, "gone"))
    rig.feed(VerifierLost(V0, "gone"))
    rig.log(record(3))
    rig.feed(Answered(rig.machine._call))
    rig.log(record(3), FenceRecord(epoch=2))
    rig.feed(TokensWritten(rig.machine._call, "t"))
    rig.answer(round_=3, committed=6)
    again = rig.only(PostPolicy)
    assert isinstance(again, PostPolicy) and again.message.from_round == 4
    rig.answer(round_=3, committed=6)
    name = rig.only(NameAtVerifier)
    assert isinstance(name, NameAtVerifier)
    assert name.message.sampling == Sampling(temperature_milli=500)
    assert name.message.contract == contract()


def test_accounts_follow_the_drafter() -> None:
    rig = Rig(drafters=2)
    rig.answer()
    assert [a for a in rig.last if isinstance(a, Named)] == [Named(D0, None)]
    rig.answer()
    rig.feed(Answered(rig.machine._call))
    assert [a for a in rig.last if isinstance(a, Named)] == []
    rig.feed(DrafterLost(D0))
    assert Named(None, D0) in rig.last


# ---- the board


def test_choice_by_load_queue_acceptance() -> None:
    """R-6.1-21, D-R6; a burst between reports spreads."""
    board = Board({})
    board.report(D0, status("d0", InstanceRole.DRAFTER, load=90), now=0.0)
    board.report(D1, status("d1", InstanceRole.DRAFTER, load=10), now=0.0)
    assert board.choose_drafter(contract(), now=0.0) == D1
    board.report(D0, status("d0", InstanceRole.DRAFTER, load=10, accept_milli=800), now=0.0)
    assert board.choose_drafter(contract(), now=0.0) == D0
    board.assigned(D0, InstanceRole.DRAFTER, 1)
    assert board.choose_drafter(contract(), now=0.0) == D1


def test_expired_instances_are_not_chosen() -> None:
    """R-6.1-22, R-6.1-23, D-R1"""
    board = Board({})
    board.report(D0, status("d0", InstanceRole.DRAFTER, ttl_ms=200), now=0.0)
    board.report(V0, status("v0", InstanceRole.VERIFIER, ttl_ms=200), now=0.0)
    assert board.choose_drafter(contract(), now=0.1) == D0
    assert board.choose_drafter(contract(), now=0.4) is None
    assert board.choose_verifier(now=0.4) is None
    board.report(D0, status("d0", InstanceRole.DRAFTER, ttl_ms=0), now=1.0)
    assert board.choose_drafter(contract(), now=1.0) is None


def test_permitted_models_and_trust() -> None:
    """R-6.1-11, R-4.1-27, R-9-6, D-C6, D-C7"""
    model = bytes(31) + b"\x01"
    board = Board({D0: Permitted(model, trusted=False), D1: Permitted(bytes(32), trusted=True)})
    for base, name in ((D0, "d0"), (D1, "d1")):
        board.report(base, status(name, InstanceRole.DRAFTER), now=0.0)
    assert board.choose_drafter(contract(drafters=(model,)), now=0.0) == D0
    assert board.choose_drafter(contract(rule=Rule.SPECULATIVE_SAMPLING), now=0.0) == D1
    assert board.choose_drafter(contract(), now=0.0, exclude={D0, D1}) is None


def test_a_new_name_replaces_the_old_process() -> None:
    """R-6.1-26, D-R2: told once; two that report in turn do not fail each other."""
    board = Board({})
    assert not board.report(D0, status("d0.a", InstanceRole.DRAFTER), now=0.0)
    assert board.report(D0, status("d0.b", InstanceRole.DRAFTER), now=1.0)
    assert not board.report(D0, status("d0.a", InstanceRole.DRAFTER), now=2.0)
    assert not board.report(D0, status("d0.b", InstanceRole.DRAFTER), now=3.0)
    with pytest.raises(Forbidden):
        board.report(D1, status("d0.b", InstanceRole.DRAFTER), now=4.0)
