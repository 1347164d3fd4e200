"""What must hold after every step, whatever has happened to messages and processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sdcpd.engine.fake import FakeModel
from sdcpd.protocol.acceptance import (
    check_rows,
    draw_from,
    greedy,
    rule2,
    target_distribution,
    truncate,
    verifier_random,
    winner,
)
from sdcpd.protocol.codec import decode
from sdcpd.protocol.commit_log import CommitRecord, FenceRecord, LogSummary, decode_log, read_log
from sdcpd.protocol.contract import contract_digest
from sdcpd.protocol.digest import extend, prefix_digest0
from sdcpd.protocol.messages import (
    Contract,
    Output,
    Proposal,
    Rule,
    SessionOpen,
    Verdict,
)
from sdcpd.protocol.uris import session_path_id
from sdcpd.transport.http import Request, Response


class Broken(Exception):
    """An invariant does not hold."""


@dataclass
class Watched:
    """One session as the network has shown it."""

    session: bytes
    contract: Contract
    prompt: tuple[int, ...]
    log: LogSummary = field(default_factory=lambda: read_log([]))
    proposals: dict[tuple[int, int], list[tuple[Proposal, bytes | None]]] = field(
        default_factory=dict
    )
    expected: list[int] = field(default_factory=list)
    """What the target alone writes, as far as it was needed (rules 1 and 200)."""


class Checker:
    """Sees every message and every state of the logs; raises Broken."""

    def __init__(self, model: FakeModel, drafters: Mapping[str, FakeModel]) -> None:
        """`drafters` are the models of drafters, by base URI."""
        self.slips = 0
        """How often the store let a fence in before a record that it had let pass (D-M7)."""
        self.sessions: dict[str, Watched] = {}
        self.rows: dict[str, bytes] = {}
        self.steps = 0
        self.replayed = 0
        self._fences: dict[str, LogSummary] = {}
        """Logs of sessions that no verifier has heard of yet."""
        self._model, self._drafters = model, drafters

    # ---- messages

    def message(self, dest: str, request: Request, response: Response) -> None:
        """A request was answered by `dest`; the answer has not arrived yet."""
        self.steps += 1
        if response.status == 500:
            raise Broken(f"{dest} answered 500 to {request.method} {request.path}")
        if request.path.endswith("/proposals") and response.status == 200:
            self._verdict(decode(Proposal, request.body), decode(Verdict, response.body))
        elif request.path.endswith("/output") and response.status == 200:
            self._output(decode(Output, response.body))

    def before(self, request: Request) -> None:
        """A request is about to be handled: what it carries may become committed."""
        if request.path.endswith("/sessions") and request.method == "POST":
            opened = decode(SessionOpen, request.body)
            assert not isinstance(opened.prompt, str), "prompts are inline here"
            label = session_path_id(opened.session)
            if label not in self.sessions:
                watched = Watched(opened.session, opened.contract, opened.prompt)
                watched.log = self._fences.pop(label, watched.log)
                self.sessions[label] = watched
        elif request.path.endswith("/proposals"):
            proposal = decode(Proposal, request.body)
            watched = self._watched(proposal.session)
            self._proposed(watched, proposal)
            known = watched.proposals
            rows = self.rows.get(proposal.q_rows or "")
            known.setdefault((proposal.epoch, proposal.round), []).append((proposal, rows))
        elif request.method == "PUT" and "/objects/" in request.path:
            self.rows[f"https://{request.authority}{request.path}"] = request.body

    def _proposed(self, watched: Watched, proposal: Proposal) -> None:
        """A drafter proposes what its model writes after what is committed, prepared or not."""
        if watched.contract.rule == Rule.SPECULATIVE_SAMPLING:
            return  # its tokens are drawn at random
        text = [*watched.log.tokens[: proposal.base]]
        model = self._drafters[proposal.drafter]
        for _ in proposal.tokens:
            text.append(_next(model, watched, text))
        if tuple(text[proposal.base :]) != proposal.tokens:
            raise Broken(f"round {proposal.round} proposes what follows some other text")

    def _watched(self, session: bytes) -> Watched:
        return self.sessions[session_path_id(session)]

    def _verdict(self, proposal: Proposal, verdict: Verdict) -> None:
        """A verdict is of the proposal's epoch and round, and its record is in the log."""
        if (proposal.epoch, proposal.round) != (verdict.epoch, verdict.round):
            raise Broken(f"a proposal of epoch {proposal.epoch} got a verdict of {verdict.epoch}")
        record = CommitRecord(
            epoch=verdict.epoch,
            round=verdict.round,
            emitted=verdict.emitted,
            committed=verdict.committed,
            digest=verdict.digest,
        )
        if record not in self._watched(verdict.session).log.commits:
            raise Broken(f"the verdict of round {verdict.round} is not in the log")

    def _output(self, output: Output) -> None:
        """Output is what the log holds from there on."""
        log = self._watched(output.session).log
        part = log.tokens[output.from_ : output.from_ + len(output.tokens)]
        if part != output.tokens:
            raise Broken(f"output from {output.from_} is not what the log holds")
        if output.epoch > max(1, log.highest_epoch):
            raise Broken("output of an epoch that the log does not know")

    # ---- logs

    def log_changed(self, label: str, octets: bytes) -> None:
        """A log has a new state."""
        self.steps += 1
        watched, new = self.sessions.get(label), read_log(decode_log(octets))
        if watched is None:
            if new.commits:
                raise Broken("a session that no verifier was asked to open has commits")
            self._fences[label] = new
            return
        old = watched.log
        if self.slips == 0 and len(new.commits) + _fences(new) < len(new.records):
            raise Broken("a record of an old epoch was appended after its end")
        if new.records[: len(old.records)] != old.records:
            raise Broken("a log lost or changed a record")
        if new.commits[: len(old.commits)] != old.commits:
            raise Broken("the committed prefix did not only grow")
        for record in new.commits[len(old.commits) :]:
            self._commit(watched, old, record)
            watched.log = old = read_log([*old.records, record])
        watched.log = new

    def _commit(self, watched: Watched, log: LogSummary, record: CommitRecord) -> None:
        """One record a round, chained, and with the content that the rule gives."""
        last = log.last_valid
        round_, committed = (last.round, last.committed) if last else (0, 0)
        start = prefix_digest0(contract_digest(watched.contract), watched.prompt)
        digest = last.digest if last else start
        if record.round != round_ + 1:
            raise Broken(f"round {record.round} follows round {round_}")
        if record.committed != committed + len(record.emitted) or not record.emitted:
            raise Broken(f"round {record.round} miscounts its tokens")
        if record.digest != extend(digest, record.emitted):
            raise Broken(f"the digest of round {record.round} is not that of its tokens")
        if record.committed > watched.contract.max_new or self._stopped(watched, log.tokens):
            raise Broken(f"round {record.round} commits beyond the end")
        if watched.contract.rule == Rule.SPECULATIVE_SAMPLING:
            self._replay(watched, log.tokens, record)
        else:
            self.alone(watched, record.committed)
            if tuple(watched.expected[committed : record.committed]) != record.emitted:
                raise Broken(f"round {record.round} is not what the target alone would write")

    def _stopped(self, watched: Watched, tokens: Sequence[int]) -> bool:
        return any(token in watched.contract.stop for token in tokens)

    def alone(self, watched: Watched, count: int) -> list[int]:
        """The first `count` tokens of the target alone, fewer if it stops (rules 1 and 200)."""
        text = watched.expected
        while len(text) < count and not self._stopped(watched, text):
            text.append(_next(self._model, watched, text))
        return text

    # ---- rule 2: the same proposals, rows and seed give the same record

    def _replay(self, watched: Watched, tokens: tuple[int, ...], record: CommitRecord) -> None:
        self.replayed += 1
        candidates = watched.proposals.get((record.epoch, record.round), [])
        found = [
            self._round(watched, tokens, record.round, p.tokens, rows)
            for p, rows in candidates
            if p.base == len(tokens) and rows is not None
        ]
        found.append(self._round(watched, tokens, record.round, (), b""))
        if record.emitted not in found:
            raise Broken(f"round {record.round} is none of what its proposals give")

    def _round(
        self,
        watched: Watched,
        tokens: tuple[int, ...],
        round_: int,
        proposed: tuple[int, ...],
        rows: bytes,
    ) -> tuple[int, ...]:
        contract = watched.contract
        sampling = contract.sampling
        assert sampling is not None and sampling.seed is not None, "texts are seeded here"
        seed, session = sampling.seed, watched.session
        prefix = [*watched.prompt, *tokens]
        p = [
            target_distribution(self._model.scores([*prefix, *proposed[:i]]), sampling)
            for i in range(len(proposed) + 1)
        ]

        def draw(i: int, purpose: int) -> float:
            return verifier_random(seed, session, round_, i, purpose)

        if proposed:
            q = check_rows(rows, self._model.vocab, proposed)
            emitted = rule2(p, q, proposed, draw).emitted(proposed)
        else:
            emitted = (draw_from(p[0], draw(1, 1)),)
        cut, _ = truncate(emitted, base=len(tokens), max_new=contract.max_new, stop=contract.stop)
        return cut


def _next(model: FakeModel, watched: Watched, text: Sequence[int]) -> int:
    """What a model writes after output (rules 1 and 200)."""
    contract = watched.contract
    scores = model.scores([*watched.prompt, *text])
    if contract.rule == Rule.GREEDY:
        return greedy(scores)
    assert contract.sampling is not None and contract.sampling.seed is not None
    p = target_distribution(scores, contract.sampling)
    return winner(p, contract.sampling.seed, len(text) + 1)


def _fences(log: LogSummary) -> int:
    return sum(isinstance(record, FenceRecord) for record in log.records)
