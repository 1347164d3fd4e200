"""A deterministic engine without torch: scores are a hash of the last tokens.

It follows the plain-Python rules of `protocol.acceptance`, so what a cluster built on it commits
can be computed in a test from the seed alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import struct
from collections.abc import Sequence
from itertools import repeat

from sdcpd.engine.api import (
    KV_BLOCK_TOKENS,
    Draft,
    DraftWork,
    EngineInfo,
    KeepEvicted,
    KvUsage,
    Prefix,
    Score,
    Scored,
)
from sdcpd.engine.without_kv import WithoutKv
from sdcpd.protocol.acceptance import (
    Acceptance,
    check_rows,
    draw_from,
    greedy,
    rule1,
    rule2,
    rule200,
    target_distribution,
    winner,
)
from sdcpd.protocol.digest import kv_prefix_hash
from sdcpd.protocol.histogram import Histogram
from sdcpd.protocol.logprobs import Row, logprob_row
from sdcpd.protocol.messages import Rule, Sampling

FAKE_KV_OCTETS = 32
CONTEXT = 3  # how many last tokens a score depends on


class FakeModel:
    """Scores of `vocab` tokens after any prefix; `noise` in [0, 1] mixes in another model's."""

    def __init__(self, *, vocab: int = 32, seed: int = 0, noise: float = 0.0) -> None:
        self.vocab = vocab
        self._seed = seed
        self._noise = noise

    def scores(self, prefix: Sequence[int]) -> list[float]:
        """Scores after a prefix, a function of its last tokens only."""
        own = self._hashed(prefix, self._seed)
        if not self._noise:
            return own
        other = self._hashed(prefix, self._seed + 1)
        return [(1 - self._noise) * a + self._noise * b for a, b in zip(own, other, strict=True)]

    def _hashed(self, prefix: Sequence[int], seed: int) -> list[float]:
        text = struct.pack(f">q{CONTEXT}q", seed, *([-1] * CONTEXT + list(prefix))[-CONTEXT:])
        octets = hashlib.shake_256(text).digest(2 * self.vocab)
        return [value / 8192 for value in struct.unpack(f">{self.vocab}H", octets)]

    def text(self, prompt: Sequence[int], count: int) -> list[int]:
        """What the model writes alone, greedily."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(greedy(self.scores(tokens)))
        return tokens[len(prompt) :]


def fake_blocks(prefix: Prefix | None, tokens: Sequence[int], first: int) -> list[bytes]:
    """What stands for the KV of a session's `tokens`, of whose prefix this was the last."""
    if prefix is None:
        return []
    whole = min(len(prefix.tokens), len(tokens)) // KV_BLOCK_TOKENS
    return [_fake_block(tokens, number) for number in range(first, whole)]


def _fake_block(tokens: Sequence[int], number: int) -> bytes:
    covered = tokens[: (number + 1) * KV_BLOCK_TOKENS]
    return kv_prefix_hash(covered).ljust(FAKE_KV_OCTETS * KV_BLOCK_TOKENS, b"\0")


def covered_by_blocks(prefix: Prefix, blocks: Sequence[bytes | memoryview]) -> int:
    """How many tokens of a prefix blocks cover, which are those of that prefix."""
    good = [one == _fake_block(prefix.tokens, number) for number, one in enumerate(blocks)]
    assert all(good), "the blocks of other tokens: whoever found them has mixed them up"
    return len(good) * KV_BLOCK_TOKENS


