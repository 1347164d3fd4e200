"""The stack: copies up, hands down, and never shows two versions of an object."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.tier_contract import Clock, entry
from tiers.api import Entry, Key, TierError, TierFull
from tiers.build import S3Place, TierSpec, build_objects
from tiers.host import OBJECT_BYTES, HostTier
from tiers.lmdb_tier import LmdbTier
from tiers.stack import TierStack

A, B, C, D = (Key("s", name) for name in "ABCD")
SLOT = 1000 + OBJECT_BYTES


@pytest.fixture
def clock() -> Clock:
    return Clock()


def two(clock: Clock, *, upper: int, lower: int, **options: int) -> tuple[TierStack, HostTier]:
    """A stack of two tiers with room for so many objects of 1000 octets, and its lower tier."""
    below = HostTier(lower * SLOT, clock=clock)
    return TierStack([HostTier(upper * SLOT, clock=clock), below], **options), below


async def test_what_is_evicted_is_handed_down_and_copied_up_on_the_next_hit(clock: Clock) -> None:
    stack, below = two(clock, upper=1, lower=4)
    await stack.put(A, entry(1, 1000), lease_s=0)
    await stack.put(B, entry(2, 1000), lease_s=0)
    await stack.settled()
    assert await below.holds(A) and not await below.holds(B)
    assert await stack.get(A) == entry(1, 1000)
    assert stack.stats().parts[0].objects == 1
    assert await stack.get(A) == entry(1, 1000)
    assert stack.stats().parts[0].hits == 1, "the second hit is above"
    await stack.settled()
    assert await below.holds(B)


async def test_leases_that_fill_the_first_tier_send_a_put_to_the_next(clock: Clock) -> None:
    stack, below = two(clock, upper=1, lower=1)
    await stack.put(A, entry(1, 1000), lease_s=9)
    await stack.put(B, entry(2, 1000), lease_s=9)
    assert await below.holds(B)
    assert await stack.get(B) == entry(2, 1000), "served from below when above is leased"
    with pytest.raises(TierFull):
        await stack.put(C, entry(3, 1000), lease_s=0)
    assert await stack.renew(B, 0) and not await stack.renew(C, 9)
    await stack.put(C, entry(3, 1000), lease_s=0)


async def test_what_outlived_its_lease_is_handed_down_only_after_a_second_use(clock: Clock) -> None:
    """Rows live one round, so they never reach the disk; what two readers wanted does."""
    stack, below = two(clock, upper=2, lower=4)
    await stack.put(A, entry(1, 1000), lease_s=1)
    await stack.put(B, entry(2, 1000), lease_s=1)
    await stack.get(A)
    await stack.get(B)
    await stack.get(B)
    clock.now += 1
    await stack.put(C, entry(3, 1000), lease_s=0)
    await stack.put(D, entry(3, 1000), lease_s=0)
    await stack.settled()
    assert not await below.holds(A) and await below.holds(B)


async def test_a_new_version_or_a_deletion_leaves_no_old_copy_anywhere(clock: Clock) -> None:
    stack, below = two(clock, upper=1, lower=4)
    await stack.put(A, entry(1, 1000), lease_s=0)
    await stack.put(B, entry(2, 1000), lease_s=0)  # A waits to be handed down
    await stack.put(A, entry(9, 1000), lease_s=0)
    await stack.settled()
    assert await stack.get(A) == entry(9, 1000)
    await stack.delete(A)
    await stack.settled()
    assert await stack.get(A) is None and not await below.holds(A)


class Gated(HostTier):
    """Takes an object when it may."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(4 * SLOT, clock=clock)
        self.asked, self.may = asyncio.Event(), asyncio.Event()

    async def put(self, key: Key, entry: Entry, *, lease_s: float) -> None:
        self.asked.set()
        await self.may.wait()
        await super().put(key, entry, lease_s=lease_s)


