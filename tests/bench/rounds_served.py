"""One of our daemons with an engine that takes no time, and what its rounds and its CPU cost.

    python -m tests.bench.rounds_served OUT --role verifier-v0 -c FILE

All but the engine is the real thing.  SIGUSR1 begins a measurement; SIGUSR2 ends it and writes OUT,
a JSON object: the seconds of each round (at a drafter), the process's CPU time, and, where the
environment has STAGES=1, samples of its stack by stage.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from sdcpd import daemon, engines
from sdcpd.engine.api import Draft, DraftWork, Score, Scored
from sdcpd.engine.fake import FakeDrafter, FakeModel, FakeTarget
from sdcpd.engine.tokenizer import TextModel

M = 4
TOKEN = 100  # no end of a text
SAMPLE_S = 0.001

STAGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("codec", ("protocol/codec", "protocol/fields", "protocol/cbor", "protocol/digest")),
    ("machine", ("sdcpd/protocol/",)),
    ("TLS", ("transport/tcp", "transport/tls", "/ssl.py")),
    ("HTTP/2", ("sdcpd/transport/", "/h2/", "/hpack/", "/hyperframe/")),
    ("append", ("/tiers/", "roles/commit_log")),
    ("shells", ("sdcpd/roles/", "sdcpd/metrics/", "sdcpd/admin")),
    ("engine", ("tests/bench/", "sdcpd/engine/")),
)
LOOP = "event loop"


class Measured:
    """What is noted between the two signals."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self.asked: dict[bytes, list[float]] = {}
        """When each session's drafter was asked for its next proposal."""
        self._stages: Counter[str] = Counter()
        self._functions: Counter[str] = Counter()
        self._cpu = self._begun = 0.0
        signal.signal(signal.SIGUSR1, self._begin)
        signal.signal(signal.SIGUSR2, self._end)

    def _begin(self, *_: Any) -> None:
        self.asked.clear()
        self._stages.clear()
        self._functions.clear()
        self._cpu, self._begun = time.process_time(), time.perf_counter()
        if os.environ.get("STAGES"):
            signal.signal(signal.SIGPROF, self._sample)
            signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)

    def _end(self, *_: Any) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        rounds = [b - a for one in self.asked.values() for a, b in pairwise(one)]
        told = {
            "seconds": time.perf_counter() - self._begun,
            "cpu_s": time.process_time() - self._cpu,
            "rounds": rounds,
            "stages": dict(self._stages),
            "functions": dict(self._functions),
        }
        part = self._out.with_suffix(".part")
        part.write_text(json.dumps(told))
        part.rename(self._out)

    def _sample(self, _: int, frame: FrameType | None) -> None:
        self._stages[stage_of(frame)] += 1
        if frame is not None:
            code = frame.f_code
            self._functions[f"{'/'.join(code.co_filename.split('/')[-2:])}:{code.co_qualname}"] += 1


def stage_of(frame: FrameType | None) -> str:
    """The stage that the innermost of our own frames belongs to."""
    while frame is not None:
        name = frame.f_code.co_filename
        for stage, parts in STAGES:
            if any(part in name for part in parts):
                return stage
        frame = frame.f_back
    return LOOP


class NullTarget(FakeTarget):
    """Accepts everything at once."""

    def __init__(self, text: TextModel) -> None:
        super().__init__(FakeModel(vocab=text.vocab))
        from dataclasses import replace

        self.info = replace(self.info, tokenizer=text.digest)

    async def score(self, work: Score) -> Scored:
        """See TargetEngine."""
        return Scored(len(work.proposed), TOKEN)


class NullDrafter(FakeDrafter):
    """Proposes the same at once, and notes when it was asked.

    The first sessions, as many as the environment's IDLE says, never get a proposal.
    """

    def __init__(self, measured: Measured) -> None:
        super().__init__(FakeModel(vocab=1 << 20))
        self._measured = measured
        self._idle_max = int(os.environ.get("IDLE", "0"))
        self._idle: set[bytes] = set()

    def resident(self, session: bytes) -> bool:
        """So that nobody looks for keys and values at each round, in a copy of the whole text."""
        return True

    async def draft(self, work: DraftWork, *, blocks: Sequence[bytes | memoryview] = ()) -> Draft:
        """See DraftEngine."""
        if work.session in self._idle or len(self._idle) < self._idle_max:
            self._idle.add(work.session)
            await asyncio.Event().wait()  # until the session is dropped
        self._measured.asked.setdefault(work.session, []).append(time.perf_counter())
        return Draft((TOKEN,) * min(M, work.m))


def main() -> None:
    """The daemon's own command line, with other engines."""
    from sdcpd.__main__ import main as sdcpd

    out, *arguments = sys.argv[1:]
    measured = Measured(Path(out))

    async def target(section: Any) -> NullTarget:
        return NullTarget(TextModel.load(section.model.path))

    async def drafter(_: Any) -> NullDrafter:
        return NullDrafter(measured)

    for module in (daemon, engines):
        module.target_engine = target  # type: ignore[assignment]
        module.draft_engine = drafter  # type: ignore[assignment]
    sdcpd(arguments)


if __name__ == "__main__":
    main()
