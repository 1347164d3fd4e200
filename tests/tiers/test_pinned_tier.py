"""The pinned tier: with CUDA, without it, with one that fails; what readers hold; what is corrupt."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from tests.kit.cuda import FakeRuntime, no_cuda
from tests.kit.tier_contract import Clock, entry
from tiers import pinned
from tiers.api import Entry, Key, TierFull
from tiers.cuda_memory import NotPinned, TorchRuntime
from tiers.host import HostTier
from tiers.pinned import PinnedTier, cost_bytes
from tiers.stack import TierStack

A, B, C = (Key("s", name) for name in "ABC")
KIB = 1024


async def got(tier: PinnedTier, key: Key) -> bytes | None:
    found = await tier.get(key)
    return None if found is None else bytes(found.data)


async def test_all_chunks_are_registered_while_it_serves_and_released_at_the_end() -> None:
    runtime = FakeRuntime()
    runtime.held = threading.Event()
    tier = PinnedTier(64 * KIB, runtime=lambda: runtime, chunk_bytes=16 * KIB)
    assert await asyncio.to_thread(runtime.entered.wait, 30)
    await tier.put(A, entry(1, 1000), lease_s=0)
    assert await got(tier, A) == entry(1, 1000).data, "it serves meanwhile"
    assert not tier.stats().pinned
    runtime.held.set()
    assert await asyncio.to_thread(tier._registration.settled)
    assert tier.stats().pinned and len(runtime.registered) == 4
    assert set(runtime.registered.values()) == {16 * KIB}
    await tier.aclose()
    assert not runtime.registered and not tier.stats().pinned


async def test_a_driver_that_fails_half_way_leaves_ordinary_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime = FakeRuntime(fails_at=2)
    with caplog.at_level(logging.INFO, "sdcpd.tiers"):
        tier = PinnedTier(64 * KIB, runtime=lambda: runtime, chunk_bytes=16 * KIB)
        assert await asyncio.to_thread(tier._registration.settled)
    assert runtime.most == 2 and not runtime.registered, "what was registered is not any more"
    assert not tier.stats().pinned
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "CUDA error 2" in caplog.text
    await tier.put(A, entry(1, 1000), lease_s=0)
    assert await got(tier, A) is not None
    await tier.aclose()


class BrokenCudart:
    """cudaHostRegister that fails, in one of its ways."""

    def __init__(self, failure: Exception | int) -> None:
        self._failure = failure

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        assert flags == 1
        if isinstance(self._failure, Exception):
            raise self._failure
        return self._failure


@pytest.mark.parametrize("failure", [2, RuntimeError("out of memory"), OSError("no device")])
async def test_a_cuda_error_is_taken_away(failure: Exception | int) -> None:
    runtime = TorchRuntime.__new__(TorchRuntime)
    cleared: list[int] = []
    runtime._cudart = BrokenCudart(failure)
    runtime._clear = lambda: cleared.append(1)  # type: ignore[method-assign]
    tier = PinnedTier(64 * KIB, runtime=lambda: runtime)
    assert await asyncio.to_thread(tier._registration.settled)
    assert cleared == [1] and not tier.stats().pinned
    await tier.aclose()


@pytest.mark.slow
def test_torch_stays_out_unless_the_tier_is_configured_and_a_cpu_is_enough() -> None:
    """The whole of it in a fresh process, with PyTorch as it is installed here."""
    code = """
import asyncio, logging, sys
logging.basicConfig(level=logging.INFO)
from tiers.api import Key, entry_of
from tiers.build import TierSpec, build_objects
async def main():
    await (await build_objects([TierSpec("host", 1 << 20)])).aclose()
    assert "torch" not in sys.modules
    tier = await build_objects([TierSpec("pinned", 1 << 20), TierSpec("host", 1 << 20)])
    await tier.put(Key("s", "a"), entry_of(b"octets", media_type="a/b"), lease_s=0)
    found = await tier.get(Key("s", "a"))
    assert bytes(found.data) == b"octets"
    del found
    assert await asyncio.to_thread(tier._tiers[0]._registration.settled)
    assert "torch" in sys.modules
    upper = tier.stats().parts[0]
    print(upper.kind, upper.pinned)
    await tier.aclose()
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kind, is_pinned = done.stdout.split()
    assert kind == "pinned"
    assert is_pinned == "True" or done.stderr.count("is ordinary memory") == 1


async def test_what_a_reader_holds_is_not_overwritten() -> None:
    tier = PinnedTier(2 * cost_bytes(20 * KIB), runtime=no_cuda)
    await tier.put(A, entry(1, 20 * KIB), lease_s=0)
    await tier.put(B, entry(2, 20 * KIB), lease_s=0)
    held = await tier.get(A)
    assert held is not None
    await tier.delete(A)
    for fill in range(3, 6):
        await tier.put(C, entry(fill, 20 * KIB), lease_s=0)
        assert bytes(held.data) == bytes([1]) * 20 * KIB
        tier.check()
    both = [held, await tier.get(C)]
    with pytest.raises(TierFull, match="fit between"):
        await tier.put(B, entry(9, 20 * KIB), lease_s=0)
    assert await tier.holds(C), "nothing is evicted for what finds no place anyway"
    del held, both
    gc.collect()
    await tier.put(B, entry(9, 20 * KIB), lease_s=0)
    assert await got(tier, B) == entry(9, 20 * KIB).data
    tier.check()
    await tier.aclose()


