"""Calls to an S3 server that end in time and raise nothing: what fails is counted.

Nothing is retried here: what asked can do without, and the next call comes soon enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from tiers.pause import Pause
from tiers.s3_format import HEAD_BYTES_MAX

ANSWER_S = 2.0  # until a read is answered, or a deletion done
WRITE_S = 5.0
# What is slower is not worth waiting for; added to the above by the object's size.
BYTES_PER_S_MIN = 16 << 20
# Nothing that is put is larger (`[mlc] object_max`), so it is not read into memory.
STORED_BYTES_MAX = 4 << 30

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stored:
    """Octets of a bucket's object, from its beginning, and the size of the whole."""

    octets: memoryview
    size_bytes: int


class S3Server:
    """One bucket; `failures` counts the calls that failed or took too long."""

    def __init__(self, store: S3Store, *, where: str, clock: Callable[[], float]) -> None:
        """`where` names it to people; `clock` measures pauses, deadlines are the event loop's."""
        self._store = store
        self._pause = Pause(where, clock)
        self.failures = 0

    @property
    def resting(self) -> bool:
        """Whether the server has failed and is left alone for a while."""
        return self._pause.resting

    async def read(self, path: str) -> Stored | None:
        """The whole object; None if there is none, or for a failure."""
        return await self._call(lambda limit: self._read(path, limit), ANSWER_S)

    async def read_head(self, path: str) -> Stored | None:
        """The beginning of the object, where its head is; None as for `read`."""
        return await self._call(lambda _: self._read_head(path), ANSWER_S)

    async def write(self, path: str, octets: bytes) -> bool:
        """Store an object, visible when complete; False for a failure, and then it is unknown."""
        seconds = WRITE_S + len(octets) / BYTES_PER_S_MIN
        return await self._call(lambda _: self._write(path, octets), seconds) is not None

    async def delete(self, path: str) -> bool:
        """Delete an object, if there is one; False for a failure."""
        return await self._call(lambda _: self._delete(path), ANSWER_S) is not None

    async def _call(
        self, call: Callable[[asyncio.Timeout], Awaitable[T | None]], seconds: float
    ) -> T | None:
        if not self._pause.enter():
            return None
        failed: bool | None = None
        try:
            async with asyncio.timeout(seconds) as limit:
                found = await call(limit)
            failed = False
            return found
        except (BaseError, OSError):  # TimeoutError is an OSError
            failed = True
            self.failures += 1
            return None
        finally:
            self._pause.leave(failed=failed)

    async def _read(self, path: str, limit: asyncio.Timeout) -> Stored | None:
        try:
            result = await obstore.get_async(self._store, path)
        except FileNotFoundError:
            return None
        size_bytes = result.meta["size"]
        if size_bytes > STORED_BYTES_MAX:
            return Stored(memoryview(b""), size_bytes)
        now = asyncio.get_running_loop().time()
        limit.reschedule(now + ANSWER_S + size_bytes / BYTES_PER_S_MIN)
        return Stored(memoryview(await result.bytes_async()), size_bytes)

    async def _read_head(self, path: str) -> Stored | None:
        try:
            result = await obstore.get_async(
                self._store, path, options={"range": (0, HEAD_BYTES_MAX)}
            )
        except FileNotFoundError:
            return None
        except BaseError as error:
            if "status code: 416" not in str(error):
                raise
            return Stored(memoryview(b""), 0)  # of nothing there is no range
        return Stored(memoryview(await result.bytes_async()), result.meta["size"])

    async def _write(self, path: str, octets: bytes) -> bool:
        # In one piece, as in several the server may be left with some of them.
        await obstore.put_async(self._store, path, octets, use_multipart=False)
        return True

    async def _delete(self, path: str) -> bool:
        try:
            await obstore.delete_async(self._store, path)
        except FileNotFoundError:
            return True
        return True
