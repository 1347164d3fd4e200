"""The identity of this process in TLS: its certificate, its contexts and what it reads of peers.

TLS 1.3 only, certificates required on both sides, ALPN `h2`, no tickets: a resumed handshake
carries no certificate and so would slip past a revocation (D-H8, D-I1, D-I2).
"""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

from sdcpd.transport.http import Peer
from sdcpd.transport.identity_files import (
    IdentityError,
    check_dates,
    check_issuer,
    common_name,
    file_stamp,
    load_key,
    read_certificates,
    read_revocations,
    uri_names,
)
from sdcpd.transport.shown import shown

ALPN = "h2"
_CERTIFICATE_MESSAGE = 11


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
    intermediates: tuple[x509.Certificate, ...]
    authorities: tuple[x509.Certificate, ...]
    revocations: tuple[x509.CertificateRevocationList, ...] | None
    key: PrivateKeyTypes
    uris: tuple[str, ...]
    server: ssl.SSLContext
    client: ssl.SSLContext
    quiet: ssl.SSLContext


class TlsIdentity:
    """The certificate, key and trusted authorities of one role, reloadable at run time."""

    def __init__(self, *, ca: Path, cert: Path, key: Path, crl: Path | None = None) -> None:
        """Load and check PEM files; raises IdentityError."""
        self._paths = (Path(ca), Path(cert), Path(key), None if crl is None else Path(crl))
        self._stamp = self.stamp()
        self._loaded = _load(*self._paths)

    renewal = "run: sdcpctl certs renew, and copy what it makes here"

    @property
    def uris(self) -> tuple[str, ...]:
        """Our own URI names: SPIFFE IDs and base URI."""
        return self._loaded.uris

    @property
    def certificate(self) -> x509.Certificate:
        """Our own leaf."""
        return self._loaded.leaf

    @property
    def intermediates(self) -> tuple[x509.Certificate, ...]:
        """What stands between our leaf and its authority."""
        return self._loaded.intermediates

    @property
    def private_key(self) -> PrivateKeyTypes:
        """The key of our leaf; for the TLS of QUIC, which OpenSSL does not do."""
        return self._loaded.key

    @property
    def authorities(self) -> tuple[x509.Certificate, ...]:
        """Whose certificates we take."""
        return self._loaded.authorities

    @property
    def revocations(self) -> tuple[x509.CertificateRevocationList, ...] | None:
        """The revocation lists in force, None if none is configured."""
        return self._loaded.revocations

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

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """What tells one state of the files from another; nothing is read."""
        return tuple(file_stamp(path) for path in self._paths if path is not None)

    @property
    def loaded_stamp(self) -> tuple[tuple[int, int, int], ...]:
        """The stamp of the files when they were read last, successfully or not."""
        return self._stamp

    def reload(self) -> None:
        """Read the files again and swap the contexts; raises IdentityError and keeps the old.

        New contexts, because a live one can only add authorities, never drop one.
        """
        self._stamp = self.stamp()
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
        common_name=shown(
            next((value for part in subject for key, value in part if key == "commonName"), "")
        ),
        fingerprint=hashlib.sha256(der).hexdigest(),
    )


def _short_fingerprint(certificate: x509.Certificate) -> str:
    return certificate.fingerprint(hashes.SHA256())[:8].hex(":")


def _load(ca: Path, cert: Path, key: Path, crl: Path | None) -> _Loaded:
    """Read and check the files; raises IdentityError and nothing else."""
    try:
        return _read(ca, cert, key, crl)
    except IdentityError:
        raise
    except Exception as error:
        # Names and extensions are parsed when they are asked for, with errors of many kinds.
        raise IdentityError(f"{cert}, {ca} or {key} cannot be understood: {error}") from error


def _read(ca: Path, cert: Path, key: Path, crl: Path | None) -> _Loaded:
    authorities = read_certificates(ca)
    leaf, *intermediates = read_certificates(cert)
    private_key = load_key(key, leaf=leaf, cert=cert)
    check_dates(leaf, cert=cert)
    check_issuer(leaf, [*intermediates, *authorities], cert=cert, ca=ca)
    uris = uri_names(leaf)
    if not uris:
        raise IdentityError(
            f"{cert} carries no URI name, so no peer could tell who we are; "
            "issue one with: sdcpctl certs issue ROLE/NAME=BASE_URI"
        )
    revocations = None if crl is None else read_revocations(crl)
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
    return _Loaded(
        leaf,
        tuple(intermediates),
        tuple(authorities),
        revocations,
        private_key,
        uris,
        server,
        client,
        quiet,
    )


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
