"""The certificate that clients of the API see, read again when its files change.

Any authority's will do: clients show none, and nothing of the protocol between instances is in it.
"""

from __future__ import annotations

import ssl
from datetime import datetime
from pathlib import Path

from cryptography import x509

from sdcpd.transport.identity_files import (
    IdentityError,
    alternative_names,
    check_dates,
    common_name,
    file_stamp,
    load_key,
    read_certificates,
)


class HttpsIdentity:
    """A certificate chain and its key, for a listener that asks its clients for none."""

    renewal = "renew it where it came from, and put the new files where the old ones are"

    def __init__(self, *, cert: Path, key: Path) -> None:
        """Load and check PEM files; raises IdentityError."""
        self._cert, self._key = cert, key
        self.loaded_stamp = self.stamp()
        self._leaf = self._check()
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self._load(self.context)

    @property
    def uris(self) -> tuple[str, ...]:
        """The names in the certificate, for messages."""
        return tuple(alternative_names(self._leaf)) or (common_name(self._leaf.subject),)

    @property
    def not_after(self) -> datetime:
        """When it expires (UTC)."""
        return self._leaf.not_valid_after_utc

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """What tells one state of the files from another; nothing is read."""
        return tuple(file_stamp(path) for path in (self._cert, self._key))

    def reload(self) -> None:
        """Read the files again for new connections; raises IdentityError and changes nothing."""
        self.loaded_stamp = self.stamp()
        leaf = self._check()
        self._load(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))
        self._load(self.context)
        self._leaf = leaf

    def _check(self) -> x509.Certificate:
        leaf = read_certificates(self._cert)[0]
        load_key(self._key, leaf=leaf, cert=self._cert)
        check_dates(leaf, cert=self._cert, cure=self.renewal)
        return leaf

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self._cert, self._key, password=_no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise IdentityError(
                f"{self._cert} and {self._key} can't be used for TLS: {error}"
            ) from error


def _no_password() -> str:
    raise ValueError("the key has a passphrase")
