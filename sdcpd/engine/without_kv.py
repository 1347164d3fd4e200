"""What drafters have in common that keep no keys and values."""

from __future__ import annotations

from collections.abc import Sequence

from sdcpd.engine.api import KeepEvicted, KvUsage


class WithoutKv:
    """What a DraftEngine without keys and values, and a thread for them, says of both."""

    kv_fingerprint: bytes | None = None

    async def blocks(self, session: bytes, tokens: Sequence[int], first: int) -> list[bytes]:
        """None: there are none."""
        return []

    def resident(self, session: bytes) -> bool:
        """Nothing is missing."""
        return True

    def on_eviction(self, keep: KeepEvicted) -> None:
        """Nothing makes room."""

    def kv_usage(self) -> KvUsage | None:
        """None: there is no such memory."""
        return None

    def silence_s(self) -> float:
        """0: there is no such thread."""
        return 0.0
