"""KV that the target has computed, kept in blocks for later prompts that begin alike.

Blocks lie in the tiers of this process, under names of a scope that no path can spell: nobody else
reads or writes them. A name is a hash over all tokens up to the block's end, the model and what
computed it (its fingerprint), so that a hit is the KV that this engine would compute itself.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Iterator, Sequence
from hashlib import sha256

from sdcpd.engine.api import KV_BLOCK_TOKENS, EngineError, EngineInfo, TargetEngine
from sdcpd.protocol.uris import session_path_id
from sdcpd.protocol.verifier import VerifierSession
from tiers.api import Key, Octets, Tier, TierFull, entry_of

log = logging.getLogger("sdcpd.roles")
FIND_S = 0.25  # a tier that is slower than this holds no opening up: the rest is computed
SCOPE = ".kv"  # no scope of a path (resource.py) begins so
MEDIA_TYPE = "application/octet-stream"
_DOMAIN = b"SDCP-KV-BLOCK-1\0"


def block_names(tokens: Sequence[int], *, info: EngineInfo, scope: bytes | None) -> Iterator[str]:
    """The names of the whole blocks of a text, each after the one that it continues.

    Sessions of different scopes share none (D-M3), nor can one find out what the other has asked.
    """
    link = sha256(_DOMAIN + info.model + info.fingerprint.encode() + b"\0" + (scope or b""))
    for start in range(0, len(tokens) - KV_BLOCK_TOKENS + 1, KV_BLOCK_TOKENS):
        block = tokens[start : start + KV_BLOCK_TOKENS]
        link = sha256(link.digest() + struct.pack(f">{KV_BLOCK_TOKENS}I", *block))
        yield link.hexdigest()


class PrefixKv:
    """Finds and keeps blocks for one engine; no failure of it is anybody's error."""

    def __init__(self, engine: TargetEngine, tier: Tier | None) -> None:
        """Without a tier nothing is kept, and neither is it for an engine that is not exact."""
        self._engine = engine
        # Where rows depend on what stands beside them, KV from another pass would change output.
        self._tier = tier if engine.info.exact else None

    async def find(self, tokens: Sequence[int], *, scope: bytes | None) -> list[Octets]:
        """The blocks of the longest beginning that is kept; the last token is never among them."""
        found: list[Octets] = []
        if self._tier is None:
            return found
        try:
            async with asyncio.timeout(FIND_S):
                for name in block_names(tokens[:-1], info=self._engine.info, scope=scope):
                    entry = await self._tier.get(Key(SCOPE, name))
                    if entry is None:
                        break
                    found.append(entry.data)
        except TimeoutError:
            log.info("KV of %d blocks found in time, the rest is computed", len(found))
        return found

    async def keep(self, machine: VerifierSession) -> None:
        """Keep the blocks of a session's text that are not kept yet."""
        if self._tier is None or not machine.prompt_length:
            return  # a text without a prompt begins with a token that is not in it (D-O9)
        names = list(
            block_names(machine.tokens, info=self._engine.info, scope=machine.contract.scope)
        )
        first = 0
        while first < len(names) and await self._tier.holds(Key(SCOPE, names[first])):
            first += 1
        try:
            await self._store(machine, names, first, self._tier)
        except EngineError as e:
            log.warning("session %s: its KV is not kept: %s", session_path_id(machine.session), e)

    async def _store(
        self, machine: VerifierSession, names: Sequence[str], first: int, tier: Tier
    ) -> None:
        if first == len(names):
            return
        blocks = await self._engine.blocks(
            machine.session, machine.epoch, first, len(names) - first
        )
        # The last first: what is older goes sooner, and without its beginning a block is worth
        # nothing.
        for name, octets in reversed(list(zip(names[first:], blocks, strict=False))):
            try:
                await tier.put(Key(SCOPE, name), entry_of(octets, media_type=MEDIA_TYPE), lease_s=0)
            except TierFull as e:
                log.info("a block of KV is not kept: %s", e)
                return
