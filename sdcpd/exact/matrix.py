"""Which cases must give one text, and what each came to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from sdcpd.engine.api import DraftEngine, TargetEngine
from sdcpd.exact.cluster import LocalCluster
from sdcpd.protocol.digest import output_digest
from sdcpd.protocol.messages import Sampling
from sdcpd.roles.generation import Generation, GenerationRequest
from tiers.api import Tier
from tiers.host import HostTier

STRANGERS = 15  # others in the same passes
M_OF_EVENTS = 4
KV_BYTES = 1 << 30
SAMPLINGS = {
    "greedy": Sampling(temperature_milli=0),
    "seeded": Sampling(temperature_milli=800, seed=20_261_130),
}
EVENTS = ("self-decoding", "failover", "prefix hit")
Drafters = Mapping[str, DraftEngine]
"""By the kind that a case names."""


@dataclass(frozen=True, slots=True)
class Case:
    """One way to come to the text."""

    sampling: str
    drafter: str
    """Empty for none: the verifier decodes alone."""
    m: int = 0
    batch: int = 1
    event: str = ""

    def __str__(self) -> str:
        parts = [self.sampling, f"{self.drafter} M={self.m}" if self.drafter else "no drafter"]
        parts += [f"batch {self.batch}"] if self.batch > 1 else []
        return ", ".join([*parts, *([self.event] if self.event else [])])


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case's text; `happened` says in figures that what it is about took place."""

    case: Case
    tokens: tuple[int, ...]
    happened: Mapping[str, int]

    @property
    def took_place(self) -> bool:
        """Whether what the case is about happened at all."""
        return {
            "": True,
            "self-decoding": self.happened["self-decoded"] > 0,
            "failover": self.happened["opened"] > self.case.batch,
            "prefix hit": self.happened["KV tokens reused"] > 0,
        }[self.case.event]

    @property
    def digest(self) -> str:
        """Of the output ids alone."""
        return output_digest(self.tokens)


def cases(drafters: Sequence[str], ms: Sequence[int]) -> Iterator[Case]:
    """All of them; the first of each sampling is what the others are held against."""
    for sampling in SAMPLINGS:
        yield Case(sampling, "")
        yield Case(sampling, "", batch=1 + STRANGERS)
        yield Case(sampling, "", event="prefix hit")
        for drafter in drafters:
            yield from (Case(sampling, drafter, m) for m in ms)
            yield Case(sampling, drafter, ms[-1], batch=1 + STRANGERS)
        for event in EVENTS:
            for batch in (1, 1 + STRANGERS):
                yield Case(sampling, drafters[0], min(M_OF_EVENTS, ms[-1]), batch, event)


class Matrix:
    """Runs cases on one target engine."""

    def __init__(
        self, target: TargetEngine, drafters: Drafters, *, prompt: Sequence[int], tokens: int
    ) -> None:
        self._target, self._drafters = target, drafters
        self._prompt, self._tokens = tuple(prompt), tokens

    async def run(self, chosen: Sequence[Case]) -> AsyncIterator[Outcome]:
        """The outcome of each case, as it is known; each has a cluster of its own."""
        for case in chosen:
            with TemporaryDirectory(prefix="sdcpd-exact-") as folder:
                yield await self._case(case, Path(folder))

    async def _case(self, case: Case, folder: Path) -> Outcome:
        kv = HostTier(KV_BYTES) if case.event == "prefix hit" else None
        cluster = self._cluster(case, folder, kv)
        try:
            await cluster.ready()
            if kv is not None:
                await self._text(cluster, self._prompt, case)
                await _settled(kv)
            strangers = [
                asyncio.ensure_future(self._text(cluster, prompt, case))
                for prompt in self._strangers(case.batch - 1)
            ]
            tokens = await self._text(cluster, self._prompt, case, event=case.event)
            await asyncio.gather(*strangers)
            return Outcome(case, tuple(tokens), _happened(cluster))
        finally:
            await cluster.aclose()

    def _cluster(self, case: Case, folder: Path, kv: Tier | None) -> LocalCluster:
        cluster = LocalCluster(self._target, folder, m_max=max(case.m, 1), kv=kv)
        if case.drafter:
            cluster.add_drafter(self._drafters[case.drafter], m=case.m)
        return cluster

    async def _text(
        self, cluster: LocalCluster, prompt: tuple[int, ...], case: Case, *, event: str = ""
    ) -> list[int]:
        request = GenerationRequest(
            prompt, self._tokens, (), SAMPLINGS[case.sampling], speculate=bool(case.drafter)
        )
        generation = await cluster.begin(request)
        tokens: list[int] = []
        async for part in generation:
            tokens += part.tokens
            if event and len(tokens) >= self._tokens // 3:
                await self._disturb(cluster, generation, event)
                event = ""
        return tokens

    async def _disturb(self, cluster: LocalCluster, text: Generation, event: str) -> None:
        if event == "self-decoding":
            await cluster.kill(next(iter(cluster.drafters.values())))
        elif event == "failover":
            await cluster.kill(cluster.serving_of(text.session))

    def _strangers(self, count: int) -> list[tuple[int, ...]]:
        chooser = random.Random(count)
        vocab = self._target.info.vocab
        return [
            tuple(chooser.randrange(vocab) for _ in range(chooser.randint(1, 90)))
            for _ in range(count)
        ]


def _happened(cluster: LocalCluster) -> dict[str, int]:
    verifiers, drafters = cluster.verifiers.values(), cluster.drafters.values()
    return {
        "accepted": sum(one.rounds.tokens_accepted for one in verifiers),
        "proposed": sum(one.rounds.tokens_proposed for one in verifiers),
        "self-decoded": sum(one.rounds.self_decoded for one in verifiers),
        "opened": sum(one.counts["opened"] for one in verifiers),
        "KV tokens reused": sum(one.counts["kv_tokens_reused"] for one in verifiers),
        "by the drafter": sum(one.counts["kv_tokens_reused"] for one in drafters),
    }


async def _settled(kv: HostTier) -> None:
    """Wait until the KV of the text before is kept: it is, when no more of it comes."""
    objects = -1
    while kv.stats().objects != objects or not objects:
        objects = kv.stats().objects
        await asyncio.sleep(0.2)
