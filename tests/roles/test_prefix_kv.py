"""KV that a later prompt with the same beginning finds in the verifier's own tiers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from sdcpd.engine.api import EngineBusy
from sdcpd.engine.fake import FakeModel, FakeTarget
from sdcpd.protocol.problems import ProblemDocument
from sdcpd.roles import kv_cost
from sdcpd.roles.kv_cost import KvCost
from sdcpd.roles.prefix_kv import SCOPE, PrefixKv
from tests.kit.answers import state_of, until, verdict_of
from tests.kit.cluster import cluster
from tests.kit.scripted import quiet
from tests.kit.tier_contract import entry
from tests.kit.verifier_machine import SESSION
from tests.kit.verifier_wire import Wire
from tests.tiers.test_mlc_resource import Mlc
from tiers.api import Entry, Key, Tier
from tiers.host import HostTier
from tiers.lmdb_tier import LmdbTier

PROMPT = tuple(i * 5 % 32 for i in range(200))
A, B = b"\x07" * 16, b"\x08" * 16


def wire_with(tier: Tier | None, **members: object) -> Wire:
    """A new verifier over a tier, as after a restart."""
    return Wire(kv_tier=tier, members=members)


async def served(wire: Wire, prompt: tuple[int, ...] = PROMPT, *, rounds: int = 1) -> list[int]:
    """Open a session and have rounds; returns what was committed."""
    state_of(await wire.open(prompt=prompt))
    state_of(await wire.name())
    tokens: list[int] = []
    for _ in range(rounds):
        tokens += verdict_of(await wire.propose(wire.good(3))).emitted
    await quiet()
    return tokens


@pytest.mark.parametrize(
    ("second", "spared"),
    [
        (PROMPT, 192),
        (PROMPT[:193], 192),
        (PROMPT[:192], 128),  # its last token is fed with the first round
        ((*PROMPT[:150], *[1] * 80), 128),
        (PROMPT[:64], 0),
        ((1, *PROMPT[1:]), 0),
    ],
)
async def test_what_begins_alike_is_not_computed_again(
    second: tuple[int, ...], spared: int
) -> None:
    tier = HostTier(1 << 20)
    await served(wire_with(tier))
    wire = wire_with(tier)
    await served(wire, second)
    assert wire.engine.prefilled == [len(second) - 1 - spared]
    assert wire.verifier.counts["kv_tokens_reused"] == spared


async def test_the_output_is_the_same_with_hits_and_without() -> None:
    tier = HostTier(1 << 20)
    texts = [await served(wire_with(one), rounds=4) for one in (None, tier, tier)]
    assert texts[0] == texts[1] == texts[2]


async def test_the_text_of_a_session_is_kept_when_it_ends() -> None:
    """The next turn of a chat begins with it."""
    tier = HostTier(1 << 20)
    wire = wire_with(tier, max_new=66)
    text = [*PROMPT, *await served(wire)]
    while len(text) < len(PROMPT) + 66:
        if len(text) > 200 + 4:
            assert await tier.holds(key_of(text, 2)) and not await tier.holds(key_of(PROMPT, 3))
        text += verdict_of(await wire.propose(wire.good(3))).emitted
    await quiet()
    assert await tier.holds(key_of(text, 3))


async def test_a_session_that_made_room_is_brought_back() -> None:
    """Its KV goes to the tiers, and comes back with its next round; the text is the same."""
    wanted = await served(wire_with(HostTier(1 << 20)), rounds=3)
    tier = HostTier(1 << 20)
    wire = wire_with(tier)
    found = await served(wire)
    for _ in range(2):
        wire.engine.evict(SESSION, 1)
        assert not wire.engine.resident(SESSION, 1)
        await until(lambda: tier.stats().objects == 3)
        found += verdict_of(await wire.propose(wire.good(3))).emitted
        assert wire.engine.resident(SESSION, 1)
        await quiet()
    assert found == wanted
    assert wire.engine.prefilled[1:] == [len(PROMPT) + 3 - 192, len(PROMPT) + 7 - 192]


async def test_a_session_that_made_room_goes_on_without_tiers() -> None:
    wire = wire_with(None)
    found = await served(wire)
    wire.engine.evict(SESSION, 1)
    found += verdict_of(await wire.propose(wire.good(3))).emitted
    assert found == await served(wire_with(None), rounds=2)


async def test_a_full_memory_is_429(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router tries another verifier, or this one again later."""
    wire = wire_with(None)
    full = AsyncMock(side_effect=EngineBusy("the memory for keys and values is full"))
    monkeypatch.setattr(wire.engine, "prepare", full)
    answer = await wire.open(prompt=PROMPT)
    assert isinstance(answer, ProblemDocument) and answer.status == 429
    monkeypatch.undo()
    state_of(await wire.open(prompt=PROMPT))


