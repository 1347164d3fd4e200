"""Target KV in the cache: an accelerator that is used where it is there (D-M4, D-O10).

A verifier publishes the KV of a long prompt, so that another one that takes the session over loads
it instead of computing it (sections 6.3 and 6.9).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sdcpd.engine.api import EngineError, TargetEngine
from sdcpd.protocol.digest import kv_prefix_hash
from sdcpd.protocol.uris import join, session_path_id
from sdcpd.protocol.verifier import VerifierSession
from sdcpd.roles.objects import NotTrusted, ObjectGone, Objects
from sdcpd.transport.http import TransportError

log = logging.getLogger("sdcpd.roles")
PROMPT_TOKENS_MIN = 64  # fewer are computed sooner than fetched
HEADER_OCTETS_MAX = 4096
LOAD_S = 5.0  # as for rows (D-P12); what takes longer is computed
PUBLISH_S = 60.0  # in the background, nobody waits


def target_kv_reference(
    base: str, session: bytes, *, scope: bytes | None, prompt: Sequence[int]
) -> str:
    """Where the KV of a session's prompt is, if a verifier has published it, below a base."""
    segment = session_path_id(scope or session)
    return join(base, f"objects/{segment}/target_kv.{kv_prefix_hash(prompt).hex()}")


async def find_target_kv(
    objects: Objects, base: str, session: bytes, *, scope: bytes | None, prompt: Sequence[int]
) -> str | None:
    """Where the KV of a session's prompt is, None unless the cache has it (section 6.9)."""
    if len(prompt) < PROMPT_TOKENS_MIN:
        return None
    reference = target_kv_reference(base, session, scope=scope, prompt=prompt)
    try:
        return reference if await objects.exists(reference) else None
    except TransportError as e:
        log.info("session %s: its KV is not looked for: %s", session_path_id(session), e)
        return None


class TargetKv:
    """Fetches and publishes KV objects for one engine; no failure of it is anybody's error."""

    def __init__(self, engine: TargetEngine, objects: Objects, *, publish_to: str | None) -> None:
        """`publish_to`: base URI of the cache that gets what is published; None: nothing is."""
        self._engine, self._objects, self._publish_to = engine, objects, publish_to

    async def fetch(
        self, reference: str | None, *, scope: bytes | None, tokens: int
    ) -> bytes | None:
        """A KV object for a beginning of `tokens` tokens; None if it can't be had."""
        if reference is None:
            return None
        octets_max = self._engine.kv_octets(tokens) + HEADER_OCTETS_MAX
        try:
            octets = await self._objects.fetch(
                reference, scope=scope, octets_max=octets_max, timeout_s=LOAD_S
            )
        except (NotTrusted, ObjectGone, TransportError) as e:
            log.info("KV is computed, not loaded: %s", e)
            return None
        return bytes(octets)

    def wanted(self, prompt_length: int) -> bool:
        """Whether the KV of a prompt of so many tokens is to be published."""
        return self._publish_to is not None and prompt_length >= PROMPT_TOKENS_MIN

    async def publish(self, machine: VerifierSession) -> None:
        """Write the KV of a session's prompt, unless the cache has it."""
        assert self._publish_to is not None, "asked only where it is wanted"
        session, prompt = machine.session, machine.tokens[: machine.prompt_length]
        reference = target_kv_reference(
            self._publish_to, session, scope=machine.contract.scope, prompt=prompt
        )
        try:
            if await self._objects.exists(reference):
                return
            octets = await self._engine.export(session, machine.epoch, len(prompt))
            if octets is not None:  # it has gone where the session has ended meanwhile
                # Unleased (D-M12): whatever else the cache needs room for comes before it.
                await self._objects.put(reference, octets, leased=False, timeout_s=PUBLISH_S)
        except (EngineError, ObjectGone, TransportError) as e:
            log.warning("session %s: its KV is not published: %s", session_path_id(session), e)
