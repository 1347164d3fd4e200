"""One piece of memory that is there from the start, lent out in slots.

A slot belongs to whoever holds it or any view of it: it is used again only when the last of them is
gone. That is told by the garbage collector, perhaps in another thread or in the middle of anything,
so it is only noted then, and acted on when the next slot is taken.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import deque
from collections.abc import Iterable
from functools import partial

from sdcpd.transport.local_memory import create
from tiers.api import TierError
from tiers.arena_slots import Slots, rounded

# The largest piece that a driver is given at once; larger ones fail, or take minutes.
CHUNK_BYTES = 64 << 30


class Slot:
    """A part of an arena; it is free again when this and all views of it are gone."""

    __slots__ = ("_exporter", "offset", "size_bytes")

    def __init__(
        self, offset: int, size_bytes: int, exporter: ctypes.Array[ctypes.c_ubyte]
    ) -> None:
        self.offset = offset
        self.size_bytes = size_bytes
        self._exporter = exporter

    def view(self) -> memoryview:
        """Return its octets, to be read only; valid for as long as somebody has the view."""
        return memoryview(self._exporter).cast("B").toreadonly()[: self.size_bytes]


class Arena:
    """Slots in memory of its own; used from one thread, views of them from any."""

    def __init__(self, size_bytes: int, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Take all the memory, which needs about a second for 2 GiB; raises TierError."""
        try:
            self._memory, self._fd = create(size_bytes, name="sdcpd-arena")
        except (OSError, OverflowError, AttributeError) as error:
            raise TierError(
                f"[mlc] tiers: {size_bytes} octets of memory for the pinned tier cannot be had"
                f' ({error}): give it a smaller size, or take kind = "host"'
            ) from error
        self._slots = Slots(size_bytes, chunk_bytes=chunk_bytes)
        self._lent: dict[int, weakref.ref[ctypes.Array[ctypes.c_ubyte]]] = {}
        self._returned: deque[int] = deque()

    @property
    def address(self) -> int:
        """Where it lies in this process."""
        return self._memory.address

    @property
    def size_bytes(self) -> int:
        """All of it."""
        return self._memory.size_bytes

    def take(self, size_bytes: int) -> Slot | None:
        """Return a slot of so many octets, None while no free piece is long enough."""
        self._collect()
        offset = self._slots.take(size_bytes)
        if offset is None:
            return None
        exporter = self._memory.exporter(offset, rounded(size_bytes))
        self._lent[offset] = weakref.ref(exporter, partial(_note, self._returned, offset))
        return Slot(offset, size_bytes, exporter)

    def could_take(self, size_bytes: int, *, keeping: Iterable[Slot]) -> bool:
        """Whether so much could be taken at once, or after all but these slots have gone."""
        self._collect()
        if rounded(size_bytes) <= self._slots.largest_bytes:
            return True
        offsets = (slot.offset for slot in keeping)
        return self._slots.could_take(size_bytes, keeping=offsets)

    def write(self, slot: Slot, at: int, data: bytes | memoryview) -> None:
        """Copy octets into a slot, from its octet `at` on."""
        assert at + len(data) <= slot.size_bytes, "within the slot"
        self._memory.write(slot.offset + at, data)

    def held_bytes(self) -> int:
        """What is lent, the rounding included."""
        self._collect()
        return self._slots.taken_bytes

    def close(self) -> None:
        """Give the memory back, or have it given back with the last view."""
        os.close(self._fd)
        self._memory.close()

    def check(self) -> None:
        """Assert that slots are lent once and tile the memory."""
        self._collect()
        self._slots.check()
        assert len(self._lent) == len(self._slots)

    def _collect(self) -> None:
        while self._returned:
            offset = self._returned.popleft()
            del self._lent[offset]
            self._slots.give_back(offset)


def _note(returned: deque[int], offset: int, _: object) -> None:
    returned.append(offset)
