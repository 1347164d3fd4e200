"""The tier at another sdcpd: its contract, what goes there, and what a bad one costs."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdcpd.protocol.problems import Problem
from sdcpd.transport.http import Handler, Request, Response
from sdcpd.transport.loopback import LoopbackClient
from tests.kit.cluster import peer
from tests.kit.tier_contract import SIZE_BYTES, Checked, Clock, contract, entry
from tiers.api import Key, Tier, TierError, TierFull, TierStats
from tiers.build import TierSpec, build_objects
from tiers.host import OBJECT_BYTES, HostTier
from tiers.pause import FAILURES_MAX
from tiers.remote import RemoteTier, path_of
from tiers.resource import MlcResource
from tiers.stack import TierStack

BASE = "https://cache.test/mlc/"
KV = Key(".kv", "target_kv.one")
SIZE = 20_000


class Far:
    """Another instance's cache; `fails` gives an answer instead of it."""

    def __init__(self, objects: Tier) -> None:
        self.objects = objects
        self.resource = MlcResource(
            base_path="/mlc",
            objects=objects,
            logs=None,
            authorize=lambda *_: None,
            object_bytes_max=1 << 20,
        )
        self.requests: list[Request] = []
        self.answer: Response | None = None

    async def handle(self, request: Request) -> Response:
        self.requests.append(request)
        if self.answer is not None:
            return self.answer
        try:
            return await self.resource.handle(request)
        except Problem as problem:
            return Response(problem.status)

    def tier(self, **options: Any) -> RemoteTier:
        network: dict[str, Handler] = {BASE: self.handle}
        return RemoteTier(LoopbackClient(network, peer("verifier", "v0")), BASE, **options)


class Watched(RemoteTier):
    """With the books of the other side, which the contract is about."""

    def __init__(self, far: Far, clock: Clock) -> None:
        network: dict[str, Handler] = {BASE: far.handle}
        client = LoopbackClient(network, peer("verifier", "v0"))
        super().__init__(client, BASE, kinds=("",), object_bytes_min=0, clock=clock)
        self._far = far

    def stats(self) -> TierStats:
        return self._far.objects.stats()


def open_remote(path: Path, clock: Clock) -> Checked:
    return Watched(Far(HostTier(SIZE_BYTES, clock=clock)), clock)


