"""Small records by key in an LMDB environment of their own, durable when acknowledged (D-F5)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set
from pathlib import Path

import lmdb

from tiers.api import TierError
from tiers.folder import Folder
from tiers.lmdb_file import FileDamaged, check_file, trouble
from tiers.writer import GroupWriter

MAP_BYTES_MIN = 64 * 1024
KEY_BYTES_MAX = 511  # LMDB's own limit

_Op = tuple[bytes, bytes | None]


class LmdbRecords:
    """What one process must find again after a restart; a few octets to a few MiB each."""

    def __init__(self, path: Path, *, map_bytes: int, setting: str) -> None:
        """Open or create; raises TierError, which names `setting` as what to change."""
        self._folder = Folder(path, setting=setting)
        self._path, self._setting = path, setting
        try:
            check_file(path, used=self._folder.used)
            self._env = lmdb.open(
                str(path), map_size=max(map_bytes, MAP_BYTES_MIN), sync=True, mode=0o600
            )
            self._env.reader_check()
            self._folder.mark_used()
        except (lmdb.Error, FileDamaged, OSError) as error:
            self._folder.release()
            raise trouble("records", path, error, setting=setting) from error
        self._writer = GroupWriter[_Op, None]("records", self._perform)

    def all(self) -> dict[bytes, bytes]:
        """Everything stored, in the order of keys; raises TierError."""
        try:
            with self._env.begin() as txn:
                return {bytes(key): bytes(value) for key, value in txn.cursor()}
        except lmdb.Error as error:
            raise TierError(f"the records at {self._path} cannot be read: {error}") from error

    async def keys_of_all(self) -> Set[bytes]:
        """The keys stored here, without their values: nobody else writes to the directory."""
        return await asyncio.to_thread(self._keys)

    def _keys(self) -> Set[bytes]:
        try:
            with self._env.begin() as txn:
                return {bytes(key) for key in txn.cursor().iternext(keys=True, values=False)}
        except lmdb.Error as error:
            raise TierError(f"the records at {self._path} cannot be read: {error}") from error

    async def put(self, key: bytes, value: bytes) -> None:
        """Store a value; on the disk when this returns. Raises TierError."""
        await self._write(key, value)

    async def delete(self, key: bytes) -> None:
        """Remove a value, if it is there; raises TierError."""
        await self._write(key, None)

    async def aclose(self) -> None:
        """Finish what was begun."""
        self._writer.stop()
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """As `aclose`, blocking."""
        self._writer.stop()
        self._writer.join()
        self._env.close()
        self._folder.release()

    async def _write(self, key: bytes, value: bytes | None) -> None:
        if not 0 < len(key) <= KEY_BYTES_MAX:
            raise ValueError(f"a key has 1 to {KEY_BYTES_MAX} octets")
        if self._writer.closed:
            raise TierError(f"the records at {self._path} are closed")
        if self._writer.busy:
            raise TierError(f"the disk of {self._path} is too far behind")
        (outcome,) = await self._writer.submit([(key, value)])
        if isinstance(outcome, Exception):
            raise outcome

    # From here on: the writer's thread.

    def _perform(self, ops: list[_Op]) -> Sequence[Exception | None]:
        try:
            with self._env.begin(write=True) as txn:
                for key, value in ops:
                    if value is None:
                        txn.delete(key)
                    else:
                        txn.put(key, value)
        except lmdb.Error as error:
            if len(ops) == 1:
                return [TierError(f"{self._path} cannot be written ({error}): see {self._setting}")]
            # Which of the group has no room shows one by one.
            return [outcome for op in ops for outcome in self._perform([op])]
        return [None] * len(ops)
