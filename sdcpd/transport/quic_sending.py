"""How aioquic sends: small messages before large ones, at a pace no finer than timers go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from aioquic.quic.connection import QuicConnection
from aioquic.quic.recovery import QuicPacketPacer

from sdcpd.transport.limits import PACE_TICK_S

if TYPE_CHECKING:
    from aioquic.quic.stream import QuicStream


class TickPacer(QuicPacketPacer):
    """The library's, which on a short path allows less than passes between two timers.

    It lets through a quarter of the congestion window at once. Where the path is shorter than four
    ticks of the event loop's clock, that is all there is in a tick, and a fraction of the window
    becomes the rate.
    """

    bucket_max: float

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        """As the library's, with room for what is due between two timers."""
        super().update_rate(congestion_window, smoothed_rtt)
        self.bucket_max = max(self.bucket_max, PACE_TICK_S)


def pace_by_ticks(quic: QuicConnection) -> None:
    """Give a connection that pacer; raises TypeError if its own is not the library's."""
    pacer = quic._loss._pacer
    if type(pacer) is not QuicPacketPacer:
        raise TypeError(f"{type(pacer)} is not the pacer of aioquic that is replaced here")
    pacer.__class__ = TickPacer


def send_first(
    quic: QuicConnection, stream_ids: set[int], *, now: float
) -> list[tuple[bytes, Any]]:
    """The datagrams of these streams before those of any other; small, so they aren't paced."""
    queue = cast("list[QuicStream]", quic._streams_queue)
    pacer = quic._loss._pacer
    quic._streams_queue = [one for one in queue if one.stream_id in stream_ids]
    packet_time, pacer.packet_time = pacer.packet_time, None
    try:
        return list(quic.datagrams_to_send(now=now))
    finally:
        pacer.packet_time = packet_time
        others = [one for one in queue if one.stream_id not in stream_ids]
        quic._streams_queue = others + quic._streams_queue
