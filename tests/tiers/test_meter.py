"""What tiers tell of their reads and writes: by kind, in octets and in seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sdcpd.transport.loopback import LoopbackClient
from tests.kit.cluster import peer
from tests.kit.cuda import no_cuda
from tests.kit.tier_contract import entry
from tiers.api import Key, Tier, TierFull
from tiers.host import HostTier
from tiers.lmdb_tier import LmdbTier
from tiers.meter import Meter, kind_of
from tiers.pinned import PinnedTier
from tiers.remote import RemoteTier
from tiers.resource import MlcResource
from tiers.stack import TierStack

SIZE = 1 << 20
KV, ROWS = Key("s", "target_kv.0123"), Key("s", "q_rows.session.abc")


def remote() -> RemoteTier:
    far = MlcResource(
        base_path="/mlc",
        objects=HostTier(SIZE),
        logs=None,
        authorize=lambda *_: None,
        object_bytes_max=SIZE,
    )
    client = LoopbackClient({"https://far.test/mlc/": far.handle}, peer("verifier", "v0"))
    return RemoteTier(client, "https://far.test/mlc/")


TIERS: dict[str, Callable[[Path], Tier]] = {
    "host": lambda path: HostTier(SIZE),
    "pinned": lambda path: PinnedTier(SIZE, runtime=no_cuda),
    "lmdb": lambda path: LmdbTier(path / "tier", SIZE),
    "remote": lambda path: remote(),
}


def meter_of(tier: Tier) -> Meter:
    meter = tier.stats().meter
    assert meter is not None
    return meter


@pytest.mark.parametrize("kind", TIERS)
async def test_a_tier_counts_what_it_was_asked_for(kind: str, tmp_path: Path) -> None:
    tier = TIERS[kind](tmp_path)
    kept = entry(1, 20_000)
    await tier.put(KV, kept, lease_s=0)
    for _ in range(2):
        assert await tier.get(KV) is not None
    assert await tier.get(ROWS) is None
    meter = meter_of(tier)
    assert (meter.hits, meter.misses) == ({"target_kv": 2}, {"q_rows": 1})
    assert (meter.read_bytes, meter.written_bytes) == (40_000, 20_000)
    assert {op: times.count for op, times in meter.seconds.items()} == {
        "get": 2,
        "miss": 1,
        "put": 1,
    }
    assert all(times.total > 0 for times in meter.seconds.values())
    await tier.aclose()


async def test_what_is_refused_was_not_written() -> None:
    tier = HostTier(4096)
    with pytest.raises(TierFull):
        await tier.put(KV, entry(1, 10_000), lease_s=0)
    meter = meter_of(tier)
    assert meter.written_bytes == 0 and meter.seconds["put"].count == 0


async def test_a_stack_counts_a_miss_of_its_first_tier_once(tmp_path: Path) -> None:
    """It asks that again under the key's lock; what is found below is copied up."""
    stack = TierStack([HostTier(SIZE), lower := HostTier(SIZE)])
    await lower.put(KV, entry(1, 500), lease_s=0)
    assert await stack.get(KV) is not None
    assert await stack.get(ROWS) is None
    first, second = stack.stats().parts
    assert first.meter is not None and second.meter is not None
    assert first.meter.misses == {"target_kv": 1, "q_rows": 1} and first.misses == 2
    assert second.meter.hits == {"target_kv": 1} and second.meter.misses == {"q_rows": 1}
    assert first.meter.written_bytes == 500 == second.meter.read_bytes


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("q_rows.x.y", "q_rows"),
        ("draft_kv.0123456789abcdef.ff", "draft_kv"),
        ("prompt.x", "prompt"),
        ("tokens.x", "tokens"),
        ("a-kind-that-a-peer-made-up.1", "other"),
        ("", "other"),
    ],
)
def test_kinds_are_few_whatever_peers_call_their_objects(name: str, kind: str) -> None:
    assert kind_of(Key("s", name)) == kind
