"""Objects in an LMDB file: rows, checksums and transactions; no budget and no leases.

Two tables by key (scope, NUL, name): `head` holds generation, size, checksum, tag and media type,
so that opening needs not touch the data; `data` holds the octets.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import lmdb
import xxhash

from tiers.api import Entry, Key, TierError
from tiers.checksum import told
from tiers.folder import Folder
from tiers.lmdb_file import FileDamaged, check_file

_HEAD = struct.Struct(">QQ16sH")
_NUL = b"\0"  # between fields, none of which holds it
_TICK = b"\0tick"  # no key starts with NUL: a scope is a path segment


class Torn(Exception):
    """A value that is not what was written."""


@dataclass(frozen=True, slots=True)
class Store:
    """Write an object."""

    key: Key
    entry: Entry
    generation: int


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete an object."""

    key: Key


@dataclass(frozen=True, slots=True)
class Tick:
    """Write nothing of use, so that a transaction passes and pages freed before become usable."""


class Objects:
    """One environment, opened once; `perform` runs in one thread, `read` in any."""

    def __init__(self, folder: Folder, *, map_bytes: int, boot: str) -> None:
        """Open, and start anew where the files can't be trusted; raises TierError."""
        self._folder = folder
        self._map_bytes = map_bytes
        try:
            if not folder.intact(boot):
                folder.wipe()
            try:
                check_file(folder.path, used=False)
                self._open()
                self.listing()
            except (lmdb.Error, FileDamaged, Torn, ValueError):
                # A cache that can't be read is worth nothing; a second failure is the disk's.
                self._close_quietly()
                folder.wipe()
                self._open()
            folder.mark(boot, clean=False)
        except (lmdb.Error, OSError) as error:
            raise TierError(
                f"the cache at {folder.path} cannot be opened ({error}): check the disk, or change"
                " [mlc] tiers"
            ) from error

    def perform(self, ops: Sequence[Store | Remove | Tick]) -> list[Exception | None]:
        """Perform operations in one transaction; what fails there is tried one by one."""
        try:
            with self._env.begin(write=True) as txn:
                for op in ops:
                    self._apply(txn, op)
        except lmdb.Error as error:
            if len(ops) == 1:
                return [error]
            return [outcome for op in ops for outcome in self.perform([op])]
        return [None] * len(ops)

    def read(self, key: Key) -> Entry | None:
        """Return a copy of an object; raises Torn, or lmdb.Error."""
        raw = _raw(key)
        with self._env.begin(buffers=True) as txn:
            head_view = txn.get(raw, db=self._heads)
            data_view = txn.get(raw, db=self._data)
            if head_view is None:
                return None
            # Copied before the transaction ends: afterwards the pages are another object's.
            head, data = bytes(head_view), bytes(data_view or b"")
        if len(head) < _HEAD.size:
            raise Torn
        generation, size_bytes, checksum, etag_size = _HEAD.unpack_from(head)
        text = head[_HEAD.size :]
        digest = xxhash.xxh3_128_digest(data)
        if checksum != _checksum(raw, generation, text, digest) or len(data) != size_bytes:
            raise Torn
        media_type, coding, after = _fields(text[etag_size:])
        return Entry(data, text[:etag_size].decode(), media_type, coding, after)

    def listing(self) -> list[tuple[Key, int, int, str]]:
        """Return key, octets, generation and what it continues, of every object, oldest first."""
        found = []
        with self._env.begin(db=self._heads) as txn:
            for raw, head in txn.cursor():
                if raw == _TICK:
                    continue
                scope, _, name = raw.partition(b"\0")
                if len(head) < _HEAD.size:
                    raise Torn
                generation, size_bytes, _, etag_size = _HEAD.unpack_from(head)
                after = _fields(head[_HEAD.size + etag_size :])[2]
                key = Key(scope.decode(), name.decode())
                found.append((key, size_bytes, generation, after))
        return sorted(found, key=lambda entry: entry[2])

    def close(self) -> None:
        """Flush and close."""
        self._env.sync(True)
        self._env.close()

    def _open(self) -> None:
        self._env = lmdb.open(
            str(self._folder.path),
            map_size=self._map_bytes,
            max_dbs=2,
            sync=False,
            metasync=False,
            mode=0o600,
            readahead=True,  # large values: without it a cold read faults page by page
        )
        # Slots of readers that were killed would keep old pages from being used again; while we
        # hold the folder there are no others.
        self._env.reader_check()
        self._heads = self._env.open_db(b"head")
        self._data = self._env.open_db(b"data")

    def _close_quietly(self) -> None:
        with suppress(AttributeError, lmdb.Error):
            self._env.close()

    def _apply(self, txn: lmdb.Transaction, op: Store | Remove | Tick) -> None:
        match op:
            case Store(key, entry, generation):
                raw = _raw(key)
                etag = entry.etag.encode()
                text = etag + entry.media_type.encode()
                if entry.coding or entry.after:
                    text += _NUL + entry.coding.encode()
                if entry.after:
                    text += _NUL + entry.after.encode()
                known = told(entry)
                digest = bytes.fromhex(known) if known else xxhash.xxh3_128_digest(entry.data)
                checksum = _checksum(raw, generation, text, digest)
                head = _HEAD.pack(generation, len(entry.data), checksum, len(etag)) + text
                txn.put(raw, head, db=self._heads)
                txn.put(raw, entry.data, db=self._data)
            case Remove(key):
                txn.delete(_raw(key), db=self._heads)
                txn.delete(_raw(key), db=self._data)
            case Tick():
                txn.put(_TICK, b"", db=self._heads)
                txn.delete(_TICK, db=self._heads)


def _fields(text: bytes) -> tuple[str, str, str]:
    """Media type, coding, and what the object continues; the last may be absent."""
    media_type, _, rest = text.decode().partition("\0")
    coding, _, after = rest.partition("\0")
    return media_type, coding, after


def _raw(key: Key) -> bytes:
    return f"{key.scope}\0{key.name}".encode()


def _checksum(raw: bytes, generation: int, text: bytes, data_digest: bytes) -> bytes:
    # The key too: a row found under another name is as wrong as one with other octets.
    digest = xxhash.xxh3_128(raw)
    digest.update(generation.to_bytes(8, "big"))
    digest.update(text)
    digest.update(data_digest)
    return digest.digest()
