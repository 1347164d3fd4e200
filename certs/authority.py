"""One small certificate authority a trust domain, and the leaves of its instances (D-I1, D-Z1).

A leaf carries its SPIFFE ID (role and name) and its base URI as URI names, so that a
certificate alone says which role and which instance a peer is.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from certs.files import CertsError, replace_file

ROLES = ("router", "verifier", "drafter", "front_end", "admin")
# These call others and are called by nobody, so they may do without a base URI.
ROLES_WITHOUT_BASE_URI = frozenset({"front_end", "admin"})
# Certificates start a little in the past: the clocks of two hosts differ.
CLOCK_SKEW = timedelta(minutes=5)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_TRUST_DOMAIN = re.compile(r"[a-z0-9._-]{1,255}")

__all__ = [
    "ROLES",
    "Authority",
    "CertsError",
    "Leaf",
    "create_authority",
    "issue",
    "leaf_paths",
    "load_authority",
]


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority on disk."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    trust_domain: str
    crt_path: Path
    key_path: Path

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, in hex."""
        return self.certificate.fingerprint(hashes.SHA256()).hex()


@dataclass(frozen=True, slots=True)
class Leaf:
    """A certificate that was issued: who it names and where its files are."""

    roles: tuple[str, ...]
    name: str
    base_uri: str | None
    uris: tuple[str, ...]
    not_after: datetime
    crt_path: Path
    key_path: Path


