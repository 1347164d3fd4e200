"""What is known of a commit log without its records: the head that every append replaces."""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from tiers.api import Corrupt

_HEAD = struct.Struct(">QQQ16s")


class Head(NamedTuple):
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
        return Head(epoch, self.size_bytes + len(octets), self.rows + 1, link(self.chain, octets))

    def packed(self) -> bytes:
        """Return the head as it is stored."""
        return _HEAD.pack(self.epoch, self.size_bytes, self.rows, self.chain)


HEAD_BYTES = _HEAD.size


def head_of(stored: bytes) -> Head:
    """Read a head as it is stored; raises Corrupt."""
    if len(stored) != _HEAD.size:
        raise Corrupt("the head of the log is damaged")
    return Head(*_HEAD.unpack(stored))


def tag_of(stored: bytes) -> str | None:
    """Return the tag of a head as it is stored, None for one that is damaged."""
    try:
        return head_of(stored).etag
    except Corrupt:
        return None


def content_of(rows: list[bytes], head: Head) -> bytes:
    """Join the rows that the head stands for; raises Corrupt if they are not those."""
    chain = Head().chain
    for octets in rows:
        chain = link(chain, octets)
    content = b"".join(rows)
    if (len(rows), len(content), chain) != (head.rows, head.size_bytes, head.chain):
        raise Corrupt("the records of the log are not those that were written")
    return content


def link(chain: bytes, octets: bytes) -> bytes:
    """Return the running checksum after a row."""
    return xxhash.xxh3_128_digest(chain + octets)
