"""What a tier was asked for, by kind of object, how much it moved, and how long that took."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from sdcpd.protocol.histogram import Histogram
from tiers.api import Entry, Key

KINDS = ("q_rows", "draft_kv", "target_kv", "prompt", "tokens")
"""What names of objects begin with, up to a dot; whatever else a peer calls its own is OTHER."""
OTHER = "other"
OPS = ("get", "miss", "put")
SECONDS = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005),
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)
_KINDS = frozenset(KINDS)


def kind_of(key: Key) -> str:
    """The kind of an object, of which there are few, by its name."""
    kind = key.name.partition(".")[0]
    return kind if kind in _KINDS else OTHER


class Meter:
    """Counters of one tier since it was opened."""

    __slots__ = ("hits", "misses", "read_bytes", "seconds", "written_bytes")

    def __init__(self) -> None:
        self.hits: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.read_bytes = self.written_bytes = 0
        self.seconds: Mapping[str, Histogram] = {op: Histogram(SECONDS) for op in OPS}

    def without(self, misses: Counter[str]) -> Meter:
        """The same counters, but for some misses that were of the same request."""
        made = Meter()
        made.hits, made.misses = self.hits, self.misses - misses
        made.read_bytes, made.written_bytes = self.read_bytes, self.written_bytes
        made.seconds = self.seconds
        return made


class Metered:
    """A tier whose reads and writes are counted: it has them as `_get` and `_put`."""

    def __init__(self) -> None:
        self.meter = Meter()

    async def get(self, key: Key) -> Entry | None:
        """See Tier."""
        meter, begin = self.meter, time.perf_counter()
        entry = await self._get(key)
        took_s = time.perf_counter() - begin
        if entry is None:
            meter.misses[kind_of(key)] += 1
            meter.seconds["miss"].add(took_s)
        else:
            meter.hits[kind_of(key)] += 1
            meter.read_bytes += len(entry.data)
            meter.seconds["get"].add(took_s)
        return entry

    async def put(self, key: Key, entry: Entry, *, lease_s: float) -> None:
        """See Tier; what is refused is in no count."""
        meter, begin = self.meter, time.perf_counter()
        await self._put(key, entry, lease_s=lease_s)
        meter.seconds["put"].add(time.perf_counter() - begin)
        meter.written_bytes += len(entry.data)

    async def _get(self, key: Key) -> Entry | None:
        raise NotImplementedError

    async def _put(self, key: Key, entry: Entry, *, lease_s: float) -> None:
        raise NotImplementedError
