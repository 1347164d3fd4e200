"""Who a peer is and what it may do, from its certificate and the peer table (D-I1, D-I3, D-Z1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from sdcpd.protocol.problems import WrongRole
from sdcpd.protocol.uris import base_uri_equal, normalize_base_uri
from sdcpd.transport.http import Peer, PeerRefused

KNOWN_MAX = 1024  # identities kept: they are asked for in every request
ROLES = ("router", "verifier", "drafter", "front_end", "admin")


@dataclass(frozen=True, slots=True)
class PeerEntry:
    """One `[[peers]]` of the configuration: what certificates from elsewhere mean."""

    id: str
    """A URI name (or DNS name, for certificates without URI names)."""
    roles: frozenset[str] = frozenset()
    base_uri: str | None = None
    model: bytes | None = None
    trusted: bool = False


@dataclass(frozen=True, slots=True)
class Identity:
    """What a peer's certificate amounts to."""

    roles: frozenset[str]
    bases: tuple[str, ...]
    name: str

    def is_instance(self, base: str) -> bool:
        """Whether the peer is the instance with that base URI (D-I1)."""
        return any(base_uri_equal(own, base) for own in self.bases)


class PeerTable:
    """Maps certificates to identities."""

    def __init__(self, trust_domain: str, entries: Sequence[PeerEntry] = ()) -> None:
        self._prefix = f"spiffe://{trust_domain}/sdcp/"
        self.entries = tuple(entries)
        self._known: dict[tuple[tuple[str, ...], tuple[str, ...]], Identity] = {}

    def identify(self, peer: Peer | None) -> Identity:
        """The identity of a peer; one without a certificate has no roles."""
        if peer is None:
            return Identity(frozenset(), (), "nobody")
        names = (peer.uris, peer.dns)  # all that counts here of a certificate
        known = self._known.get(names)
        if known is None:
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            known = self._known[names] = self._identity(peer)
        return known

    def _identity(self, peer: Peer) -> Identity:
        roles: set[str] = set()
        bases: list[str] = []
        label = ""
        names = peer.uris or peer.dns
        for name in names:
            role, _, rest = name.removeprefix(self._prefix).partition("/")
            if name.startswith(self._prefix) and role in ROLES and rest:
                roles.add(role)
                label = label or f"{role}/{rest}"
            elif name in peer.uris and normalize_base_uri(name) is not None:
                bases.append(name)
        for entry in self.entries:
            if entry.id in names:
                roles |= entry.roles
                bases += [entry.base_uri] if entry.base_uri else []
                label = label or entry.id
        return Identity(frozenset(roles), tuple(bases), label or (names[0] if names else "nobody"))

    def require(self, peer: Peer | None, *roles: str) -> Identity:
        """The peer's identity if it has one of the roles; raises WrongRole (D-I3)."""
        identity = self.identify(peer)
        if not identity.roles & set(roles):
            wanted = " or ".join(roles)
            raise WrongRole(f"this needs the role {wanted}; you are {identity.name}")
        return identity

    def check_server(self, peer: Peer, authority: str) -> None:
        """Raise PeerRefused unless a server is the instance that is called (D-I1, D-I2)."""
        identity = self.identify(peer)
        if not identity.roles:
            raise PeerRefused(f"{authority} shows a certificate without a role of this cluster")
        if not any(_authority(base) == authority for base in identity.bases):
            raise PeerRefused(
                f"{authority} is {identity.name}, whose certificate is for "
                f"{', '.join(identity.bases) or 'no base URI'}; fix base_uri or reissue"
            )


def _authority(base_uri: str) -> str:
    """host:port of a base URI, the default port made explicit."""
    parts = urlsplit(base_uri)
    host = parts.hostname or ""
    return f"{f'[{host}]' if ':' in host else host}:{parts.port or 443}"
