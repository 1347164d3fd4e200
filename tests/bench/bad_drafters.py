"""What a drafter that is no help costs others: `python -m tests.bench.bad_drafters`.

Two clusters of real processes take turns, equal but for their second drafter: an honest one here,
and one there that is always wrong, always slow or hostile.  What counts are the streams that the
first drafter alone served, in tokens a second; and how soon sessions leave the bad one.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx2 as httpx

from sdcpd.admin_client import fetch
from tests.chaos.client import Client
from tests.chaos.cluster import Cluster
from tests.chaos.texts import Text, Undisturbed, make_texts, undisturbed

KINDS = ("wrong", "slow", "hostile")
CLIENTS = 6
WINDOW_S = 6.0
TARGET = 0.95
LOOK_S = 0.05
REJECTED = "sdcp_proposals_rejected_total{"


@dataclass
class Side:
    """One of the two clusters."""

    cluster: Cluster
    texts: list[Text]
    known: dict[Text, Undisturbed]
    bad: str
    """Base URI of the second drafter."""
    rates: list[list[float]] = field(default_factory=list)
    """Tokens a second of streams that the second drafter never had, by window."""
    left_after: list[int] = field(default_factory=list)
    """Tokens that sessions had when the second drafter was named no more."""
    stayed: int = 0
    wrong: list[str] = field(default_factory=list)

    async def rejected(self) -> int:
        """Proposals that the verifier has refused."""
        said = await asyncio.to_thread(fetch, self.cluster.processes["v0"].socket_path, "/metrics")
        lines = (line for line in said.splitlines() if line.startswith(REJECTED))
        return round(sum(float(line.split()[-1]) for line in lines))

    async def window(self, number: int) -> None:
        """Stream for a while, and look who serves whom."""
        drafters: dict[str, list[tuple[str | None, int]]] = {}
        until = time.monotonic() + WINDOW_S
        async with httpx.AsyncClient(base_url=self.cluster.api) as http:
            clients = [Client(i, http, self.texts, self.known, seed=number) for i in range(CLIENTS)]
            running = asyncio.gather(
                *(one.run(lambda: time.monotonic() < until) for one in clients)
            )
            while not running.done():
                for session, one in (await self.cluster.sessions()).items():
                    drafters.setdefault(session, []).append((one["drafter"], one["committed"]))
                await asyncio.wait({running}, timeout=LOOK_S)
            await running
        rates = []
        for stream in (stream for one in clients for stream in one.streams):
            seen = drafters.get(stream.session, [])
            mine = [at for at, (drafter, _) in enumerate(seen) if drafter == self.bad]
            if seen and not mine and len(stream.times) > 1:
                spent = stream.times[-1] - stream.times[0]
                rates.append(stream.text.max_tokens / spent)
            elif mine and mine[-1] + 1 < len(seen):
                self.left_after.append(seen[mine[-1] + 1][1])
            elif mine:
                self.stayed += 1
        self.rates.append(rates)
        self.wrong += [one for client in clients for one in client.wrong]


async def measure(kind: str, windows: int, folder: Path) -> tuple[Side, Side]:
    """The honest and the other cluster, in turns."""
    texts = [one for one in make_texts(1) if one.rule != 2]
    async with AsyncExitStack() as stack:
        sides = []
        for name, programs in (
            ("honest", {}),
            (kind, {"d1": ("tests.kit.bad_drafter", kind)}),
        ):
            directory = folder / f"{kind}-{name}"
            directory.mkdir()
            cluster = await stack.enter_async_context(
                Cluster(directory, verifiers=1, drafters=2, programs=programs)
            )
            known = await undisturbed(cluster.router, texts)
            sides.append(Side(cluster, texts, known, cluster.base("d1")))
        honest, bad = sides
        for number in range(windows):
            for side in (honest, bad) if number % 2 else (bad, honest):
                await side.window(number)
        print(
            f"{kind}: {await bad.rejected()} proposals refused ({await honest.rejected()} of the honest)"
        )
    return honest, bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--kind", choices=KINDS, action="append", dest="kinds")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory(prefix="bad-") as folder:
        for kind in options.kinds or KINDS:
            honest, bad = asyncio.run(measure(kind, options.windows, Path(folder)))
            ratios = [
                statistics.median(b) / statistics.median(a)
                for a, b in zip(honest.rates, bad.rates, strict=True)
                if a and b
            ]
            ratio = statistics.median(ratios)
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            word = "reached" if ratio >= TARGET else "missed"
            streams = sum(map(len, bad.rates))
            print(
                f"{kind}: streams of the other drafter at {ratio:.2f} ({spread}; {streams} streams), to be at least {TARGET:.2f}: {word}"
            )
            after = statistics.median(bad.left_after) if bad.left_after else None
            print(
                f"  {len(bad.left_after)} sessions left it, after {after} tokens in the median; {bad.stayed} ended with it"
            )
            wrong = honest.wrong + bad.wrong
            print("\n".join(f"  WRONG: {one}" for one in wrong) or "  all texts as undisturbed")
            failed |= bool(wrong) or ratio < TARGET
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
