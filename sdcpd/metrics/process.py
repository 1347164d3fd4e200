"""Metrics of a process and its listener: who is let in, until when, and whether it can serve."""

from __future__ import annotations

import asyncio
import platform
from typing import TYPE_CHECKING

import sdcpd
from sdcpd.metrics.families import Samples, counter, gauge

if TYPE_CHECKING:
    from sdcpd.metrics import Metrics

HANDSHAKES = counter("sdcp_tls_handshake_failures", "Connections not let in, by reason.", "reason")
REFUSED = counter(
    "sdcp_requests_refused", "Requests refused by the transport, by reason.", "reason"
)
LOCAL = counter(
    "sdcp_local_requests",
    "Requests for objects that came through shared memory, from this host.",
)
EXPIRY = gauge(
    "sdcp_tls_certificate_expiry_timestamp_seconds",
    "When the role's certificate expires, the last of its authorities, its revocation list.",
    "kind",
)
TASKS = gauge("sdcp_tasks", "Tasks of the event loop.")
READY = gauge("sdcp_ready", "1 if it can serve now.")
RELOADED = gauge(
    "sdcp_config_last_reload_successful",
    "0 if the last reload of the configuration found something wrong and changed nothing.",
)
BUILD = gauge("sdcp_build_info", "Always 1.", "version", "python")


def samples(metrics: Metrics) -> Samples:
    """All of them."""
    for reason, count in metrics.handshake_failures.items():
        yield HANDSHAKES(count, reason)
    for reason, count in metrics.refused_requests.items():
        yield REFUSED(count, reason)
    if metrics.local_requests is not None:
        yield LOCAL(metrics.local_requests())
    if metrics.expiries is not None:
        yield from (EXPIRY(when, kind) for kind, when in metrics.expiries().items())
    if (tasks := _tasks()) is not None:
        yield TASKS(tasks)
    if metrics.ready is not None:
        yield READY(float(metrics.ready()))
    if metrics.reloaded is not None:
        yield RELOADED(float(metrics.reloaded()))
    yield BUILD(1, sdcpd.__version__, platform.python_version())


def _tasks() -> int | None:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return None  # asked from outside a loop: there are none to count
