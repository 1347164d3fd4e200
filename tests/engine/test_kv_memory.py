"""The memory for keys and values: nothing is mixed up in it, nothing is lost of it, nobody starves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sdcpd.engine import kv_memory
from sdcpd.engine.api import KV_BLOCK_TOKENS, ContextFull, ModelError, Prefix, Score
from sdcpd.engine.kv import SessionKv
from sdcpd.engine.kv_memory import IDLE_S, KvMemory
from sdcpd.engine.kv_pool import KvFull, KvPool
from sdcpd.engine.load import load_target
from sdcpd.engine.model import LARGEST, _finite
from sdcpd.engine.model_settings import ModelSettings
from sdcpd.engine.runner import SHAPES, Feed, Runner
from sdcpd.engine.target import LlamaTarget
from sdcpd.protocol.messages import Sampling
from tests.engine.conftest import runner_of

GREEDY = Sampling(temperature_milli=0)
BLOCK = KV_BLOCK_TOKENS


def pool_of(blocks: int) -> KvPool:
    """Two layers, one head of width 2."""
    octets = blocks * 2 * 2 * 2 * 4 * BLOCK
    return KvPool(
        layers=2,
        kv_heads=1,
        head_dim=2,
        octets_max=octets,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def feed(kv: SessionKv, tokens: list[int]) -> None:
    """Write rows that say which token stands where."""
    start = len(kv.tokens)
    kv.reserve(start + len(tokens))
    kv.own(start)
    kv.tokens += tokens
    keys, values = kv.rows(len(kv.tokens))
    for at in range(start, len(kv.tokens)):
        keys[:, :, at], values[:, :, at] = kv.tokens[at], -at
    kv.pool.put(kv.table, keys, values)


def check(kv: SessionKv) -> None:
    """Every row is of its token, at its position."""
    keys, values = kv.rows(len(kv.tokens))
    assert keys[0, 0, :, 0].tolist() == kv.tokens
    assert values[1, 0, :, 1].tolist() == [-at for at in range(len(kv.tokens))]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


# ---- blocks


def test_a_session_grows_where_it_is_and_moves_when_it_cannot() -> None:
    pool = pool_of(64)
    one, other = SessionKv(pool), SessionKv(pool)
    feed(one, [1] * BLOCK)
    feed(other, [2] * BLOCK)
    for _ in range(50):
        feed(one, [3] * 20)
        feed(other, [4] * 7)
        for kv in (one, other):
            check(kv)
            assert kv.table == list(range(kv.table[0], kv.table[0] + len(kv.table)))
    one.free()
    other.free()
    assert pool.free == pool.blocks


def test_a_session_that_was_cut_up_is_read_all_the_same() -> None:
    """Where there is no run left, its blocks lie where they can."""
    pool = pool_of(9)
    others = [SessionKv(pool) for _ in range(8)]
    for number, kv in enumerate(others):
        feed(kv, [number] * BLOCK)
    for kv in others[::2]:
        kv.free()
    kv = SessionKv(pool)
    feed(kv, list(range(5 * BLOCK)))
    assert kv.table != sorted(kv.table) or kv.table[-1] - kv.table[0] > 4
    check(kv)
    with pytest.raises(KvFull, match="1 blocks of keys and values are wanted, 0 are free"):
        kv.reserve(5 * BLOCK + 1)
    for one in others[1::2]:
        check(one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_give_the_scores_of_a_whole(tiny: tuple[Any, Path], dtype: torch.dtype) -> None:
    """Bit for bit: gathered blocks and a run, with other sessions' rows around."""
    runner = runner_of(tiny[1], dtype)
    chooser = random.Random(5)
    text = [chooser.randrange(160) for _ in range(330)]
    for shape in SHAPES:
        runner.shape = shape
        scores = []
        for cut_up in (False, True):
            kv, stranger = runner.new_kv(), runner.new_kv()
            for at in range(0, 320, 40):
                runner.run([Feed(kv, text[at : at + 40]), Feed(stranger, text[at : at + 40])])
                if cut_up:
                    blocker = runner.pool.allocate(1, after=kv.table[-1])
                    kv.table += runner.pool.allocate(1)
                    runner.pool.release([*blocker, kv.table.pop()])
                    kv.table[-1:] = moved(kv)
            assert (kv.table == list(range(kv.table[0], kv.table[0] + 5))) is not cut_up
            scores.append(runner.run([Feed(kv, text[320:], 10)])[0])
            kv.free()
            stranger.free()
        assert torch.equal(*scores)
    assert runner.pool.free == runner.pool.blocks


