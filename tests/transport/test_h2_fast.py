"""The short way through HTTP/2 against h2: whatever comes, both say, send and refuse the same."""

from __future__ import annotations

import pytest
from hpack import Decoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcpd.transport.h2_blocks import BlockReader
from sdcpd.transport.h2_codec import H2Codec
from sdcpd.transport.h2_fast import FastH2Codec
from sdcpd.transport.hpack_static import NotPlain, read_plain
from sdcpd.transport.http import End, HttpProtocolError, RequestHeaders, ResetCode
from sdcpd.transport.limits import BLOCKS_KEPT_MAX
from tests.kit.h2_side import LIMITS, Act, Answer, Cancel, Consume, Octets, Side, block, huffman
from tests.kit.http_pair import H2Kind, request_fields

STREAMS = st.sampled_from([1, 3, 5, 7, 9])
ENDS = st.sampled_from([[], ["END_STREAM"]])
REQUEST = (
    (":method", "POST"),
    (":scheme", "https"),
    (":authority", "a"),
    (":path", "/x?n=1"),
)
BLOCKS = st.sampled_from(
    [
        block(*REQUEST),
        block(*REQUEST, ("content-length", "5")),
        block(*REQUEST, ("content-length", "1500")),
        block(*REQUEST, ("content-length", "3000")),
        block(*REQUEST, ("content-length", "5"), ("content-length", "6")),
        block(*REQUEST, ("content-length", "x")),
        block(*REQUEST, ("te", "gzip")),
        block(*REQUEST[:3]),
        block(*REQUEST[1:], REQUEST[0]),
        block(("x", "y")),
        huffman(*REQUEST),
        huffman(*REQUEST, ("content-length", "5")),
        block(*REQUEST)[:-1],
        b"\x20" + block(*REQUEST),
        b"\x3f\xe1\x1f" + block(*REQUEST),
        b"\xbe" + block(*REQUEST),
        b"",
    ]
)
FRAMES = st.one_of(
    st.builds(
        lambda number, raw, end: HeadersFrame(number, raw, flags=["END_HEADERS", *end]),
        STREAMS,
        BLOCKS,
        ENDS,
    ),
    st.builds(
        lambda number, end: HeadersFrame(
            number, block(*REQUEST, ("content-length", "5")), flags=["END_HEADERS", *end]
        ),
        STREAMS,
        ENDS,
    ),
    st.builds(
        lambda number, raw, pad: HeadersFrame(
            number, raw, flags=["END_HEADERS", "PADDED"], pad_length=pad
        ),
        STREAMS,
        BLOCKS,
        st.integers(0, 3),
    ),
    st.builds(lambda number, raw: HeadersFrame(number, raw), STREAMS, BLOCKS),
    st.builds(lambda number: ContinuationFrame(number, b"", flags=["END_HEADERS"]), STREAMS),
    st.builds(
        lambda number, size, end: DataFrame(number, bytes(size), flags=end),
        STREAMS,
        st.sampled_from([0, 5, 5, 5, 6, 1500, 2001]),
        ENDS,
    ),
    st.builds(
        lambda number: DataFrame(number, b"abc", flags=["PADDED"], pad_length=2),
        STREAMS,
    ),
    st.builds(lambda number: RstStreamFrame(number, 8), STREAMS),
    st.builds(WindowUpdateFrame, STREAMS | st.just(0), st.sampled_from([1, 70_000, 2**31 - 1])),
    st.builds(
        lambda size: SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: size}),
        st.sampled_from([0, 10, 65_535]),
    ),
    st.just(PingFrame(0, b"12345678")),
    st.just(GoAwayFrame(0, 0)),
)
ACTS: st.SearchStrategy[Act] = st.one_of(
    st.builds(
        lambda frames, cut: Octets(b"".join(one.serialize() for one in frames), cut),
        st.lists(FRAMES, min_size=1, max_size=4),
        st.sampled_from([1, 4, 9, 10, 14, 10_000, 10_000]),
    ),
    st.builds(Answer, STREAMS, st.sampled_from([0, 3, 300, 70_000]), st.booleans()),
    st.builds(Consume, STREAMS, st.integers(1, 2000)),
    st.builds(Cancel, STREAMS),
)


