"""Every tier keeps the contract of the kit; leases (D-M10) and eviction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit.cuda import no_cuda
from tests.kit.tier_contract import SIZE_BYTES, Checked, Clock, contract, entry
from tiers.api import Key, TierFull
from tiers.host import OBJECT_BYTES, HostTier
from tiers.ledger import Ledger
from tiers.lmdb_tier import LmdbTier
from tiers.pinned import PinnedTier
from tiers.stack import TierStack


def open_host(path: Path, clock: Clock) -> Checked:
    return HostTier(SIZE_BYTES, clock=clock)


def open_lmdb(path: Path, clock: Clock) -> Checked:
    return LmdbTier(path / "objects", SIZE_BYTES, clock=clock)


def open_stack(path: Path, clock: Clock) -> Checked:
    lower = LmdbTier(path / "objects", SIZE_BYTES, clock=clock)
    return TierStack([HostTier(SIZE_BYTES // 2, clock=clock), lower], demote_bytes_max=20000)


def open_stack_of_three(path: Path, clock: Clock) -> Checked:
    return TierStack([HostTier(SIZE_BYTES // 2, clock=clock) for _ in range(3)])


def open_host_with_quota(path: Path, clock: Clock) -> Checked:
    return HostTier(SIZE_BYTES, scope_bytes_max=SIZE_BYTES // 2, clock=clock)


def open_pinned(path: Path, clock: Clock) -> Checked:
    return PinnedTier(SIZE_BYTES, clock=clock, runtime=no_cuda)


def open_pinned_in_chunks(path: Path, clock: Clock) -> Checked:
    """Of which none holds two of the largest objects."""
    chunk_bytes = 24 * 1024
    return PinnedTier(3 * chunk_bytes, clock=clock, runtime=no_cuda, chunk_bytes=chunk_bytes)


def open_pinned_stack(path: Path, clock: Clock) -> Checked:
    """What leaves the arena goes to memory, and comes back."""
    upper = PinnedTier(SIZE_BYTES // 2, clock=clock, runtime=no_cuda)
    return TierStack([upper, HostTier(SIZE_BYTES // 2, clock=clock)])


TestHost = contract(open_host, examples=40)
TestHostWithQuota = contract(open_host_with_quota, examples=40)
TestLmdb = contract(open_lmdb)
TestPinned = contract(open_pinned, examples=40)
TestPinnedInChunks = contract(open_pinned_in_chunks, examples=30)
TestPinnedStack = contract(open_pinned_stack, examples=30)
TestStack = contract(open_stack)
TestStackOfThree = contract(open_stack_of_three, examples=30)

A, B, C, D = (Key("s", name) for name in "ABCD")


@pytest.fixture
def clock() -> Clock:
    return Clock()


def host(clock: Clock, *, objects: int) -> HostTier:
    """A tier with room for that many objects of 1000 octets."""
    return HostTier(objects * (1000 + OBJECT_BYTES), clock=clock)


async def held(tier: Checked) -> set[Key]:
    return {key for key in (A, B, C, D) if await tier.holds(key)}


async def test_dm10_full_of_leases_is_told_at_once_and_nothing_is_lost(clock: Clock) -> None:
    tier = host(clock, objects=2)
    await tier.put(A, entry(1, 1000), lease_s=5)
    await tier.put(B, entry(2, 1000), lease_s=5)
    with pytest.raises(TierFull):
        await tier.put(C, entry(3, 1000), lease_s=5)
    assert await held(tier) == {A, B}
    tier.check()


async def test_dm10_a_lease_ends_by_itself_and_its_object_goes_first(clock: Clock) -> None:
    tier = host(clock, objects=3)
    await tier.put(A, entry(1, 1000), lease_s=0)
    await tier.put(B, entry(2, 1000), lease_s=5)
    await tier.put(C, entry(3, 1000), lease_s=0)
    clock.now += 5
    assert tier.stats().leased_bytes == 0
    await tier.put(D, entry(4, 1000), lease_s=0)
    assert await held(tier) == {A, C, D}


async def test_dm10_renewal_counts_from_now_and_zero_releases(clock: Clock) -> None:
    tier = host(clock, objects=1)
    await tier.put(A, entry(1, 1000), lease_s=5)
    clock.now += 4
    assert await tier.renew(A, 5)
    clock.now += 4
    with pytest.raises(TierFull):
        await tier.put(B, entry(2, 1000), lease_s=0)
    assert await tier.renew(A, 0)
    await tier.put(B, entry(2, 1000), lease_s=0)
    assert await held(tier) == {B}
    assert not await tier.renew(A, 5)


async def test_looking_renews_no_lease_and_reading_only_the_order(clock: Clock) -> None:
    tier = host(clock, objects=2)
    await tier.put(A, entry(1, 1000), lease_s=5)
    clock.now += 4.9
    assert await tier.holds(A) and await tier.get(A)
    clock.now += 0.1
    assert tier.stats().leased_bytes == 0
    await tier.put(B, entry(2, 1000), lease_s=0)
    await tier.get(A)
    await tier.put(C, entry(3, 1000), lease_s=0)
    assert await held(tier) == {A, C}


async def test_a_refused_object_evicts_nothing(clock: Clock) -> None:
    tier = host(clock, objects=2)
    await tier.put(A, entry(1, 1000), lease_s=0)
    with pytest.raises(TierFull):
        await tier.put(B, entry(2, 10_000), lease_s=0)
    assert await held(tier) == {A}


async def test_many_renewals_leave_the_books_small(clock: Clock) -> None:
    ledger = Ledger(10_000, clock=clock)
    ledger.add(A, 1, lease_s=1)
    for _ in range(1000):
        clock.now += 0.5
        assert ledger.renew(A, 1)
    ledger.check()
    assert len(ledger._deadlines) < 100
    assert ledger.leased_bytes == 1


async def test_a_scope_makes_room_among_its_own(clock: Clock) -> None:
    """One that writes without end pushes out nobody else's."""
    tier = HostTier(
        4 * (1000 + OBJECT_BYTES), scope_bytes_max=2 * (1000 + OBJECT_BYTES), clock=clock
    )
    other = Key("t", "A")
    await tier.put(other, entry(9, 1000), lease_s=0)
    for key in (A, B, C, D):
        await tier.put(key, entry(1, 1000), lease_s=0)
    assert await held(tier) == {C, D} and await tier.holds(other)
    tier.check()


