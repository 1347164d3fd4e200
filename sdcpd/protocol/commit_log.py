"""The commit log: its records, and what a reader takes from them (Section 6.8, D-M5, D-M8)."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import cbor2

from sdcpd.protocol import cbor
from sdcpd.protocol.codec import encode_item
from sdcpd.protocol.fields import Invalid, Table, octets, required, uint, uints
from sdcpd.protocol.limits import DIGEST_BYTES
from sdcpd.protocol.messages import Message

MEDIA_TYPE = "application/cbor-seq"


class LogCorrupt(Exception):
    """A log that does not parse to its end; it is never overwritten (D-M6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord(Message):
    """One round's commit: the tokens emitted, and n and d[n] after them."""

    epoch: int
    round: int
    emitted: tuple[int, ...]
    committed: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceRecord(Message):
    """Ends the authority of every lower epoch."""

    epoch: int


Record = CommitRecord | FenceRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSummary:
    """What a log says; highest_epoch is 0 for an empty one.

    `commits` are the valid commit records in order, `tokens` what they emitted, all in all.
    """

    highest_epoch: int
    last_valid: CommitRecord | None
    tokens: tuple[int, ...]
    records: tuple[Record, ...]
    commits: tuple[CommitRecord, ...]


_commit = Table(
    CommitRecord,
    required("epoch", uint),
    required("round", uint),
    required("emitted", uints),
    required("committed", uint),
    required("digest", octets(DIGEST_BYTES)),
)
_fence = Table(FenceRecord, required("epoch", uint))


_UINT = rb"(?:[\x00-\x17]|\x18.|\x19.{2}|\x1a.{4}|\x1b.{8})"
_OWN_COMMIT = re.compile(
    rb"\xa5\x65epoch" + _UINT + rb"\x65round" + _UINT + rb"\x66digest\x58\x20.{32}"
    rb"\x67emitted(?:[\x80-\x97]|\x98.)" + _UINT + rb"{0,255}\x69committed" + _UINT,
    re.DOTALL,
)


def encode_record(record: Record) -> bytes:
    """Encode one record in deterministic encoding."""
    table = _commit if isinstance(record, CommitRecord) else _fence
    return encode_item(table.plain(record, {}))


def decode_log(data: bytes) -> list[Record]:
    """Decode a log, or any part of one that begins and ends between records.

    Unknown keys are ignored; raises LogCorrupt for anything else that is not a record.
    """
    records: list[Record] = []
    position = 0
    while position < len(data):
        if (own := _own_commit(data, position)) is not None:
            record, position = own
            records.append(record)
            continue
        try:
            value, position = cbor.decode_next(data, position)
            records.append(_record(value))
        except (cbor.NotWellFormed, Invalid) as error:
            raise LogCorrupt(f"record {len(records)}: {error}") from None
    return records


def _own_commit(data: bytes, position: int) -> tuple[Record, int] | None:
    """A commit laid out as `encode_record` does, and where it ends; None for all else there.

    Every round passes here at every store, and each record of a log whose session moves. What the
    pattern lets through is one map of five different keys, unless the array's count is wrong, and
    then a key is missing.
    """
    if (found := _OWN_COMMIT.match(data, position)) is None:
        return None
    try:
        value = cbor2.loads(found[0])
        return (_commit.read(value), found.end()) if "committed" in value else None
    except (cbor2.CBORDecodeError, Invalid):
        return None


def _record(value: object) -> Record:
    if cbor.holds_duplicates(value):
        raise Invalid("has a key twice")
    # A record with a round is a commit (D-M5); whatever is no map at all, either table refuses.
    is_commit = isinstance(value, dict) and "round" in value
    return _commit.read(value) if is_commit else _fence.read(value)


def read_log(records: Iterable[Record]) -> LogSummary:
    """Go through the records in order, keeping the highest epoch seen (D-M8).

    A record with a lower epoch is void, wherever it stands; a commit with a higher epoch fences
    like a fence record.
    """
    records = tuple(records)
    highest_epoch = 0
    commits: list[CommitRecord] = []
    for record in records:
        if record.epoch < highest_epoch:
            continue
        highest_epoch = record.epoch
        if isinstance(record, CommitRecord):
            commits.append(record)
    return LogSummary(
        highest_epoch=highest_epoch,
        last_valid=commits[-1] if commits else None,
        tokens=tuple(chain.from_iterable(commit.emitted for commit in commits)),
        records=records,
        commits=tuple(commits),
    )
