"""A front end in a process of its own, fed by tokens that come by the clock, and what it costs.

    python -m tests.bench.front_end_served --rate 500 --streams 32 --part 1 --seconds 10

Prints its URL, waits until so many texts are being written, measures its own CPU time and prints
one JSON object.  --bare consumes the same tokens with nothing in between: that is the baseline.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import io
import itertools
import json
import pstats
import resource
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvloop

from sdcpd.engine.tokenizer import TextModel
from sdcpd.roles.frontend import FrontEnd
from sdcpd.roles.generation import GenerationRequest, GenerationStats, Readiness, Tokens
from sdcpd.transport.http1 import Http1Server
from tests.kit.api import api_settings
from tests.kit.dev import PAIR

STORY = (
    "Once upon a time, a tiny dragon lived in a teacup. It was afraid of the rain, and it read a"
    " book about the sea every evening until the lamp went out.\n"
)
BEGIN_S = 30.0  # until all clients must have come
WARM_UP_S = 2.0
PROFILED = 25  # functions shown


@dataclass
class Paced:
    """A generator whose texts get a part of so many tokens each so many seconds."""

    tokens: tuple[int, ...]
    part: int
    period_s: float
    streams: int
    begun: int = 0
    given: int = 0
    all_run: asyncio.Event = field(default_factory=asyncio.Event)

    def readiness(self) -> Readiness:
        """Always."""
        return Readiness(True, "ready")

    async def generate(self, request: GenerationRequest) -> PacedText:
        """One more text, whose parts come between those of the others."""
        self.begun += 1
        if self.begun == self.streams:
            self.all_run.set()
        return PacedText(self, self.begun.to_bytes(16), self.begun / self.streams)

    async def output(self, session: bytes) -> None:
        """Nobody comes back to one."""


@dataclass
class PacedText:
    """One of its texts, which has no end."""

    paced: Paced
    session: bytes
    offset: float
    stats: GenerationStats = field(default_factory=GenerationStats)

    async def __aiter__(self) -> AsyncIterator[Tokens]:
        paced, loop = self.paced, asyncio.get_running_loop()
        at_s = loop.time() + self.offset * paced.period_s
        tokens = itertools.cycle(paced.tokens)
        while True:
            await asyncio.sleep(max(0.0, at_s - loop.time()))
            at_s += paced.period_s
            paced.given += paced.part
            yield Tokens(tuple(itertools.islice(tokens, paced.part)), finished=False)

    async def cancel(self) -> None:
        """Its client has gone."""


def cpu_s() -> float:
    """User and system time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def consume(paced: Paced) -> list[asyncio.Task[None]]:
    """What the baseline does with the tokens: nothing."""

    async def read() -> None:
        request: Any = None
        async for _ in await paced.generate(request):
            pass

    return [asyncio.ensure_future(read()) for _ in range(paced.streams)]


async def measure(paced: Paced, seconds: float, profile: cProfile.Profile | None) -> dict[str, Any]:
    """CPU time once all texts run."""
    async with asyncio.timeout(BEGIN_S):
        await paced.all_run.wait()
    await asyncio.sleep(WARM_UP_S)
    begin, used, given = time.perf_counter(), cpu_s(), paced.given
    if profile is not None:
        profile.enable()
    await asyncio.sleep(seconds)
    if profile is not None:
        profile.disable()
    wall = time.perf_counter() - begin
    tokens = paced.given - given
    percent = 100 * (cpu_s() - used) / wall
    return {
        "tokens_per_s": tokens / wall,
        "cpu_percent": percent,
        "us_per_token": 1e4 * percent * wall / tokens,
    }


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Serve or consume, and measure."""
    text = TextModel.load(PAIR / "target")
    tokens = tuple(text.encode(STORY, special=False))
    period_s = options.part * options.streams / options.rate
    paced = Paced(tokens, options.part, period_s, options.streams)
    profile = cProfile.Profile() if options.profile else None
    if options.bare:
        running = await consume(paced)
        found = await measure(paced, options.seconds, profile)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return found
    front_end = FrontEnd(paced, text, api_settings(max_queue=options.streams))
    server = Http1Server(front_end.handle, refuse=front_end.refuse)
    print(f"http://127.0.0.1:{await server.start()}/v1", flush=True)
    try:
        found = await measure(paced, options.seconds, profile)
    finally:
        await server.aclose()
        await front_end.aclose()
    if profile is not None:
        found["profile"] = table(profile)
    return found


def table(profile: cProfile.Profile) -> str:
    """Where the time went, by own time."""
    written = io.StringIO()
    pstats.Stats(profile, stream=written).sort_stats("tottime").print_stats(PROFILED)
    return written.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=500.0, help="tokens a second, of all")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--part", type=int, default=1, help="tokens that come together")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(run(options))), flush=True)


if __name__ == "__main__":
    main()