@st.composite
def stories(draw: st.DrawFn) -> list[Act]:
    """One stream from its beginning, mostly as it should be, with something odd in the middle."""
    number = draw(st.sampled_from([1, 3]))
    length = draw(st.sampled_from([5, 1500, 1900]))
    raw = block(*REQUEST, ("content-length", str(length)))
    acts: list[Act] = [Octets(HeadersFrame(number, raw, flags=["END_HEADERS"]).serialize(), 10_000)]
    left = length + draw(st.sampled_from([0, 0, 0, 1, -1]))
    while left > 0:
        odd = draw(st.sampled_from([None, None, None, WindowUpdateFrame(number, 5), None]))
        if odd is not None:
            acts.append(Octets(odd.serialize(), 10_000))
        size = min(left, draw(st.sampled_from([5, 600, 1900])))
        left -= size
        flags = ["END_STREAM"] if not left and draw(st.integers(0, 3)) else []
        acts.append(Octets(DataFrame(number, bytes(size), flags=flags).serialize(), 10_000))
        if draw(st.booleans()):
            acts.append(Consume(number, size))
    if draw(st.booleans()):
        acts.append(Octets(WindowUpdateFrame(number, 7).serialize(), 10_000))
    acts.append(Consume(number, length))
    answer = Answer(number, draw(st.sampled_from([0, 3, 70_000])), in_pieces=False)
    opened = Octets(WindowUpdateFrame(number, 7).serialize(), 10_000)
    return [*acts, answer, opened, answer] if draw(st.booleans()) else [*acts, answer]


def play(kind: H2Kind, acts: list[Act], *, client: bool = False, asked: int = 0) -> list[object]:
    side = Side(kind, client=client)
    for number in range(asked):
        method = "HEAD" if number == 1 else "POST"
        stream_id = side.codec.open_stream()
        assert stream_id == 2 * number + 1
        side.codec.send_headers(stream_id, request_fields(method), end=method == "HEAD")
        if method != "HEAD" and number != 2:
            side.codec.send_data(stream_id, b"ask", end=True)
    side.note()
    try:
        for act in acts:
            act(side)
            side.said.append(side.codec.open_stream() if client else None)
    except HttpProtocolError:
        pass
    return side.said


@settings(max_examples=500, deadline=None)
@given(st.lists(ACTS, max_size=12) | st.builds(list.__add__, stories(), st.lists(ACTS, max_size=3)))
def test_a_server_does_as_h2_does(acts: list[Act]) -> None:
    assert play(FastH2Codec, acts) == play(H2Codec, acts)


ANSWERS = st.sampled_from(
    [
        block((":status", "200"), ("content-length", "5")),
        block((":status", "200"), ("content-length", "3000")),
        block((":status", "204")),
        block((":status", "100")),
        block((":status", "2x0")),
        block(("x", "y")),
        huffman((":status", "200"), ("content-length", "5")),
    ]
)
ANSWER_FRAMES = st.one_of(
    st.builds(
        lambda number, raw, end: HeadersFrame(number, raw, flags=["END_HEADERS", *end]),
        STREAMS,
        ANSWERS,
        ENDS,
    ),
    FRAMES,
)
CLIENT_ACTS: st.SearchStrategy[Act] = st.one_of(
    st.builds(
        lambda frames, cut: Octets(b"".join(one.serialize() for one in frames), cut),
        st.lists(ANSWER_FRAMES, min_size=1, max_size=4),
        st.sampled_from([1, 9, 11, 10_000, 10_000]),
    ),
    st.builds(Consume, STREAMS, st.integers(1, 2000)),
    st.builds(Cancel, STREAMS),
)


