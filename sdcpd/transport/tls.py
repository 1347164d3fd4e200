"""The identity of this process in TLS: its certificate, its contexts and what it reads of peers.

TLS 1.3 only, certificates required on both sides, ALPN `h2`, no tickets: a resumed handshake
carries no certificate and so would slip past a revocation (D-H8, D-I1, D-I2).
"""

from __future__ import annotations

import hashlib
import ssl
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization

from sdcpd.transport.http import Peer

ALPN = "h2"
# The owner may do anything and the service's group may read; all else is refused.
KEY_MODE_FORBIDDEN = 0o037
_CERTIFICATE_MESSAGE = 11


class IdentityError(Exception):
    """Our own certificate files cannot be used; the text says which file, why and what to do."""


class RecordingSSLObject(ssl.SSLObject):
    """An SSLObject that keeps the leaf its peer presented, verified or not.

    OpenSSL forgets a certificate that it refuses, and without it nobody could be told which
    authority had signed it. Use the octets for messages only, never for a decision.
    """

    presented_leaf: bytes | None = None


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Everything read from the files at one moment, already checked against each other."""

    leaf: x509.Certificate
    authorities: tuple[x509.Certificate, ...]
    uris: tuple[str, ...]
    server: ssl.SSLContext
    client: ssl.SSLContext
    quiet: ssl.SSLContext


class TlsIdentity:
    """The certificate, key and trusted authorities of one role, reloadable at run time."""

    def __init__(self, *, ca: Path, cert: Path, key: Path, crl: Path | None = None) -> None:
        """Load and check PEM files; raises IdentityError."""
        self._paths = (Path(ca), Path(cert), Path(key), None if crl is None else Path(crl))
        self._loaded = _load(*self._paths)

    @property
    def uris(self) -> tuple[str, ...]:
        """Our own URI names: SPIFFE IDs and base URI."""
        return self._loaded.uris

    @property
    def certificate(self) -> x509.Certificate:
        """Our own leaf."""
        return self._loaded.leaf

    @property
    def not_after(self) -> datetime:
        """When our certificate expires (UTC)."""
        return self._loaded.leaf.not_valid_after_utc

    @property
    def authority_text(self) -> str:
        """Our trusted authorities by name and fingerprint, for messages."""
        return ", ".join(
            f'"{common_name(one.subject)}" sha256 {_short_fingerprint(one)}'
            for one in self._loaded.authorities
        )

    def server_context(self) -> ssl.SSLContext:
        """The context for connections accepted from now on."""
        return self._loaded.server

    def client_context(self) -> ssl.SSLContext:
        """The context for connections opened from now on."""
        return self._loaded.client

    def quiet_context(self) -> ssl.SSLContext:
        """The context to switch to after a handshake: it records no certificates."""
        return self._loaded.quiet

    def reload(self) -> None:
        """Read the files again and swap the contexts; raises IdentityError and keeps the old.

        New contexts, because a live one can only add authorities, never drop one.
        """
        fresh = _load(*self._paths)
        if set(fresh.uris) != set(self._loaded.uris):
            raise IdentityError(
                f"{self._paths[1]} now names {', '.join(fresh.uris)} and not "
                f"{', '.join(self._loaded.uris)}; restart sdcpd to take another identity"
            )
        self._loaded = fresh


def peer_of(ssl_object: ssl.SSLObject, *, address: str = "") -> Peer:
    """Who is at the other end of a finished handshake, by its verified certificate."""
    details = ssl_object.getpeercert()
    der = ssl_object.getpeercert(True)
    if not details or der is None:
        raise ValueError("the handshake of this connection is not finished")
    names: Sequence[tuple[str, str]] = details.get("subjectAltName", ())  # type: ignore[assignment]
    subject: Sequence[Sequence[tuple[str, str]]] = details.get("subject", ())  # type: ignore[assignment]
    return Peer(
        address=address,
        uris=tuple(value for kind, value in names if kind == "URI"),
        dns=tuple(value for kind, value in names if kind == "DNS"),
        common_name=next(
            (value for part in subject for key, value in part if key == "commonName"), ""
        ),
        fingerprint=hashlib.sha256(der).hexdigest(),
    )


def common_name(name: x509.Name) -> str:
    """The common name of a subject or issuer, or its whole RFC 4514 text."""
    found = name.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return str(found[0].value) if found else name.rfc4514_string()


def alternative_names(certificate: x509.Certificate) -> list[str]:
    """All names of a certificate as text: URIs, host names and addresses."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]


