"""Whose keys and values the pool holds: who gets room, who gives it up, who begins with whose.

It is a cache of what can be computed again from tokens, with rules that keep many sessions from
pushing each other out in turn:

1. A job gets all the blocks that it may need before it begins, or waits; one that runs never waits.
2. Room is made, in this order, by texts that have ended; by sessions that were not used for
   IDLE_S, the one used longest ago first; and by sessions that came after the one that needs room,
   the last first.  So whoever came first always gets on.
3. A session that came to a full memory waits behind those that wait already.

Used by the engine's thread alone.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from struct import pack
from typing import NamedTuple

from sdcpd.engine.api import KV_BLOCK_TOKENS, ContextFull
from sdcpd.engine.kv import SessionKv
from sdcpd.engine.kv_pool import KvPool

log = logging.getLogger("sdcpd.engine")
IDLE_S = 1.0  # many times a round: a session whose drafter is drafting is not idle
TURNS_MAX = 1 << 16
SHARED_BELOW = 0.5  # share of the memory that is free, below which beginnings are shared

Evicted = Callable[[Hashable, SessionKv], None]


@dataclass(slots=True)
class _Held:
    """A session that is in memory, or waits to be."""

    kv: SessionKv
    turn: int
    """Its place among all that ever came."""
    used_at: float


class _Beginning(NamedTuple):
    """Whose first blocks a new session can begin with, and how many of them it would share."""

    kv: SessionKv
    blocks: int
    shared: int


class KvMemory:
    """Sessions' KV in one pool."""

    def __init__(
        self,
        pool: KvPool,
        *,
        reuse: bool = True,
        evicted: Evicted = lambda key, kv: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`reuse`: whether texts may begin with what was computed for others.

        `evicted` is told of a session's KV before it is given up.
        """
        self.pool = pool
        self.evictions = self.adopted_tokens = 0
        self._reuse, self._evicted, self._clock = reuse, evicted, clock
        self._held: dict[Hashable, _Held] = {}
        self._ended: OrderedDict[int, SessionKv] = OrderedDict()
        self._index: dict[bytes, SessionKv] = {}
        self._turns = itertools.count()
        self._turn_of: dict[Hashable, int] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def get(self, key: Hashable) -> SessionKv | None:
        """A session's KV; None if it has none here."""
        held = self._held.get(key)
        return None if held is None else held.kv

    def sessions(self) -> list[Hashable]:
        """The sessions that have KV here."""
        return list(self._held)

    def enter(
        self,
        key: Hashable,
        text: Sequence[int],
        *,
        positions: int,
        scope: bytes = b"",
        busy: Container[Hashable] = (),
        evict: bool = True,
    ) -> SessionKv | None:
        """A session's KV with room for so many positions; None: there is none now, wait.

        A session that is new here begins with the longest beginning of `text` that another of its
        `scope` has.  Those that are `busy` keep theirs, and without `evict` all do.  Raises
        ContextFull for what never fits.
        """
        if positions > self.pool.tokens_max:
            raise ContextFull(
                f"{positions} tokens do not fit the memory for keys and values, which holds "
                f"{self.pool.tokens_max}; more kv_memory would"
            )
        held = self._held.get(key)
        if held is None:
            held = _Held(SessionKv(self.pool), self.turn(key), self._clock())
        beginning = None if held.kv.table else self._find(text, scope)
        blocks = held.kv.wants(positions) - (beginning.shared if beginning else 0)
        # The last token may be fed again, and is then written where others read.
        blocks += held.kv.shared_from(len(text) - 1)
        if blocks > self.pool.free and not evict:
            return None
        if not self._make_room(held, key, blocks, busy):
            return None
        if beginning is not None:
            # It may have had to make room itself, and then nothing is spared.
            self._adopt(held.kv, beginning, text)
            if not self._make_room(held, key, held.kv.wants(positions), busy):
                held.kv.free()
                return None
        held.kv.reserve(positions)
        held.used_at = self._clock()
        self._held[key] = held
        return held.kv

    def turn(self, key: Hashable) -> int:
        """A session's place among all that came; it keeps it until it ends."""
        if key not in self._turn_of:
            self._turn_of[key] = next(self._turns)
            if len(self._turn_of) > TURNS_MAX:  # of those that were let go while they waited
                del self._turn_of[next(iter(self._turn_of))]
        return self._turn_of[key]

    def settle(self, key: Hashable, tokens: int, scope: bytes = b"") -> None:
        """The first `tokens` of a session's rows are of its text for good: others may use them."""
        kv = self.get(key)
        if kv is None or not self._reuse:
            return
        whole = min(tokens, len(kv.tokens)) // KV_BLOCK_TOKENS
        if whole > len(kv.links):
            kv.links += itertools.islice(_links(kv.tokens, scope), len(kv.links), whole)
            self._index.update(dict.fromkeys(kv.links, kv))

    def forget(self, key: Hashable) -> None:
        """A session has ended; what others may begin with stays while there is room."""
        self._turn_of.pop(key, None)
        held = self._held.pop(key, None)
        if held is None:
            return
        kv, whole = held.kv, len(held.kv.links)
        if not whole:
            kv.free()
            return
        kv.shorten(whole)
        self._ended[id(kv)] = kv

    def drop(self, key: Hashable) -> None:
        """What a session has is not to be trusted: free it."""
        held = self._held.pop(key, None)
        if held is not None:
            self._free(held.kv)

    # ---- room

    def _make_room(
        self, held: _Held, key: Hashable, blocks: int, busy: Container[Hashable]
    ) -> bool:
        while blocks > self.pool.free:
            if self._ended:
                self._free(self._ended.popitem(last=False)[1])
                continue
            victim = self._victim(held, key, busy)
            if victim is None:
                return False
            self.evictions += 1
            gone = self._held.pop(victim)
            try:
                self._evicted(victim, gone.kv)
            except Exception:
                log.exception("KV that makes room is not kept")
            self._free(gone.kv)
        return True

    def _victim(self, held: _Held, key: Hashable, busy: Container[Hashable]) -> Hashable | None:
        others = [
            (other, at) for other, at in self._held.items() if other != key and other not in busy
        ]
        idle = [one for one in others if self._clock() - one[1].used_at >= IDLE_S]
        if idle:
            return min(idle, key=lambda one: one[1].used_at)[0]
        younger = [one for one in others if one[1].turn > held.turn]
        return max(younger, key=lambda one: one[1].turn)[0] if younger else None

    def _free(self, kv: SessionKv) -> None:
        for link in kv.links:
            if self._index.get(link) is kv:
                del self._index[link]
        kv.links = []
        kv.free()

    # ---- beginnings

    def _find(self, text: Sequence[int], scope: bytes) -> _Beginning | None:
        """Who has the longest beginning of a text; its last token is never among it."""
        found, blocks = None, 0
        for link in _links(text[:-1], scope):
            if (other := self._index.get(link)) is None:
                break
            found, blocks = other, blocks + 1
        if found is None:
            return None
        if id(found) in self._ended:
            self._ended.move_to_end(id(found))
        # A text in one piece is read where it lies: while there is room each has its own copy.
        share = self.pool.free - blocks < SHARED_BELOW * self.pool.blocks
        return _Beginning(found, blocks, blocks if share else 0)

    def _adopt(self, kv: SessionKv, found: _Beginning, text: Sequence[int]) -> None:
        if found.kv.agreed(text) >= found.blocks * KV_BLOCK_TOKENS:
            kv.adopt(found.kv, found.blocks, share=found.shared > 0)
            self.adopted_tokens += len(kv.tokens)


def _links(tokens: Sequence[int], scope: bytes) -> Iterator[bytes]:
    """Names of the whole blocks of a text, each of all that comes before it; none of two scopes."""
    link = sha256(scope).digest()
    for start in range(0, len(tokens) - KV_BLOCK_TOKENS + 1, KV_BLOCK_TOKENS):
        block = tokens[start : start + KV_BLOCK_TOKENS]
        link = sha256(link + pack(f">{KV_BLOCK_TOKENS}I", *block)).digest()
        yield link
