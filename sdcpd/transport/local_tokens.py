"""What lets a peer in over the local socket: a secret that it was told over mutual TLS.

A token stands for the certificate that was shown then. It lasts a minute, so that a peer that is no
longer let in over TLS is soon not let in here; after a reload of certificates all are forgotten.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from sdcpd.transport.http import Peer

LIFETIME_S = 60.0
TOKENS_MAX = 256
TOKEN_BYTES = 24


@dataclass(frozen=True, slots=True)
class _Issued:
    peer: Peer
    until: float


class LocalTokens:
    """The tokens of one server; bounded, the oldest goes first."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._issued: dict[str, _Issued] = {}
        self._latest: dict[str, str] = {}
        """The newest of each certificate."""

    def issue(self, peer: Peer) -> str:
        """A token for that peer: the one it has, or another once that has lived half its life."""
        now = self._clock()
        token = self._latest.get(peer.fingerprint)
        known = self._issued.get(token) if token else None
        if token and known and known.until - now > LIFETIME_S / 2 and _same(known.peer, peer):
            return token
        while self._issued and (
            len(self._issued) >= TOKENS_MAX or next(iter(self._issued.values())).until <= now
        ):
            self._drop(next(iter(self._issued)))
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._issued[token] = _Issued(peer, now + LIFETIME_S)
        self._latest[peer.fingerprint] = token
        return token

    def peer(self, token: str) -> Peer | None:
        """Who was told it, None for one that is unknown or too old."""
        issued = self._issued.get(token)
        return issued.peer if issued and self._clock() < issued.until else None

    def forget(self) -> None:
        """Let nobody in until it has asked again over TLS."""
        self._issued.clear()
        self._latest.clear()

    def __len__(self) -> int:
        return len(self._issued)

    def _drop(self, token: str) -> None:
        issued = self._issued.pop(token)
        if self._latest.get(issued.peer.fingerprint) == token:
            del self._latest[issued.peer.fingerprint]


def _same(one: Peer, other: Peer) -> bool:
    return (one.fingerprint, one.uris, one.dns) == (other.fingerprint, other.uris, other.dns)
