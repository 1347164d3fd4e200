"""Blocks of KV: bit for bit what would be computed, at the target and at the drafter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdcpd.engine.api import KV_BLOCK_TOKENS, DraftWork, Prefix
from sdcpd.engine.kv_blocks import decode_blocks, encode_blocks
from sdcpd.protocol.messages import Sampling
from tests.engine.conftest import dense, drafter_of
from tests.engine.test_kv_object import KIND, rows_of
from tests.kit.spied_target import PROMPT, Spied

TEXT = [*PROMPT, *range(20, 70)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    kind = replace(KIND, dtype=dtype)
    rows = rows_of(kind, 3 * KV_BLOCK_TOKENS + 5)
    blocks = encode_blocks(kind, rows)
    assert [len(one) for one in blocks] == 3 * [kind.octets(KV_BLOCK_TOKENS)]
    for count in (1, 3):
        found = decode_blocks(blocks[:count], kind=kind)
        assert found is not None and found.positions == count * KV_BLOCK_TOKENS
        part = slice(0, found.positions)
        assert torch.equal(found.keys, rows.keys[:, :, part])
        assert torch.equal(found.values, rows.values[:, :, part])
    broken = decode_blocks([blocks[0], blocks[1][:-1], blocks[2]], kind=kind)
    assert broken is not None and broken.positions == KV_BLOCK_TOKENS
    assert decode_blocks([blocks[0][1:]], kind=kind) is None


@pytest.mark.parametrize("shared", [90, 80, 64, 130])
async def test_blocks_of_the_same_beginning_are_what_would_be_computed(
    spied: Spied, shared: int
) -> None:
    """Two texts that begin alike: every score is the same, bit for bit, with them and without."""
    other = [*TEXT[:shared], *[9] * (140 - shared)]
    await spied.target.prepare(b"a", 1, Prefix(TEXT, len(TEXT), 90))
    await spied.round(b"a", TEXT)
    blocks = await spied.target.blocks(b"a", 1, other, 0)
    assert len(blocks) == shared // KV_BLOCK_TOKENS
    reused = len(blocks) * KV_BLOCK_TOKENS
    before = spied.fed
    prefix = Prefix(other, len(other), 90)
    assert await spied.target.prepare(b"b", 1, prefix, blocks=blocks) == reused
    assert spied.fed - before == len(other) - 1 - reused
    assert await spied.target.prepare(b"c", 1, prefix) == 0
    for proposed in ((), (3, 4, 5)):
        with_them = await spied.round(b"b", other, *proposed)
        without = await spied.round(b"c", other, *proposed)
        assert with_them[:2] == without[:2] and torch.equal(with_them[2], without[2])


async def test_only_whole_blocks_that_are_there(spied: Spied) -> None:
    await spied.target.prepare(b"a", 1, Prefix(PROMPT, len(PROMPT), 90))
    assert len(await spied.target.blocks(b"a", 1, PROMPT, 0)) == 1
    assert await spied.target.blocks(b"a", 1, PROMPT, 1) == []
    assert await spied.target.blocks(b"z", 1, PROMPT, 0) == []


async def test_rows_of_rejected_tokens_are_in_no_block(spied: Spied) -> None:
    """The text ends with a block, and where its last token stands a rejected one was fed."""
    text = TEXT[: KV_BLOCK_TOKENS - 1]
    accepted, additional, _ = await spied.round(b"a", text, 159)
    assert accepted == 0 and additional != 159
    committed = [*text, additional]
    assert await spied.target.blocks(b"a", 1, committed, 0) == []
    await spied.round(b"a", committed)
    assert len(await spied.target.blocks(b"a", 1, committed, 0)) == 1


@pytest.mark.parametrize(
    ("rule", "sampling"),
    [
        (1, Sampling(temperature_milli=0)),
        (200, Sampling(temperature_milli=900, seed=11)),
        (2, Sampling(temperature_milli=900)),
    ],
)
async def test_drafts_after_blocks_are_those_without(
    tiny: tuple[Any, Path], rule: int, sampling: Sampling
) -> None:
    """So that acceptance after a hit is what it is without."""
    drafter = drafter_of(tiny[1])

    def work(session: bytes, tokens: list[int]) -> DraftWork:
        scope = session + bytes([len(tokens)])  # in which nobody else has begun alike
        prefix = Prefix(tokens, len(tokens), 90, scope)
        return DraftWork(session, prefix, 4, rule, sampling, 0, 160)

    await drafter.draft(work(b"a", TEXT))
    blocks = await drafter.blocks(b"a", TEXT, 0)
    assert len(blocks) == len(TEXT) // KV_BLOCK_TOKENS == 2
    for text, reused in ((TEXT, 128), (TEXT[:128], 127)):
        hit = await drafter.draft(work(b"b", text), blocks=blocks)
        without = await drafter.draft(work(b"c", text))
        assert (hit.reused, without.reused) == (reused, 0)
        # Under rule 2 the draws differ, and with them all rows but the first.
        assert rule != 2 or dense(hit)[:640] == dense(without)[:640]
        assert rule == 2 or hit.tokens == without.tokens
        drafter.forget(b"b")
        drafter.forget(b"c")
    await drafter.aclose()