def open_stack(path: Path, clock: Clock) -> Checked:
    return TierStack([HostTier(SIZE_BYTES // 2, clock=clock), open_remote(path, clock)])


TestRemote = contract(open_remote, examples=30)
TestStack = contract(open_stack, examples=30)


async def test_kv_comes_back_whole_with_what_it_continues() -> None:
    far = Far(HostTier(1 << 20))
    tier = far.tier()
    kept = replace(entry(7, SIZE), after="target_kv.none")
    await tier.put(KV, kept, lease_s=0)
    assert await tier.get(KV) == kept
    assert await far.objects.get(Key("kv", KV.name)) == kept
    assert await tier.holds(KV) and not await tier.holds(Key(".kv", "target_kv.two"))
    await tier.delete(KV)
    assert await tier.get(KV) is None
    assert (tier.stats().hits, tier.stats().misses) == (1, 1)


@pytest.mark.parametrize(
    ("name", "size", "lease_s"),
    [
        ("q_rows.x", SIZE, 0.0),
        ("tokens.x", SIZE, 0.0),
        ("prompt.x", SIZE, 0.0),
        ("target_kv.x", SIZE, 5.0),
        ("target_kv.x", 100, 0.0),
    ],
)
async def test_what_is_of_one_round_or_session_is_never_sent(
    name: str, size: int, lease_s: float
) -> None:
    far = Far(HostTier(1 << 20))
    tier = far.tier()
    with pytest.raises(TierFull):
        await tier.put(Key("s", name), entry(1, size), lease_s=lease_s)
    if not name.startswith("target_kv."):
        assert await tier.get(Key("s", name)) is None
        assert not await tier.renew(Key("s", name), 1) and not await tier.holds(Key("s", name))
        await tier.delete(Key("s", name))
    assert far.requests == []


async def test_octets_that_are_not_those_of_the_tag_are_a_miss() -> None:
    far = Far(HostTier(1 << 20))
    tier = far.tier()
    far.answer = Response(200, (("etag", entry(1, SIZE).etag),), entry(2, SIZE).data)  # type: ignore[arg-type]
    assert await tier.get(KV) is None
    assert tier.stats().corrupt == 1


async def test_another_object_than_the_one_that_was_put_is_a_miss() -> None:
    """Whole, and of its own tag, but not what the key holds as far as this process knows."""
    far = Far(HostTier(1 << 20))
    tier = far.tier()
    await tier.put(KV, entry(1, SIZE), lease_s=0)
    other = entry(2, SIZE)
    far.answer = Response(200, (("etag", other.etag),), bytes(other.data))
    assert await tier.get(KV) is None
    far.answer = None
    assert await tier.get(KV) == entry(1, SIZE)


@pytest.mark.parametrize("status", [403, 412, 413, 507, 500, 503])
async def test_a_refusal_is_no_room(status: int) -> None:
    far = Far(HostTier(1 << 20))
    far.answer = Response(status)
    tier = far.tier()
    with pytest.raises(TierFull):
        await tier.put(KV, entry(1, SIZE), lease_s=0)
    assert await tier.get(KV) is None


async def test_one_that_fails_is_left_alone_for_a_while() -> None:
    clock = Clock()
    tier = RemoteTier(LoopbackClient({}, peer("verifier", "v0")), BASE, clock=clock)
    for _ in range(FAILURES_MAX + 5):
        assert await tier.get(KV) is None
    assert tier.stats().failures == FAILURES_MAX
    clock.now += 1.0
    assert await tier.get(KV) is None
    assert tier.stats().failures == FAILURES_MAX + 1


async def test_two_that_name_each_other_do_not_ask_in_a_circle() -> None:
    network: dict[str, Handler] = {}
    client = LoopbackClient(network, peer("verifier", "v0"))
    bases = ("https://a.test/mlc/", "https://b.test/mlc/")
    stacks = [
        TierStack([HostTier(SIZE + OBJECT_BYTES), RemoteTier(client, other)])
        for other in bases[::-1]
    ]
    fars = [Far(stack) for stack in stacks]
    network.update(zip(bases, (far.handle for far in fars), strict=True))
    assert await stacks[0].get(KV) is None
    assert [len(far.requests) for far in fars] == [0, 1]
    for number in range(4):
        await stacks[0].put(Key(".kv", f"target_kv.{number}"), entry(number, SIZE), lease_s=0)
    await stacks[0].settled()
    await stacks[1].settled()
    assert len(fars[0].requests) == 0, "what is handed over is not handed back"


async def test_an_object_that_was_replaced_here_is_not_read_there() -> None:
    far = Far(HostTier(1 << 20))
    remote = far.tier()
    stack = TierStack([HostTier(SIZE + OBJECT_BYTES), remote])
    await remote.put(KV, entry(1, SIZE), lease_s=0)
    await stack.put(KV, entry(2, SIZE), lease_s=0)
    await stack.put(Key(".kv", "target_kv.other"), entry(3, SIZE), lease_s=0)
    await stack.settled()
    assert await stack.get(KV) == entry(2, SIZE)


def test_no_scope_of_a_session_is_that_of_kept_kv() -> None:
    assert path_of(KV) == "kv/target_kv.one"
    assert path_of(Key(".kv." + "A" * 22, "x")) == f"kv_{'A' * 22}/x"
    assert path_of(Key("A" * 22, "x")) == f"{'A' * 22}/x"


async def test_it_is_never_the_first() -> None:
    with pytest.raises(TierError, match="put an entry before it"):
        await build_objects([TierSpec("remote", 0, base=BASE)])


async def test_a_server_that_callers_give_up_on_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who asks has less patience than the call: that is a failure of the server all the same."""
    monkeypatch.setattr("tiers.remote.GIVEN_UP_S", 0.01)
    asked = 0

    async def silent(_: Request) -> Response:
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    tier = RemoteTier(LoopbackClient({BASE: silent}, peer("verifier", "v0")), BASE)
    for _ in range(FAILURES_MAX + 3):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await tier.get(KV)
    assert asked == tier.stats().failures == FAILURES_MAX
