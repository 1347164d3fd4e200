"""Why a connection was refused, as one sentence for a person and one word for a metric.

The server's log and the client's error say the same thing from their two sides (ux.md, part 4).
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from cryptography import x509

from sdcpd.transport.http import ConnectFailed, HttpProtocolError, OtherProtocol, PeerRefused
from sdcpd.transport.identity_files import alternative_names, common_name
from sdcpd.transport.tls import TlsIdentity

# OpenSSL's verification codes (x509_vfy.h) and the word for each.
_VERIFY_WORDS = {
    3: "crl",
    7: "unknown_ca",
    9: "not_yet_valid",
    10: "expired",
    12: "crl",
    18: "unknown_ca",
    19: "unknown_ca",
    20: "unknown_ca",
    21: "unknown_ca",
    23: "revoked",
    26: "wrong_purpose",
    62: "wrong_name",
    64: "wrong_name",
}
# What the other side's alert says about our certificate.
_ALERTS = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "got no certificate from us",
    "TLSV1_ALERT_UNKNOWN_CA": "does not know the CA of our certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "says that our certificate has expired",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "says that our certificate was revoked",
    "SSLV3_ALERT_BAD_CERTIFICATE": "refused our certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "refused our certificate",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "says that our certificate is for another purpose",
    "TLSV1_ALERT_ACCESS_DENIED": "denied us access",
    "TLSV1_ALERT_DECRYPT_ERROR": "could not check our certificate's signature",
}
_ALERT_NAMES = {
    42: "SSLV3_ALERT_BAD_CERTIFICATE",
    43: "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE",
    44: "SSLV3_ALERT_CERTIFICATE_REVOKED",
    45: "SSLV3_ALERT_CERTIFICATE_EXPIRED",
    46: "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
    48: "TLSV1_ALERT_UNKNOWN_CA",
    49: "TLSV1_ALERT_ACCESS_DENIED",
    51: "TLSV1_ALERT_DECRYPT_ERROR",
    70: "TLSV1_ALERT_PROTOCOL_VERSION",
    116: "TLSV13_ALERT_CERTIFICATE_REQUIRED",
    120: "NO_APPLICATION_PROTOCOL",
}
REASONS = (
    "no_certificate",
    "unknown_ca",
    "expired",
    "not_yet_valid",
    "wrong_purpose",
    "revoked",
    "crl",
    "bad_certificate",
    "tls_version",
    "alpn",
    "plain_http",
    "peer_alert",
    "tls_error",
    "handshake_timeout",
    "handshake_flood",
    "too_many_connections",
    "http_error",
    "wrong_role",
)
"""Every word that a refused connection is counted under."""
REQUEST_REASONS = ("body_too_large", "too_many_bytes", "too_many_requests", "slow_body")
"""The same for single requests of peers that were let in."""
_NO_CERTIFICATE = "no client certificate; every peer needs one, see: sdcpctl certs issue"
_VERSION_REASONS = frozenset(
    ("UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION", "WRONG_SSL_VERSION")
)


class NotTls(Exception):
    """The peer's first octets were no TLS record."""

    def __init__(self, first: bytes) -> None:
        super().__init__("the peer does not speak TLS")
        self.is_http = first[:5] == b"HTTP/" or first.split(b" ", 1)[0].isalpha()


class NoHttp2(Exception):
    """TLS worked, but ALPN did not settle on h2 (over TCP) or h3 (over QUIC)."""


class CertificateRefused(Exception):
    """The peer's certificate is not one that we take; `word` is the reason as for OpenSSL's."""

    def __init__(self, word: str, message: str, leaf: x509.Certificate | None = None) -> None:
        super().__init__(message)
        self.word, self.leaf = word, leaf


class PeerAlert(Exception):
    """The peer ended a QUIC handshake with this TLS alert (RFC 9001 section 4.8)."""

    def __init__(self, alert: int) -> None:
        super().__init__(f"TLS alert {alert}")
        self.reason = _ALERT_NAMES.get(alert, f"TLS alert {alert}")


class TlsFailed(Exception):
    """Our QUIC ended a handshake by an alert that says nothing of certificates."""


