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
from collections.abc import Callable, Collection
from functools import partial

from sdcpd.transport.local_memory import create
from tiers.api import TierError
from tiers.arena_firm import Firm
from tiers.arena_slots import Slots, rounded

# The largest piece that a driver is given at once; larger ones fail, or take minutes.
CHUNK_BYTES = 64 << 30


_Octets = ctypes.Array[ctypes.c_ubyte]


class Slot:
    """A part of an arena; it is free again when this and all views of it are gone."""

    __slots__ = ("_exporter", "_lent", "offset", "size_bytes")

    def __init__(
        self, offset: int, size_bytes: int, exporter: _Octets, lent: Callable[[int, _Octets], None]
    ) -> None:
        """`lent` is told of what each view is made from."""
        self.offset = offset
        self.size_bytes = size_bytes
        self._exporter = exporter
        self._lent = lent

    def view(self) -> memoryview:
        """Return its octets, to be read only; valid for as long as somebody has the view."""
        exporter = type(self._exporter).from_buffer(self._exporter)
        self._lent(self.offset, exporter)
        return memoryview(exporter).cast("B").toreadonly()[: self.size_bytes]


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
        self._firm = Firm(size_bytes, chunk_bytes=chunk_bytes)
        self._lent: dict[int, weakref.ref[_Octets]] = {}
        self._views: dict[int, tuple[int, weakref.ref[_Octets]]] = {}
        self._view = 0
        # In their order: the slot's offset, or None and the number of the view.
        self._returned: deque[tuple[int | None, int]] = deque()

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
        self._lent[offset] = weakref.ref(exporter, partial(_note, self._returned, (offset, 0)))
        return Slot(offset, size_bytes, exporter, self._viewed)

    def hold(self, slot: Slot, until: float) -> None:
        """Count on a slot that it is not given back before then."""
        self._firm.hold(slot.offset, self._slots.size_of(slot.offset), until)

    def let_go(self, slot: Slot) -> None:
        """Count no longer on it."""
        self._firm.let_go(slot.offset)

    def held(self, now: float) -> Collection[int]:
        """The offsets of those slots that are counted on."""
        self._collect()
        return self._firm.held(now)

    def could_take(self, size_bytes: int, now: float, *, replaced: Slot | None = None) -> bool:
        """Whether so much could be taken at once, or when all had gone that may go.

        What is held stays, unless it is `replaced`, and so does what somebody has a view of.
        """
        self._collect()
        if rounded(size_bytes) <= self._slots.largest_bytes:
            return True
        viewed = {
            offset: self._slots.size_of(offset)
            for offset, _ in self._views.values()
            if offset in self._lent  # the collector may tell of slot and view in any order
        }
        old = None if replaced is None else replaced.offset
        return self._firm.leaves(rounded(size_bytes), now, besides=viewed, replaced=old)

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
        self._firm.check()
        assert len(self._lent) == len(self._slots)
        assert {offset for offset, _ in self._views.values()} <= self._lent.keys()

    def _viewed(self, offset: int, exporter: _Octets) -> None:
        self._collect()  # else only puts would, and a cache is read more often
        self._view += 1
        gone = partial(_note, self._returned, (None, self._view))
        self._views[self._view] = offset, weakref.ref(exporter, gone)

    def _collect(self) -> None:
        while self._returned:
            offset, view = self._returned.popleft()
            if offset is None:
                del self._views[view]
                continue
            del self._lent[offset]
            self._firm.let_go(offset)
            self._slots.give_back(offset)


def _note(returned: deque[tuple[int | None, int]], what: tuple[int | None, int], _: object) -> None:
    returned.append(what)
