"""Certificates that change while the process runs: by SIGHUP, or because their files changed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import datetime
from typing import Protocol

from sdcpd.transport.identity_files import IdentityError
from sdcpd.transport.tls import TlsIdentity
from sdcpd.units import duration_text

log = logging.getLogger("sdcpd")
WATCH_S = 5.0  # how often the files are looked at
DATES_S = 600.0  # how often it is looked at when they expire
LAST_S = 86400.0  # in which it is told every hour


def warning_every_s(left_s: float, *, warn_before_s: float) -> float | None:
    """How often to tell of a certificate that expires so soon; None: not yet."""
    if left_s < LAST_S:
        return 3600.0
    return 86400.0 if left_s < warn_before_s else None


def _expiry(identity: Renewable, left_s: float) -> str:
    when = f"{identity.not_after:%Y-%m-%d %H:%MZ}"
    what = f"expires {when}, in {duration_text(left_s)}" if left_s > 0 else f"expired {when}"
    return f"certificate of {', '.join(identity.uris)} {what}; {identity.renewal}"


def expiries(identity: TlsIdentity) -> dict[str, float]:
    """When what an identity goes by expires, in seconds since the epoch.

    Of several authorities the last counts, of several revocation lists the first.
    """
    found = {"certificate": identity.not_after.timestamp()}
    authorities = [one.not_valid_after_utc for one in identity.authorities]
    if authorities:
        found["authority"] = max(authorities).timestamp()
    lists = [one.next_update_utc for one in identity.revocations or ()]
    if updates := [one for one in lists if one is not None]:
        found["revocations"] = min(updates).timestamp()
    return found


class Renewable(Protocol):
    """A certificate with its key, whose files may change."""

    @property
    def uris(self) -> tuple[str, ...]:
        """Its names, for messages."""
        ...

    @property
    def not_after(self) -> datetime:
        """When it expires (UTC)."""
        ...

    @property
    def renewal(self) -> str:
        """What to do before that."""
        ...

    @property
    def loaded_stamp(self) -> tuple[tuple[int, int, int], ...]:
        """The stamp of the files when they were read last, successfully or not."""
        ...

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """What tells one state of the files from another."""
        ...

    def reload(self) -> None:
        """Read the files again; raises IdentityError and keeps the old."""
        ...


class Certificates:
    """The identities of this process, and who must know when one of them is new.

    New connections show and demand what is new. Those that are open finish what they carry and are
    then opened anew, so that a certificate that is no longer trusted goes out of use.
    """

    def __init__(self) -> None:
        self._renewals: dict[Renewable, list[Callable[[], None]]] = {}

    def add(self, identity: Renewable) -> None:
        """Keep an identity up to date."""
        self._renewals[identity] = []

    def on_renewal(self, identity: Renewable, renew: Callable[[], None]) -> None:
        """Call `renew` after the identity was read again."""
        self._renewals[identity].append(renew)

    def reload(self) -> list[str]:
        """Read all files again; a sentence for each that does not fit: the old ones stay in use."""
        problems = [self._reload(identity) for identity in self._renewals]
        return [one for one in problems if one is not None]

    async def watch(self, *, every_s: float = WATCH_S, warn_before_s: float = 0.0) -> None:
        """Reload what has changed on the disk, and tell of what is about to expire."""
        await asyncio.gather(self._watch_files(every_s), self._watch_dates(warn_before_s))

    async def _watch_dates(self, warn_before_s: float) -> None:
        told: dict[Renewable, float] = {}
        while True:
            for identity in self._renewals:
                now = time.time()
                left_s = identity.not_after.timestamp() - now
                every_s = warning_every_s(left_s, warn_before_s=warn_before_s)
                if every_s is not None and now - told.get(identity, 0.0) >= every_s:
                    told[identity] = now
                    level = logging.ERROR if left_s < LAST_S else logging.WARNING
                    log.log(level, "%s", _expiry(identity, left_s))
            await asyncio.sleep(DATES_S)  # a clock tick, not a wait for something

    async def _watch_files(self, every_s: float) -> None:
        """Reload what has changed, once it has stayed as it is for an interval; 0: never."""
        if not every_s:
            return
        seen = {identity: identity.stamp() for identity in self._renewals}
        while True:
            await asyncio.sleep(every_s)  # a clock tick, not a wait for something
            for identity in self._renewals:
                stamp = identity.stamp()
                if stamp == seen.get(identity) and stamp != identity.loaded_stamp:
                    self._reload(identity)
                seen[identity] = stamp

    def _reload(self, identity: Renewable) -> str | None:
        try:
            identity.reload()
        except IdentityError as e:
            problem = f"certificates not reloaded, the old ones stay in use: {e}"
            log.error("%s", problem)
            return problem
        log.info("certificates reloaded: %s", ", ".join(identity.uris))
        for renew in self._renewals[identity]:
            try:
                renew()
            except Exception:
                # One that stumbles keeps neither the others from it nor the process from signals.
                log.exception("a connection did not take the new certificate")
        return None