class TooSlow(Exception):
    """The handshake took longer than allowed."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """`reason` is one word for a counter, `text` one sentence for the log."""

    reason: str
    text: str


def server_refusal(
    error: Exception | None, *, presented: bytes | None, identity: TlsIdentity
) -> Refusal | None:
    """Why our server did not let a client in; None when it just went away."""
    match error:
        case NotTls():
            what = "plain HTTP" if error.is_http else "no TLS"
            return Refusal("plain_http", f"{what} on the TLS port; use https")
        case NoHttp2():
            return Refusal("alpn", f"the client offered {error}; use HTTP/2 or HTTP/3")
        case TooSlow():
            return Refusal("handshake_timeout", str(error))
        case ssl.SSLCertVerificationError():
            return _verification(error, presented=presented, identity=identity)
        case CertificateRefused(word="no_certificate"):
            return Refusal("no_certificate", _NO_CERTIFICATE)
        case CertificateRefused():
            text = _certificate_text(error.word, str(error), leaf=error.leaf, identity=identity)
            return Refusal(error.word, text)
        case ssl.SSLError():
            return _tls_error(error.reason or str(error))
        case PeerAlert():
            return _tls_error(error.reason)
        case TlsFailed():
            return _tls_error(str(error))
        case _:
            return None


def _tls_error(reason: str) -> Refusal:
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return Refusal("no_certificate", _NO_CERTIFICATE)
    if reason in _VERSION_REASONS:
        return Refusal("tls_version", "the client does not offer TLS 1.3")
    if reason in _ALERTS:
        return Refusal("peer_alert", f"the client {_ALERTS[reason]} ({reason})")
    return Refusal("tls_error", f"TLS failed ({reason})")


def _verification(
    error: ssl.SSLCertVerificationError, *, presented: bytes | None, identity: TlsIdentity
) -> Refusal:
    word = _VERIFY_WORDS.get(error.verify_code, "bad_certificate")
    text = _certificate_text(word, error.verify_message, leaf=_parsed(presented), identity=identity)
    return Refusal(word, text)


def _certificate_text(
    word: str, message: str, *, leaf: x509.Certificate | None, identity: TlsIdentity
) -> str:
    who = "the certificate" if leaf is None else f"certificate of {common_name(leaf.subject)}"
    match word:
        case "expired" if leaf is not None:
            return (
                f"{who} expired {leaf.not_valid_after_utc:%Y-%m-%d %H:%MZ}; "
                "renew it with: sdcpctl certs issue"
            )
        case "not_yet_valid" if leaf is not None:
            return (
                f"{who} is not valid before {leaf.not_valid_before_utc:%Y-%m-%d %H:%MZ}; "
                "check the clocks of both hosts"
            )
        case "unknown_ca":
            issuer = "" if leaf is None else f' ("{common_name(leaf.issuer)}")'
            return f"{who} is signed by an unknown CA{issuer}; ours is {identity.authority_text}"
        case "wrong_purpose":
            return f"{who} is for another purpose (extended key usage); issue it for both sides"
        case "revoked":
            return f"{who} was revoked"
        case "crl":
            return f"our revocation list is missing or out of date ({message})"
        case _:
            return f"{who} is not acceptable: {message}"


def client_refusal(
    error: Exception | None,
    *,
    server: str,
    host: str,
    presented: bytes | None,
    identity: TlsIdentity,
) -> ConnectFailed:
    """Why our client has no connection to a server that it reached."""
    match error:
        case ConnectFailed():
            return error
        case NotTls() if error.is_http:
            return OtherProtocol(
                f"{server} speaks plain HTTP, not TLS; check the port in its base URI"
            )
        case NotTls():
            return OtherProtocol(
                f"{server} speaks something else than TLS; check the port in its base URI"
            )
        case NoHttp2() | PeerAlert(reason="NO_APPLICATION_PROTOCOL"):
            return OtherProtocol(f"{server} does not offer HTTP in ALPN (h2 or h3); is it sdcpd?")
        case HttpProtocolError():
            return OtherProtocol(
                f"{server} does not speak HTTP as it should ({error}); is it sdcpd?"
            )
        case TooSlow():
            text = f"{server} did not finish the TLS handshake: {error}"
        case ssl.SSLCertVerificationError():
            text = _server_certificate_text(
                error, server=server, host=host, presented=presented, identity=identity
            )
        case CertificateRefused(word="wrong_name"):
            text = _wrong_name_text(error.leaf, server=server, host=host)
        case CertificateRefused():
            why = _certificate_text(error.word, str(error), leaf=error.leaf, identity=identity)
            text = f"{server} presents a certificate that we refuse: {why}"
        case ssl.SSLError():
            text = _client_tls_text(error.reason or str(error), server=server)
        case PeerAlert():
            text = _client_tls_text(error.reason, server=server)
        case TlsFailed():
            text = _client_tls_text(str(error), server=server)
        case _:
            text = (
                f"{server} closed the connection before it spoke HTTP, without a TLS alert; "
                "if it is not sdcpd, check its CA and your certificate: "
                f"sdcpctl certs check --peer {server}"
            )
    return PeerRefused(text)


def _client_tls_text(reason: str, *, server: str) -> str:
    if reason in _ALERTS:
        return (
            f"{server} {_ALERTS[reason]} ({reason}); "
            "install a certificate from its CA: sdcpctl certs issue"
        )
    if reason in _VERSION_REASONS:
        return f"{server} does not offer TLS 1.3, which SDCP requires"
    return f"TLS with {server} failed ({reason}); is it sdcpd?"


def _server_certificate_text(
    error: ssl.SSLCertVerificationError,
    *,
    server: str,
    host: str,
    presented: bytes | None,
    identity: TlsIdentity,
) -> str:
    word = _VERIFY_WORDS.get(error.verify_code, "bad_certificate")
    if word != "wrong_name":
        text = _certificate_text(
            word, error.verify_message, leaf=_parsed(presented), identity=identity
        )
        return f"{server} presents a certificate that we refuse: {text}"
    return _wrong_name_text(_parsed(presented), server=server, host=host)


def _wrong_name_text(leaf: x509.Certificate | None, *, server: str, host: str) -> str:
    names = [] if leaf is None else [one for one in alternative_names(leaf) if "://" not in one]
    return (
        f'the certificate of {server} is for {", ".join(names) or "no host"}, not "{host}"; '
        f"reissue it with --san {host}, or fix the base URI"
    )


def _parsed(presented: bytes | None) -> x509.Certificate | None:
    if presented is None:
        return None
    try:
        return x509.load_der_x509_certificate(presented)
    except ValueError:
        return None  # A certificate that cannot even be parsed has no names to tell.
