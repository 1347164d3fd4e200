"""KV that an engine has computed, kept in blocks for later texts that begin alike.

Blocks lie in the tiers of this process, under names in scopes that no path can spell: no peer reads
or writes them. A name is a hash over all tokens up to the block's end, the scope, the model and
what computed it (its fingerprint), so that a hit is the KV that this engine would compute itself.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Protocol

from sdcpd.engine.api import KV_BLOCK_TOKENS, EngineError
from sdcpd.protocol.uris import session_path_id
from sdcpd.roles.kv_cost import KvCost
from tiers.api import Key, Octets, Tier, TierFull, entry_of

log = logging.getLogger("sdcpd.roles")
SCOPE = ".kv"  # no scope of a path (resource.py) begins so
MEDIA_TYPE = "application/octet-stream"
_DOMAIN = b"SDCP-KV-BLOCK-2\0"

Read = Callable[[Sequence[int], int], Awaitable[list[bytes]]]
"""The blocks of a text from a number on, as an engine has them; raises EngineError."""


class Text(Protocol):
    """A session's machine, as far as its KV goes."""

    session: bytes
    prompt_length: int

    @property
    def tokens(self) -> Sequence[int]: ...


def kv_scope(scope: bytes | None) -> str:
    """Where a scope's blocks are accounted, so that none can push out another's (D-M3)."""
    return SCOPE if scope is None else f"{SCOPE}.{session_path_id(scope)}"


def draft_kind(owner: str) -> str:
    """What the names of a drafter's blocks begin with, `owner` being as its certificate names it.

    In a cache that drafters share each writes its own alone: one cannot tell KV that another has
    made up from its own.
    """
    return f"draft_kv.{sha256(owner.encode()).hexdigest()[:16]}"


class PrefixKv:
    """Finds and keeps blocks for one engine; no failure of it is anybody's error."""

    def __init__(self, tier: Tier | None, *, kind: str, fingerprint: bytes | None) -> None:
        """`fingerprint` names model and computer of the KV, `kind` begins its blocks' names.

        Without a tier or a fingerprint nothing is kept.
        """
        self._tier = None if fingerprint is None else tier
        self._root = sha256(_DOMAIN + kind.encode() + b"\0" + (fingerprint or b"")).digest()
        self._kind = kind
        self.cost = KvCost()

    def keys(self, tokens: Sequence[int], scope: bytes | None) -> Iterator[Key]:
        """The keys of the whole blocks of a text, each after the one that it continues.

        Texts of different scopes share none (D-M3), nor can one find out what the other has asked.
        """
        place = kv_scope(scope)
        link = sha256(self._root + (scope or b""))
        for start in range(0, len(tokens) - KV_BLOCK_TOKENS + 1, KV_BLOCK_TOKENS):
            block = tokens[start : start + KV_BLOCK_TOKENS]
            link = sha256(link.digest() + struct.pack(f">{KV_BLOCK_TOKENS}I", *block))
            yield Key(place, f"{self._kind}.{link.hexdigest()}")

    async def find(self, tokens: Sequence[int], scope: bytes | None) -> list[Octets]:
        """The blocks of the longest beginning that is kept; the last token is never among them.

        Takes no longer than computing all of them is expected to.
        """
        found: list[Octets] = []
        limit_s = self.cost.limit_s(len(tokens))
        if self._tier is None or not limit_s:
            return found
        begin = time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                for key in self.keys(tokens[:-1], scope):
                    entry = await self._tier.get(key)
                    if entry is None:
                        break
                    found.append(entry.data)
        except TimeoutError:
            log.info("KV of %d blocks found in time, the rest is computed", len(found))
        # What gave nothing has cost its time as well.
        tokens_found = max(len(found), 1) * KV_BLOCK_TOKENS
        self.cost.fetched(tokens_found, time.monotonic() - begin)
        return found

    async def keep(self, text: Text, scope: bytes | None, read: Read) -> None:
        """Keep the blocks of a session's text that are not kept yet."""
        if self._tier is None or not text.prompt_length:
            return  # a text without a prompt begins with a token that is not in it (D-O9)
        tokens = list(text.tokens)
        keys = list(self.keys(tokens, scope))
        first = await self._first_missing(keys)
        if first == len(keys):
            return
        try:
            blocks = await read(tokens, first)
        except EngineError as e:
            log.warning("session %s: its KV is not kept: %s", session_path_id(text.session), e)
            return
        await self._store(keys, first, blocks)

    async def keep_evicted(
        self, tokens: Sequence[int], scope: bytes | None, blocks: Sequence[bytes]
    ) -> None:
        """Keep the blocks of a text that had to make room in an engine's memory."""
        if self._tier is None:
            return
        keys = list(self.keys(tokens, scope))
        first = await self._first_missing(keys)
        await self._store(keys, first, blocks[first:])

    async def _first_missing(self, keys: Sequence[Key]) -> int:
        """Which of a text's blocks is the first that is not kept."""
        assert self._tier is not None, "asked only where there is one"
        first = 0
        while first < len(keys) and await self._tier.holds(keys[first]):
            first += 1
        return first

    async def _store(self, keys: Sequence[Key], first: int, blocks: Sequence[bytes]) -> None:
        assert self._tier is not None, "asked only where there is one"
        for number, octets in enumerate(blocks, first):
            after = keys[number - 1].name if number else ""
            entry = replace(entry_of(octets, media_type=MEDIA_TYPE), after=after)
            try:
                await self._tier.put(keys[number], entry, lease_s=0)
            except TierFull as e:
                log.info("a block of KV is not kept: %s", e)
                return
