"""Whether a peer's certificate is one that we take, for the TLS of QUIC (D-I1, D-I2).

Over TCP OpenSSL decides this. aioquic checks no client certificate at all and of a server's not
what it is for, so over QUIC the decision is made here, by the same rules and with the same words.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime

from cryptography import x509
from cryptography.x509 import verification
from cryptography.x509.oid import ExtendedKeyUsageOID

from sdcpd.transport.identity_files import alternative_names
from sdcpd.transport.refusals import CertificateRefused
from sdcpd.transport.tls import TlsIdentity

CHAIN_DEPTH_MAX = 2


def check_client(
    leaf: x509.Certificate | None, chain: Sequence[x509.Certificate], *, identity: TlsIdentity
) -> None:
    """Raise CertificateRefused unless a client with this certificate may speak to us."""
    if leaf is None:
        raise CertificateRefused("no_certificate", "no client certificate")
    try:
        _builder(identity).build_client_verifier().verify(leaf, list(chain))
    except (verification.VerificationError, ValueError) as error:
        purpose = ExtendedKeyUsageOID.CLIENT_AUTH
        raise _why(leaf, identity=identity, purpose=purpose, message=str(error)) from error
    _check_revocation(leaf, identity=identity)


def check_server(
    leaf: x509.Certificate | None,
    chain: Sequence[x509.Certificate],
    *,
    identity: TlsIdentity,
    host: str,
) -> None:
    """Raise CertificateRefused unless a server with this certificate may be `host`."""
    if leaf is None:
        raise CertificateRefused("no_certificate", "no server certificate")
    try:
        _builder(identity).build_server_verifier(_subject(host)).verify(leaf, list(chain))
    except (verification.VerificationError, ValueError) as error:
        purpose = ExtendedKeyUsageOID.SERVER_AUTH
        raise _why(
            leaf, identity=identity, purpose=purpose, message=str(error), host=host
        ) from error
    _check_revocation(leaf, identity=identity)


def _builder(identity: TlsIdentity) -> verification.PolicyBuilder:
    store = verification.Store(list(identity.authorities))
    return (
        verification.PolicyBuilder()
        .store(store)
        .time(datetime.now(UTC))
        .max_chain_depth(CHAIN_DEPTH_MAX)
    )


def _subject(host: str) -> x509.DNSName | x509.IPAddress:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _why(
    leaf: x509.Certificate,
    *,
    identity: TlsIdentity,
    purpose: x509.ObjectIdentifier,
    message: str,
    host: str | None = None,
) -> CertificateRefused:
    """The first reason that a person can act on; the library tells none of them apart."""
    now = datetime.now(UTC)
    if leaf.not_valid_after_utc < now:
        return CertificateRefused("expired", message, leaf)
    if leaf.not_valid_before_utc > now:
        return CertificateRefused("not_yet_valid", message, leaf)
    try:
        _ = leaf.extensions
    except ValueError as error:
        return CertificateRefused("bad_certificate", f"it cannot be read: {error}", leaf)
    if all(leaf.issuer != authority.subject for authority in identity.authorities):
        return CertificateRefused("unknown_ca", message, leaf)
    if not _has_purpose(leaf, purpose):
        return CertificateRefused("wrong_purpose", message, leaf)
    if host is not None and host not in alternative_names(leaf):
        return CertificateRefused("wrong_name", message, leaf)
    return CertificateRefused("unknown_ca", message, leaf)


def _has_purpose(leaf: x509.Certificate, purpose: x509.ObjectIdentifier) -> bool:
    try:
        usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return True
    return purpose in usage


def _check_revocation(leaf: x509.Certificate, *, identity: TlsIdentity) -> None:
    """As OpenSSL with CRL_CHECK_LEAF: a list of the issuer must be there and in force."""
    if identity.revocations is None:
        return
    now = datetime.now(UTC)
    issuers = [one for one in identity.authorities if one.subject == leaf.issuer]
    in_force = [
        crl
        for crl in identity.revocations
        if crl.issuer == leaf.issuer
        and (crl.next_update_utc is None or crl.next_update_utc > now)
        and any(_signed(crl, issuer) for issuer in issuers)
    ]
    if not in_force:
        raise CertificateRefused("crl", "no list of its issuer is in force", leaf)
    if any(
        crl.get_revoked_certificate_by_serial_number(leaf.serial_number) is not None
        for crl in in_force
    ):
        raise CertificateRefused("revoked", "it was revoked", leaf)


def _signed(crl: x509.CertificateRevocationList, issuer: x509.Certificate) -> bool:
    key = issuer.public_key()
    try:
        return crl.is_signature_valid(key)  # type: ignore[arg-type]
    except TypeError:
        return False  # a key of a kind that signs no lists
