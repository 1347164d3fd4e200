"""The contract of a cache tier, for every implementation: a machine against a dict model.

A cache may forget, so the model doesn't say what is there but what must never be seen: other octets
than those put last, an object that was deleted, and the loss of one under lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tiers.api import Entry, Key, Tier, TierFull, entry_of

T = TypeVar("T")
KEYS = tuple(Key("scope" + str(n % 2), f"q/{n // 2}") for n in range(6))
SIZE_BYTES = 64 * 1024
MEDIA_TYPE = "application/octet-stream"

keys = st.sampled_from(KEYS)
leases = st.sampled_from((0.0, 1.0, 5.0))


class Checked(Tier, Protocol):
    """A tier that can check itself."""

    def check(self) -> None: ...


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


OpenTier = Callable[[Path, Clock], Checked]


def entry(fill: int, size_bytes: int) -> Entry:
    """Return an object of that many octets."""
    return entry_of(bytes([fill]) * size_bytes, media_type=MEDIA_TYPE)


class TierMachine(RuleBasedStateMachine):
    """Drives a tier of SIZE_BYTES; a subclass says how it is opened."""

    open_tier: OpenTier

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.clock = Clock()
        self.loop = asyncio.new_event_loop()
        self.tier = type(self).open_tier(Path(self.folder.name), self.clock)
        self.model: dict[Key, Entry] = {}
        self.leased_until: dict[Key, float] = {}

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(call)

    def leased(self, key: Key) -> bool:
        return self.leased_until.get(key, 0.0) > self.clock.now

    @rule(
        key=keys,
        fill=st.integers(0, 3),
        size=st.sampled_from((0, 1, 5000, 20000)),
        lease=leases,
        after=st.one_of(st.just(""), keys.map(lambda key: key.name)),
    )
    def put(self, key: Key, fill: int, size: int, lease: float, after: str) -> None:
        new = replace(entry(fill, size), after=after)
        try:
            self.run(self.tier.put(key, new, lease_s=lease))
        except TierFull:
            # What it held, or nothing: the model keeps the old, without promise.
            self.leased_until.pop(key, None)
            assert self.run(self.tier.get(key)) in (None, self.model.get(key))
            return
        self.model[key] = new
        self.leased_until[key] = self.clock.now + lease
        if lease:
            assert self.run(self.tier.get(key)) == new

    @rule(key=keys)
    def get(self, key: Key) -> None:
        found = self.run(self.tier.get(key))
        if found is None:
            assert not self.leased(key), "an object under lease was lost"
        else:
            assert found == self.model.get(key), "other octets, or a deleted object"

    @rule(key=keys)
    def delete(self, key: Key) -> None:
        self.run(self.tier.delete(key))
        self.model.pop(key, None)
        self.leased_until.pop(key, None)
        assert self.run(self.tier.get(key)) is None
        assert not self.run(self.tier.holds(key))

    @rule(key=keys, lease=leases)
    def renew(self, key: Key, lease: float) -> None:
        if self.run(self.tier.renew(key, lease)):
            assert key in self.model
            self.leased_until[key] = self.clock.now + lease
        else:
            assert not self.leased(key)

    @rule(seconds=st.sampled_from((0.5, 1.0, 4.0)))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def others_run(self) -> None:
        self.run(asyncio.sleep(0))

    @invariant()
    def books_agree(self) -> None:
        self.tier.check()
        stats = self.tier.stats()
        assert 0 <= stats.leased_bytes <= stats.used_bytes <= stats.size_bytes
        leased = sum(len(self.model[key].data) for key in self.leased_until if self.leased(key))
        assert stats.leased_bytes >= leased, "leases are counted"

    def teardown(self) -> None:
        self.run(self.tier.aclose())
        self.run(self.loop.shutdown_default_executor())
        self.loop.close()
        self.folder.cleanup()


def contract(open_it: OpenTier, *, examples: int = 12) -> type[Any]:
    """Return the test case of an implementation."""

    class Machine(TierMachine):
        open_tier = staticmethod(open_it)

    Machine.TestCase.settings = settings(
        max_examples=examples, stateful_step_count=30, deadline=None
    )
    return Machine.TestCase