def moved(kv: SessionKv) -> list[int]:
    """The last block, somewhere else."""
    (new,) = kv.pool.allocate(1)
    kv.pool.copy(kv.table[-1:], [new])
    kv.pool.release(kv.table[-1:])
    return [new]


def test_rows_that_are_not_finite_are_never_written() -> None:
    """A neighbour's rows are masked, and 0 times what is not finite would be none."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = torch.tensor([float("inf"), -float("inf"), float("nan"), 3.0], dtype=dtype)
        found = _finite(rows)
        assert found.isfinite().all() and found.abs().max() <= LARGEST * 1.01
        assert found[2] == 0 and found[3] == 3


def test_a_session_is_not_touched_by_its_neighbours_rubbish(tiny: tuple[Any, Path]) -> None:
    """Whatever stands behind a session's rows, its scores are the same bits."""
    runner, found = runner_of(tiny[1]), []
    for rubbish in (0.0, LARGEST, -LARGEST):
        runner.pool.keys.fill_(rubbish)
        runner.pool.values.fill_(-rubbish)
        kv = runner.new_kv()
        runner.run([Feed(kv, list(range(3, 60)))])
        found.append(runner.run([Feed(kv, [7, 8], 2)])[0])
        kv.free()
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


# ---- who has room


def filled(memory: KvMemory, key: str, tokens: list[int], **options: Any) -> SessionKv | None:
    """A session with its rows; None if it has to wait."""
    kv = memory.enter(key, tokens, positions=len(tokens), **options)
    if kv is not None:
        kv.match(tokens, len(tokens))
        feed(kv, tokens[len(kv.tokens) :])
        memory.settle(key, len(tokens), options.get("scope", b""))
    return kv


def test_little_is_wasted_on_sessions_of_unlike_length() -> None:
    """At most 5 % beyond one block a session."""
    pool = pool_of(400)
    memory, chooser, total, sessions = KvMemory(pool), random.Random(4), 0, 0
    while True:
        tokens = [sessions] * chooser.choice((5, 30, 200, 900, 1500))
        if filled(memory, f"s{sessions}", tokens, busy=Everybody()) is None:
            break
        total, sessions = total + len(tokens), sessions + 1
    spare = pool.tokens_max - total - sessions * BLOCK - len(tokens)
    assert spare <= 0.05 * pool.tokens_max


class Everybody:
    def __contains__(self, key: object) -> bool:
        return True


def test_room_is_made_by_the_ended_the_idle_and_the_younger_in_that_order() -> None:
    clock, gone = Clock(), []
    memory = KvMemory(pool_of(4), clock=clock, evicted=lambda key, kv: gone.append(key))
    assert filled(memory, "ended", [1] * BLOCK) and filled(memory, "old", [2] * BLOCK)
    memory.forget("ended")
    clock.now += IDLE_S / 2
    assert filled(memory, "middle", [3] * BLOCK) and filled(memory, "young", [4] * BLOCK)
    assert filled(memory, "new", [5] * BLOCK), "the ended text goes first"
    assert gone == [] and memory.evictions == 0
    assert filled(memory, "newer", [6] * BLOCK) is None, "nobody is idle, nobody is younger"
    clock.now += IDLE_S / 2
    assert filled(memory, "newer", [6] * BLOCK)
    assert gone == ["old"], "used longest ago"
    assert filled(memory, "middle", [3] * 2 * BLOCK) and gone == ["old", "newer"]
    assert filled(memory, "new", [5] * 2 * BLOCK) is None, "those that came before keep theirs"
    assert filled(memory, "middle", [3] * 3 * BLOCK, busy={"new"}) and gone[2:] == ["young"]
    assert filled(memory, "old", [2] * BLOCK), "it keeps its turn"
    assert gone[3:] == ["new"]


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(ContextFull, match="129 tokens do not fit the memory"):
        KvMemory(pool_of(2)).enter("a", [1] * 129, positions=129)