@settings(max_examples=500, deadline=None)
@given(st.lists(CLIENT_ACTS, max_size=12), st.integers(1, 3))
def test_a_client_does_as_h2_does(acts: list[Act], asked: int) -> None:
    of_both = [play(kind, acts, client=True, asked=asked) for kind in (FastH2Codec, H2Codec)]
    assert of_both[0] == of_both[1]


def test_a_stream_that_is_handed_over_brings_its_window() -> None:
    """Octets taken and given back before are h2's to give back after."""
    side = Side(FastH2Codec, client=False)
    raw = block(*REQUEST, ("content-length", "1900"))
    side.take(HeadersFrame(1, raw, flags=["END_HEADERS"]).serialize())
    side.take(DataFrame(1, bytes(700)).serialize())
    Consume(1, 600)(side)
    side.take(WindowUpdateFrame(1, 5).serialize())
    stream = side.codec._h2.streams[1]
    assert stream.inbound_flow_control_window == 1300
    assert stream.outbound_flow_control_window == 30_005
    side.codec.consumed(1, 400)
    update = WindowUpdateFrame(1, 700).serialize()
    assert b"".join(one.data for one in side.codec.outgoing(0.0)) == update


def get(number: int) -> bytes:
    raw = block((":method", "GET"), *REQUEST[1:])
    return HeadersFrame(number, raw, flags=["END_HEADERS", "END_STREAM"]).serialize()


def test_streams_that_were_handed_over_are_forgotten_when_they_end() -> None:
    side = Side(FastH2Codec, client=False)
    for number in range(1, 2000, 2):
        side.take(get(number))
        side.take(WindowUpdateFrame(number, 5).serialize())
        Answer(number, 3, in_pieces=False)(side)
    assert len(side.codec._h2.streams) <= LIMITS.streams_max


def test_streams_that_were_handed_over_count_as_open() -> None:
    """Or a client could open any number, each with a frame that makes it h2's."""
    side = Side(FastH2Codec, client=False)
    with pytest.raises(HttpProtocolError, match="Max inbound streams"):
        for number in range(1, 100, 2):
            side.take(get(number))
            side.take(WindowUpdateFrame(number, 5).serialize())
    assert len(side.codec._h2.streams) <= 2 * LIMITS.streams_max


def test_requests_that_are_refused_are_charged_as_resets() -> None:
    side = Side(FastH2Codec, client=False)
    with pytest.raises(HttpProtocolError, match="flood of resets"):
        for number in range(1, 2000, 2):
            side.take(get(number))
            side.codec.reset(number, ResetCode.REFUSED_STREAM)


def test_nothing_may_stand_within_a_header_block() -> None:
    side = Side(FastH2Codec, client=False)
    raw = block(*REQUEST, ("content-length", "5"))
    side.take(HeadersFrame(1, raw, flags=["END_HEADERS"]).serialize())
    side.take(HeadersFrame(3, raw).serialize())
    with pytest.raises(HttpProtocolError):
        side.take(DataFrame(1, b"abcde", flags=["END_STREAM"]).serialize())


@pytest.mark.parametrize("size", [10, 16_000])
@pytest.mark.parametrize("cut", [3, 9, 12])
def test_a_stream_that_begins_within_settings_has_the_new_window(size: int, cut: int) -> None:
    """The first half of the frame is h2's already when the stream begins."""
    frame = SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: size}).serialize()
    side = Side(FastH2Codec, client=True)
    side.take(frame[:cut])
    side.codec.send_headers(1, request_fields(), end=False)
    side.take(frame[cut:])
    assert side.codec.writable(1) == size


def test_a_head_request_with_a_body_keeps_its_length_when_it_is_handed_over() -> None:
    side = Side(FastH2Codec, client=False)
    raw = block((":method", "HEAD"), *REQUEST[1:], ("content-length", "10"))
    side.take(HeadersFrame(1, raw, flags=["END_HEADERS"]).serialize())
    side.take(DataFrame(1, b"abcde").serialize())
    side.take(WindowUpdateFrame(1, 5).serialize())
    side.take(DataFrame(1, b"fghij", flags=["END_STREAM"]).serialize())
    assert side.said[-1] == End(1)


