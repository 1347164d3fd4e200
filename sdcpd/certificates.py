"""Certificates that change while the process runs: by SIGHUP, or because their files changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sdcpd.transport.identity_files import IdentityError
from sdcpd.transport.tls import TlsIdentity

log = logging.getLogger("sdcpd")
WATCH_S = 5.0  # how often the files are looked at


class Certificates:
    """The identities of this process, and who must know when one of them is new.

    New connections show and demand what is new. Those that are open finish what they carry and are
    then opened anew, so that a certificate that is no longer trusted goes out of use.
    """

    def __init__(self) -> None:
        self._renewals: dict[TlsIdentity, list[Callable[[], None]]] = {}

    def add(self, identity: TlsIdentity) -> None:
        """Keep an identity up to date."""
        self._renewals[identity] = []

    def on_renewal(self, identity: TlsIdentity, renew: Callable[[], None]) -> None:
        """Call `renew` after the identity was read again."""
        self._renewals[identity].append(renew)

    def reload(self) -> None:
        """Read all files again; those that do not fit leave the old ones in use."""
        for identity in self._renewals:
            self._reload(identity)

    async def watch(self, *, every_s: float = WATCH_S) -> None:
        """Reload what has changed on the disk, once it has stayed as it is for an interval."""
        seen = {identity: identity.stamp() for identity in self._renewals}
        while True:
            await asyncio.sleep(every_s)  # a clock tick, not a wait for something
            for identity in self._renewals:
                stamp = identity.stamp()
                if stamp == seen.get(identity) and stamp != identity.loaded_stamp:
                    self._reload(identity)
                seen[identity] = stamp

    def _reload(self, identity: TlsIdentity) -> None:
        try:
            identity.reload()
        except IdentityError as e:
            log.error("certificates not reloaded, the old ones stay in use: %s", e)
            return
        log.info("certificates reloaded: %s", ", ".join(identity.uris))
        for renew in self._renewals[identity]:
            try:
                renew()
            except Exception:
                # One that stumbles keeps neither the others from it nor the process from signals.
                log.exception("a connection did not take the new certificate")