def create_authority(
    out_dir: Path | str,
    *,
    trust_domain: str,
    days: int = 3650,
    overwrite: bool = False,
    now: datetime | None = None,
) -> Authority:
    """Write `ca.crt` and `ca.key` for a new trust domain; raises CertsError if they exist."""
    out = Path(out_dir)
    if not _TRUST_DOMAIN.fullmatch(trust_domain):
        raise CertsError(
            f'trust domain "{trust_domain}" may hold only a-z, 0-9, dot, dash and underscore'
        )
    crt_path, key_path = out / "ca.crt", out / "ca.key"
    if not overwrite and (crt_path.exists() or key_path.exists()):
        raise CertsError(
            f"{out} already holds an authority; choose another folder, or keep using this one"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _authority_certificate(key, trust_domain=trust_domain, days=days, now=now)
    out.mkdir(parents=True, exist_ok=True)
    replace_file(key_path, _key_pem(key), mode=0o600)
    replace_file(crt_path, certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)
    return Authority(certificate, key, trust_domain, crt_path, key_path)


def load_authority(out_dir: Path | str) -> Authority:
    """Read an authority back; raises CertsError when it is missing or damaged."""
    out = Path(out_dir)
    crt_path, key_path = out / "ca.crt", out / "ca.key"
    try:
        certificate = x509.load_pem_x509_certificate(crt_path.read_bytes())
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
    except FileNotFoundError as error:
        raise CertsError(
            f"{error.filename} does not exist; make an authority with: sdcpctl certs init"
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise CertsError(f"the authority in {out} cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertsError(f"{key_path} is not an elliptic-curve key")
    if key.public_key() != certificate.public_key():
        raise CertsError(f"{key_path} does not belong to {crt_path}")
    return Authority(certificate, key, _trust_domain_of(certificate), crt_path, key_path)


def issue(
    out_dir: Path | str,
    *,
    role: str | Sequence[str],
    name: str,
    base_uri: str | None,
    sans: Sequence[str] = (),
    days: float = 90,
    now: datetime | None = None,
) -> Leaf:
    """Write `{role}.{name}.crt` and `.key`, replacing an older pair; raises CertsError.

    `sans` adds host names or addresses beside the host of the base URI. Several roles make
    one certificate with one SPIFFE ID each; the first names the files.
    """
    authority = load_authority(out_dir)
    roles = _checked_roles(role)
    if not _NAME.fullmatch(name):
        raise CertsError(f'name "{name}" may hold only letters, digits, dot, dash and underscore')
    uris = [f"spiffe://{authority.trust_domain}/sdcp/{one}/{name}" for one in roles]
    hosts = list(sans)
    if base_uri is not None:
        hosts.insert(0, _host_of(base_uri))
        uris.append(base_uri)
    elif not ROLES_WITHOUT_BASE_URI.issuperset(roles):
        raise CertsError(f"{roles[0]}/{name} needs a base URI: {roles[0]}/{name}=https://HOST:PORT")
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _leaf_certificate(
        authority,
        public_key=key.public_key(),
        common_name=f"{roles[0]}/{name}",
        names=[x509.UniformResourceIdentifier(uri) for uri in uris] + _host_names(hosts),
        start=now or datetime.now(UTC),
        days=days,
    )
    crt_path, key_path = leaf_paths(out_dir, role=roles[0], name=name)
    replace_file(key_path, _key_pem(key), mode=0o600)
    replace_file(crt_path, certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)
    return Leaf(
        roles, name, base_uri, tuple(uris), certificate.not_valid_after_utc, crt_path, key_path
    )


def leaf_paths(out_dir: Path | str, *, role: str, name: str) -> tuple[Path, Path]:
    """Where the certificate and the key of an instance stand."""
    out = Path(out_dir)
    return out / f"{role}.{name}.crt", out / f"{role}.{name}.key"


def _authority_certificate(
    key: ec.EllipticCurvePrivateKey, *, trust_domain: str, days: int, now: datetime | None
) -> x509.Certificate:
    start = now or datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{trust_domain} SDCP CA")])
    trust_uri = x509.UniformResourceIdentifier(f"spiffe://{trust_domain}")
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - CLOCK_SKEW)
        .not_valid_after(start + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(authority=True), critical=True)
        .add_extension(x509.SubjectAlternativeName([trust_uri]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _leaf_certificate(
    authority: Authority,
    *,
    public_key: ec.EllipticCurvePublicKey,
    common_name: str,
    names: list[x509.GeneralName],
    start: datetime,
    days: float,
) -> x509.Certificate:
    end = min(start + timedelta(days=days), authority.certificate.not_valid_after_utc)
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
        .issuer_name(authority.certificate.subject)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(start, end) - CLOCK_SKEW)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(issuer_id, critical=False)
        .sign(authority.key, hashes.SHA256())
    )


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _checked_roles(role: str | Sequence[str]) -> tuple[str, ...]:
    roles = (role,) if isinstance(role, str) else tuple(role)
    unknown = [one for one in roles if one not in ROLES]
    if not roles or unknown:
        raise CertsError(f'role "{", ".join(unknown)}" is none of {", ".join(ROLES)}')
    return roles


def _host_of(base_uri: str) -> str:
    """The host of a base URI, which D-H5 bounds to https without query, fragment or userinfo."""
    try:
        parts = urlsplit(base_uri)
        usable = parts.scheme.lower() == "https" and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise CertsError(f'base URI "{base_uri}" is not a URI: {error}') from error
    if not usable or "?" in base_uri or "#" in base_uri or "@" in parts.netloc:
        raise CertsError(
            f'base URI "{base_uri}" must look like https://HOST:PORT, without query or fragment'
        )
    return parts.hostname or ""


def _host_names(hosts: list[str]) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys(hosts):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
            continue
        except ValueError:
            pass  # Not an address, so it has to be a host name.
        try:
            names.append(x509.DNSName(host.encode("idna").decode("ascii")))
        except (UnicodeError, ValueError) as error:
            raise CertsError(f'"{host}" is neither a host name nor an address') from error
    return names


def _trust_domain_of(certificate: x509.Certificate) -> str:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound as error:
        raise CertsError("the authority carries no SPIFFE trust domain in its names") from error
    for uri in names.get_values_for_type(x509.UniformResourceIdentifier):
        if uri.startswith("spiffe://"):
            return uri.removeprefix("spiffe://")
    raise CertsError("the authority carries no SPIFFE trust domain in its names")
