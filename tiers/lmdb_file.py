"""Whether an LMDB file holds all that its newest commit needs, seen before LMDB maps it.

A commit writes pages that no earlier one needs, flushes them, and then writes one of the two meta
pages, in turn: whatever part of it a power cut leaves, the state before or after it is whole. But a
file that lost more, by a copy that broke off or a file system that was mended, would kill the
process: by SIGBUS with the first page behind its end, by SIGABRT with one that LMDB takes for
impossible, or by whatever comes of octets that it takes for the place of others.

So every page in use is looked at: whether it is there, says that it is itself, is of the kind that
belongs there, keeps what it names within itself, and is in use once, and not free besides. What the
values hold is their readers' to check. A file may be shorter than its newest commit says, since
pages that were taken and given up in one transaction are never written. What is read here is the
format of LMDB 0.9 on machines of 64 bits.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import lmdb

from tiers.api import TierError
from tiers.disk_room import check_lock_room

_MAGIC = 0xBEEFC0DE
# Behind the page's head of 16 octets: magic, version; then address, map size.
_META = struct.Struct("<16xII16x")
# Of a tree, the two first of which are in the meta pages: page size (in the first), flags, depth,
# counts; root.
_TREE = struct.Struct("<I2H4QQ")
_LAST = struct.Struct("<QQ")  # last page, transaction
# Of a page: its number, flags, lower and upper end of the free room; or how many pages it is.
_HEAD = struct.Struct("<Q2xHHH")
_BIG_HEAD = struct.Struct("<Q2xHI")
_NODE = struct.Struct("<4H")  # size or child page, in two or three parts, or flags; size of the key
_PAGE = struct.Struct("<Q")
_NO_PAGE = 2**64 - 1
_BRANCH, _LEAF, _OVERFLOW = 0x01, 0x02, 0x04
_BIG, _TREE_NODE = 0x01, 0x02
_NODE_FLAGS = (0, _BIG, _TREE_NODE)
_PASSING = 0x10 | 0x4000 | 0x8000  # of a page that is being written
_DEPTH_MAX = 32
_PAGE_SIZES = tuple(1 << power for power in range(9, 17))
_LAST_AT = _META.size + 2 * _TREE.size
_META_BYTES = _LAST_AT + _LAST.size


class FileDamaged(Exception):
    """Not all that was written is in the file as it was; the text says what is wrong."""


def check_file(directory: Path, *, used: bool) -> None:
    """Raise FileDamaged if a page in use is not as it should be; before LMDB opens the directory.

    Raises OSError if the file can't be read, or the disk is too full for what LMDB writes besides.

    Without a file that was `used` before, LMDB would begin a new one. Whatever else is no LMDB
    file is left for LMDB to refuse.
    """
    check_lock_room(directory)
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


@dataclass(frozen=True, slots=True)
class _Place:
    """A page to look at, and what it must be: a leaf where `levels` is 1, else above leaves."""

    number: int
    levels: int
    is_free_list: bool = False


class _File:
    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._size_bytes = os.fstat(handle).st_size
        self._page_bytes = 0
        self._last_page = 0
        self._in_use = bytearray()
        self._free_lists: list[bytes] = []

    def check(self) -> None:
        first = os.pread(self._handle, _META_BYTES, 0)
        if len(first) < _META_BYTES or _META.unpack_from(first)[0] != _MAGIC:
            return
        self._page_bytes = _TREE.unpack_from(first, _META.size)[0]
        if self._page_bytes not in _PAGE_SIZES:
            raise FileDamaged("the beginning of data.mdb is overwritten")
        second = os.pread(self._handle, _META_BYTES, self._page_bytes)
        if len(second) < _META_BYTES or _META.unpack_from(second)[0] != _MAGIC:
            return
        newest = max(first, second, key=lambda meta: _LAST.unpack_from(meta, _LAST_AT)[1])
        self._last_page, _ = _LAST.unpack_from(newest, _LAST_AT)
        self._in_use = bytearray(self._size_bytes // self._page_bytes)
        self._in_use[:2] = b"\1\1"
        waiting = [
            *self._root(newest, _META.size, is_free_list=True),
            *self._root(newest, _META.size + _TREE.size),
        ]
        while waiting:
            waiting += self._children(waiting.pop())
        for pages in self._free_lists:
            self._check_free(pages)

    def _root(self, octets: bytes, offset: int, *, is_free_list: bool = False) -> Iterator[_Place]:
        """The first page of a tree, if it has any."""
        _, _, levels, *_, number = _TREE.unpack_from(octets, offset)
        if levels > _DEPTH_MAX or (levels == 0) != (number == _NO_PAGE):
            raise FileDamaged("a tree has no possible depth")
        if levels:
            yield _Place(number, levels, is_free_list)

    def _children(self, place: _Place) -> Iterator[_Place]:
        """Pages that a page names; raises FileDamaged."""
        page = self._page(place.number)
        own, flags, lower, upper = _HEAD.unpack_from(page)
        is_leaf = place.levels == 1
        # LMDB aborts at a branch with one key, but not in its list of what is free.
        keys_min = 1 if is_leaf or place.is_free_list else 2
        lowest = _HEAD.size + 2 * keys_min
        kind = _LEAF if is_leaf else _BRANCH
        if own != place.number or flags & ~_PASSING != kind:
            raise self._overwritten(place.number)
        if lower % 2 or not lowest <= lower <= upper <= len(page):
            raise self._overwritten(place.number)
        self._use(place.number, 1)
        offsets = struct.unpack_from(f"<{(lower - _HEAD.size) // 2}H", page, _HEAD.size)
        if min(offsets) < upper or max(offsets) > len(page) - _NODE.size:
            raise self._overwritten(place.number)
        if is_leaf:
            yield from self._in_leaf(place, page, offsets)
            return
        for offset in offsets:
            low, high, more, key_bytes = _NODE.unpack_from(page, offset)
            if offset + _NODE.size + key_bytes > len(page):
                raise self._overwritten(place.number)
            yield replace(place, number=low | high << 16 | more << 32, levels=place.levels - 1)

    def _in_leaf(self, place: _Place, page: bytes, offsets: tuple[int, ...]) -> Iterator[_Place]:
        unpack, end = _NODE.unpack_from, len(page)
        for offset in offsets:
            low, high, flags, key_bytes = unpack(page, offset)
            size_bytes = low | high << 16
            data = offset + 8 + key_bytes
            inside_bytes = _PAGE.size if flags == _BIG else size_bytes
            if data + inside_bytes > end or flags not in _NODE_FLAGS:
                raise self._overwritten(place.number)
            if flags == _BIG:
                (number,) = _PAGE.unpack_from(page, data)
                self._check_big(number, size_bytes, place)
            elif flags == _TREE_NODE and size_bytes == _TREE.size:
                yield from self._root(page, data)
            elif flags:
                raise self._overwritten(place.number)
            elif place.is_free_list:
                self._free_lists.append(page[data : data + size_bytes])

    def _check_big(self, number: int, size_bytes: int, place: _Place) -> None:
        """A value that has pages of its own, only the first of which has a head."""
        own, flags, count = _BIG_HEAD.unpack_from(self._page(number))
        start_bytes = number * self._page_bytes + _HEAD.size
        if own != number or flags & ~_PASSING != _OVERFLOW:
            raise self._overwritten(number)
        if size_bytes > count * self._page_bytes - _HEAD.size:
            raise self._overwritten(number)
        self._page(number + count - 1)
        self._use(number, count)
        if place.is_free_list:
            self._free_lists.append(os.pread(self._handle, size_bytes, start_bytes))

    def _check_free(self, octets: bytes) -> None:
        """A list of pages that LMDB will write to: their count, and their numbers."""
        count = _PAGE.unpack_from(octets)[0] if len(octets) >= _PAGE.size else 0
        if len(octets) < (count + 1) * _PAGE.size:
            raise FileDamaged("the list of free pages is overwritten")
        for number in struct.unpack_from(f"<{count}Q", octets, _PAGE.size):
            written = number < len(self._in_use)
            if number > self._last_page or (written and self._in_use[number]):
                raise FileDamaged(f"page {number} is free and in use")

    def _use(self, number: int, count: int) -> None:
        if self._in_use.find(1, number, number + count) >= 0:
            raise FileDamaged(f"page {number} is in use twice")
        self._in_use[number : number + count] = bytes([1]) * count

    def _page(self, number: int) -> bytes:
        if number > self._last_page:
            raise FileDamaged(f"a page names page {number}, of {self._last_page + 1}")
        pages = len(self._in_use)
        if number >= pages:
            raise FileDamaged(
                f"data.mdb has lost its end: {pages} of {self._last_page + 1} pages left"
            )
        return os.pread(self._handle, self._page_bytes, number * self._page_bytes)

    def _overwritten(self, number: int) -> FileDamaged:
        return FileDamaged(f"page {number} is overwritten")
