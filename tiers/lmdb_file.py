"""Whether an LMDB file holds all that its newest commit needs, seen before LMDB maps it.

A commit writes pages that no earlier one needs, flushes them, and then writes one of the two meta
pages, in turn: whatever part of it a power cut leaves, the state before or after it is whole. But a
file that lost its end, by a copy that broke off or a file system that was mended, would kill the
process by SIGBUS with the first page that is read there.

A file may be shorter than its newest commit says, since pages that were taken and given up in one
transaction are never written. So where it is shorter, every page in use is looked for. What is read
here is the format of LMDB 0.9 on machines of 64 bits.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import lmdb

from tiers.api import TierError

_MAGIC = 0xBEEFC0DE
# Behind the page's head of 16 octets: magic, version; then address, map size.
_META = struct.Struct("<16xII16x")
# Of each of the two first trees: page size (in the first), flags, depth, counts; root.
_TREE = struct.Struct("<I2H4QQ")
_LAST = struct.Struct("<QQ")  # last page, transaction
_HEAD = struct.Struct("<10xHHH")  # flags, lower and upper end of the free room
_OVERFLOW = struct.Struct("<12xI")
_NODE = struct.Struct("<4H")  # size or child page, in three parts; size of the key
_PAGE = struct.Struct("<Q")
_NO_PAGE = 2**64 - 1
_BRANCH, _LEAF = 0x01, 0x02
_BIG, _TREE_NODE = 0x01, 0x02
_META_BYTES = _META.size + 2 * _TREE.size + _LAST.size


class FileDamaged(Exception):
    """Not all that was written is in the file; the text says what is missing."""


def check_file(directory: Path, *, used: bool) -> None:
    """Raise FileDamaged if a page in use is not there, OSError if the file can't be read.

    Without a file that was `used` before, LMDB would begin a new one. Whatever else is no LMDB
    file is left for LMDB to refuse.
    """
    path = directory / "data.mdb"
    if not path.exists() or path.stat().st_size == 0:
        if used:
            raise FileDamaged("data.mdb is gone, or empty")
        return
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _File(handle).check()
    finally:
        os.close(handle)


def trouble(what: str, path: Path, error: Exception, *, setting: str) -> TierError:
    """Why something that lies at a path can't be opened, and what to do."""
    text = str(error).removeprefix(f"{path}: ")
    if isinstance(error, FileDamaged | lmdb.InvalidError | lmdb.CorruptedError):
        return TierError(
            f"the {what} at {path} are damaged ({text}) and were left as they are: restore the"
            " directory from a backup, or move it away to begin anew; sessions that ran can't be"
            " resumed without it"
        )
    return TierError(
        f"the {what} at {path} cannot be opened ({text}): check the disk and who may write there,"
        f" or change {setting}"
    )


class _File:
    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._size_bytes = os.fstat(handle).st_size
        self._page_bytes = 0

    def check(self) -> None:
        first = os.pread(self._handle, _META_BYTES, 0)
        if len(first) < _META_BYTES or _META.unpack_from(first)[0] != _MAGIC:
            return
        self._page_bytes = _TREE.unpack_from(first, _META.size)[0]
        second = os.pread(self._handle, _META_BYTES, self._page_bytes)
        if len(second) < _META_BYTES or _META.unpack_from(second)[0] != _MAGIC:
            return
        newest = max(first, second, key=lambda meta: _LAST.unpack_from(meta, _LAST_AT)[1])
        last_page, _ = _LAST.unpack_from(newest, _LAST_AT)
        if self._size_bytes < (last_page + 1) * self._page_bytes:
            roots = [_root(newest, _META.size), _root(newest, _META.size + _TREE.size)]
            self._check_trees(roots, last_page)

    def _check_trees(self, roots: list[int], last_page: int) -> None:
        waiting, seen = roots, set[int]()
        while waiting:
            number = waiting.pop()
            if number == _NO_PAGE or number in seen:
                continue
            seen.add(number)
            try:
                waiting += self._children(number, last_page)
            except struct.error as error:
                raise FileDamaged(f"page {number} is overwritten") from error

    def _children(self, number: int, last_page: int) -> Iterator[int]:
        """Pages that a page names; raises FileDamaged."""
        page = self._page(number, last_page)
        flags, lower, _ = _HEAD.unpack_from(page)
        if not flags & (_BRANCH | _LEAF) or not _HEAD.size <= lower <= len(page):
            raise FileDamaged(f"page {number} is overwritten")
        for (offset,) in struct.iter_unpack("<H", page[_HEAD.size : lower & ~1]):
            low, high, more, key_bytes = _NODE.unpack_from(page, offset)
            data = offset + _NODE.size + key_bytes
            if flags & _BRANCH:
                yield low | high << 16 | more << 32
            elif more & _BIG:
                (big,) = _PAGE.unpack_from(page, data)
                (count,) = _OVERFLOW.unpack_from(self._page(big, last_page))
                self._page(big + count - 1, last_page)
            elif more & _TREE_NODE:
                yield _root(page, data)

    def _page(self, number: int, last_page: int) -> bytes:
        page = b""
        if number <= last_page:
            page = os.pread(self._handle, self._page_bytes, number * self._page_bytes)
        if len(page) < self._page_bytes:
            pages = self._size_bytes // self._page_bytes
            raise FileDamaged(f"data.mdb has lost its end: {pages} of {last_page + 1} pages left")
        return page


_LAST_AT = _META.size + 2 * _TREE.size


def _root(octets: bytes, offset: int) -> int:
    root: int = _TREE.unpack_from(octets, offset)[-1]
    return root