async def test_a_refused_object_evicts_nothing_and_leaves_the_old(clock: Clock) -> None:
    """There is room, but a leased object lies in the middle of it."""
    tier = PinnedTier(10 * cost_bytes(4 * KIB), runtime=no_cuda, clock=clock)
    keys = [Key("s", str(n)) for n in range(9)]
    for n, key in enumerate(keys):
        await tier.put(key, entry(n, 4 * KIB), lease_s=5 if n == 4 else 0)
    with pytest.raises(TierFull, match="fit between"):
        await tier.put(keys[0], entry(9, 26 * KIB), lease_s=0)
    assert [await tier.holds(key) for key in keys] == [True] * 9
    assert await got(tier, keys[0]) == bytes(4 * KIB)
    clock.now += 5
    await tier.put(keys[0], entry(9, 26 * KIB), lease_s=0)
    assert await got(tier, keys[0]) == bytes([9]) * 26 * KIB
    tier.check()
    await tier.aclose()


async def test_a_put_that_readers_leave_no_place_for_evicts_nothing() -> None:
    tier = PinnedTier(16 * cost_bytes(4 * KIB), runtime=no_cuda)
    keys = [Key("s", str(n)) for n in range(15)]
    for n, key in enumerate(keys):
        await tier.put(key, entry(n, 4 * KIB), lease_s=0)
    read = await tier.get(keys[7])
    await tier.delete(keys[7])
    with pytest.raises(TierFull, match="fit between"):
        await tier.put(A, entry(1, 48 * KIB), lease_s=0)
    assert tier.stats().objects == 14 and tier.stats().evicted == 0
    del read
    await tier.put(A, entry(1, 48 * KIB), lease_s=0)
    tier.check()
    await tier.aclose()


@pytest.mark.parametrize("objects", [10, 200])
async def test_to_refuse_is_as_much_work_however_many_are_leased(objects: int) -> None:
    tier = PinnedTier(4 << 20, runtime=no_cuda)
    size_bytes = (4 << 20) // (2 * objects) - 768
    for n in range(2 * objects):
        await tier.put(Key("s", str(n)), entry(0, size_bytes), lease_s=60 if n % 2 else 0)
    big = entry(1, 1000 * KIB)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        with pytest.raises(TierFull, match="fit between"):
            await tier.put(A, big, lease_s=0)
    finally:
        sys.setprofile(None)
    assert calls < 200
    assert tier.stats().evicted == 0
    await tier.aclose()


@pytest.mark.slow
async def test_many_that_make_room_go_down_while_others_have_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is deleted before its turn does not go down, and nothing of it stays."""
    monkeypatch.setattr(pinned, "PIECE_OBJECTS", 10)
    tier = PinnedTier(100 * cost_bytes(1), runtime=no_cuda)
    keys = [Key("s", str(n)) for n in range(100)]
    below: list[str] = []
    tier.on_evicted(lambda key, _: below.append(key.name))
    for event in ("", "delete the new", "cancel"):
        below.clear()
        for key in keys:
            await tier.put(key, entry(1, 1), lease_s=0)
        below.clear()
        task = asyncio.create_task(tier.put(A, entry(1, 15 * KIB), lease_s=5))
        await asyncio.sleep(0)
        assert 0 < len(below) < 20 and not task.done()
        waiting = next(key for key in tier._leaving if key.name not in below)
        await tier.delete(waiting)
        assert await tier.renew(A, 5)
        if event == "cancel":
            task.cancel()
        elif event:
            await tier.delete(A)
        await asyncio.wait([task])
        assert waiting.name not in below and not tier._leaving
        assert await tier.holds(A) == (not event)
        del task
        gc.collect()
        tier.check()
        await tier.delete(A)
    await tier.aclose()


async def test_what_is_corrupt_is_a_miss_and_counted() -> None:
    tier = PinnedTier(64 * KIB, runtime=no_cuda)
    coded = replace(entry(2, 500), coding="zstd", etag='"of-what-it-decodes-to"')
    for key, put in ((A, entry(1, 500)), (B, coded)):
        await tier.put(key, put, lease_s=5)
        assert await tier.get(key) == put
        tier._arena._memory.write(tier._kept[key].slot.offset + 250, b"\xff")
        assert await tier.get(key) is None
        assert not await tier.holds(key)
    assert (tier.stats().corrupt, tier.stats().misses, tier.stats().hits) == (2, 2, 2)
    tier.check()
    await tier.aclose()


async def test_what_is_corrupt_does_not_go_down() -> None:
    """Below it would have a checksum of its own, of the wrong octets."""
    tier = PinnedTier(2 * cost_bytes(20 * KIB), runtime=no_cuda)
    below: list[Key] = []
    tier.on_evicted(lambda key, _: below.append(key))
    await tier.put(A, entry(1, 20 * KIB), lease_s=0)
    await tier.put(B, entry(2, 20 * KIB), lease_s=0)
    tier._arena._memory.write(tier._kept[A].slot.offset + 250, b"\xff")
    await tier.put(C, entry(3, 40 * KIB), lease_s=0)
    assert below == [B] and tier.stats().corrupt == 1
    await tier.aclose()


async def test_what_is_evicted_goes_down_as_a_copy(clock: Clock) -> None:
    lower = HostTier(1 << 20, clock=clock)
    tier = PinnedTier(2 * cost_bytes(20 * KIB), runtime=no_cuda, clock=clock)
    stack = TierStack([tier, lower])
    keys = [Key("s", str(n)) for n in range(12)]
    for n, key in enumerate(keys):
        # None waits for those before it to be written below, though none is yet.
        await stack.put(key, entry(n, 20 * KIB), lease_s=0)
    for n, key in enumerate(keys):
        await stack.settled()
        found = await stack.get(key)
        assert found is not None and bytes(found.data) == bytes([n]) * 20 * KIB
    assert stack.stats().corrupt == 0
    await stack.aclose()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that objects of KiB are copied as those of many MiB are."""
    monkeypatch.setattr(pinned, "PIECE_BYTES", 1000)
    monkeypatch.setattr("tiers.checksum.PIECE_BYTES", 1000)