async def test_a_deletion_waits_for_what_is_being_handed_down(clock: Clock) -> None:
    """Else the old copy would come to lie below after it, and be found again."""
    below = Gated(clock)
    stack = TierStack([HostTier(SLOT, clock=clock), below])
    await stack.put(A, entry(1, 1000), lease_s=0)
    await stack.put(B, entry(2, 1000), lease_s=0)
    await below.asked.wait()
    deletion = asyncio.create_task(stack.delete(A))
    await asyncio.sleep(0)
    assert not deletion.done()
    below.may.set()
    await asyncio.gather(deletion, stack.settled())
    assert not await below.holds(A) and await stack.get(A) is None


async def test_the_queue_downwards_is_bounded_and_counts_what_it_drops(clock: Clock) -> None:
    stack, _ = two(clock, upper=1, lower=9, demote_bytes_max=1500)
    for key in (A, B, C, D):
        await stack.put(key, entry(1, 1000), lease_s=0)
        stack.check()
    await stack.settled()
    assert stack.stats().dropped == 2
    assert await stack.get(A) == entry(1, 1000)


async def test_concurrent_users_see_one_version_or_none(tmp_path: Path) -> None:
    stack = TierStack([HostTier(3 * SLOT), LmdbTier(tmp_path, 1 << 20)])
    keys = [Key("s", str(number)) for number in range(8)]

    async def user(number: int) -> None:
        for step in range(20):
            key = keys[(number + step) % 8]
            if step % 5 == number % 5:
                await stack.delete(key)
            elif step % 3 == 0:
                await stack.put(key, entry(int(key.name), 1000), lease_s=0)
            assert await stack.get(key) in (None, entry(int(key.name), 1000))
            stack.check()

    await asyncio.gather(*map(user, range(8)))
    await stack.aclose()


async def test_a_restart_finds_on_the_disk_what_was_handed_down(tmp_path: Path) -> None:
    specs = [TierSpec("host", 64 * 1024), TierSpec("lmdb", 1 << 20, tmp_path / "mlc" / "objects")]
    stack = await build_objects(specs)
    for number in range(8):
        await stack.put(Key("s", str(number)), entry(number, 20_000), lease_s=0)
    await stack.aclose()
    stack = await build_objects(specs)
    assert await stack.get(Key("s", "0")) == entry(0, 20_000)
    await stack.aclose()


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        ([], "give at least"),
        ([TierSpec("host", 10)], "give at least 65536"),
        ([TierSpec("lmdb", 1 << 20)], "give a directory"),
        ([TierSpec("tape", 1 << 20)], 'use one of "pinned", "host", "lmdb", "remote", "s3"'),  # type: ignore[arg-type]
        ([TierSpec("lmdb", 1 << 20, Path("x")), TierSpec("lmdb", 1 << 20, Path("x"))], "its own"),
        ([TierSpec("s3", 1 << 20)], "has no bucket"),
        (
            [TierSpec("s3", 1 << 20, place=S3Place(bucket="b")), TierSpec("host", 1 << 20)],
            "put its entry last",
        ),
        ([TierSpec("lmdb", 1 << 20, Path("/proc/none"))], "/proc/none cannot be written"),
    ],
)
async def test_what_is_wrong_with_tiers_is_said_in_one_sentence(
    specs: list[TierSpec], text: str
) -> None:
    with pytest.raises(TierError, match=text) as caught:
        await build_objects(specs)
    assert "\n" not in str(caught.value)


async def test_a_tier_that_fails_to_open_closes_the_others(tmp_path: Path) -> None:
    good = TierSpec("lmdb", 1 << 20, tmp_path / "a")
    with pytest.raises(TierError):
        await build_objects([good, TierSpec("lmdb", 1 << 20, Path("/proc/none"))])
    await (await build_objects([good])).aclose()


def test_a_bucket_without_the_package_for_it_says_what_to_install() -> None:
    """And nobody else needs the package."""
    script = (
        "import sys; sys.modules['obstore'] = None\n"
        "import sdcpd.parts\n"
        "from tiers.build import *\n"
        "import asyncio\n"
        "try: asyncio.run(build_objects([TierSpec('host', 1 << 20), TierSpec('s3', 1 << 20, place=S3Place(bucket='abc'))]))\n"
        "except TierError as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.count("\n") == 1 and "pip install 'sdcpd[s3]'" in run.stdout
