"""What continues another object goes before it: a suffix of a text before its beginning."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit.tier_contract import entry
from tiers.api import Entry, Key, Tier, TierFull
from tiers.host import EVICTED_AT_ONCE, OBJECT_BYTES, HostTier
from tiers.lmdb_tier import LmdbTier, cost_bytes
from tiers.stack import TierStack

SIZE = 1000


def key(name: str) -> Key:
    """Of a block of a text; its name is that of the text to its end."""
    return Key("s", name)


def block(name: str) -> Entry:
    return replace(entry(ord(name[-1]), SIZE), after=name[:-1])


async def write(tier: Tier, *names: str, lease_s: float = 0) -> None:
    for name in names:
        await tier.put(key(name), block(name), lease_s=lease_s)


async def held(tier: Tier, *names: str) -> str:
    """Those of the names that a tier holds."""
    return " ".join([name for name in names if await tier.holds(key(name))])


def host(objects: int, *, scope: int | None = None) -> HostTier:
    share = None if scope is None else scope * (SIZE + OBJECT_BYTES)
    return HostTier(objects * (SIZE + OBJECT_BYTES), scope_bytes_max=share)


async def test_the_end_goes_first_whenever_it_came() -> None:
    """A text that was continued later: its beginning is the oldest and stays."""
    tier = host(4)
    await write(tier, "a", "ab", "x", "abc")
    await write(tier, "y")
    assert await held(tier, "a", "ab", "abc", "x", "y") == "a ab x y"


@pytest.mark.parametrize("scope", [None, 4])
async def test_nothing_goes_for_what_continues_it(scope: int | None) -> None:
    """The text is the oldest, and its newest block is the next that would go."""
    tier = host(4 if scope is None else 9, scope=scope)
    await write(tier, "a", "ab", "abc", "x")
    await write(tier, "abcd")
    tier.check()
    assert await held(tier, "a", "ab", "abc", "abcd", "x") == "a ab abc abcd"
    await write(tier, "y")
    assert await held(tier, "a", "ab", "abc", "abcd", "y") == "a ab abc y"


@pytest.mark.parametrize("order", [1, -1])
async def test_a_long_text_costs_each_block_once(
    order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it came, and however it goes: a peer must not make every write go through all."""
    count, asked = 3000, 0
    tier = host(count)
    chains = tier._ledger._chains
    is_idle = chains.is_idle

    def counted(one: Key) -> bool:
        nonlocal asked
        asked += 1
        return is_idle(one)

    chains.is_idle = counted
    numbers = range(count)[::order]
    for number in numbers:
        after = f"b{number - 1}" if number else ""
        one = replace(entry(1, SIZE), after=after)
        await tier.put(Key("s", f"b{number}"), one, lease_s=0)
    for number in range(count // 2):
        await tier.put(Key("s", f"other{number}"), entry(1, SIZE), lease_s=0)
    await tier.put(Key("s", "large"), entry(1, count // 2 * SIZE), lease_s=0)
    tier.check()
    assert await tier.holds(Key("s", "b0")) or count < 9
    assert asked < 20 * count


async def test_within_a_scopes_share_too() -> None:
    tier = host(9, scope=3)
    await write(tier, "a", "ab", "abc", "x")
    assert await held(tier, "a", "ab", "abc", "x") == "a ab x"


async def test_what_is_leased_stays_and_holds_nothing_else() -> None:
    tier = host(3)
    await write(tier, "a", "ab")
    await write(tier, "abc", lease_s=60)
    await write(tier, "x")
    assert await held(tier, "a", "ab", "abc", "x") == "a abc x"
    await write(tier, "y")
    assert await held(tier, "a", "ab", "abc", "y") == "abc y", "nothing is left but what was oldest"


async def test_a_tier_that_is_smaller_than_a_text_keeps_its_beginning() -> None:
    """What is more is refused, so that a stack hands it to the tier below."""
    tier = host(3)
    names = ["abcdefgh"[: n + 1] for n in range(8)]
    await write(tier, *names[:3])
    for name in names[3:5]:
        with pytest.raises(TierFull):
            await write(tier, name[:4])
    assert await held(tier, *names) == "a ab abc"
    stack = TierStack([host(3), host(9)])
    await write(stack, *names)
    await stack.settled()
    assert await held(stack, *names) == " ".join(names)


async def test_a_text_as_large_as_a_scopes_share_is_no_failure() -> None:
    tier = host(9, scope=3)
    await write(tier, "a", "ab", "abc")
    with pytest.raises(TierFull):
        await write(tier, "abcd")
    await write(tier, "x")
    assert await held(tier, "a", "ab", "abc", "x") == "a ab x"


async def test_after_a_restart_and_below_too(tmp_path: Path) -> None:
    """The file remembers what continues what, and so does what was handed down to it."""
    size_bytes = 4 * cost_bytes(SIZE)
    stack = TierStack([host(1), LmdbTier(tmp_path, size_bytes)])
    await write(stack, "a", "ab", "x", "abc", "z")
    await stack.settled()
    await stack.aclose()
    tier = LmdbTier(tmp_path, size_bytes)
    assert await held(tier, "a", "ab", "abc", "x") == "a ab abc x"
    await write(tier, "y")
    assert await held(tier, "a", "ab", "abc", "x", "y") == "a ab x y"
    await tier.aclose()


@pytest.mark.parametrize("seed", range(6))
async def test_no_block_is_left_without_its_beginning(seed: int) -> None:
    """Texts that share beginnings, read and written at random, in a tier that holds a third."""
    rng, tier = random.Random(seed), host(20)
    names = [first + rest for first in "abcdef" for rest in ("", "g", "gh", "gi", "ghj", "gik")]
    for _ in range(400):
        text = rng.choice(names)
        for end in range(1, len(text) + 1):
            if await tier.get(key(text[:end])) is None:
                await write(tier, text[:end])
    tier.check()
    alone = [n for n in names if len(n) > 1 and await tier.holds(key(n))]
    orphans = [name for name in alone if not await tier.holds(key(name[:-1]))]
    assert len(alone) > 9 and not orphans


async def test_many_small_ones_go_in_turns_with_others() -> None:
    """A large write to a tier full of small objects must not hold the process up."""
    count = 10 * EVICTED_AT_ONCE
    tier = HostTier(count * (1 + OBJECT_BYTES))
    for number in range(count):
        await tier.put(Key("s", str(number)), entry(1, 1), lease_s=0)
    turns, over = 0, False

    async def others() -> None:
        nonlocal turns
        while not over:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    await tier.put(Key("s", "large"), entry(1, (count - 2) * (1 + OBJECT_BYTES)), lease_s=0)
    over = True
    await beside
    tier.check()
    assert turns >= 9 and await tier.holds(Key("s", "large"))
