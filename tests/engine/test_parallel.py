"""A model over two processes: the same ids as in one, and nothing is left when it ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdcpd.engine.api import ModelError, Prefix, Score
from sdcpd.engine.load import load_drafter, load_target
from sdcpd.engine.model_config import read_config
from sdcpd.engine.model_settings import ModelSettings
from sdcpd.engine.shard import Shard
from sdcpd.engine.target import LlamaTarget
from sdcpd.engines import _loading
from sdcpd.protocol.messages import Sampling

GREEDY = Sampling(temperature_milli=0)
SEEDED = Sampling(temperature_milli=800, seed=5)
PROMPTS = ([5, 6, 7], [9] * 70, [i % 150 for i in range(200)])


def settings(directory: Path, processes: int) -> ModelSettings:
    return ModelSettings(
        directory, threads=1, kv_octets_max=64 << 20, tensor_parallel=processes, dtype="float32"
    )


async def texts(target: LlamaTarget) -> list[list[int]]:
    """Greedy and seeded, with proposals that are right and wrong."""
    found = []
    for number, (prompt, (rule, sampling)) in enumerate(
        (prompt, how) for prompt in PROMPTS for how in ((1, GREEDY), (200, SEEDED))
    ):
        chooser, tokens, session = random.Random(number), list(prompt), b"%d" % number
        await target.prepare(session, 1, Prefix(tokens, len(tokens), len(prompt)))
        while len(tokens) < len(prompt) + 24:
            done = len(tokens) - len(prompt)
            proposed = tuple(chooser.randrange(160) for _ in range(chooser.randrange(4)))
            prefix = Prefix(tokens, len(tokens), len(prompt))
            work = Score(session, 1, prefix, proposed, rule, sampling, done)
            scored = await target.score(work)
            tokens += [*proposed[: scored.accepted], scored.additional]
        found.append(tokens)
    return found


def test_the_parts_of_a_tensor_are_the_tensor() -> None:
    whole = torch.arange(24).view(4, 6)
    for dim in (0, 1):
        parts = [Shard(rank, 2).slice(whole, dim) for rank in range(2)]
        assert torch.equal(torch.cat(parts, dim=dim), whole)
    assert Shard().slice(whole, 0) is whole


def test_a_model_that_cannot_be_divided_is_refused(tiny: tuple[Any, Path]) -> None:
    config = read_config(tiny[1])
    with pytest.raises(ModelError, match=r"tensor_parallel = 3: the model's heads \(4\) cannot"):
        Shard(0, 3).part_of(config)
    with pytest.raises(ModelError, match=r"kv_heads \(2\)"):
        load_target(settings(tiny[1], 4), report=lambda _: None)


@pytest.mark.slow
async def test_two_processes_write_what_one_does(tiny: tuple[Any, Path]) -> None:
    """With gloo: ids, the self-check, and KV that either can use."""
    one = load_target(settings(tiny[1], 1), report=lambda _: None)
    two = load_target(settings(tiny[1], 2), report=lambda _: None)
    try:
        assert two.info.exact and two.info.fingerprint.endswith(";parallel-2")
        assert await texts(two) == await texts(one)
        prompt = PROMPTS[2]
        kinds = []
        for target in (one, two):
            await target.prepare(b"kv", 1, Prefix(prompt, 200, 200, b"a scope"))
            kinds.append(await target.blocks(b"kv", 1, prompt, 0))
        assert [len(block) for block in kinds[0]] == [len(block) for block in kinds[1]]
        prefix = Prefix(prompt, 200, 200, b"another")
        assert await two.prepare(b"again", 1, prefix, blocks=kinds[1]) == 192
        assert await two.blocks(b"again", 1, prompt, 0) == kinds[1]
        followers = two._runner._followers
        assert followers is not None
    finally:
        await one.aclose()
        await two.aclose()
    assert [process.returncode for process in followers._processes] == [0]


LEADER = """
import asyncio, sys
from pathlib import Path
from sdcpd.engine.load import load_target
from sdcpd.engine.model_settings import ModelSettings

async def main():
    settings = ModelSettings(Path(sys.argv[1]), threads=1, tensor_parallel=2)
    target = load_target(settings, report=lambda _: None)
    print(target._runner._followers._processes[0].pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["follower", "leader"])
def test_none_outlives_the_other(tiny: tuple[Any, Path], dies: str) -> None:
    """A leader without its followers ends, to be started anew; followers end with their leader."""
    command = [sys.executable, "-c", LEADER, str(tiny[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        follower = int(leader.stdout.readline())
        os.kill(follower if dies == "follower" else leader.pid, signal.SIGKILL)
        wanted = -signal.SIGTERM if dies == "follower" else -signal.SIGKILL
        assert leader.wait(30) == wanted
    descriptor = _pidfd(follower)
    if descriptor is not None:
        import select

        assert select.select([descriptor], [], [], 30)[0], "the follower lives on"
        os.close(descriptor)


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


@pytest.mark.slow
async def test_a_model_that_was_loaded_in_a_thread_outlives_it(tiny: tuple[Any, Path]) -> None:
    """As the daemon loads it: its other processes do not end with that thread."""
    target = await _loading(lambda: load_target(settings(tiny[1], 2), report=lambda _: None))
    followers = target._runner._followers
    assert followers is not None
    tokens = [5, 6, 7]
    for done in range(3):
        work = Score(b"s", 1, Prefix(tokens, len(tokens), 3), (), 1, GREEDY, done)
        tokens.append((await target.score(work)).additional)
    assert [process.poll() for process in followers._processes] == [None]
    await target.aclose()


@pytest.mark.slow
@pytest.mark.parametrize("load", [load_target, load_drafter])
def test_what_cannot_be_loaded_leaves_no_process(load: Any, tiny: tuple[Any, Path]) -> None:
    for wrong in (
        replace(settings(tiny[1], 2), kv_octets_max=1 << 16),
        replace(settings(tiny[1], 2), model=bytes(32)),
    ):
        with pytest.raises(ModelError):
            load(wrong, report=lambda _: None)
        assert not torch.distributed.is_initialized()
