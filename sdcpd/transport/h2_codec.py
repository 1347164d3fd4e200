"""HTTP/2 by the h2 library, behind `HttpConnection`, with the defences that h2 leaves to us.

What each bound is for stands at the bound. The subclass that drains and the strict frame buffer
are in `h2_hardening.py`.
"""

from __future__ import annotations

import h2.events
from h2.config import H2Configuration
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from h2.stream import H2Stream

from sdcpd.transport.h2_fields import encoded_field, go_away_of, request_headers, response_headers
from sdcpd.transport.h2_hardening import DrainingH2, LeakyBucket, StrictFrameBuffer
from sdcpd.transport.http import (
    Address,
    Data,
    End,
    Headers,
    HttpProtocolError,
    Outgoing,
    PeerReady,
    PingAcked,
    Reset,
    ResetCode,
    StreamEvent,
    StreamGone,
)
from sdcpd.transport.limits import H2Limits

KEEPALIVE_PING = b"sdcpalve"
LAST_STREAM_ID_MAX = 2**31 - 1
WINDOW_UPDATES_FREE = 256.0  # kept for a peer that opens its windows late
DATA_FRAMES_FREE = 256.0  # kept for a peer whose next body comes in small pieces


class H2Codec:
    """One HTTP/2 connection, client or server, as a sans-IO `HttpConnection` (RFC 9113)."""

    piecewise = False

    def __init__(self, *, client: bool, now: float, limits: H2Limits | None = None) -> None:
        self._limits = limits or H2Limits()
        self._client = client
        self._h2 = _configured(client=client, limits=self._limits)
        self._resets = LeakyBucket(self._limits.resets_burst, self._limits.resets_per_s)
        self._idle_frames = LeakyBucket(
            self._limits.idle_frames_burst, self._limits.idle_frames_per_s
        )
        self._late_frames_seen = self._window_updates_seen = 0
        self._window_updates_free = WINDOW_UPDATES_FREE
        self._messages = self._data_frames = self._data_octets = 0
        """What has come since DATA frames were last charged."""
        self._data_frames_free = 0.0
        self._refused_streams = 0
        self._peer_ready = False
        self._peer_going = False
        self._started = now
        self._last_heard = now
        self._ping_sent: float | None = None

    def receive(
        self, data: bytes | memoryview, *, address: Address | None = None, now: float
    ) -> list[StreamEvent]:
        """Take octets; raises HttpProtocolError and leaves a GOAWAY in `outgoing`."""
        self._last_heard = now
        self._ping_sent = None
        found: list[StreamEvent] = []
        try:
            self._read(data, found, now)
        except HttpProtocolError:
            raise
        except ProtocolError as error:
            raise HttpProtocolError(
                f"HTTP/2 protocol error: {error}", code=int(error.error_code)
            ) from error
        except Exception as error:
            # h2 asserts and indexes in places that a peer can reach; whatever comes out of it
            # was caused by these octets, so it ends this connection and nothing else.
            self.go_away(final=True, code=ResetCode.INTERNAL_ERROR)
            raise HttpProtocolError(f"HTTP/2 octets that h2 cannot take: {error!r}") from error
        return found

    def _read(self, data: bytes | memoryview, found: list[StreamEvent], now: float) -> None:
        for event in self._h2.receive_data(data):
            self._translate(event, found, now)
        self._charge_silent_work(now)

    def open_stream(self) -> int | None:
        """The next stream id, or None at the peer's limit, after its GOAWAY or out of ids."""
        if self._peer_going or not self._peer_ready:
            return None
        if self._h2.open_outbound_streams >= self._h2.remote_settings.max_concurrent_streams:
            return None
        stream_id = self._h2.highest_outbound_stream_id + 2 if self._started_streams else 1
        return stream_id if stream_id <= LAST_STREAM_ID_MAX else None

    def send_headers(self, stream_id: int, headers: Headers, *, end: bool) -> None:
        """Queue a header section; raises StreamGone or ValueError (a field not allowed)."""
        encoded = [encoded_field(name, value) for name, value in headers]
        if not self._client or stream_id <= self._h2.highest_outbound_stream_id:
            self._live(stream_id)
        self._h2.send_headers(stream_id, encoded, end_stream=end)

    def send_data(self, stream_id: int, data: bytes | memoryview, *, end: bool) -> None:
        """Queue at most `writable` octets; raises StreamGone."""
        self._live(stream_id)
        self._h2.send_data(stream_id, data, end_stream=end)

    def writable(self, stream_id: int) -> int:
        """Octets that both windows and the peer's frame size allow now; 0 if it is gone."""
        stream = self._h2.streams.get(stream_id)
        if stream is None or stream.closed:
            return 0
        window = min(
            self._h2.outbound_flow_control_window,
            stream.outbound_flow_control_window,
            self._h2.max_outbound_frame_size,
            self._limits.frame_bytes_max,
        )
        return max(0, window)

    @property
    def unsent(self) -> bool:
        """Never: what `outgoing` has given is the link's to send before it closes."""
        return False

    def consumed(self, stream_id: int, size: int) -> None:
        """Give octets back to the connection window, and to the stream's if it still lives."""
        if size:
            self._h2.acknowledge_received_data(size, stream_id)

    def reset(self, stream_id: int, code: int) -> None:
        """End a stream early; nothing happens if it already ended."""
        stream = self._h2.streams.get(stream_id)
        if stream is not None and not stream.closed:
            self._h2.reset_stream(stream_id, code)
            # A peer that opens streams only to have them refused is the same flood as resets.
            self._refused_streams += code == ResetCode.REFUSED_STREAM

    def ping(self, payload: bytes) -> None:
        """Queue a PING."""
        self._h2.ping(payload)

    def go_away(self, *, final: bool, code: int = 0) -> None:
        """Queue a GOAWAY: first with the highest id there is, finally with the last one seen."""
        last = self._h2.highest_inbound_stream_id if final else LAST_STREAM_ID_MAX
        self._h2.send_goaway(last_stream_id=last, code=code)

    def outgoing(self, now: float) -> list[Outgoing]:
        """Take everything that is queued to be sent."""
        data = self._h2.data_to_send()
        earned = self._window_updates_free + len(data) / self._limits.octets_per_window_update
        self._window_updates_free = min(earned, WINDOW_UPDATES_FREE)
        return [Outgoing(data)] if data else []

    def deadline(self) -> float | None:
        """When the preface, the next keepalive ping or its answer is due."""
        if not self._peer_ready:
            return self._started + self._limits.preface_timeout_s
        if self._ping_sent is not None:
            return self._ping_sent + self._limits.ping_timeout_s
        limits = self._limits
        return self._last_heard + (limits.ping_after_busy_s if self.busy else limits.ping_after_s)

    def on_deadline(self, now: float) -> list[StreamEvent]:
        """Ping a silent peer; raises HttpProtocolError when it is late with its preface or dead."""
        due = self.deadline()
        if due is None or now < due:
            return []
        if not self._peer_ready:
            raise HttpProtocolError(
                f"no HTTP/2 preface within {self._limits.preface_timeout_s:g} s"
            )
        if self._ping_sent is not None:
            raise HttpProtocolError(f"silent for {now - self._last_heard:.0f} s, ping unanswered")
        self._ping_sent = now
        self.ping(KEEPALIVE_PING)
        return []

    @property
    def busy(self) -> bool:
        """Whether we wait for an answer of the peer."""
        return self._client and self._h2.open_outbound_streams > 0

    @property
    def _started_streams(self) -> bool:
        return self._h2.highest_outbound_stream_id > 0

    def _live(self, stream_id: int) -> H2Stream:
        stream = self._h2.streams.get(stream_id)
        if stream is None or stream.closed:
            raise StreamGone(f"stream {stream_id} is closed")
        return stream

    def _charge(self, bucket: LeakyBucket, amount: float, *, now: float) -> None:
        if bucket.add(amount, now=now):
            self.go_away(final=True, code=ResetCode.ENHANCE_YOUR_CALM)
            kind = "resets" if bucket is self._resets else "frames that carry nothing"
            raise HttpProtocolError(f"flood of {kind}", code=ResetCode.ENHANCE_YOUR_CALM)

    def _charge_silent_work(self, now: float) -> None:
        """Count what makes work without an event.

        Frames of streams that have ended, streams that we refused, and window updates beyond those
        that what we sent has earned.
        """
        late = self._h2.late_frames - self._late_frames_seen
        updates = self._h2.window_updates - self._window_updates_seen
        if late or updates:
            self._late_frames_seen += late
            self._window_updates_seen += updates
            free = min(updates, int(self._window_updates_free))
            self._window_updates_free -= free
            self._charge(self._idle_frames, late + updates - free, now=now)
        if self._refused_streams:
            refused, self._refused_streams = self._refused_streams, 0
            self._charge(self._resets, refused, now=now)
        if self._data_frames:
            self._charge_data_frames(now)

    def _charge_data_frames(self, now: float) -> None:
        """Count the DATA frames that neither their octets nor their messages have paid for."""
        limits = self._limits
        earned = self._data_octets / limits.octets_per_data_frame
        earned += min(self._messages * limits.data_frames_per_message, DATA_FRAMES_FREE)
        left = self._data_frames_free + earned - self._data_frames
        self._messages = self._data_frames = self._data_octets = 0
        self._data_frames_free = min(max(left, 0.0), DATA_FRAMES_FREE)
        if left < 0:
            self._charge(self._idle_frames, -left, now=now)

    def _translate(self, event: h2.events.Event, found: list[StreamEvent], now: float) -> None:
        """Turn one h2 event into ours; what h2 answers by itself is only counted."""
        match event:
            case h2.events.RequestReceived():
                self._messages += 1
                found.append(request_headers(event))
            case h2.events.ResponseReceived():
                self._messages += 1
                found.append(response_headers(event))
            case h2.events.DataReceived():
                if not event.data and event.stream_ended is None:
                    self._charge(self._idle_frames, 1, now=now)
                flow_bytes = event.flow_controlled_length or 0
                self._data_frames += 1
                self._data_octets += len(event.data or b"")
                found.append(Data(event.stream_id or 0, event.data or b"", flow_bytes))
            case h2.events.StreamEnded():
                found.append(End(event.stream_id or 0))
            case h2.events.StreamReset():
                # A server that resets only hurts its own answers, so clients do not count.
                self._charge(self._resets, 0 if self._client else 1, now=now)
                code = int(event.error_code or 0)
                found.append(Reset(event.stream_id or 0, code, event.remote_reset))
            case h2.events.ConnectionTerminated():
                self._peer_going = True
                found.append(go_away_of(event))
            case h2.events.RemoteSettingsChanged():
                self._charge(self._idle_frames, 1, now=now)
                if not self._peer_ready:
                    self._peer_ready = True
                    found.append(PeerReady())
            case h2.events.SettingsAcknowledged():
                # From here on the peer's header blocks refer to no table (RFC 7541, 4.2).
                self._h2.decoder.max_allowed_table_size = 0
            case h2.events.PingAckReceived():
                found.append(PingAcked(event.ping_data or b""))
            case (
                h2.events.PingReceived()
                | h2.events.PriorityUpdated()
                | h2.events.UnknownFrameReceived()
                | h2.events.InformationalResponseReceived()
            ):
                self._charge(self._idle_frames, 1, now=now)
            case _:
                # Windows are asked for by `writable`; trailers are checked by h2 and carry
                # nothing in SDCP.
                return