class FakeTarget:
    """`TargetEngine` over a FakeModel; a pass takes `pass_time_s`."""

    def __init__(self, model: FakeModel, *, pass_time_s: float = 0.0) -> None:
        self.model = model
        self.scored: list[Score] = []
        """Every work item, in order, for tests."""
        self.prefilled: list[int] = []
        """How many tokens each opening would have had to compute, for tests."""
        self._prefixes: dict[tuple[bytes, int], Prefix] = {}
        self._keep: KeepEvicted | None = None
        self._pass_time_s = pass_time_s
        name = f"fake-{model.vocab}"
        digest = hashlib.sha256(name.encode()).digest()
        self.info = EngineInfo(name, digest, digest, model.vocab, 1 << 20, "fake", True)

    async def prepare(
        self,
        session: bytes,
        epoch: int,
        prefix: Prefix,
        *,
        kv: bytes | None = None,
        blocks: Sequence[bytes | memoryview] = (),
    ) -> int:
        """See TargetEngine; nothing is computed, but what would have been is noted."""
        self._prefixes[(session, epoch)] = prefix
        known = self._covered(prefix, kv) if kv is not None else 0
        known = known or covered_by_blocks(prefix, blocks)
        self.prefilled.append(max(0, prefix.length - 1 - known))
        return min(known, prefix.length - 1)

    async def blocks(
        self, session: bytes, epoch: int, tokens: Sequence[int], first: int
    ) -> list[bytes]:
        """Hashes of the tokens up to each block's end, as long as `kv_octets` says."""
        return fake_blocks(self._prefixes.get((session, epoch)), tokens, first)

    async def export(self, session: bytes, epoch: int, tokens: int) -> bytes | None:
        """A hash of the tokens, as long as `kv_octets` says."""
        prefix = self._prefixes.get((session, epoch))
        if prefix is None or len(prefix.tokens) < tokens:
            return None
        return kv_prefix_hash(prefix.tokens[:tokens]).ljust(self.kv_octets(tokens), b"\0")

    def resident(self, session: bytes, epoch: int) -> bool:
        """See TargetEngine."""
        return (session, epoch) in self._prefixes

    def on_eviction(self, keep: KeepEvicted) -> None:
        """See TargetEngine."""
        self._keep = keep

    def kv_usage(self) -> KvUsage | None:
        """None: nothing is computed."""
        return None

    def evict(self, session: bytes, epoch: int) -> None:
        """Have a session make room, for tests."""
        prefix = self._prefixes.pop((session, epoch))
        if self._keep is not None:
            self._keep((session, epoch), list(prefix.tokens), fake_blocks(prefix, prefix.tokens, 0))

    def kv_octets(self, tokens: int) -> int:
        """See TargetEngine."""
        return FAKE_KV_OCTETS * tokens

    def _covered(self, prefix: Prefix, kv: bytes) -> int:
        count = len(kv) // FAKE_KV_OCTETS
        covered = prefix.tokens[: min(count, prefix.length)]
        good = len(covered) == count and kv.startswith(kv_prefix_hash(covered))
        return count if good else 0

    async def check_rows(self, octets: bytes | memoryview, tokens: Sequence[int]) -> None:
        """See TargetEngine."""
        check_rows(octets, self.info.vocab, tokens)

    async def score(self, work: Score) -> Scored:
        """See TargetEngine."""
        self.scored.append(work)
        await asyncio.sleep(self._pass_time_s)  # the length of a pass is what is being faked
        tokens = list(work.prefix.tokens[: work.prefix.length])
        rows = [self.model.scores(tokens)]
        for token in work.proposed:
            tokens.append(token)
            rows.append(self.model.scores(tokens))
        found = self._accept(rows, work)
        told: tuple[Row, ...] = ()
        if work.logprobs is not None:
            chosen = (*work.proposed[: found.accepted], found.additional)
            told = tuple(map(logprob_row, rows, chosen, repeat(work.logprobs)))
        return Scored(found.accepted, found.additional, self._pass_time_s, told)

    async def logprobs(
        self, tokens: Sequence[int], from_: int, alternatives: int, *, scope: bytes = b""
    ) -> tuple[Row, ...]:
        """See TargetEngine."""
        rows = (self.model.scores(tokens[:at]) for at in range(from_, len(tokens)))
        return tuple(map(logprob_row, rows, tokens[from_:], repeat(alternatives)))

    def forget(self, session: bytes, epoch: int) -> None:
        """See TargetEngine."""
        self._prefixes.pop((session, epoch), None)

    def silence_s(self) -> float:
        """See TargetEngine; there is no thread."""
        return 0.0

    def batches(self) -> Histogram | None:
        """None: there are no passes."""
        return None

    def pass_s(self) -> float:
        """See TargetEngine."""
        return self._pass_time_s

    async def aclose(self) -> None:
        """Nothing to stop."""

    def _accept(self, rows: list[list[float]], work: Score) -> Acceptance:
        if work.rule == Rule.GREEDY:
            return rule1([greedy(row) for row in rows], work.proposed)
        p = [target_distribution(row, work.sampling) for row in rows]
        if work.rule == Rule.RACE:
            assert work.sampling.seed is not None, "a rule-200 profile always has a seed"
            return rule200(p, work.proposed, work.sampling.seed, work.base)
        assert work.draw is not None, "rule 2 draws random values"
        q = check_rows(work.q_rows, self.model.vocab, work.proposed) if work.q_rows else []
        return rule2(p, q, work.proposed, work.draw)


