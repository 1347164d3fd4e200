"""The process as its supervisor sees it: sd_notify messages and its watchdog."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Iterable

from sdcpd.roles.health import Health

log = logging.getLogger("sdcpd")
PROGRESS_S = 600  # more than the longest step of a start that tells nothing, which is compiling
NOTIFY_S = 0.5  # for systemd to read; whoever waits longer holds up every session
LOOK_S = 1.0  # how often instances are looked at where no watchdog asks for more


def notify(message: str) -> None:
    """Tell systemd something, if it is listening (sd_notify(3)); otherwise nothing happens."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(NOTIFY_S)
            sender.connect(address)
            sender.sendall(message.encode())
    except OSError as e:
        log.warning("systemd could not be told %r: %s", message, e)


def notify_reloading() -> None:
    """Tell systemd that a reload has begun; it waits for the READY=1 that follows.

    Since version 253 it needs the time as well, to tell this reload from an earlier one.
    """
    now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notify(f"RELOADING=1\nMONOTONIC_USEC={now_us}")


def notify_starting(text: str) -> None:
    """Tell systemd what a start is doing, and that it may go on for `PROGRESS_S` from now.

    A large model on a slow disk thus may take longer than TimeoutStartSec=; a start that hangs
    tells nothing and is ended.  Before that time has passed the message shortens nothing.
    """
    notify(f"STATUS={text}\nEXTEND_TIMEOUT_USEC={PROGRESS_S * 1_000_000}")


def watchdog_s() -> float | None:
    """For how many seconds systemd lets this process be silent; None: for ever.

    As sd_watchdog_enabled(3) has it: a pid that is not ours means somebody else.
    """
    text = os.environ.get("WATCHDOG_USEC", "")
    meant = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(text) / 1e6 if meant and text.isdecimal() and int(text) else None


async def keep_watch(healths: Iterable[Health]) -> None:
    """Feed systemd's watchdog from the event loop, but not while an instance is wedged.

    Begun when READY=1 is told, with which the watchdog begins to count; with no watchdog only the
    log tells.
    """
    limit_s = watchdog_s()
    stuck: Health | None = None
    while True:
        now = next((one for one in healths if one.wedged), None)
        if now is not None and stuck is None:
            then = "; systemd's watchdog is not fed" if limit_s else ""
            log.error("%s: %s%s", now.label, now.wedged, then)
        elif now is None and stuck is not None:
            log.warning("%s: its engine goes on", stuck.label)
        stuck = now
        if stuck is None and limit_s:
            notify("WATCHDOG=1")
        await asyncio.sleep(limit_s / 3 if limit_s else LOOK_S)