def _configured(*, client: bool, limits: H2Limits) -> DrainingH2:
    """An h2 connection whose limits hold from the first octet, not from the peer's ACK on."""
    # Outbound header fields are made and checked here, so h2 need not do it again.
    config = H2Configuration(
        client_side=client,
        header_encoding=None,
        validate_outbound_headers=False,
        normalize_outbound_headers=False,
        normalize_inbound_headers=False,
    )
    connection = DrainingH2(config)
    connection.incoming_buffer = StrictFrameBuffer(
        server=not client, header_block_bytes_max=4 * limits.header_list_bytes_max
    )
    connection.local_settings = Settings(
        client=client,
        initial_values={
            SettingCodes.MAX_CONCURRENT_STREAMS: limits.streams_max,
            SettingCodes.MAX_HEADER_LIST_SIZE: limits.header_list_bytes_max,
            SettingCodes.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
            SettingCodes.MAX_FRAME_SIZE: limits.frame_bytes_max,
            SettingCodes.ENABLE_PUSH: 0,
            # Blocks that need no table can be read and written without h2 (h2_fast.py).
            SettingCodes.HEADER_TABLE_SIZE: 0,
        },
    )
    connection.max_inbound_frame_size = limits.frame_bytes_max
    connection.decoder.max_header_list_size = limits.header_list_bytes_max
    connection.initiate_connection()
    extra = limits.connection_window_bytes - 65535
    if extra > 0:
        connection.increment_flow_control_window(extra)
    # h2 kills the whole connection above the limit. We refuse single streams at the limit
    # (server_exchange.py), and leave h2's own limit as the backstop at twice that.
    connection.local_settings._settings[SettingCodes.MAX_CONCURRENT_STREAMS][0] = (
        2 * limits.streams_max
    )
    return connection
