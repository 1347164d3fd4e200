"""Throw-away authorities and certificates for tests, made by the real `certs` package."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import NameOID

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

    def reissued(
        self,
        leaf: Leaf,
        *,
        usage: x509.ObjectIdentifier | None = None,
        raw_names: bytes = b"",
        common_name: str | None = None,
    ) -> Leaf:
        """Sign a leaf anew: for another purpose, with names that are no DER, or as somebody else."""
        old = x509.load_pem_x509_certificate(leaf.crt_path.read_bytes())
        subject = old.subject
        if common_name is not None:
            subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(old.issuer)
            .public_key(old.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(old.not_valid_before_utc)
            .not_valid_after(old.not_valid_after_utc)
        )
        for extension in old.extensions:
            value: x509.ExtensionType = extension.value
            if isinstance(value, x509.ExtendedKeyUsage) and usage is not None:
                value = x509.ExtendedKeyUsage([usage])
            elif isinstance(value, x509.SubjectAlternativeName) and raw_names:
                value = x509.UnrecognizedExtension(extension.oid, raw_names)
            builder = builder.add_extension(value, extension.critical)
        made = builder.sign(self.authority.key, hashes.SHA256())
        leaf.crt_path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        return leaf

    def revoke(self, leaf: Leaf) -> Path:
        """Write a revocation list that holds one certificate."""
        now = datetime.now(UTC)
        serial = x509.load_pem_x509_certificate(leaf.crt_path.read_bytes()).serial_number
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
        crl = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.authority.certificate.subject)
            .last_update(now - timedelta(hours=1))
            .next_update(now + timedelta(days=1))
            .add_revoked_certificate(entry)
            .sign(self.authority.key, hashes.SHA256())
        )
        path = self.folder / "revoked.crl"
        path.write_bytes(crl.public_bytes(serialization.Encoding.PEM))
        return path

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
