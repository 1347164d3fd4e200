"""`sdcpctl certs check --peer`: a TLS 1.3 handshake with an instance, told in plain words."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from certs.files import CertsError

# Client preface and empty SETTINGS: a server that accepts us answers with its own SETTINGS.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a peer presented once it had accepted us."""

    address: str
    tls_version: str
    uris: tuple[str, ...]
    not_after: str


def probe_peer(
    address: str, *, ca: Path, cert: Path, key: Path, timeout_s: float = 5.0
) -> ProbeResult:
    """Connect to "host:port" as the holder of a certificate; raises CertsError saying what failed.

    A server judges our certificate only after our side of the handshake is done, so the check is
    over when its first HTTP/2 octets arrive.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise CertsError(f'"{address}" must look like HOST:PORT')
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(ca)
        context.load_cert_chain(cert, key)
        context.set_alpn_protocols(["h2"])
    except (OSError, ssl.SSLError) as error:
        raise CertsError(f"{cert}, {key} and {ca} cannot be used together: {error}") from error
    name = host.strip("[]")
    try:
        with (
            socket.create_connection((name, int(port)), timeout=timeout_s) as plain,
            context.wrap_socket(plain, server_hostname=name) as secure,
        ):
            return _greet(secure, address)
    except ssl.SSLCertVerificationError as error:
        text = f"{address} presents a certificate that we refuse: {error.verify_message}"
        raise CertsError(text) from error
    except ssl.SSLError as error:
        raise CertsError(f"{address} refused us in TLS: {error.reason or error}") from error
    except OSError as error:
        raise CertsError(f"no connection to {address}: {error}") from error


def _greet(secure: ssl.SSLSocket, address: str) -> ProbeResult:
    if secure.selected_alpn_protocol() != "h2":
        raise CertsError(f"{address} does not offer HTTP/2 (h2 in ALPN); is it sdcpd?")
    secure.sendall(_HELLO)
    if not secure.recv(9):
        raise CertsError(
            f"{address} closed the connection without an alert; it probably refused our certificate"
        )
    details = secure.getpeercert() or {}
    names = cast("tuple[tuple[str, str], ...]", details.get("subjectAltName", ()))
    return ProbeResult(
        address=address,
        tls_version=secure.version() or "",
        uris=tuple(value for kind, value in names if kind == "URI"),
        not_after=str(details.get("notAfter", "")),
    )
