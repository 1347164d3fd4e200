"""Load on an API: clients that each wait for their text, or arrivals that wait for none."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from cli.bench.client import Text

Ask = Callable[[str, float], Awaitable[Text]]
Take = Callable[[], str | None]
AFTER_FAILURE_S = 0.1  # a client that was refused comes again only then
RETRY_AFTER_S_MAX = 2.0  # of what a server asks for; a block would be over otherwise
IN_FLIGHT_MAX = 1024  # texts of an open loop at a time: a cluster that far behind has been shown
CROWDED = f"not sent: {IN_FLIGHT_MAX} texts waited already"


@dataclass(slots=True)
class Block:
    """A stretch of one kind of load."""

    begin_s: float
    end_s: float
    """Tokens that come later count for no rate: the load was no longer whole."""
    texts: list[Text] = field(default_factory=list)
    cpu_s: float = 0.0
    """Processor time of this process."""
    wall_s: float = 0.0


def arrivals(rate: float, duration_s: float, seed: int) -> list[float]:
    """When requests are due, in seconds from the beginning: a Poisson process, one for a seed."""
    draw, at, due = random.Random(seed), 0.0, list[float]()
    while (at := at + draw.expovariate(rate)) < duration_s:
        due.append(at)
    return due


async def closed_loop(
    ask: Ask, take: Take, *, clients: int, duration_s: float | None, requests: int | None
) -> Block:
    """Have clients that each ask again once they have their text; one of the two bounds ends it."""
    begin = time.perf_counter()
    block = Block(begin, begin + duration_s if duration_s else float("inf"))
    left = requests

    def more() -> str | None:
        nonlocal left
        if time.perf_counter() >= block.end_s or left == 0:
            return None
        left = None if left is None else left - 1
        return take()

    async def client() -> None:
        while (prompt := more()) is not None:
            text = await ask(prompt, time.perf_counter())
            block.texts.append(text)
            if text.failure is not None:
                wait = min(text.retry_after_s or AFTER_FAILURE_S, RETRY_AFTER_S_MAX)
                await asyncio.sleep(wait)
        block.end_s = min(block.end_s, time.perf_counter())

    async with _measured(block), asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return block


async def open_loop(ask: Ask, take: Take, *, due: Sequence[float], duration_s: float) -> Block:
    """Ask when a request is due, whether or not earlier ones are answered."""
    begin = time.perf_counter()
    block = Block(begin, begin + duration_s)
    running = set[asyncio.Task[None]]()

    async def one(prompt: str, at: float) -> None:
        block.texts.append(await ask(prompt, at))

    async with _measured(block), asyncio.TaskGroup() as group:
        for at in due:
            await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
            if len(running) >= IN_FLIGHT_MAX:
                block.texts.append(Text(begin + at, failure=CROWDED))
            elif (prompt := take()) is None:
                break
            else:
                running.add(task := group.create_task(one(prompt, begin + at)))
                task.add_done_callback(running.discard)
    return block


class _measured:
    """Puts down what a block took of time and processor."""

    def __init__(self, block: Block) -> None:
        self._block = block

    async def __aenter__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    async def __aexit__(self, *_: object) -> None:
        self._block.cpu_s = time.process_time() - self._cpu
        self._block.wall_s = time.perf_counter() - self._wall
