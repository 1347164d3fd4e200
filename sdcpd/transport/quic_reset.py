"""Stateless resets: how a server that was restarted tells so at once (RFC 9000 section 10.3).

A token belongs to a connection id and is made of it with a key that outlives the process, so that
the next process can end a connection of which it knows nothing. Only the server could have made it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

TOKEN_BYTES = 16
MACHINE_ID = Path("/etc/machine-id")
# Shorter could not be told from noise, and longer helps nobody.
_PACKET_BYTES_MIN, _PACKET_BYTES_MAX = 21, 43
_FIXED_BIT, _FIRST_BITS_FREE = 0x40, 0x3F


class ResetTokens:
    """The tokens of one server: of a certificate at one address of one host.

    Servers that share a certificate must not make each other's tokens, or one could be asked to end
    the other's connections (RFC 9000 section 21.11).
    """

    def __init__(self, private_key: PrivateKeyTypes, *, listener: str) -> None:
        """`private_key`: secret, and still there after a restart; `listener`: host and port."""
        octets = private_key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
        parts = (b"sdcpd stateless reset", _host(), listener.encode(), octets)
        self._key = hashlib.sha256(b"\0".join(parts)).digest()

    def of(self, connection_id: bytes) -> bytes:
        """The token of a connection id."""
        return hmac.digest(self._key, connection_id, "sha256")[:TOKEN_BYTES]

    def packet(self, connection_id: bytes, *, received_bytes: int) -> bytes | None:
        """What answers a packet of an unknown connection; None for one that is too short.

        Shorter than what it answers, so that two servers never answer each other for ever.
        """
        size = min(received_bytes - 1, _PACKET_BYTES_MAX)
        if size < _PACKET_BYTES_MIN:
            return None
        noise = bytearray(os.urandom(size - TOKEN_BYTES))
        noise[0] = _FIXED_BIT | noise[0] & _FIRST_BITS_FREE
        return bytes(noise) + self.of(connection_id)


def _host() -> bytes:
    """What tells this host from those that have a copy of its certificate."""
    name = socket.gethostname().encode()
    try:
        return name + b"\0" + MACHINE_ID.read_bytes().strip()
    except OSError:
        return name  # a system without one
