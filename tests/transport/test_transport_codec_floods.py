"""The HTTP/2 codec in memory under floods, by h2 alone and with the short way beside it."""

from __future__ import annotations

import pytest
from hyperframe.frame import (
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from sdcpd.transport.http import HttpProtocolError, Reset, ResetCode
from tests.kit.h2_kinds import GET_FIELDS, headers, last_goaway, raw_server
from tests.kit.h2_kinds import kind as kind


def test_rapid_reset_flood_ends_the_connection_with_enhance_your_calm() -> None:
    codec = raw_server()
    with pytest.raises(HttpProtocolError, match="flood of resets") as failed:
        for number in range(1, 1000, 2):
            codec.receive(headers(number) + RstStreamFrame(number, 8).serialize(), now=0.0)
    assert failed.value.code == ResetCode.ENHANCE_YOUR_CALM
    assert last_goaway(codec) == ResetCode.ENHANCE_YOUR_CALM


def test_made_you_reset_counts_the_same() -> None:
    codec = raw_server()
    overflow = 2**31 - 1
    with pytest.raises(HttpProtocolError, match="flood of resets"):
        for number in range(1, 1000, 2):
            codec.receive(
                headers(number) + WindowUpdateFrame(number, overflow).serialize(), now=0.0
            )


def test_resets_at_a_human_pace_are_forgiven() -> None:
    codec = raw_server()
    for step in range(1000):
        number = 2 * step + 1
        events = codec.receive(
            headers(number) + RstStreamFrame(number, 8).serialize(), now=step * 0.1
        )
        assert isinstance(events[-1], Reset)


@pytest.mark.parametrize(
    "frame",
    [
        PingFrame(0, b"12345678"),
        SettingsFrame(0),
        PriorityFrame(1, depends_on=0, stream_weight=1),
    ],
)
def test_floods_of_frames_that_carry_nothing_end_the_connection(frame: Frame) -> None:
    codec = raw_server()
    with pytest.raises(HttpProtocolError, match="carry nothing"):
        for _ in range(30):
            codec.receive(frame.serialize() * 100, now=0.0)
            codec.outgoing(0.0)


def test_flood_of_data_after_our_reset_ends_the_connection() -> None:
    codec = raw_server()
    codec.receive(headers(1, end=False), now=0.0)
    codec.reset(1, ResetCode.CANCEL)
    late = DataFrame(1, b"x").serialize() * 100
    with pytest.raises(HttpProtocolError, match="carry nothing"):
        for _ in range(30):
            codec.receive(late, now=0.0)


def get(number: int) -> bytes:
    return headers(number, block=GET_FIELDS)


@pytest.mark.parametrize(
    "frame",
    [
        WindowUpdateFrame(0, 1),
        WindowUpdateFrame(1, 1),
        WindowUpdateFrame(3, 1),
        RstStreamFrame(3, 8),
    ],
)
def test_floods_that_h2_says_nothing_of_end_the_connection(frame: Frame) -> None:
    """Stream 1 is open, 3 has ended: window updates, and frames of a stream that is no more."""
    codec = raw_server()
    codec.receive(get(1) + get(3), now=0.0)
    codec.send_headers(3, ((":status", "204"),), end=True)
    with pytest.raises(HttpProtocolError, match="carry nothing"):
        for _ in range(40):
            codec.receive(frame.serialize() * 100, now=0.0)
            codec.outgoing(0.0)


def test_window_updates_that_are_owed_are_free() -> None:
    """A long body in small windows has as many of them as it needs."""
    codec = raw_server()
    codec.receive(get(1), now=0.0)
    codec.send_headers(1, ((":status", "200"),), end=False)
    both = WindowUpdateFrame(0, 16_384).serialize() + WindowUpdateFrame(1, 16_384).serialize()
    for _ in range(3000):
        codec.send_data(1, bytes(16_384), end=False)
        codec.outgoing(0.0)
        codec.receive(both, now=0.0)


def test_overlong_frame_is_refused_by_its_header_alone() -> None:
    codec = raw_server()
    with pytest.raises(HttpProtocolError, match="SETTINGS_MAX_FRAME_SIZE"):
        codec.receive((65537).to_bytes(3, "big") + b"\x00\x00" + (1).to_bytes(4, "big"), now=0.0)
    assert last_goaway(codec) == 6


def test_header_list_over_its_limit_ends_the_connection() -> None:
    codec = raw_server()
    field = b"\x00\x01a\x7f\x81\x1f" + b"v" * 4096
    with pytest.raises(HttpProtocolError):
        codec.receive(headers(1, block=GET_FIELDS + field * 5), now=0.0)


def test_continuation_flood_is_cut_before_megabytes() -> None:
    codec = raw_server()
    codec.receive(HeadersFrame(1, GET_FIELDS).serialize(), now=0.0)
    piece = (60_000).to_bytes(3, "big") + b"\x09\x00" + (1).to_bytes(4, "big") + bytes(60_000)
    with pytest.raises(HttpProtocolError, match="header block too long"):
        codec.receive(piece * 3, now=0.0)
