"""The process as its supervisor sees it: sd_notify messages, signals, logging."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time


def notify(message: str) -> None:
    """Tell systemd something, if it is listening (sd_notify(3)); otherwise nothing happens."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.connect(address)
            sender.sendall(message.encode())
    except OSError as e:
        logging.getLogger("sdcpd").warning("systemd could not be told %r: %s", message, e)


def notify_reloading() -> None:
    """Tell systemd that a reload has begun; it waits for the READY=1 that follows.

    Since version 253 it needs the time as well, to tell this reload from an earlier one.
    """
    now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notify(f"RELOADING=1\nMONOTONIC_USEC={now_us}")


def set_up_logging(level: str) -> None:
    """One line a message on standard error; the journal adds its own time."""
    under_journal = "JOURNAL_STREAM" in os.environ
    layout = "%(levelname).1s %(name)s: %(message)s"
    if not under_journal:
        layout = "%(asctime)s.%(msecs)03d " + layout
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(layout, datefmt="%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