def _short_fingerprint(certificate: x509.Certificate) -> str:
    return certificate.fingerprint(hashes.SHA256())[:8].hex(":")


def _load(ca: Path, cert: Path, key: Path, crl: Path | None) -> _Loaded:
    authorities = _read_certificates(ca)
    leaf, *intermediates = _read_certificates(cert)
    _check_key(key, leaf=leaf, cert=cert)
    _check_dates(leaf, cert=cert)
    _check_issuer(leaf, [*intermediates, *authorities], cert=cert, ca=ca)
    uris = _uri_names(leaf)
    if not uris:
        raise IdentityError(
            f"{cert} carries no URI name, so no peer could tell who we are; "
            "issue one with: sdcpctl certs issue ROLE/NAME=BASE_URI"
        )
    try:
        server = _context(ssl.PROTOCOL_TLS_SERVER, ca, cert, key, crl)
        client = _context(ssl.PROTOCOL_TLS_CLIENT, ca, cert, key, crl)
        quiet = _context(ssl.PROTOCOL_TLS_SERVER, ca, cert, key, crl)
    except (OSError, ssl.SSLError) as error:
        raise IdentityError(f"OpenSSL cannot use {cert}, {key} and {ca}: {error}") from error
    server.num_tickets = 0
    for context in (server, client):
        context.sslobject_class = RecordingSSLObject
        _record_presented_leaf(context)
    return _Loaded(leaf, tuple(authorities), uris, server, client, quiet)


def _context(protocol: int, ca: Path, cert: Path, key: Path, crl: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(cert, key)
    context.load_verify_locations(ca)
    if crl is not None:
        context.load_verify_locations(crl)
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    context.set_alpn_protocols([ALPN])
    return context


def _record_presented_leaf(context: ssl.SSLContext) -> None:
    """Keep the peer's leaf on the SSLObject by the interpreter's own message hook."""

    def seen(
        connection: object,
        direction: str,
        _version: object,
        _content_type: object,
        message: object,
        data: bytes,
    ) -> None:
        if (
            direction == "read"
            and message == _CERTIFICATE_MESSAGE
            and isinstance(connection, RecordingSSLObject)
        ):
            connection.presented_leaf = _first_certificate(data)

    # Where another interpreter lacks the hook, messages only lose the issuer's name.
    if hasattr(ssl.SSLContext, "_msg_callback"):
        context._msg_callback = seen  # type: ignore[attr-defined]


def _first_certificate(message: bytes) -> bytes | None:
    """The first entry of a TLS 1.3 Certificate message (RFC 8446 section 4.4.2)."""
    position = 4 + 1 + message[4] + 3 if len(message) > 4 else len(message)
    size = int.from_bytes(message[position : position + 3], "big")
    return bytes(message[position + 3 : position + 3 + size]) if size else None


def _read_certificates(path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise IdentityError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise IdentityError(f"{path} holds no certificate in PEM form: {error}") from error


def _check_key(path: Path, *, leaf: x509.Certificate, cert: Path) -> None:
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


def _check_dates(leaf: x509.Certificate, *, cert: Path) -> None:
    now = datetime.now(UTC)
    if leaf.not_valid_after_utc < now:
        raise IdentityError(
            f"{cert} expired {leaf.not_valid_after_utc:%Y-%m-%d %H:%MZ}; "
            "replace it with: sdcpctl certs issue ROLE/NAME=BASE_URI"
        )
    if leaf.not_valid_before_utc > now:
        raise IdentityError(
            f"{cert} is not valid before {leaf.not_valid_before_utc:%Y-%m-%d %H:%MZ}; "
            "check the clock of this host"
        )


def _check_issuer(
    leaf: x509.Certificate, issuers: list[x509.Certificate], *, cert: Path, ca: Path
) -> None:
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


def _uri_names(leaf: x509.Certificate) -> tuple[str, ...]:
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(names.get_values_for_type(x509.UniformResourceIdentifier))
