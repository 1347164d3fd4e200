"""Which parts of an arena are free: best fit, neighbours joined at once.

Sizes are rounded up to GRANULE_BYTES, so an object wastes less than that; what is free lies in as
few pieces as can be. Pieces never reach across a multiple of `chunk_bytes`: memory is registered
with the GPU's driver in such chunks, and one copy must not span two of them. Invariants, told by
`check`: the free pieces and those taken tile the arena, and no two free ones could be joined.
"""

from __future__ import annotations

from bisect import bisect_left, insort

GRANULE_BYTES = 256


def rounded(size_bytes: int) -> int:
    """Return what so many octets take; nothing takes no room at all."""
    return max(1, -(-size_bytes // GRANULE_BYTES)) * GRANULE_BYTES


class Slots:
    """Hands out parts of `size_bytes` octets; holds no data."""

    def __init__(self, size_bytes: int, *, chunk_bytes: int) -> None:
        """What is left of a granule at the end is not used."""
        assert chunk_bytes % GRANULE_BYTES == 0, "chunks are whole granules"
        self.size_bytes = size_bytes - size_bytes % GRANULE_BYTES
        self._chunk_bytes = chunk_bytes
        self._taken: dict[int, int] = {}
        self._free: dict[int, int] = {}
        self._free_by_end: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        for start in range(0, self.size_bytes, chunk_bytes):
            self._add_free(start, min(chunk_bytes, self.size_bytes - start))
        self.taken_bytes = 0

    def __len__(self) -> int:
        """How many parts are taken."""
        return len(self._taken)

    @property
    def largest_bytes(self) -> int:
        """The largest part that could be taken now."""
        return self._by_size[-1][0] if self._by_size else 0

    def take(self, size_bytes: int) -> int | None:
        """Take a part, in whole granules, and return its offset; None if there is none."""
        size_bytes = rounded(size_bytes)
        at = bisect_left(self._by_size, (size_bytes, 0))
        if at == len(self._by_size):
            return None
        found_bytes, start = self._by_size[at]
        self._remove_free(start)
        if found_bytes > size_bytes:
            self._add_free(start + size_bytes, found_bytes - size_bytes)
        self._taken[start] = size_bytes
        self.taken_bytes += size_bytes
        return start

    def size_of(self, start: int) -> int:
        """What a part that is taken takes, in whole granules."""
        return self._taken[start]

    def give_back(self, start: int) -> None:
        """Free a part that was taken."""
        size_bytes = self._taken.pop(start)
        self.taken_bytes -= size_bytes
        after = start + size_bytes
        if after in self._free and after % self._chunk_bytes:
            size_bytes += self._remove_free(after)
        before = self._free_by_end.get(start)
        if before is not None and start % self._chunk_bytes:
            size_bytes += self._remove_free(before)
            start = before
        self._add_free(start, size_bytes)

    def check(self) -> None:
        """Assert the invariants of this module."""
        parts = sorted([*self._taken.items(), *self._free.items()])
        at = 0
        was_free = False
        for start, size_bytes in parts:
            assert start == at, "no gap and no overlap"
            is_free = start in self._free
            assert not (was_free and is_free and start % self._chunk_bytes), "neighbours are joined"
            assert start // self._chunk_bytes == (start + size_bytes - 1) // self._chunk_bytes
            at, was_free = start + size_bytes, is_free
        assert at == self.size_bytes
        assert self.taken_bytes == sum(self._taken.values())
        assert self._by_size == sorted((size, start) for start, size in self._free.items())
        assert self._free_by_end == {start + size: start for start, size in self._free.items()}

    def _add_free(self, start: int, size_bytes: int) -> None:
        self._free[start] = size_bytes
        self._free_by_end[start + size_bytes] = start
        insort(self._by_size, (size_bytes, start))

    def _remove_free(self, start: int) -> int:
        size_bytes = self._free.pop(start)
        del self._free_by_end[start + size_bytes]
        del self._by_size[bisect_left(self._by_size, (size_bytes, start))]
        return size_bytes