@pytest.mark.parametrize("kind", [FastH2Codec, H2Codec])
def test_the_limit_of_open_streams_is_twice_what_is_announced(kind: H2Kind) -> None:
    side = Side(kind, client=False)
    with pytest.raises(HttpProtocolError, match="Max inbound streams is 6, 6 open"):
        for number in range(1, 100, 2):
            side.take(get(number))


def test_a_list_that_is_too_large_is_not_read_to_its_end() -> None:
    """A frame of one-octet fields: h2 stops early, and so does this."""
    with pytest.raises(NotPlain, match="too large"):
        read_plain(b"\x82" * 600 + b"\xff", list_bytes_max=16 << 10)
    long = block(("x", "y" * 17_000))
    with pytest.raises(NotPlain, match="too large"):
        read_plain(long, list_bytes_max=16 << 10)


def test_what_is_kept_of_blocks_is_bounded() -> None:
    reader = BlockReader(Decoder(), client=False, header_list_bytes_max=16 << 10)
    for number in range(2 * BLOCKS_KEPT_MAX):
        assert reader.read(block(*REQUEST, ("x", str(number))))
    assert len(reader._kept) <= BLOCKS_KEPT_MAX
    kept = len(reader._kept)
    assert reader.read(block(*REQUEST, *((f"x-{n}", "") for n in range(60))))
    assert len(reader._kept) == kept, "many small fields are much to keep"


@given(st.binary(min_size=1, max_size=40))
def test_no_block_breaks_the_reader(raw: bytes) -> None:
    BlockReader(Decoder(), client=False, header_list_bytes_max=1000).read(raw)


def test_the_steady_exchange_goes_the_short_way() -> None:
    """Or all of the above would compare h2 with itself."""
    side = Side(FastH2Codec, client=False)
    for number in (1, 3, 5):
        raw = block(*REQUEST, ("content-length", "5"))
        side.take(HeadersFrame(number, raw, flags=["END_HEADERS"]).serialize())
        side.take(DataFrame(number, b"abcde", flags=["END_STREAM"]).serialize())
        Answer(number, 3, False)(side)
    codec = side.codec
    assert isinstance(codec, FastH2Codec) and not codec._h2.streams and not codec._fast
    assert sum(isinstance(one, RequestHeaders) for one in side.said) == 3


@given(
    st.lists(
        st.tuples(
            st.sampled_from([":path", "x", "content-length", "accept-encoding"])
            | st.text("abc-", min_size=1),
            st.text(st.characters(codec="latin-1", exclude_characters="\r\n\0"), max_size=400),
        ),
        max_size=6,
    )
)
def test_plain_blocks_mean_the_same_to_hpack(fields: list[tuple[str, str]]) -> None:
    raw = block(*fields)
    decoder = Decoder()
    decoder.header_table.maxsize = 0
    expected = [tuple(one) for one in decoder.decode(raw, raw=True)]
    assert read_plain(raw, list_bytes_max=1 << 20) == expected
    for cut in range(len(raw)):
        try:
            assert (
                read_plain(raw[:cut], list_bytes_max=1 << 20)
                == expected[: len(read_plain(raw[:cut], list_bytes_max=1 << 20))]
            )
        except NotPlain:
            continue


@pytest.mark.parametrize(
    "raw", [b"\x80", b"\xbe", b"\x20", b"\x00\x81a\x00", b"\x0f\xff\xff\xff\xff\x01", b"\x04\x7f"]
)
def test_what_is_not_plain_is_left_to_hpack(raw: bytes) -> None:
    with pytest.raises(NotPlain):
        read_plain(raw, list_bytes_max=1 << 20)
