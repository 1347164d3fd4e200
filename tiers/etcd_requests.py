"""How commit logs lie in etcd, and the transactions on them; builds and reads messages, no I/O.

Below `<prefix>/<log>/`: `head` (with the mark of the append that wrote it), `fence` (the highest
epoch, 8 octets), `r/<number>` for each append (the number in 8 octets, so that rows lie in order),
and `put` while a large append is staged. Rows from `head.rows` on are not part of the log, whatever
they hold. Keys that are no log's have a dot behind the prefix, which no log has in its name.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aetcd.rpc import kv_pb2 as kv
from aetcd.rpc import rpc_pb2 as pb

from sdcpd.protocol.commit_log import CommitRecord, Record
from tiers.api import Corrupt, LogEntry
from tiers.log_head import HEAD_BYTES, Head, head_of, tag_of
from tiers.log_rules import is_log_id

EPOCH_MAX = 2**64 - 1
# etcd counts the operations of a transaction and of the deepest one inside it together.
TXN_OPS_MAX = 128
APPEND_OPS_MAX = 4
GROUP_MAX = TXN_OPS_MAX - APPEND_OPS_MAX - 1  # the one is the mark below
STATES_MAX = TXN_OPS_MAX // 2
# etcd takes requests of 1.5 MiB; what is left is for keys and framing.
GROUP_BYTES_MAX = 1_400_000
ROW_BYTES_MAX = 1 << 20

_NUMBER = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class LogState:
    """What etcd held of a log at one moment; revision and created are those of the head's key.

    `mark` is that of the append that wrote the head.
    """

    head: Head | None = None
    fence: int | None = None
    revision: int = 0
    created: int = 0
    mark: bytes = b""

    @property
    def highest_epoch(self) -> int:
        """The epoch below which nobody may write."""
        return max(self.head.epoch if self.head else 0, self.fence or 0)


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one log."""

    prefix: str
    log_id: str

    @property
    def all(self) -> bytes:
        """What all keys of the log begin with, and no key of another."""
        return f"{self.prefix}/{self.log_id}/".encode()

    @property
    def head(self) -> bytes:
        return self.all + b"head"

    @property
    def fence(self) -> bytes:
        return self.all + b"fence"

    @property
    def put(self) -> bytes:
        return self.all + b"put"

    def row(self, number: int) -> bytes:
        return self.all + b"r/" + _NUMBER.pack(number)

    @property
    def rows_end(self) -> bytes:
        return self.all + b"r0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One append as etcd gets it: from a state to the next head.

    Either `row` is the octets of the one new row, or `nonce` names rows that are staged.
    """

    keys: Keys
    old: LogState
    new: Head
    records: Sequence[Record]
    mark: bytes
    row: bytes = b""
    nonce: bytes | None = None


def state_requests(keys: Keys) -> list[Any]:
    """The two reads that tell a log's state."""
    return [pb.RequestOp(request_range=pb.RangeRequest(key=key)) for key in (keys.head, keys.fence)]


def state_of(head_read: Any, fence_read: Any) -> LogState:
    """What the two reads found; raises Corrupt."""
    heads = head_read.response_range.kvs
    fences = fence_read.response_range.kvs
    fence = None
    if fences:
        if len(fences[0].value) != _NUMBER.size:
            raise Corrupt("the fence of the log is damaged")
        (fence,) = _NUMBER.unpack(fences[0].value)
    if not heads:
        return LogState(fence=fence)
    value = heads[0].value
    head = head_of(value[:HEAD_BYTES])
    if fence is None or fence < head.epoch:
        raise Corrupt("the fence of the log is not the one that was written")
    revision, created = heads[0].mod_revision, heads[0].create_revision
    return LogState(head, fence, revision, created, value[HEAD_BYTES:])


def write_request(write: Write) -> Any:
    """The transaction of one append: etcd itself refuses a changed log and a stale writer."""
    keys, old, new = write.keys, write.old, write.new
    compare = [unchanged(keys, old), *_not_fenced(write)]
    success = [put(keys.head, new.packed() + write.mark)]
    if write.nonce is None:
        success.append(put(keys.row(new.rows - 1), write.row))
    else:
        compare.append(value_is(keys.put, write.nonce))
        success.append(delete_key(keys.put))
    if old.fence != new.epoch:
        success.append(put(keys.fence, _NUMBER.pack(new.epoch)))
    return pb.TxnRequest(compare=compare, success=success, failure=state_requests(keys))


