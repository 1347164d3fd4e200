"""Records in memory, as durable as the object that holds them (D-F5)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Set

from tiers.api import TierError


class MemoryRecords:
    """`Records` that outlive a router in a test; `failing` makes every write fail."""

    def __init__(self, *, write_s: float = 0.0) -> None:
        self.content: dict[bytes, bytes] = {}
        self.failing = False
        self._write_s = write_s

    def all(self) -> Mapping[bytes, bytes]:
        """See Records."""
        return dict(self.content)

    async def keys_of_all(self) -> Set[bytes]:
        """See Records."""
        return set(self.content)

    async def put(self, key: bytes, value: bytes) -> None:
        """See Records."""
        await self._written()
        self.content[key] = value

    async def delete(self, key: bytes) -> None:
        """See Records."""
        await self._written()
        self.content.pop(key, None)

    async def _written(self) -> None:
        await asyncio.sleep(self._write_s)  # the length of a flush is what is being faked
        if self.failing:
            raise TierError("the disk is full")
