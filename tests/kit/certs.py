"""Throw-away authorities and certificates for tests, made by the real `certs` package."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from certs import Leaf, create_authority, issue
from sdcpd.transport.tls import TlsIdentity


class CertKit:
    """One authority in a folder of its own, and identities issued from it."""

    def __init__(self, folder: Path, *, trust_domain: str = "test.example") -> None:
        self.folder = folder
        self.authority = create_authority(folder, trust_domain=trust_domain)

    @property
    def ca(self) -> Path:
        """The authority's certificate file."""
        return self.authority.crt_path

    def leaf(
        self,
        role: str = "router",
        name: str = "r0",
        *,
        base_uri: str = "https://127.0.0.1:7441/",
        sans: tuple[str, ...] = ("localhost",),
        days: float = 90,
        now: datetime | None = None,
    ) -> Leaf:
        """Issue one certificate for loopback."""
        return issue(
            self.folder, role=role, name=name, base_uri=base_uri, sans=sans, days=days, now=now
        )

    def identity(
        self,
        role: str = "router",
        name: str = "r0",
        *,
        base_uri: str = "https://127.0.0.1:7441/",
        sans: tuple[str, ...] = ("localhost",),
    ) -> TlsIdentity:
        """Issue a certificate and load it as the identity of a process."""
        leaf = self.leaf(role, name, base_uri=base_uri, sans=sans)
        return TlsIdentity(ca=self.ca, cert=leaf.crt_path, key=leaf.key_path)