class FakeDrafter(WithoutKv):
    """`DraftEngine` over a FakeModel; a token takes `token_time_s`."""

    tokenizer: bytes | None = None

    def __init__(
        self, model: FakeModel, *, name: str = "fake-drafter", token_time_s: float = 0.0
    ) -> None:
        self.own = model
        self._token_time_s = token_time_s
        self.model = hashlib.sha256(name.encode()).digest()
        self.vocab: int | None = model.vocab
        self.kv_fingerprint: bytes | None = self.model
        self._prefixes: dict[bytes, Prefix] = {}
        self._keep: KeepEvicted | None = None

    async def draft(self, work: DraftWork, *, blocks: Sequence[bytes | memoryview] = ()) -> Draft:
        """See DraftEngine."""
        reused = min(covered_by_blocks(work.prefix, blocks), work.prefix.length - 1)
        self._prefixes[work.session] = work.prefix
        if self._token_time_s:
            await asyncio.sleep(work.m * self._token_time_s)  # what is being faked
        tokens = [*work.prefix.tokens[: work.prefix.length], *work.after]
        rows = b""
        for index in range(work.m):
            scores = self.own.scores(tokens)[: work.vocab]
            if work.rule == Rule.GREEDY:
                token = greedy(scores)
            elif work.rule == Rule.RACE:
                assert work.sampling.seed is not None, "a rule-200 profile always has a seed"
                p = target_distribution(scores, work.sampling)
                token = winner(p, work.sampling.seed, work.base + index + 1)
            else:
                token, row = self._sample(scores, work.sampling)
                rows += row
            tokens.append(token)
        seconds = work.m * self._token_time_s
        return Draft(tuple(tokens[-work.m :]), rows or None, seconds, max(reused, 0))

    async def blocks(self, session: bytes, tokens: Sequence[int], first: int) -> list[bytes]:
        """See DraftEngine."""
        return fake_blocks(self._prefixes.get(session), tokens, first)

    def resident(self, session: bytes) -> bool:
        """See DraftEngine."""
        return session in self._prefixes

    def on_eviction(self, keep: KeepEvicted) -> None:
        """See DraftEngine."""
        self._keep = keep

    def evict(self, session: bytes) -> None:
        """Have a session make room, for tests."""
        prefix = self._prefixes.pop(session)
        if self._keep is not None:
            self._keep(session, list(prefix.tokens), fake_blocks(prefix, prefix.tokens, 0))

    def _sample(self, scores: list[float], sampling: Sampling) -> tuple[int, bytes]:
        octets = struct.pack(f"<{len(scores)}f", *target_distribution(scores, sampling))
        row = struct.unpack(f"<{len(scores)}f", octets)  # as published, after rounding
        return draw_from(row, secrets.randbits(53) / (1 << 53)), octets

    def forget(self, session: bytes) -> None:
        """See DraftEngine."""
        self._prefixes.pop(session, None)

    async def aclose(self) -> None:
        """Nothing to stop."""