# ---- who begins with whose


@pytest.mark.parametrize("blocks", [100, 14])
def test_a_text_begins_with_what_another_has(blocks: int) -> None:
    """With room it has a copy of its own, otherwise both use the same blocks."""
    memory = KvMemory(pool_of(blocks))
    text = list(range(4 * BLOCK))
    first = filled(memory, "a", text)
    longer = [*text, 5, 6]
    kv = memory.enter("b", longer, positions=len(longer))
    assert first is not None and kv is not None
    assert kv.adopted == len(kv.tokens) == 4 * BLOCK
    assert (kv.table[:4] == first.table) is (blocks == 14)
    feed(kv, longer[4 * BLOCK :])
    check(kv)
    for tokens, wanted in ((text, 3 * BLOCK), (text[: 2 * BLOCK + 9], 2 * BLOCK), ([1, *text], 0)):
        other = memory.enter(str(tokens), tokens, positions=len(tokens))
        assert other is not None and other.adopted == wanted
    memory.forget("a")
    memory.forget("b")
    again = memory.enter("c", longer, positions=len(longer))
    assert again is not None and again.adopted == 4 * BLOCK
    feed(again, longer[4 * BLOCK :])
    check(again)


def test_texts_of_two_scopes_have_nothing_in_common() -> None:
    """D-M3"""
    memory = KvMemory(pool_of(50))
    text = list(range(3 * BLOCK))
    filled(memory, "a", text, scope=b"x")
    for scope, wanted in ((b"y", 0), (b"", 0), (b"x", 2 * BLOCK)):
        kv = memory.enter(str(scope), text, positions=len(text), scope=scope)
        assert kv is not None and kv.adopted == wanted


def test_what_was_rejected_is_nobodys_beginning() -> None:
    """Rows of tokens that are not of the text yet are not found."""
    memory = KvMemory(pool_of(50))
    kv = memory.enter("a", [1], positions=3 * BLOCK)
    assert kv is not None
    feed(kv, [1] * 3 * BLOCK)
    memory.settle("a", BLOCK + 1)
    other = memory.enter("b", [1] * 3 * BLOCK, positions=3 * BLOCK)
    assert other is not None and other.adopted == BLOCK


def test_a_shared_block_is_copied_before_it_is_written() -> None:
    memory = KvMemory(pool_of(8))
    text = list(range(4 * BLOCK))
    first = filled(memory, "a", text)
    kv = memory.enter("b", [*text, 1], positions=4 * BLOCK + 1)
    assert first is not None and kv is not None and kv.table[:4] == first.table
    kv.match(text, 4 * BLOCK - 10)
    feed(kv, [9] * 10)
    check(kv)
    check(first)


