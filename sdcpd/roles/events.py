"""Delivery of events to the router: at least once, in order for each session (D-V2)."""

from __future__ import annotations

import asyncio
import logging

from sdcpd.protocol.messages import Action, Event
from sdcpd.protocol.uris import join, session_path_id
from sdcpd.roles.calls import Declined, call
from sdcpd.transport.http import Client, TransportError

log = logging.getLogger("sdcpd.events")
RETRY_FIRST_S, RETRY_MAX_S = 0.2, 10.0


class EventSender:
    """The events of one session."""

    def __init__(self, client: Client, router: str, session: bytes) -> None:
        self._client = client
        self._uri = join(router, "events")
        self._label = session_path_id(session)
        self._queue: list[Event] = []
        self._wake = asyncio.Event()
        self._done = False

    def send(self, event: Event) -> None:
        """Queue an event."""
        self._queue.append(event)
        self._wake.set()

    def withdraw(self) -> None:
        """Drop what a new assignment has met: events of kind 2 and 3."""
        kept = (Action.FINISH, Action.FAIL)
        self._queue = [event for event in self._queue if event.kind in kept]

    def finish(self) -> None:
        """End `run` once the queue is empty."""
        self._done = True
        self._wake.set()

    async def run(self) -> None:
        """Deliver until finished."""
        while True:
            while self._queue:
                await self._deliver(self._queue[0])
            if self._done:
                return
            self._wake.clear()
            await self._wake.wait()

    async def _deliver(self, event: Event) -> None:
        pause = RETRY_FIRST_S
        while event in self._queue:
            try:
                await call(self._client, "POST", self._uri, message=event, timeout_s=5.0)
                break
            except Declined as e:
                if e.problem.status < 500 and e.problem.status != 429:
                    log.info("session %s: event refused: %s", self._label, e)
                    break
                reason = str(e)
            except TransportError as e:
                reason = str(e)
            log.info("session %s: event not delivered, again: %s", self._label, reason)
            await asyncio.sleep(pause)  # backoff between attempts, D-V2
            pause = min(2 * pause, RETRY_MAX_S)
        if event in self._queue:
            self._queue.remove(event)
