"""For tests that run with h2 alone and with the short way beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hyperframe.frame import Frame, GoAwayFrame, HeadersFrame, SettingsFrame

from sdcpd.transport.h2_codec import H2Codec
from sdcpd.transport.h2_fast import FastH2Codec
from sdcpd.transport.limits import H2Limits
from tests.kit.http_pair import H2Kind, HttpPair, agree_on_no_table

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
GET_FIELDS = b"\x82\x87\x84\x41\x01x"  # GET, https, /, authority "x" as HPACK.


kinds: list[H2Kind] = []
"""The one under test."""


@pytest.fixture(autouse=True, scope="module", params=[H2Codec, FastH2Codec])
def kind(request: pytest.FixtureRequest) -> Iterator[None]:
    kinds.append(request.param)
    yield
    kinds.clear()


def ready_pair(**options: object) -> HttpPair:
    pair = HttpPair(kind=kinds[0], **options)  # type: ignore[arg-type]
    pair.move()
    agree_on_no_table(pair.client_codec, pair.server_codec)
    assert pair.client.ready
    return pair


def raw_server(**limits: float) -> H2Codec:
    """A server codec that has seen a client's preface and SETTINGS."""
    codec = kinds[0](client=False, now=0.0, limits=H2Limits(**limits))  # type: ignore[arg-type]
    codec.receive(PREFACE + SettingsFrame(0).serialize(), now=0.0)
    agree_on_no_table(codec)
    codec.outgoing(0.0)
    return codec


def headers(stream_id: int, *, end: bool = True, block: bytes = GET_FIELDS) -> bytes:
    flags = ["END_HEADERS", "END_STREAM"] if end else ["END_HEADERS"]
    return HeadersFrame(stream_id, block, flags=flags).serialize()


def frames_in(codec: H2Codec) -> list[Frame]:
    data = b"".join(one.data for one in codec.outgoing(0.0))
    found: list[Frame] = []
    while data:
        frame, size = Frame.parse_frame_header(memoryview(data[:9]))
        frame.parse_body(memoryview(data[9 : 9 + size]))
        found.append(frame)
        data = data[9 + size :]
    return found


def last_goaway(codec: H2Codec) -> int:
    return [frame for frame in frames_in(codec) if isinstance(frame, GoAwayFrame)][-1].error_code
