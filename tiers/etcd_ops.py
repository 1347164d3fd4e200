"""What waits to be done to the logs, and whether a log's state allows it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from sdcpd.protocol.commit_log import CommitRecord, Record
from tiers.api import Fenced, NotExtending, StoreFailed
from tiers.etcd_requests import Keys, LogState, Write
from tiers.log_head import Head
from tiers.log_rules import check_tag, highest_epoch

MARK_BYTES = 8


def _new_mark() -> bytes:
    return secrets.token_bytes(MARK_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Rows that lie in etcd behind the log's end already; they count when the head says so."""

    nonce: bytes
    old: LogState
    rows: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """Octets that parse as `records`, to follow the log with the tag `if_match` (None: no log).

    `mark` tells it from any other append, which may have the same octets.
    """

    log_id: str
    octets: bytes
    records: Sequence[Record]
    if_match: str | None
    offset: int | None = None
    staged: Staged | None = None
    mark: bytes = field(default_factory=_new_mark)

    @property
    def rows(self) -> tuple[bytes, ...]:
        """The rows that it adds."""
        return (self.octets,) if self.staged is None else self.staged.rows


@dataclass(frozen=True, slots=True)
class Delete:
    """A log to forget, with a tag only while it has that."""

    log_id: str
    if_match: str | None = None


Op = Append | Delete


def checked(append: Append, state: LogState) -> Head:
    """Return the log's head after an append; raises the LogError that refuses it."""
    head = state.head
    check_authority(state.highest_epoch, append.records)
    check_tag(None if head is None else head.etag, if_match=append.if_match)
    head = head or Head()
    if append.offset not in (None, head.size_bytes):
        raise NotExtending(f"the log is {head.size_bytes} octets long, not {append.offset}")
    epoch = highest_epoch(state.highest_epoch, append.records)
    for row in append.rows:
        head = head.after(row, epoch=epoch)
    return head


def check_authority(highest: int, records: Sequence[Record]) -> None:
    """Raise Fenced for a commit below the log's highest epoch.

    Before the tag is looked at: who has lost authority would else read the log only to find a tag
    with which it is refused again.
    """
    for record in records:
        if isinstance(record, CommitRecord) and record.epoch < highest:
            raise Fenced(
                f"a record of epoch {record.epoch} comes after epoch {highest}",
                highest_epoch=highest,
            )


def write_of(append: Append, state: LogState, prefix: str) -> Write:
    """Return the write that an append is in a state; raises the LogError that refuses it."""
    new = checked(append, state)
    staged = append.staged
    if staged is not None and (staged.old.revision, staged.old.fence) != (
        state.revision,
        state.fence,
    ):
        raise StoreFailed("the log was changed while a long append was being written")
    return Write(
        keys=Keys(prefix, append.log_id),
        old=state,
        new=new,
        records=append.records,
        mark=append.mark,
        row=b"" if staged else append.octets,
        nonce=staged.nonce if staged else None,
    )
