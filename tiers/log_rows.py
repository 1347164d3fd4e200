"""How commit logs lie in LMDB: a head row a log, and a row for each append.

The head (highest epoch, length, number of rows, running checksum) is all that an append reads, so
a round costs the same at the end of a long log as at its beginning.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import lmdb
import xxhash

from tiers.api import Corrupt, LogContent

_HEAD = struct.Struct(">QQQ16s")
_SEQUENCE = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class Head:
    """A log without its records; the default is that of a log yet to be made."""

    epoch: int = 0
    size_bytes: int = 0
    rows: int = 0
    chain: bytes = bytes(16)

    @property
    def etag(self) -> str:
        """A strong tag: the length, and a checksum of all that was appended, in order."""
        return f'"{self.size_bytes}-{self.chain.hex()}"'

    def after(self, octets: bytes, *, epoch: int) -> Head:
        """Return the head after an append."""
        return Head(epoch, self.size_bytes + len(octets), self.rows + 1, _link(self.chain, octets))


class LogRows:
    """Rows and heads in one environment; checks what it reads, enforces nothing."""

    def __init__(self, env: lmdb.Environment) -> None:
        self._env = env
        self._heads = env.open_db(b"head")
        self._records = env.open_db(b"records")

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

    def head_in(self, txn: lmdb.Transaction, log_id: str) -> Head | None:
        """As `head`, within a transaction."""
        raw = txn.get(log_id.encode(), db=self._heads)
        if raw is None:
            return None
        if len(raw) != _HEAD.size:
            raise Corrupt("the head of the log is damaged")
        return Head(*_HEAD.unpack(raw))

    def content_in(self, txn: lmdb.Transaction, log_id: str, head: Head) -> bytes:
        """Return the octets that the head stands for; raises Corrupt if they are not there."""
        chain = Head().chain
        rows = []
        for sequence, (_, octets) in enumerate(self._rows_of(txn, log_id)):
            if sequence == head.rows:
                break
            chain = _link(chain, octets)
            rows.append(octets)
        content = b"".join(rows)
        if (len(rows), len(content), chain) != (head.rows, head.size_bytes, head.chain):
            raise Corrupt("the records of the log are not those that were written")
        return content

    def extend(
        self, txn: lmdb.Transaction, log_id: str, head: Head, octets: bytes, *, epoch: int
    ) -> Head:
        """Write a row and the new head; raises lmdb.MapFullError, which ends the transaction."""
        new = head.after(octets, epoch=epoch)
        txn.put(_prefix(log_id) + _SEQUENCE.pack(head.rows), octets, db=self._records)
        raw = _HEAD.pack(new.epoch, new.size_bytes, new.rows, new.chain)
        txn.put(log_id.encode(), raw, db=self._heads)
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


def _link(chain: bytes, octets: bytes) -> bytes:
    return xxhash.xxh3_128_digest(chain + octets)
