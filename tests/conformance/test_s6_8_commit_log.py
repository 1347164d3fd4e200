"""Section 6.8, the verifier's side: how it appends to the log, and what it makes of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cbor2
import pytest

from sdcpd.protocol.commit_log import (
    CommitRecord,
    FenceRecord,
    decode_log,
    encode_record,
    read_log,
)
from sdcpd.protocol.messages import Contract, Resume
from sdcpd.roles.commit_log import CommitLog
from sdcpd.transport.http import Request, Response
from tests.kit.answers import output_of, refused, state_of, verdict_of
from tests.kit.cluster import ROUTER
from tests.kit.mlc import MemoryMlc
from tests.kit.scripted_target import RowsModel, one_hot
from tests.kit.vectors import VECTORS, hashes
from tests.kit.verifier_wire import Wire

MakeWire = Callable[..., Wire]
LOGS = VECTORS["commit_log"]["cases"]
PROMPT = tuple(VECTORS["appendix_a"]["prompt"])


class PlainMlc(MemoryMlc):
    """A store of another make, which knows whole PUTs alone and answers each with 200 (D-M6)."""

    def _log(self, request: Request, name: str) -> Response:
        answer = super()._log(request, name)
        headers = tuple(h for h in answer.headers if h[0] != "sdcp-append")
        status = 200 if answer.status < 300 else answer.status
        return Response(status, headers, answer.body)


@pytest.mark.parametrize("kind", [MemoryMlc, PlainMlc])
@pytest.mark.parametrize("enforcing", [True, False])
async def test_appends_are_conditional_and_only_extend(
    make_wire: MakeWire, kind: type[MemoryMlc], enforcing: bool
) -> None:
    """R-6.8-1, R-6.8-10, R-6.8-3: each PUT names the tag it goes by, or that there is no log; the
    records before it stay as they are, octet for octet.
    """
    wire = make_wire(mlc=kind(enforcing=enforcing), enforcing=enforcing)
    await wire.ready()
    contents = [b""]
    for i in range(6):
        version = wire.mlc.logs.get(wire.log_name, (0, b""))[0]
        seen = len(wire.mlc.requests)
        verdict_of(await wire.propose(wire.bad(2, good=i % 2)))
        puts = [request for request in wire.mlc.requests[seen:] if request.method == "PUT"]
        (put,) = puts
        if version:
            assert (put.header("if-match"), put.header("if-none-match")) == (f'"{version}"', None)
        else:
            assert (put.header("if-match"), put.header("if-none-match")) == (None, "*")
        after = wire.mlc.logs[wire.log_name][1]
        if span := put.header("content-range"):
            assert kind is MemoryMlc and version
            assert span == f"bytes {len(contents[-1])}-{len(after) - 1}/*"
        else:
            assert put.body == after
        assert after.startswith(contents[-1]) and len(after) > len(contents[-1])
        contents.append(after)
    assert [record.epoch for record in wire.records()] == [1] * 6


async def test_a_log_reencodes_to_itself(wire: Wire) -> None:
    """R-6.8-9: a CBOR sequence of maps in deterministic encoding, names as in the verdict."""
    await wire.ready()
    found = [verdict_of(await wire.propose(wire.good(2))) for _ in range(3)]
    octets = wire.mlc.logs[wire.log_name][1]
    assert b"".join(encode_record(record) for record in decode_log(octets)) == octets
    again = b""
    for verdict in found:
        again += cbor2.dumps(
            {
                "epoch": 1,
                "round": verdict.round,
                "emitted": list(verdict.emitted),
                "committed": verdict.committed,
                "digest": verdict.digest,
            },
            canonical=True,
        )
    assert again == octets


@pytest.mark.parametrize("case", LOGS, ids=lambda c: c["name"])
def test_the_vectors_objects_parse(case: dict[str, Any]) -> None:
    """R-6.8-9, R-6.8-8"""
    octets = bytes.fromhex(case["object"])
    records = decode_log(octets)
    assert b"".join(map(encode_record, records)) == octets
    plain_records = [{"epoch": r.epoch} for r in records if isinstance(r, FenceRecord)]
    assert [r for r in hashes(case["records"]) if "round" not in r] == plain_records
    summary = read_log(records)
    assert summary.highest_epoch == case["highest_epoch"]
    assert list(summary.tokens) == case["committed_tokens"]


def appendix_wire(make_wire: MakeWire) -> Wire:
    """A verifier of Appendix A's model, which writes 7 for ever."""
    wire = make_wire(model=RowsModel([one_hot(7, 128)], prompt=4))
    members = hashes(VECTORS["appendix_a"]["contract"])
    wire.engine.info = replace(
        wire.engine.info, model=members["target"], tokenizer=members["tokenizer"]
    )
    wire.contract = Contract(**{k: tuple(v) if type(v) is list else v for k, v in members.items()})
    return wire