async def begun(tier: PinnedTier, key: Key, value: Entry) -> asyncio.Task[None]:
    """A put that has copied its first piece."""
    task = asyncio.create_task(tier.put(key, value, lease_s=5))
    await asyncio.sleep(0)
    assert not task.done()
    return task


@pytest.mark.usefixtures("small_pieces")
async def test_a_long_copy_is_seen_when_it_is_whole() -> None:
    tier = PinnedTier(256 * KIB, runtime=no_cuda)
    task = await begun(tier, A, entry(1, 20 * KIB))
    assert await tier.get(A) is None and not await tier.holds(A)
    await task
    assert await got(tier, A) == entry(1, 20 * KIB).data
    tier.check()
    await tier.aclose()


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    "event",
    ["cancel", *(pytest.param(one, marks=pytest.mark.slow) for one in ("delete", "replace"))],
)
async def test_a_long_copy_that_is_overtaken_leaves_nothing(event: str) -> None:
    tier = PinnedTier(256 * KIB, runtime=no_cuda)
    task = await begun(tier, A, entry(1, 20 * KIB))
    expected: bytes | None = None
    if event == "delete":
        await tier.delete(A)
    elif event == "replace":
        await tier.put(A, entry(2, 100), lease_s=5)
        expected = bytes([2]) * 100
    else:
        task.cancel()
    await asyncio.wait([task])
    assert await got(tier, A) == expected
    tier.check()
    del task
    gc.collect()
    await asyncio.sleep(0)  # the loop forgets what it called last
    gc.collect()
    assert tier._arena.held_bytes() == (0 if expected is None else 256)
    await tier.aclose()


@pytest.mark.usefixtures("small_pieces")
async def test_no_put_counts_on_the_place_of_one_that_is_being_written() -> None:
    """It could evict that one, and would have its place no sooner."""
    tier = PinnedTier(256 * KIB, runtime=no_cuda)
    task = asyncio.create_task(tier.put(A, entry(1, 150 * KIB), lease_s=0))
    await asyncio.sleep(0)
    with pytest.raises(TierFull, match="fit between"):
        await tier.put(B, entry(2, 200 * KIB), lease_s=0)
    await task
    assert await got(tier, A) == entry(1, 150 * KIB).data
    await tier.put(B, entry(2, 200 * KIB), lease_s=0)
    assert await got(tier, B) == entry(2, 200 * KIB).data
    tier.check()
    await tier.aclose()


@pytest.mark.device
async def test_a_gpu_copies_from_the_arena_and_sees_no_error_of_ours() -> None:
    import torch

    tier = PinnedTier(64 << 20)
    assert await asyncio.to_thread(tier._registration.settled)
    assert tier.stats().pinned
    await tier.put(A, entry(7, 4 << 20), lease_s=0)
    found = await tier.get(A)
    assert found is not None
    here = torch.frombuffer(found.data, dtype=torch.uint8)
    assert here.is_pinned()
    assert torch.equal(here.cuda(non_blocking=True).cpu(), here)
    with pytest.raises(NotPinned):
        TorchRuntime().register(tier._arena.address, 1 << 20)  # a second time
    assert torch.zeros(1, device="cuda").item() == 0, "the error is not pending"
    del found, here
    await tier.aclose()