def key_of(text: Sequence[int], number: int) -> Key:
    """Of a block of a text without a scope, as the verifier keeps it."""
    info = FakeTarget(FakeModel()).info
    kept = PrefixKv(None, kind="target_kv", fingerprint=info.model + info.fingerprint.encode())
    keys = list(kept.keys(text, None))
    return keys[number] if number < len(keys) else Key(SCOPE, "none")


async def test_scopes_share_nothing() -> None:
    """D-M3: neither KV, nor the knowledge of what another has asked."""
    tier = HostTier(1 << 20)
    await served(wire_with(tier, scope=A))
    for scope, spared in ((B, 0), (None, 0), (A, 192)):
        wire = wire_with(tier, scope=scope)
        await served(wire)
        assert wire.verifier.counts["kv_tokens_reused"] == spared


async def test_another_model_finds_nothing() -> None:
    tier = HostTier(1 << 20)
    await served(wire_with(tier))

    def other(model: FakeModel) -> FakeTarget:
        made = FakeTarget(model)
        made.info = replace(made.info, fingerprint="another machine")
        return made

    wire = Wire(kv_tier=tier, engine_kind=other)
    await served(wire)
    assert wire.verifier.counts["kv_tokens_reused"] == 0


async def test_an_engine_that_is_not_exact_keeps_and_finds_nothing() -> None:
    """KV computed beside others could change output (D-O10)."""

    def inexact(model: FakeModel) -> FakeTarget:
        made = FakeTarget(model)
        made.info = replace(made.info, exact=False)
        return made

    tier = HostTier(1 << 20)
    await served(Wire(kv_tier=tier, engine_kind=inexact))
    assert tier.stats().objects == 0


async def test_a_restart_finds_it_on_the_disk(tmp_path: Path) -> None:
    first = LmdbTier(tmp_path, 4 << 20)
    await served(wire_with(first))
    await until(lambda: first.stats().objects == 3)
    await first.aclose()
    second = LmdbTier(tmp_path, 4 << 20)
    wire = wire_with(second)
    await served(wire)
    assert wire.verifier.counts["kv_tokens_reused"] == 192
    await second.aclose()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What the costs are learned from: what was done with how many tokens."""
    seen: list[tuple[str, int]] = []
    for what in ("fetched", "computed"):
        note = partial(lambda what, tokens, _: seen.append((what, tokens)), what)
        monkeypatch.setattr(KvCost, what, lambda _, *counted, note=note: note(*counted))
    return seen


async def test_a_verifier_learns_what_fetching_and_computing_take(
    measured: list[tuple[str, int]],
) -> None:
    tier = HostTier(1 << 20)
    await served(wire_with(tier))
    assert measured == [("fetched", 64), ("computed", 200)], "what gave nothing took its time"
    measured.clear()
    await served(wire_with(tier))
    assert measured == [("fetched", 192), ("computed", 8)]


@pytest.fixture
def looked_for(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each text had of which blocks were looked for."""
    lengths: list[int] = []

    async def find(_: PrefixKv, tokens: Sequence[int], scope: bytes | None) -> list[bytes]:
        lengths.append(len(tokens))
        return []

    monkeypatch.setattr(PrefixKv, "find", find)
    return lengths


async def test_a_verifier_looks_for_nothing_of_a_text_without_a_prompt(
    looked_for: list[int],
) -> None:
    """Such a text is computed after a token that is not in it: its tokens' blocks are others'."""
    tier = HostTier(1 << 20)
    await served(wire_with(tier), ())
    assert looked_for == []
    await served(wire_with(tier))
    assert looked_for == [200]


async def test_a_drafter_looks_for_nothing_of_a_text_without_a_prompt(
    looked_for: list[int],
) -> None:
    async with cluster() as c:
        await c.ready()
        await c.text(())
        assert looked_for == []
        await c.text(PROMPT)
        assert looked_for == [200, 200], "by the verifier and by the drafter"


async def test_nothing_is_kept_of_a_text_without_a_prompt() -> None:
    tier = HostTier(1 << 20)
    wire = wire_with(tier, max_new=140)
    text = await served(wire, ())
    while len(text) < 140:
        text += verdict_of(await wire.propose(wire.good(3))).emitted
    assert await kept_by(tier) == 0


async def test_a_tier_that_is_full_of_leases_disturbs_nobody() -> None:
    tier = HostTier(1 << 20)
    await tier.put(Key("s", "rows"), entry(1, (1 << 20) - 2000), lease_s=60)
    assert await served(wire_with(tier)) == await served(wire_with(None))