@pytest.mark.parametrize("case", LOGS, ids=lambda c: c["name"])
async def test_resuming_from_the_vectors_logs(case: dict[str, Any], make_wire: MakeWire) -> None:
    """R-6.8-8: void records are none; the last valid commit is what must be resumed, at an epoch
    not below the highest; the next record goes behind what is there.
    """
    wire = appendix_wire(make_wire)
    octets = bytes.fromhex(case["object"])
    if octets:
        wire.mlc.append(wire.log_name, octets)
    epoch, last = case["highest_epoch"] + 1, case["last"]
    if epoch > 2:
        answer = await wire.open(epoch=epoch - 2, prompt=PROMPT)
        refused(answer, 409, "sdcp-stale-epoch")
    resume = None
    if last:
        answer = await wire.open(epoch=epoch, prompt=PROMPT)
        state = refused(answer, 409, "sdcp-stale-base").session_state
        assert state is not None
        assert (state.round, state.committed) == (last["round"], last["committed"])
        assert (state.digest.hex(), state.epoch) == (last["digest"], case["highest_epoch"])
        resume = Resume(
            round=last["round"],
            committed=last["committed"],
            digest=bytes.fromhex(last["digest"]),
            committed_tokens=f"{ROUTER}objects/x/gone",
        )
    opened = state_of(await wire.open(epoch=epoch, prompt=PROMPT, resume=resume))
    assert opened.round == (last["round"] if last else 0)
    tokens = output_of(await wire.output(wait_s=0)).tokens
    assert list(tokens) == case["committed_tokens"]
    state_of(await wire.name(epoch=epoch, prompt=PROMPT))
    found = verdict_of(await wire.propose([7], epoch=epoch))
    assert wire.mlc.logs[wire.log_name][1].startswith(octets)
    assert wire.mlc.tokens(wire.log_name) == (*tokens, *found.emitted)


async def test_a_damaged_log_is_not_overwritten(make_wire: MakeWire) -> None:
    """R-6.8-9, D-M6: a sequence that does not parse to its end is 503, and left as it is."""
    wire = make_wire()
    wire.mlc.append(wire.log_name, b"\xa1\x65epoch")
    refused(await wire.open(), 503)
    assert wire.mlc.logs[wire.log_name][1] == b"\xa1\x65epoch"


@pytest.mark.parametrize("enforcing", [True, False])
async def test_a_foreign_record_ends_the_authority(make_wire: MakeWire, enforcing: bool) -> None:
    """R-6.8-4, R-6.8-12: a commit of the same epoch behind its back; from then on 409."""
    wire = make_wire(enforcing=enforcing)
    await wire.ready()
    verdict_of(await wire.propose(wire.good(1)))
    foreign = CommitRecord(epoch=1, round=2, emitted=(0,), committed=9, digest=bytes(32))
    wire.mlc.append(wire.log_name, encode_record(foreign))
    for _ in range(2):
        refused(await wire.propose(wire.good(1)), 409, "sdcp-stale-epoch")
    refused(await wire.output(), 409, "sdcp-stale-epoch")
    refused(await wire.name(), 409, "sdcp-stale-epoch")
    assert wire.commits()[-1] == foreign and len(wire.commits()) == 2