def group_request(prefix: str, requests: Sequence[Any]) -> Any:
    """One transaction around several, each with an outcome of its own."""
    if len(requests) == 1:
        return requests[0]
    inner = [pb.RequestOp(request_txn=request) for request in requests]
    # etcd charges its quota for puts that are not nested only: without one, groups would go on
    # filling a database that is full.
    return pb.TxnRequest(success=[*inner, put(f"{prefix}/.group".encode(), b"")])


def group_answers(answer: Any, count: int) -> list[Any]:
    """The answers to the transactions of a group."""
    if count == 1:
        return [answer]
    return [part.response_txn for part in answer.responses[:count]]


def unchanged(keys: Keys, state: LogState) -> Any:
    """The condition that the head is the one that was seen, or still none."""
    if state.head is None:
        return kv_absent(keys.head)
    return at_revision(keys.head, state.revision)


def at_revision(key: bytes, revision: int) -> Any:
    """The condition that a key was last written at a revision; 0: that there is none."""
    return pb.Compare(
        key=key, result=pb.Compare.EQUAL, target=pb.Compare.MOD, mod_revision=revision
    )


def kv_absent(key: bytes) -> Any:
    """The condition that there is no such key."""
    return pb.Compare(key=key, result=pb.Compare.EQUAL, target=pb.Compare.CREATE, create_revision=0)


def value_is(key: bytes, value: bytes) -> Any:
    """The condition that a key holds a value."""
    return pb.Compare(key=key, result=pb.Compare.EQUAL, target=pb.Compare.VALUE, value=value)


def put(key: bytes, value: bytes) -> Any:
    """The operation that writes a key."""
    return pb.RequestOp(request_put=pb.PutRequest(key=key, value=value))


def delete_key(key: bytes) -> Any:
    """The operation that removes a key."""
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key))


def delete_log_request(keys: Keys) -> Any:
    """The removal of every key of a log."""
    return pb.DeleteRangeRequest(key=keys.all, range_end=_after(keys.all))


def delete_unchanged_request(keys: Keys, state: LogState) -> Any:
    """The same, while the log is what was seen."""
    removal = pb.RequestOp(request_delete_range=delete_log_request(keys))
    return pb.TxnRequest(compare=[unchanged(keys, state)], success=[removal])


def after_log(prefix: str, name: bytes) -> bytes:
    """Where the keys begin that follow those of a log, or of all that have a dot there."""
    return prefix.encode() + b"/" + (b"/" if name.startswith(b".") else name + b"0")


def next_log_request(prefix: str, start: bytes) -> Any:
    """The first two keys from `start` on, which are `fence` and `head` of the next log."""
    return pb.RangeRequest(key=start, range_end=f"{prefix}0".encode(), limit=2)


def entry_of(prefix: str, found: Sequence[kv.KeyValue]) -> tuple[bytes, LogEntry | None]:
    """What two keys are of: the name behind the prefix, and the log if it is one's."""
    name, _, _ = bytes(found[0].key)[len(prefix) + 1 :].partition(b"/")
    if not is_log_id(name.decode("latin-1")):
        return name, None
    keys = Keys(prefix, name.decode())
    whole = [bytes(one.key) for one in found] == [keys.fence, keys.head]
    tag = tag_of(bytes(found[1].value)[:HEAD_BYTES]) if whole else None
    return name, LogEntry(keys.log_id, tag)


def rows_request(keys: Keys, first: int, *, limit: int, end: int | None, revision: int) -> Any:
    """A page of rows from `first` on, before `end` if given, as of a revision (0: now)."""
    return pb.RangeRequest(
        key=keys.row(first),
        range_end=keys.rows_end if end is None else keys.row(end),
        limit=limit,
        revision=revision,
    )


def rows_of(keys: Keys, first: int, values: Sequence[kv.KeyValue]) -> list[bytes]:
    """The octets of the rows from `first` on that follow each other without a gap."""
    rows = []
    for number, row in enumerate(values, first):
        if row.key != keys.row(number):
            break
        rows.append(bytes(row.value))
    return rows


def _not_fenced(write: Write) -> list[Any]:
    """The condition on the fence that the first record asks for; the others follow from it."""
    keys, old = write.keys, write.old
    if old.fence is None:
        return [kv_absent(keys.fence)]
    if not write.records:
        return []
    first = write.records[0]
    below = first.epoch + 1 if isinstance(first, CommitRecord) else first.epoch
    if below > EPOCH_MAX:
        return []
    return [
        pb.Compare(
            key=keys.fence,
            result=pb.Compare.LESS,
            target=pb.Compare.VALUE,
            value=_NUMBER.pack(below),
        )
    ]


def _after(prefix: bytes) -> bytes:
    return prefix[:-1] + bytes([prefix[-1] + 1])
