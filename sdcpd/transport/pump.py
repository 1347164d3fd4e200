"""Moves octets between a link and an HTTP codec, for both sides and both transports."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from sdcpd.transport.http import (
    Address,
    HttpConnection,
    HttpProtocolError,
    ResetCode,
    StreamEvent,
)
from sdcpd.transport.link import Link

# How late a deadline that nobody foresaw may be noticed.
TICK_S = 0.5


class HttpPump(ABC):
    """A link's user: feeds the codec, passes events on, and writes what the codec queued.

    Writes do not go out at once but once a turn of the loop, so that many become one.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._link: Link | None = None
        self._codec: HttpConnection | None = None
        self._flush_due = False
        self._tick: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Whether streams can be written."""
        return self._link is not None and self._link.is_open and self._codec is not None

    def attach(self, link: Link, codec: HttpConnection) -> None:
        """Begin to pump."""
        self._link, self._codec = link, codec
        self._arm_tick(codec)
        self.flush()

    def link_data(self, data: memoryview, address: Address | None = None) -> None:
        """Octets arrived, or for QUIC perhaps only time has passed."""
        assert self._codec is not None  # `link_open` came first.
        now = self._loop.time()
        try:
            events = self._codec.receive(data, address=address, now=now)
        except HttpProtocolError as error:
            self.give_up(error)
            return
        try:
            self.on_events(events, now=now)
            if self._codec.piecewise:
                self.flush_soon()
            else:
                self.flush()
        except Exception:
            self.abort()  # a fault of ours: nobody may wait for the rest of what came
            raise

    def link_flooded(self, what: str) -> None:
        """The peer sends too much of what carries nothing."""
        if self._codec is not None:
            self._codec.go_away(final=True, code=ResetCode.ENHANCE_YOUR_CALM)
        code = ResetCode.ENHANCE_YOUR_CALM
        self.give_up(HttpProtocolError(f"flood of {what}", code=code))

    def link_resumed(self) -> None:
        """There is room in the write buffer again."""
        self.flush()

    def flush_soon(self) -> None:
        """Write at the end of this turn of the loop."""
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write one turn's worth, and ask for another turn if there is more."""
        self._flush_due = False
        if not self.is_open:
            return
        assert self._link is not None and self._codec is not None  # As `is_open` says.
        more = not self._link.paused and self.pump_bodies()
        for outgoing in self._codec.outgoing(self._loop.time()):
            self._link.send(outgoing)
        self._link.flushed()
        if more and not self._link.paused:
            self.flush_soon()
        elif not more and self.is_drained() and not self._codec.unsent:
            self.close()

    def give_up(self, error: HttpProtocolError) -> None:
        """Send the codec's last words and close."""
        if self._link is None or self._codec is None:
            return
        for outgoing in self._codec.outgoing(self._loop.time()):
            self._link.send(outgoing)
        self._link.close(error)

    def close(self) -> None:
        """Close the link in order."""
        self._stop_tick()
        if self._link is not None:
            self._link.close()

    def abort(self) -> None:
        """Drop the link at once."""
        self._stop_tick()
        if self._link is not None:
            self._link.abort()

    @abstractmethod
    def on_events(self, events: list[StreamEvent], *, now: float) -> None:
        """Act on what the peer did."""

    @abstractmethod
    def on_tick(self, now: float) -> None:
        """Act on time passed."""

    @abstractmethod
    def pump_bodies(self) -> bool:
        """Hand one turn's bodies to the codec; returns whether more could go at once."""

    @abstractmethod
    def is_drained(self) -> bool:
        """Whether the connection has nothing left to do and should close."""

    def _stop_tick(self) -> None:
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None

    def _arm_tick(self, codec: HttpConnection) -> None:
        now = self._loop.time()
        due = codec.deadline()
        at = now + TICK_S if due is None else min(now + TICK_S, max(due, now + 0.001))
        self._tick = self._loop.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._tick = None
        if not self.is_open or self._codec is None:
            return
        now = self._loop.time()
        try:
            events = self._codec.on_deadline(now)
        except HttpProtocolError as error:
            self.give_up(error)
            return
        if events:
            self.on_events(events, now=now)
        self.on_tick(now)
        self.flush()
        if self.is_open:
            self._arm_tick(self._codec)
