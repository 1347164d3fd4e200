"""How commit logs lie in LMDB: a head row a log, and a row for each append.

The head (highest epoch, length, number of rows, running checksum) is all that an append reads, so
a round costs the same at the end of a long log as at its beginning.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import lmdb

from tiers.api import LogContent, LogEntry
from tiers.log_head import Head, content_of, head_of, tag_of
from tiers.log_rules import is_log_id

_SEQUENCE = struct.Struct(">Q")


class LogRows:
    """Rows and heads in one environment; checks what it reads, enforces nothing."""

    def __init__(self, env: lmdb.Environment) -> None:
        self._env = env
        self._heads = env.open_db(b"head")
        self._records = env.open_db(b"records")

    def used_bytes(self, txn: lmdb.Transaction) -> int:
        """What the pages of all logs take."""
        trees = [txn.stat(self._heads), txn.stat(self._records)]
        return sum(
            (tree["branch_pages"] + tree["leaf_pages"] + tree["overflow_pages"]) * tree["psize"]
            for tree in trees
        )

    def head(self, log_id: str) -> Head | None:
        """Return a log's head; raises Corrupt."""
        with self._env.begin() as txn:
            return self.head_in(txn, log_id)

    def read(self, log_id: str) -> LogContent | None:
        """Return a whole log; raises Corrupt."""
        with self._env.begin() as txn:
            head = self.head_in(txn, log_id)
            if head is None:
                return None
            return LogContent(self.content_in(txn, log_id, head), head.etag)

    def entries(self, after: str, count_max: int) -> list[LogEntry]:
        """Return the logs whose ids follow `after`, in the order of their octets."""
        found: list[LogEntry] = []
        with self._env.begin() as txn, txn.cursor(db=self._heads) as cursor:
            if not cursor.set_range(after.encode() + b"\0"):
                return found
            for key, raw in cursor:
                log_id = bytes(key).decode(errors="replace")
                if not is_log_id(log_id):
                    continue  # no store of ours wrote that: a damaged key
                found.append(LogEntry(log_id, tag_of(bytes(raw))))
                if len(found) == count_max:
                    break
        return found

    def head_in(self, txn: lmdb.Transaction, log_id: str) -> Head | None:
        """As `head`, within a transaction."""
        raw = txn.get(log_id.encode(), db=self._heads)
        return None if raw is None else head_of(bytes(raw))

    def content_in(self, txn: lmdb.Transaction, log_id: str, head: Head) -> bytes:
        """Return the octets that the head stands for; raises Corrupt if they are not there."""
        rows = []
        for sequence, (_, octets) in enumerate(self._rows_of(txn, log_id)):
            if sequence == head.rows:
                break
            rows.append(octets)
        return content_of(rows, head)

    def extend(
        self, txn: lmdb.Transaction, log_id: str, head: Head, octets: bytes, *, epoch: int
    ) -> Head:
        """Write a row and the new head; raises lmdb.MapFullError, which ends the transaction."""
        new = head.after(octets, epoch=epoch)
        txn.put(_prefix(log_id) + _SEQUENCE.pack(head.rows), octets, db=self._records)
        txn.put(log_id.encode(), new.packed(), db=self._heads)
        return new

    def delete(self, txn: lmdb.Transaction, log_id: str) -> None:
        """Delete a log's rows and head, if there are any."""
        for key in [key for key, _ in self._rows_of(txn, log_id)]:
            txn.delete(key, db=self._records)
        txn.delete(log_id.encode(), db=self._heads)

    def _rows_of(self, txn: lmdb.Transaction, log_id: str) -> Iterator[tuple[bytes, bytes]]:
        prefix = _prefix(log_id)
        with txn.cursor(db=self._records) as cursor:
            if not cursor.set_range(prefix):
                return
            for key, octets in cursor:
                if bytes(key[: len(prefix)]) != prefix:
                    return
                yield bytes(key), bytes(octets)


def _prefix(log_id: str) -> bytes:
    # An id has no NUL, so no log's rows lie among another's.
    return log_id.encode() + b"\0"