async def test_a_tier_that_does_not_answer_holds_no_opening_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it gave before is used, the rest computed."""
    monkeypatch.setattr(kv_cost, "FIRST_LIMIT_S", 0.05)
    tier = HostTier(1 << 20)
    await served(wire_with(tier))
    slow = key_of(PROMPT, 1)
    get = tier.get

    async def stuck(key: Key) -> Entry | None:
        return await (asyncio.Event().wait() if key == slow else get(key))  # type: ignore[return-value]

    monkeypatch.setattr(tier, "get", stuck)
    wire = wire_with(tier)
    await served(wire)
    assert wire.verifier.counts["kv_tokens_reused"] == 64


async def test_a_tier_that_never_answers_is_not_asked_at_every_opening(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_cost, "FIRST_LIMIT_S", 0.05)
    kept = PrefixKv(HostTier(1 << 20), kind="target_kv", fingerprint=b"x")
    asked = 0

    async def stuck(_: Key) -> Entry | None:
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    assert kept._tier is not None
    monkeypatch.setattr(kept._tier, "get", stuck)
    kept.cost.computed(1000, 0.2)
    for _ in range(16):
        assert await kept.find(PROMPT, None) == []
    assert asked <= 2


async def test_nobody_reaches_it_by_a_path() -> None:
    tier = HostTier(1 << 20)
    await served(wire_with(tier))
    name = key_of(PROMPT, 0).name
    assert await tier.holds(Key(SCOPE, name))
    for path in (f"/mlc/objects/{SCOPE}/{name}", f"/mlc/objects/%2ekv/{name}"):
        for method in ("GET", "PUT", "DELETE"):
            assert await Mlc(tier, None).status(method, path, b"") == 404
    assert tier.stats().objects == 3


async def test_one_tenant_cannot_push_out_anothers() -> None:
    """D-M3: the blocks of each scope count against that scope's share of the tier."""
    tier = HostTier(64 << 10, scope_bytes_max=16 << 10)
    await served(wire_with(tier, scope=A))
    for first in range(9):
        await served(wire_with(tier, scope=B), (first, *PROMPT[1:]))
    wire = wire_with(tier, scope=A)
    await served(wire)
    assert wire.verifier.counts["kv_tokens_reused"] == 192


async def kept_by(tier: Tier) -> int:
    """How many objects are in a tier once nobody is putting any."""
    await quiet()
    return tier.stats().objects


async def drafted(tier: Tier) -> tuple[list[int], int]:
    """A text of a new cluster whose drafter has the tier, and what that reused."""
    async with cluster(drafters=0) as c:
        drafter = c.add_drafter(kv_tier=tier, noise=0.3)
        await c.ready()
        text = await c.text(PROMPT)
        await until(lambda: not drafter.sessions)
        await quiet()
        assert text == c.model.text(PROMPT, 40)
        return text, drafter.counts["kv_tokens_reused"]


async def test_a_drafter_finds_what_it_computed_before() -> None:
    tier = HostTier(1 << 20)
    text, reused = await drafted(tier)
    assert (reused, await kept_by(tier)) == (0, (len(PROMPT) + len(text)) // 64)
    assert await drafted(tier) == (text, 192)


async def test_a_verifier_and_a_drafter_of_one_model_share_no_blocks() -> None:
    """What a drafter computes is held to less: its passes have had no self-check."""
    tier = HostTier(1 << 20)
    async with cluster(drafters=0, verifiers=0) as c:
        c.add_drafter(kv_tier=tier)
        c.add_verifier(kv_tier=tier)
        await c.ready()
        await c.text(PROMPT)
        await until(lambda: tier.stats().objects == 6)
        names = {key.name.partition(".")[0] for key in tier._entries}
        assert names == {"target_kv", "draft_kv"}


class TestCost:
    """Fetching KV is worth it where it is faster than computing it."""

    def test_what_was_not_measured_may_take_a_while(self) -> None:
        assert KvCost().limit_s(10_000) == kv_cost.FIRST_LIMIT_S

    def test_no_longer_than_computing_takes(self) -> None:
        cost = KvCost()
        cost.computed(1000, 1.0)
        assert cost.limit_s(500) == pytest.approx(0.5)
        assert cost.limit_s(10**6) == kv_cost.LIMIT_S_MAX

    def test_what_is_slower_is_computed_and_tried_again_now_and_then(self) -> None:
        cost = KvCost()
        cost.computed(1000, 1.0)
        cost.fetched(1000, 2.0)
        tried = [cost.limit_s(100) > 0 for _ in range(48)]
        assert cost.limit_s(4) == kv_cost.LIMIT_S_MIN, "so little is always looked for"
        assert tried.count(True) == 3 and not any(tried[:15])
        for _ in range(9):
            cost.fetched(1000, 0.1)
        assert cost.limit_s(100) > 0

    def test_what_gives_nothing_and_takes_long_is_given_up(self) -> None:
        """As `find` counts it: the time of one block."""
        cost = KvCost()
        cost.computed(1000, 1.0)
        for _ in range(3):
            cost.fetched(64, 0.5)
        assert sum(cost.limit_s(500) > 0 for _ in range(16)) == 1

    def test_short_measurements_say_nothing(self) -> None:
        cost = KvCost()
        cost.computed(63, 60.0)
        assert cost.limit_s(10_000) == kv_cost.FIRST_LIMIT_S