class Sessions(RuleBasedStateMachine):
    """Sessions come, grow, are rolled back and go, in a memory that is too small."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.memory = KvMemory(pool_of(10), clock=self.clock)
        self.texts: dict[int, list[int]] = {}

    @rule(key=st.integers(0, 5), beginning=st.integers(0, 1), length=st.integers(1, 300))
    def come(self, key: int, beginning: int, length: int) -> None:
        if key not in self.texts:
            self.texts[key] = [beginning] * length
            filled(self.memory, key, self.texts[key])  # type: ignore[arg-type]

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 3), max_size=90), settle=st.booleans())
    def grow(self, data: st.DataObject, tokens: list[int], settle: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.texts)))
        text = self.texts[key]
        kv = self.memory.enter(key, text, positions=len(text) + len(tokens))
        if kv is None:
            return
        kv.match(text, len(text))
        feed(kv, [*text[len(kv.tokens) :], *tokens])
        if settle:
            text += tokens
        self.memory.settle(key, len(text))

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), drop=st.booleans())
    def go(self, data: st.DataObject, drop: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.texts)))
        (self.memory.drop if drop else self.memory.forget)(key)
        del self.texts[key]

    @rule()
    def wait(self) -> None:
        self.clock.now += IDLE_S

    @invariant()
    def every_row_is_of_its_token(self) -> None:
        for key in self.memory.sessions():
            kv = self.memory.get(key)
            assert kv is not None
            check(kv)

    @invariant()
    def every_block_is_counted(self) -> None:
        pool, users = self.memory.pool, [0] * self.memory.pool.blocks
        for kv in self._all():
            for block in kv.table:
                users[block] += 1
        assert users == pool._users.tolist() and pool.free == users.count(0)

    def _all(self) -> Iterator[SessionKv]:
        yield from (held.kv for held in self.memory._held.values())
        yield from self.memory._ended.values()


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


# ---- the engine


async def written(target: LlamaTarget, session: int, prompt: list[int], count: int) -> list[int]:
    tokens, name = list(prompt), bytes([session]) * 16
    await target.prepare(name, 1, Prefix(tokens, len(tokens), len(prompt), b"%d" % session))
    for done in range(count):
        prefix = Prefix(tokens, len(tokens), len(prompt), b"%d" % session)
        tokens.append((await target.score(Score(name, 1, prefix, (), 1, GREEDY, done))).additional)
    target.forget(name, 1)
    return tokens[len(prompt) :]


async def test_sessions_wait_for_memory_and_all_write_what_they_would_alone(
    tiny: tuple[Any, Path],
) -> None:
    """Twelve sessions of up to 250 tokens in a memory for 512: nobody fails, no token differs."""
    model = runner_of(tiny[1]).pool
    octets = 9 * model.block_octets
    small = ModelSettings(tiny[1], threads=1, kv_octets_max=octets)
    target = load_target(small, report=lambda _: None)
    roomy = load_target(ModelSettings(tiny[1], threads=1), report=lambda _: None)
    prompts = [[i + 1] * (20 * i + 9) for i in range(12)]
    wanted = [await written(roomy, i, prompt, 12) for i, prompt in enumerate(prompts)]
    work = [written(target, i, prompt, 12) for i, prompt in enumerate(prompts)]
    found = await asyncio.wait_for(asyncio.gather(*work), 60)
    assert found == wanted
    usage = target.kv_usage()
    assert usage is not None and (usage.tokens_max, usage.waiting) == (9 * BLOCK, 0)
    assert target.info.context_max == 512 and usage.tokens_used <= usage.tokens_max
    await target.aclose()
    await roomy.aclose()


async def test_what_makes_room_is_handed_over_and_spares_the_way_back(
    tiny: tuple[Any, Path],
) -> None:
    """Eviction to the tiers and return: bit for bit, and the rest alone is computed."""
    blocks = 9 * runner_of(tiny[1]).pool.block_octets
    target = load_target(
        ModelSettings(tiny[1], threads=1, kv_octets_max=blocks), report=lambda _: None
    )
    kept: asyncio.Queue[tuple[Any, list[int], list[bytes]]] = asyncio.Queue()
    target.on_eviction(lambda *gone: kept.put_nowait(gone))  # type: ignore[arg-type]
    texts = [[i + 3] * 290 for i in range(2)]
    prefixes = [Prefix(text, 290, 290) for text in texts]
    before = []
    for session, prefix in zip((b"a", b"b"), prefixes, strict=True):
        if kept.empty() and before:
            target._memory._held[(b"a", 1)].used_at -= IDLE_S  # it has been idle for a while
        await target.prepare(session, 1, prefix)
        before.append(await target.score(Score(session, 1, prefix, (5, 6), 1, GREEDY, 0)))
    key, tokens, octets = await asyncio.wait_for(kept.get(), 10)
    assert key == (b"a", 1) and tokens == texts[0][:256] and len(octets) == 4
    assert not target.resident(b"a", 1) and target.resident(b"b", 1)
    target._memory._held[(b"b", 1)].used_at -= IDLE_S
    assert await target.prepare(b"a", 1, prefixes[0], blocks=octets) == 256
    again = await target.score(Score(b"a", 1, prefixes[0], (5, 6), 1, GREEDY, 0))
    assert (again.accepted, again.additional) == (before[0].accepted, before[0].additional)
    await target.aclose()


def test_a_memory_that_holds_next_to_nothing_is_refused(tiny: tuple[Any, Path]) -> None:
    settings = ModelSettings(tiny[1], threads=1, kv_octets_max=1 << 16)
    with pytest.raises(
        ModelError,
        match="kv_memory: 64 KiB hold keys and values of 64 tokens of this model; give at least 1 MiB",
    ):
        load_target(settings, report=lambda _: None)


def test_the_memory_is_told_at_start(tiny: tuple[Any, Path]) -> None:
    said: list[str] = []
    load_target(ModelSettings(tiny[1], threads=1), report=said.append)
    assert any(line.startswith("keys and values: 2048 MiB for") for line in said)


def test_a_run_of_the_runner_that_finds_no_room_changes_nothing(tiny: tuple[Any, Path]) -> None:
    runner = Runner(runner_of(tiny[1]).model, kv_octets_max=runner_of(tiny[1]).pool.block_octets)
    kv = runner.new_kv()
    with pytest.raises(ContextFull):
        runner.run([Feed(kv, [1] * 65)])
    assert kv.tokens == []


# ---- what goes wrong


async def test_a_session_that_ends_between_two_of_its_passes_leaves_nothing(
    tiny: tuple[Any, Path],
) -> None:
    """Its work goes on, or waits for memory; either way its blocks are free after that."""
    target = load_target(
        ModelSettings(tiny[1], threads=1, kv_octets_max=64 << 20), report=lambda _: None
    )
    for number in range(4):
        session = b"%d" % number
        prefix = Prefix([number + 3] * 500, 500, 500, session)
        work = asyncio.ensure_future(target.prepare(session, 1, prefix))
        await asyncio.sleep(0)
        target.forget(session, 1)
        await asyncio.gather(work, return_exceptions=True)
    await target.worker.read(("nobody", 0), lambda kv: None)  # the thread has gone round once more
    await target.worker.read(("nobody", 0), lambda kv: None)
    assert target._memory.sessions() == [] and not target._memory._turn_of
    held = sum(len(kv.table) for kv in target._memory._ended.values())
    assert target._memory.pool.blocks - target._memory.pool.free == held
    assert not target.worker._window._done_at
    await target.aclose()


def test_kv_that_is_loaded_leaves_what_is_shared_alone() -> None:
    """Only what is beyond it is written: a full memory has no room for copies."""
    memory = KvMemory(pool_of(6))
    text = list(range(4 * BLOCK))
    first = filled(memory, "a", text)
    longer = [*text, *range(BLOCK)]
    kv = memory.enter("b", longer, positions=5 * BLOCK)
    assert first is not None and kv is not None and kv.table[:4] == first.table
    keys, values = first.rows(4 * BLOCK)
    more = torch.full((2, 1, BLOCK, 2), 9.0)
    kv.load(longer, torch.cat((keys, more), 2), torch.cat((values, more), 2))
    assert kv.table[:4] == first.table and kv.tokens == longer
    assert torch.equal(kv.rows(BLOCK, start=4 * BLOCK)[0], more)
    check(first)


def test_a_copy_that_fails_costs_nobody_his_room() -> None:
    def fails(key: object, kv: SessionKv) -> None:
        raise MemoryError("no room for a copy")

    clock = Clock()
    memory = KvMemory(pool_of(4), clock=clock, evicted=fails)
    filled(memory, "a", [1] * 3 * BLOCK)
    clock.now += IDLE_S
    assert filled(memory, "b", [2] * 4 * BLOCK) is not None
    memory.drop("b")
    assert memory.pool.free == 4 and memory.sessions() == []


async def test_small_sessions_overtake_one_that_waits_for_much(tiny: tuple[Any, Path]) -> None:
    """A few of them, and only into what is free."""
    octets = 9 * runner_of(tiny[1]).pool.block_octets
    target = load_target(
        ModelSettings(tiny[1], threads=1, kv_octets_max=octets), report=lambda _: None
    )
    prefixes = {n: Prefix([n] * size, size, size) for n, size in ((1, 300), (2, 400), (3, 30))}
    await target.prepare(b"first", 1, prefixes[1])
    with patch.object(kv_memory, "IDLE_S", 60.0):
        large = asyncio.ensure_future(target.prepare(b"large", 1, prefixes[2]))
        await asyncio.wait_for(target.prepare(b"small", 1, prefixes[3]), 5)
        assert not large.done()
        target.forget(b"first", 1)
        await asyncio.wait_for(large, 10)
    await target.aclose()