async def test_leases_of_a_scope_are_bounded_with_it(clock: Clock) -> None:
    tier = HostTier(
        4 * (1000 + OBJECT_BYTES), scope_bytes_max=2 * (1000 + OBJECT_BYTES), clock=clock
    )
    await tier.put(A, entry(1, 1000), lease_s=5)
    await tier.put(B, entry(2, 1000), lease_s=5)
    with pytest.raises(TierFull, match="left to the scope"):
        await tier.put(C, entry(3, 1000), lease_s=0)
    await tier.put(B, entry(4, 1000), lease_s=5)
    assert await tier.get(B) == entry(4, 1000), "its own place is enough for it"
    await tier.put(Key("t", "A"), entry(5, 1000), lease_s=5)
    clock.now += 5
    await tier.put(C, entry(3, 1000), lease_s=0)
    tier.check()


async def test_an_octet_that_changed_in_memory_is_a_miss_that_is_counted(clock: Clock) -> None:
    tier = host(clock, objects=4)
    await tier.put(A, entry(1, 1000), lease_s=0)
    await tier.put(
        B, replace(entry(2, 900), coding="zstd", etag='"of-what-it-decodes-to"'), lease_s=0
    )
    for key in (A, B):
        kept = tier._entries[key]
        assert await tier.get(key) == kept
        tier._entries[key] = replace(kept, data=b"\xff" + kept.data[1:])
        assert await tier.get(key) is None and not await tier.holds(key)
    assert tier.stats().corrupt == 2
    tier.check()
