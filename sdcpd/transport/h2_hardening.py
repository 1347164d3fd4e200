"""Subclasses that make the h2 library drain gracefully and refuse early, and a leaky bucket.

They reach into h2's internals on purpose; the tests of this module fail if a new h2 moves them.
"""

from __future__ import annotations

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, Event
from h2.exceptions import FrameTooLargeError, ProtocolError, StreamClosedError
from h2.frame_buffer import FrameBuffer
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, RstStreamFrame, WindowUpdateFrame


class StrictFrameBuffer(FrameBuffer):
    """Refuses an overlong frame by its header; h2 alone would first buffer up to 16 MiB of it."""

    def __init__(self, *, server: bool, header_block_bytes_max: int) -> None:
        super().__init__(server=server)
        self._header_block_bytes_max = header_block_bytes_max

    def __next__(self) -> Frame:
        """The next whole frame; raises ProtocolError before buffering what is not allowed."""
        data = self._data
        if len(data) >= 9 and int.from_bytes(data[:3], "big") > self.max_frame_size:
            raise FrameTooLargeError("frame header announces more than SETTINGS_MAX_FRAME_SIZE")
        # 64 CONTINUATION frames of 64 KiB would be 4 MiB for a list of 16 KiB.
        if self._headers_buffer:
            held = sum(len(frame.data) for frame in self._headers_buffer)
            if held > self._header_block_bytes_max:
                raise ProtocolError("header block too long")
        return super().__next__()


class DrainingH2(H2Connection):
    """An H2Connection that works on after a GOAWAY, as RFC 9113 section 6.8 wants."""

    def __init__(self, config: H2Configuration) -> None:
        super().__init__(config)
        self.late_frames = self.window_updates = 0
        """Frames of streams that have ended, and all window updates: h2 tells of neither."""
        self._frame_dispatch_table[GoAwayFrame] = self._note_goaway

    def send_goaway(self, *, last_stream_id: int, code: int = 0) -> None:
        """Queue a GOAWAY and keep the connection's state as it is."""
        frame = GoAwayFrame(0)
        frame.last_stream_id = last_stream_id
        frame.error_code = code
        self._prepare_for_sending([frame])

    def _note_goaway(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        event = ConnectionTerminated()
        event.error_code = frame.error_code
        event.last_stream_id = frame.last_stream_id
        event.additional_data = frame.additional_data or None
        return [], [event]

    def _handle_data_on_closed_stream(
        self, events: list[Event], exc: StreamClosedError, frame: DataFrame
    ) -> tuple[list[Frame], list[Event]]:
        # Each such frame makes h2 send a RST_STREAM without telling anyone: count them.
        self.late_frames += 1
        return super()._handle_data_on_closed_stream(events, exc, frame)

    def _receive_rst_stream_frame(self, frame: RstStreamFrame) -> tuple[list[Frame], list[Event]]:
        frames, events = super()._receive_rst_stream_frame(frame)
        self.late_frames += not events
        return frames, events

    def _receive_window_update_frame(
        self, frame: WindowUpdateFrame
    ) -> tuple[list[Frame], list[Event]]:
        self.window_updates += 1
        return super()._receive_window_update_frame(frame)


class LeakyBucket:
    """Counts events that leak away at a steady rate, to tell a burst from a flood."""

    def __init__(self, burst: int, per_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._level = 0.0
        self._updated: float | None = None

    def add(self, amount: float, *, now: float) -> bool:
        """Count; returns whether the bucket runs over."""
        if self._updated is not None:
            self._level = max(0.0, self._level - (now - self._updated) * self._per_s)
        self._updated = now
        self._level += amount
        return self._level > self._burst

    def take_back(self, amount: float) -> None:
        """Uncount what did not happen after all."""
        self._level -= amount
