"""What a cache holds, as operators see it, and what it lets go of when they ask."""

from __future__ import annotations

from pathlib import Path

from tests.kit.tier_contract import entry
from tests.tiers.test_meter import remote
from tiers.api import Key
from tiers.host import OBJECT_BYTES, HostTier
from tiers.listing import let_go, sums
from tiers.lmdb_tier import LmdbTier
from tiers.stack import TierStack

MIB = 1 << 20
ROWS, KV = Key("a", "q_rows.s.1"), Key("a", "target_kv.1")
OTHER_ROWS, ODD = Key("b", "q_rows.s.2"), Key("b", "mine")


async def filled(path: Path) -> TierStack:
    """Two scopes; the rows of one are leased, and one object lies in a disk's tier alone."""
    host, disk = HostTier(MIB), LmdbTier(path / "tier", MIB)
    await disk.put(ODD, entry(0, 5000), lease_s=0)
    stack = TierStack([host, disk, remote()])
    await stack.put(ROWS, entry(0, 1000), lease_s=60)
    await stack.put(KV, entry(0, 2000), lease_s=0)
    await stack.put(OTHER_ROWS, entry(0, 3000), lease_s=0)
    return stack


async def test_sums_are_by_tier_scope_and_kind_the_largest_first(tmp_path: Path) -> None:
    stack = await filled(tmp_path)
    found = [(one.tier, one.scope, one.kind, one.objects, one.leased) for one in await sums(stack)]
    assert found == [
        ("2 lmdb", "b", "other", 1, 0),
        ("1 host", "b", "q_rows", 1, 0),
        ("1 host", "a", "target_kv", 1, 0),
        ("1 host", "a", "q_rows", 1, 1),
    ]
    assert (await sums(stack))[1].size_bytes == 3000 + OBJECT_BYTES
    await stack.aclose()


async def test_what_is_leased_stays(tmp_path: Path) -> None:
    stack = await filled(tmp_path)
    count, octets = await let_go(stack)
    assert count == 3 and octets > 10_000
    assert await stack.get(ROWS) is not None
    assert [await stack.get(key) for key in (KV, OTHER_ROWS, ODD)] == [None] * 3
    assert (await let_go(stack)) == (0, 0)
    await stack.aclose()


async def test_one_scope_or_kind_alone(tmp_path: Path) -> None:
    stack = await filled(tmp_path)
    assert (await let_go(stack, scope="b", kind="q_rows"))[0] == 1
    assert await stack.get(OTHER_ROWS) is None and await stack.get(ODD) is not None
    assert (await let_go(stack, scope="a"))[0] == 1
    assert await stack.get(KV) is None and await stack.get(ROWS) is not None
    assert (await let_go(stack, kind="tokens")) == (0, 0)
    await stack.aclose()


async def test_a_tier_alone_is_a_cache_too() -> None:
    host = HostTier(MIB)
    await host.put(KV, entry(0, 1), lease_s=0)
    assert [one.tier for one in await sums(host)] == ["1 host"]
    assert await let_go(host) == (1, 1 + OBJECT_BYTES)
