"""The target and draft engines over real (tiny, random) models, many sessions at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdcpd.engine.api import ContextFull, DraftWork, EngineError, ModelError, Prefix, Score
from sdcpd.engine.load import load_target
from sdcpd.engine.model_config import read_config
from sdcpd.engine.model_files import model_digest, weight_files
from sdcpd.engine.model_settings import ModelSettings
from sdcpd.engine.ngram import NgramDrafter, NgramIndex
from sdcpd.engine.scheduler import PrefillPace, plan
from sdcpd.engine.target import LlamaTarget
from sdcpd.protocol.acceptance import check_rows
from sdcpd.protocol.messages import Sampling
from tests.engine.conftest import dense, drafter_of

GREEDY = Sampling(temperature_milli=0)


@pytest.fixture
async def target(tiny: tuple[Any, Path]) -> AsyncIterator[LlamaTarget]:
    engine = load_target(ModelSettings(tiny[1], threads=1), report=lambda _: None)
    yield engine
    await engine.aclose()


async def grow(
    target: LlamaTarget, session: bytes, prompt: list[int], count: int, chooser: random.Random
) -> list[int]:
    """Greedy text by rounds whose proposals are partly right and partly rubbish."""
    tokens, known = list(prompt), await alone(target, prompt, count + 8)
    while len(tokens) < len(prompt) + count:
        done = len(tokens) - len(prompt)
        m = chooser.randrange(0, 6)
        proposed = [t if chooser.random() < 0.7 else 3 for t in known[done : done + m]]
        work = Score(
            session, 1, Prefix(tokens, len(tokens), len(prompt)), tuple(proposed), 1, GREEDY, done
        )
        found = await target.score(work)
        tokens += [*proposed[: found.accepted], found.additional]
    return tokens[len(prompt) :][:count]


async def alone(target: LlamaTarget, prompt: list[int], count: int) -> list[int]:
    """What the target writes with no proposals at all, in a session of its own."""
    tokens = list(prompt)
    session = bytes([len(prompt) % 251]) * 16
    for done in range(count):
        work = Score(session, 9, Prefix(tokens, len(tokens), len(prompt)), (), 1, GREEDY, done)
        tokens.append((await target.score(work)).additional)
    target.forget(session, 9)
    return tokens[len(prompt) :]


async def test_text_does_not_depend_on_proposals_or_company(target: LlamaTarget) -> None:
    """R-6.3-24, R-6.3-25, R-6.4-4: bit-identical choices, alone or among strangers."""
    prompts = [[i + 1] * (i * 9 + 1) for i in range(8)]
    wanted = [await alone(target, prompt, 20) for prompt in prompts]
    found = await asyncio.gather(
        *(
            grow(target, bytes([i]) * 16, prompt, 20, random.Random(i))
            for i, prompt in enumerate(prompts)
        )
    )
    assert found == wanted


async def test_long_prompt_is_fed_in_chunks(target: LlamaTarget, tiny: tuple[Any, Path]) -> None:
    """A prompt longer than a pass gives what transformers gives."""
    prompt = torch.randint(0, 160, (1, 300), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        wanted = int(tiny[0](prompt).logits[0, -1].argmax())
    tokens = prompt[0].tolist()
    prefix = Prefix(tokens, 300, 300)
    found = await target.score(Score(b"l" * 16, 1, prefix, (wanted, 5, 6), 1, GREEDY, 0))
    assert found.accepted >= 1
    await target.prepare(b"m" * 16, 1, prefix)
    again = await target.score(Score(b"m" * 16, 1, prefix, (wanted, 5, 6), 1, GREEDY, 0))
    assert (again.accepted, again.additional) == (found.accepted, found.additional)


async def test_empty_prompt_begins_with_the_models_own_token(target: LlamaTarget) -> None:
    """D-O9"""
    begun = await target.score(Score(b"e" * 16, 1, Prefix([], 0, 0), (), 1, GREEDY, 0))
    same = await target.score(Score(b"f" * 16, 1, Prefix([1], 1, 1), (), 1, GREEDY, 0))
    assert begun.additional == same.additional


async def test_context_full_fails_alone(target: LlamaTarget) -> None:
    """A session that has outgrown the context fails; its neighbour is served."""
    long = asyncio.ensure_future(
        target.score(Score(b"x" * 16, 1, Prefix([1] * 512, 512, 512), (1, 2), 1, GREEDY, 0))
    )
    fine = await target.score(Score(b"y" * 16, 1, Prefix([1], 1, 1), (), 1, GREEDY, 0))
    assert fine.accepted == 0
    with pytest.raises(ContextFull):
        await long


async def test_stopped_engine_fails_what_waits(tiny: tuple[Any, Path]) -> None:
    engine = load_target(ModelSettings(tiny[1], threads=1), report=lambda _: None)
    waiting = [
        asyncio.ensure_future(
            engine.score(Score(bytes([i]) * 16, 1, Prefix([1] * 400, 400, 400), (), 1, GREEDY, 0))
        )
        for i in range(12)
    ]
    await asyncio.sleep(0)
    await engine.aclose()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert any(isinstance(r, EngineError) for r in results)


def draft_work(
    rule: int, sampling: Sampling, tokens: list[int], m: int = 4, base: int = 0
) -> DraftWork:
    prefix = Prefix(list(tokens), len(tokens), len(tokens))
    return DraftWork(b"d" * 16, prefix, m, rule, sampling, base, 160)


async def test_drafter_that_is_the_target_has_everything_accepted(
    target: LlamaTarget, tiny: tuple[Any, Path]
) -> None:
    """R-Z-5, R-6.2-9: greedy and by the race, bit for bit."""
    drafter = drafter_of(tiny[1])
    seeded = Sampling(temperature_milli=900, seed=11)
    for rule, sampling in ((1, GREEDY), (200, seeded)):
        draft = await drafter.draft(draft_work(rule, sampling, [4, 5, 6]))
        work = Score(b"z" * 16, rule, Prefix([4, 5, 6], 3, 3), draft.tokens, rule, sampling, 0)
        assert (await target.score(work)).accepted == 4
    await drafter.aclose()


async def test_a_draft_goes_on_from_what_was_accepted_alone(tiny: tuple[Any, Path]) -> None:
    """R-6.3-37: after partial verdicts, and when it has missed some (D-D2): bit for bit what a
    drafter that saw no other tokens drafts.
    """
    used, fresh = (drafter_of(tiny[1]) for _ in range(2))
    tokens = [4, 5, 6]
    for kept, missed in ((2, 0), (0, 3), (3, 1), (1, 2), (0, 0)):
        draft = await used.draft(draft_work(2, Sampling(temperature_milli=1000), tokens))
        other = await fresh.draft(draft_work(2, Sampling(temperature_milli=1000), tokens))
        assert dense(draft)[: 4 * 160] == dense(other)[: 4 * 160]
        fresh.forget(b"d" * 16)
        tokens += [*draft.tokens[:kept], (draft.tokens[kept] + 1) % 160, *range(missed)]
    await used.aclose()
    await fresh.aclose()


@pytest.mark.parametrize(
    ("rule", "profile"), [(1, GREEDY), (200, Sampling(seed=11)), (2, Sampling())]
)
async def test_what_is_prepared_is_what_would_be_drafted_after_the_verdict(
    tiny: tuple[Any, Path], rule: int, profile: Sampling
) -> None:
    """R-6.2-8, R-6.3-37, D-D4: bit for bit, right or wrong; a wrong one leaves no trace."""
    used, fresh = (drafter_of(tiny[1]) for _ in range(2))
    tokens = [4, 5, 6]
    for kept, missed in ((4, 0), (4, 0), (1, 0), (0, 3), (4, 0), (2, 1), (4, 0)):
        work = draft_work(rule, profile, tokens, base=len(tokens))
        draft = await used.draft(work)
        look = replace(work, base=work.base + 4, m=1, after=draft.tokens)
        after = (*draft.tokens, *(await used.draft(look)).tokens)
        found = await used.draft(replace(work, base=work.base + 5, after=after))
        tokens += after if kept == 4 else [*draft.tokens[:kept], (draft.tokens[kept] + 1) % 160]
        tokens += range(missed)
        work = draft_work(rule, profile, tokens, base=len(tokens))
        if kept < 4:
            found = await used.draft(work)
        other = await fresh.draft(work)
        fresh.forget(b"d" * 16)
        if rule == 2:  # drawn at random, the first from the same row
            assert dense(found)[: 4 * 160] == dense(other)[: 4 * 160]
        else:
            assert found.tokens == other.tokens
    await used.aclose()
    await fresh.aclose()


async def test_a_preparation_that_is_given_up_holds_up_nobody(tiny: tuple[Any, Path]) -> None:
    """R-6.2-8: it ends at its next pass, and what is drafted then is as without it."""
    drafter = drafter_of(tiny[1])
    tokens = [4, 5, 6]
    wanted = (await drafter.draft(draft_work(1, GREEDY, tokens))).tokens
    long = replace(draft_work(1, GREEDY, tokens, m=400), after=(7, 8, 9))
    given_up = asyncio.ensure_future(drafter.draft(long))
    while drafter.worker.passes < 10:
        await asyncio.sleep(0)
    given_up.cancel()
    passes = drafter.worker.passes
    assert (await drafter.draft(draft_work(1, GREEDY, tokens))).tokens == wanted
    assert drafter.worker.passes <= passes + 6
    await drafter.aclose()


async def test_ngram_preparation_leaves_the_index_as_it_is() -> None:
    """D-D4: what it assumes and prepares follows the proposed tokens, which are not taken in."""
    drafter, work = NgramDrafter(), draft_work(1, GREEDY, [5, 6, 7, 8, 5, 6], m=2)
    assert (await drafter.draft(work)).tokens == (7, 8)
    assert (await drafter.draft(replace(work, after=(7, 8)))).tokens == (5, 6)
    assert (await drafter.draft(replace(work, after=(7, 9)))).tokens == (9,)
    assert (await drafter.draft(work)).tokens == (7, 8)


async def test_rule_2_rows_are_the_distribution_sampled_from(tiny: tuple[Any, Path]) -> None:
    """R-5.2-15, R-5.2-16: V values a row, q > 0 at each proposed token, top 64 at most."""
    drafter = drafter_of(tiny[1])
    draft = await drafter.draft(draft_work(2, Sampling(temperature_milli=1000), [9, 8, 7]))
    rows = check_rows(dense(draft), 160, draft.tokens)
    assert all(sum(q > 0 for q in row) <= 64 for row in rows)
    await drafter.aclose()


async def test_ngram_drafter_copies_what_followed() -> None:
    work = draft_work(1, GREEDY, [5, 6, 7, 8, 9, 5, 6, 7])
    draft = await NgramDrafter().draft(work)
    assert draft.tokens == (8, 9, 5, 6)


async def test_ngram_rows_are_certain() -> None:
    """Rule 2 with a drafter that is sure: a one-hot row is sampled from exactly."""
    draft = await NgramDrafter().draft(draft_work(2, GREEDY, [1, 2, 1], m=2))
    rows = check_rows(dense(draft), 160, draft.tokens)
    assert [list(row).index(1.0) for row in rows] == list(draft.tokens)


def test_ngram_index_always_proposes_something() -> None:
    assert len(NgramIndex().propose(3)) == 1
    index = NgramIndex()
    index.extend([1, 2, 3])
    assert index.propose(3) == [3]


class _Job:
    def __init__(self, rows: int) -> None:
        self.rows_left = rows


def test_rounds_go_before_prefills_and_the_oldest_prefill_moves() -> None:
    jobs = [_Job(500), *(_Job(8) for _ in range(20)), _Job(300)]
    chosen = plan(jobs, rows_max=128)
    rows = {jobs.index(job): count for job, count in chosen}
    assert rows[0] == rows[21] == 4, "both prefills move on"
    assert sum(rows.values()) <= 128
    assert all(rows[i] == 8 for i in range(1, 16))


def test_a_prefill_takes_as_much_of_a_pass_as_leaves_rounds_their_pace() -> None:
    """Sixteen sessions go on while a long prompt comes; its rows cost more and more."""
    pace, costs = PrefillPace(), iter(i / 4000 for i in range(1, 200))
    rounds = [_Job(1) for _ in range(16)]
    for _ in range(20):
        pace.passed(0.05, rounds=16, prefill_rows=0)
    slowest, fed = 0.0, 0
    for row_s in costs:
        chosen = plan([_Job(8000), *rounds], rows_max=128, prefill_max=pace.rows)
        rows = sum(count for job, count in chosen if job not in rounds)
        spent_s = 0.05 + rows * row_s / 16
        pace.passed(spent_s, rounds=16, prefill_rows=rows)
        slowest, fed = max(slowest, spent_s), fed + rows
        assert len(chosen) == 17 and rows >= 4
    assert slowest <= 3 * 0.05 and fed > 20 * 199
    alone = plan([_Job(8000)], rows_max=128, prefill_max=pace.rows)
    assert alone[0][1] == 128, "where nobody waits for a token it has the pass to itself"


def test_missing_and_unsupported_models_are_named(tiny: tuple[Any, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    with pytest.raises(ModelError, match="MambaForCausalLM is not supported; supported are"):
        read_config(tmp_path)
    with pytest.raises(ModelError, match=r"model\.safetensors is missing"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"rubbish")
    (tmp_path / "config.json").write_text((tiny[1] / "config.json").read_text())
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        load_target(ModelSettings(tmp_path), report=lambda _: None)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="damaged or incomplete"):
        load_target(ModelSettings(tmp_path), report=lambda _: None)


def test_digest_of_one_file_is_its_sha256(tiny: tuple[Any, Path]) -> None:
    """D-C9"""
    import hashlib

    octets = (tiny[1] / "model.safetensors").read_bytes()
    assert model_digest(tiny[1]) == hashlib.sha256(octets).digest()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_attention_heads", 0, "num_attention_heads is 0"),
        ("num_attention_heads", 8, "do not belong together"),
        ("vocab_size", 100, "do not belong together"),
        ("hidden_size", "x", "wrong value"),
        ("num_key_value_heads", 3, "do not fit each other"),
    ],
)
def test_config_and_weights_that_disagree(
    tiny: tuple[Any, Path], tmp_path: Path, key: str, value: object, words: str
) -> None:
    import json
    import shutil

    directory = tmp_path / "model"
    shutil.copytree(tiny[1], directory)
    config = json.loads((directory / "config.json").read_text())
    config[key] = value
    config.pop("head_dim", None)
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=words):
        load_target(ModelSettings(directory), report=lambda _: None)


def test_a_long_prompt_leaves_others_their_share() -> None:
    """The oldest has half of what there is for prefills, the shortest the rest."""
    jobs = [_Job(8000), _Job(3000), _Job(100)]
    chosen = {jobs.index(job): rows for job, rows in plan(jobs, rows_max=128)}
    assert chosen == {0: 64, 2: 64}
    assert plan([_Job(8000), _Job(90)], rows_max=128)[1][1] == 64
