"""Status reports: every instance tells every router how it is, well within its ttl (D-R1)."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from urllib.parse import quote

import anyio

from sdcpd.protocol.messages import Status
from sdcpd.protocol.uris import join
from sdcpd.roles.calls import Declined, call
from sdcpd.transport.http import Client, TransportError

log = logging.getLogger("sdcpd.status")


def instance_name(configured: str) -> str:
    """A new name for this process start: the configured one and a random suffix (D-R2)."""
    return f"{configured}.{secrets.token_hex(4)}"


class StatusReporter:
    """Reports to the routers until cancelled, then withdraws."""

    def __init__(
        self,
        client: Client,
        routers: Sequence[str],
        status: Callable[[], Status],
        *,
        interval_s: float,
    ) -> None:
        self._client = client
        self._routers = tuple(routers)
        self._status = status
        self._interval_s = interval_s
        self._soon = asyncio.Event()
        self._reachable: dict[str, bool] = {}

    def report_soon(self) -> None:
        """Report now rather than at the end of the interval."""
        self._soon.set()

    async def run(self) -> None:
        """Report at each interval; a router that doesn't answer is tried again at the next."""
        while True:
            self._soon.clear()
            status, due = self._status(), time.monotonic() + self._interval_s
            await self._send_all(status)
            # A router that did not answer has used up the interval: the others must not wait more.
            with anyio.move_on_after(max(0.0, due - time.monotonic())):
                await self._soon.wait()

    async def withdraw(self) -> None:
        """Tell the routers that this instance is going (ttl_ms 0, D-R1)."""
        await self._send_all(replace(self._status(), ttl_ms=0))

    async def _send_all(self, status: Status) -> None:
        async with anyio.create_task_group() as sends:
            for router in self._routers:
                sends.start_soon(self._send, router, status)

    async def _send(self, router: str, status: Status) -> None:
        uri = join(router, f"instances/{quote(status.instance, safe='')}/status")
        try:
            await call(self._client, "PUT", uri, message=status, timeout_s=self._interval_s * 2)
        except (Declined, TransportError) as e:
            if self._reachable.get(router, True):
                log.warning("status not taken by router %s: %s", router, e)
            self._reachable[router] = False
            return
        if not self._reachable.get(router, False):
            log.info("router %s takes our status", router)
        self._reachable[router] = True
