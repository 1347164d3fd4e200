"""Certificate, key and revocation files: read, and checked before anything relies on them."""

from __future__ import annotations

import stat
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

from sdcpd.transport.shown import shown

# The owner may do anything and the service's group may read; all else is refused.
KEY_MODE_FORBIDDEN = 0o037


class IdentityError(Exception):
    """Our own certificate files cannot be used; the text says which file, why and what to do."""


def common_name(name: x509.Name) -> str:
    """The common name of a subject or issuer, or its whole RFC 4514 text, to be shown."""
    try:
        found = name.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        return shown(str(found[0].value) if found else name.rfc4514_string())
    except ValueError:
        return "a name that cannot be read"


def alternative_names(certificate: x509.Certificate) -> list[str]:
    """All names of a certificate as text: URIs, host names and addresses."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [shown(str(name.value)) for name in names]


def read_certificates(path: Path) -> list[x509.Certificate]:
    """The certificates of a PEM file; raises IdentityError."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise IdentityError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise IdentityError(f"{path} holds no certificate in PEM form: {error}") from error


def load_key(path: Path, *, leaf: x509.Certificate, cert: Path) -> PrivateKeyTypes:
    """The key of a certificate, which nobody else may read; raises IdentityError."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        data = path.read_bytes()
    except OSError as error:
        raise IdentityError(f"{path} cannot be read: {error.strerror}") from error
    if mode & KEY_MODE_FORBIDDEN:
        raise IdentityError(f"{path} is open to others (mode {mode:04o}); run: chmod 0640 {path}")
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise IdentityError(f"{path} is not a private key without passphrase: {error}") from error
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != leaf.public_key().public_bytes(*form):
        raise IdentityError(f"{path} is not the key of {cert}; install the two as a pair")
    return key


ISSUE = "replace it with: sdcpctl certs issue ROLE/NAME=BASE_URI"


def check_dates(leaf: x509.Certificate, *, cert: Path, cure: str = ISSUE) -> None:
    """Raise IdentityError unless our certificate is valid now."""
    now = datetime.now(UTC)
    if leaf.not_valid_after_utc < now:
        raise IdentityError(f"{cert} expired {leaf.not_valid_after_utc:%Y-%m-%d %H:%MZ}; {cure}")
    if leaf.not_valid_before_utc > now:
        raise IdentityError(
            f"{cert} is not valid before {leaf.not_valid_before_utc:%Y-%m-%d %H:%MZ}; "
            "check the clock of this host"
        )


def check_issuer(
    leaf: x509.Certificate, issuers: list[x509.Certificate], *, cert: Path, ca: Path
) -> None:
    """Raise IdentityError unless one of the issuers signed our certificate."""
    for issuer in issuers:
        try:
            leaf.verify_directly_issued_by(issuer)
        except (ValueError, TypeError, InvalidSignature):
            continue  # Not this one; the loop's end is the refusal.
        return
    raise IdentityError(
        f'{cert} was signed by "{common_name(leaf.issuer)}", which is not in {ca}; '
        "install the ca.crt that belongs to it"
    )


def uri_names(leaf: x509.Certificate) -> tuple[str, ...]:
    """The URI names of a certificate."""
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(names.get_values_for_type(x509.UniformResourceIdentifier))


def read_revocations(path: Path) -> tuple[x509.CertificateRevocationList, ...]:
    """The revocation lists of a PEM file; raises IdentityError."""
    end = b"-----END X509 CRL-----"
    try:
        parts = path.read_bytes().split(end)[:-1]
        return tuple(x509.load_pem_x509_crl(part + end) for part in parts)
    except OSError as error:
        raise IdentityError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise IdentityError(f"{path} holds no revocation list in PEM form: {error}") from error


def file_stamp(path: Path) -> tuple[int, int, int]:
    try:
        state = path.stat()
    except OSError:
        return (0, 0, 0)
    return (state.st_mtime_ns, state.st_size, state.st_ino)
