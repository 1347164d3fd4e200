"""The writer thread: order, groups, errors that are told and a thread that lives on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from tiers.writer import GROUP_MAX, WAITING_MAX, GroupWriter


async def test_what_waits_while_a_group_is_written_is_the_next_group() -> None:
    groups: list[list[int]] = []
    started, go_on = threading.Event(), threading.Event()

    def perform(ops: list[int]) -> Sequence[int | Exception]:
        groups.append(ops)
        started.set()
        assert go_on.wait(10)
        return [op * 2 for op in ops]

    writer = GroupWriter[int, int]("test", perform)
    first = asyncio.ensure_future(writer.submit([0]))
    assert await asyncio.to_thread(started.wait, 10)
    rest = [asyncio.ensure_future(writer.submit([n, -n])) for n in range(1, 300)]
    await asyncio.sleep(0)
    go_on.set()
    assert await first == [0]
    assert await asyncio.gather(*rest) == [[2 * n, -2 * n] for n in range(1, 300)]
    assert groups[0] == [0]
    assert groups[1][:4] == [1, -1, 2, -2]
    assert len(groups) == 3 and len(groups[1]) == GROUP_MAX
    writer.stop()
    await asyncio.to_thread(writer.join)


async def test_an_error_is_told_to_its_group_and_the_thread_goes_on() -> None:
    def perform(ops: list[str]) -> Sequence[str | Exception]:
        if "bad" in ops:
            raise RuntimeError("a defect")
        return ops

    writer = GroupWriter[str, str]("test", perform)
    outcomes = await writer.submit(["good", "bad"])
    assert [str(outcome) for outcome in outcomes] == ["a defect"] * 2
    assert await writer.submit(["good"]) == ["good"]
    writer.stop()
    writer.stop()
    await asyncio.to_thread(writer.join)
    with pytest.raises(AssertionError):
        await writer.submit(["late"])


async def test_it_is_busy_when_too_much_waits_and_finishes_it_before_it_ends() -> None:
    go_on = threading.Event()

    def perform(ops: list[int]) -> Sequence[int | Exception]:
        assert go_on.wait(10)
        return ops

    writer = GroupWriter[int, int]("test", perform)
    waiting = [asyncio.ensure_future(writer.submit([1] * 512)) for _ in range(WAITING_MAX // 512)]
    await asyncio.sleep(0)
    assert writer.busy
    writer.stop()
    go_on.set()
    assert all(len(outcome) == 512 for outcome in await asyncio.gather(*waiting))
    await asyncio.to_thread(writer.join)
    assert not writer.busy


async def test_those_that_were_told_together_are_the_next_group_together() -> None:
    """Otherwise the first of them has a flush of its own, and the rest waits for two."""
    sizes: list[int] = []

    def perform(ops: list[int]) -> Sequence[int | Exception]:
        sizes.append(len(ops))
        return ops

    writer = GroupWriter[int, int]("test", perform)

    async def rounds() -> None:
        for number in range(5):
            await writer.submit([number])

    await asyncio.gather(*(rounds() for _ in range(64)))
    assert sizes == [64] * 5
    writer.stop()
    await asyncio.to_thread(writer.join)


def test_a_loop_that_ends_in_the_turn_of_a_submission_holds_up_nobody() -> None:
    writer = GroupWriter[int, int]("test", lambda ops: ops)
    loop = asyncio.new_event_loop()
    task = loop.create_task(writer.submit([1]))
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    assert not task.done()

    async def submit() -> Sequence[int | Exception]:
        async with asyncio.timeout(10):
            return await writer.submit([2])

    assert asyncio.run(submit()) == [2]
    writer.stop()
    writer.join()
    task.get_coro().close()  # type: ignore[union-attr]
    task._log_destroy_pending = False  # type: ignore[attr-defined]