async def test_a_round_that_an_unfenced_writer_has_taken_is_not_written_again(
    make_wire: MakeWire,
) -> None:
    """R-6.8-4: of an older epoch whose authority nobody had ended; two commits would be one round."""
    wire = make_wire()
    state_of(await wire.open(epoch=2))
    state_of(await wire.name(epoch=2))
    other = CommitRecord(epoch=1, round=1, emitted=(0, 1), committed=2, digest=bytes(32))
    wire.mlc.append(wire.log_name, encode_record(other))
    refused(await wire.propose(wire.good(2), epoch=2), 409, "sdcp-stale-epoch")
    assert wire.commits() == [other]
    refused(await wire.output(), 409, "sdcp-stale-epoch")


async def test_a_fence_that_was_seen_behind_a_record_ends_the_writer(make_wire: MakeWire) -> None:
    """R-6.8-6, R-6.8-7: the record before the fence counts; after it nothing is written at all."""
    wire = make_wire(enforcing=False)
    await wire.ready()

    async def fence_after(request: Request) -> Response | None:
        if request.method == "GET" and wire.mlc.logs.get(wire.log_name, (0, b""))[0] == 1:
            wire.mlc.append(wire.log_name, encode_record(FenceRecord(epoch=2)))
        return None

    wire.mlc.before = fence_after
    first = verdict_of(await wire.propose(wire.good(1)))
    refused(await wire.propose(wire.good(1)), 409, "sdcp-stale-epoch")
    assert [record.emitted for record in wire.commits()] == [first.emitted]
    assert decode_log(wire.mlc.logs[wire.log_name][1])[1:] == [FenceRecord(epoch=2)]


async def test_a_new_tag_alone_is_no_loss(make_wire: MakeWire) -> None:
    """R-6.8-4, D-P17: 412 and nothing new in the log: read, and appended once."""
    wire = make_wire()
    await wire.ready()
    verdict_of(await wire.propose(wire.good(1)))
    wire.mlc.append(wire.log_name, b"")
    found = verdict_of(await wire.propose(wire.good(1)))
    assert [record.round for record in wire.commits()] == [1, 2]
    assert wire.commits()[-1].emitted == found.emitted


class FencingMlc(MemoryMlc):
    """Lets a fence slip in before the second record, and enforces nothing."""

    def _log(self, request: Request, name: str) -> Response:
        version, old = self.logs.get(name, (0, b""))
        if request.method == "PUT" and version == 1:
            fence = encode_record(FenceRecord(epoch=2))
            answer = super()._log(request, name)
            new = self.logs[name][1][len(old) :]
            self.logs[name] = (self.logs[name][0], old + fence + new)
            return answer
        return super()._log(request, name)


async def test_a_store_that_does_not_enforce_is_read_after_each_append(make_wire: MakeWire) -> None:
    """R-6.8-7: the append succeeds, but a fence precedes its record: 409, and never in output."""
    wire = make_wire(mlc=FencingMlc(enforcing=False), enforcing=False)
    await wire.ready()
    first = verdict_of(await wire.propose(wire.good(2)))
    refused(await wire.propose(wire.good(2)), 409, "sdcp-stale-epoch")
    refused(await wire.output(), 409, "sdcp-stale-epoch")
    assert len(wire.commits()) == 2, "the void record is there"
    assert wire.mlc.tokens(wire.log_name) == first.emitted
    assert list(wire.served().machine.verdicts) == [1]


async def test_a_fence_carries_the_epoch_alone(wire: Wire) -> None:
    """R-6.8-5: a map of one member, as the router's own writer makes it."""
    log = CommitLog(wire.clients["router"], f"{ROUTER}logs/{wire.log_name}", enforcing=True)
    summary = await log.read()
    assert await log.fence(summary.highest_epoch + 2, etag=log.etag)
    assert cbor2.loads(wire.mlc.logs[wire.log_name][1]) == {"epoch": 2}
