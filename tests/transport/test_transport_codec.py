"""The HTTP/2 codec and the exchanges in memory: windows, limits, floods, drain, garbage.

Every test runs with h2 alone and with the short way beside it.
"""

from __future__ import annotations

import pytest
from hyperframe.frame import (
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcpd.transport.client_exchange import NotProcessed
from sdcpd.transport.h2_codec import H2Codec
from sdcpd.transport.http import (
    ConnectionLost,
    GoAway,
    HttpProtocolError,
    RequestHeaders,
    Response,
    StreamGone,
)
from sdcpd.transport.limits import H2Limits, PaceLimits
from sdcpd.transport.tuning import silence_frame_text
from tests.kit.h2_kinds import (
    PREFACE,
    frames_in,
    headers,
    kinds,
    raw_server,
    ready_pair,
)
from tests.kit.h2_kinds import kind as kind
from tests.kit.http_pair import request_fields


def test_request_and_response_in_memory() -> None:
    pair = ready_pair()
    pair.ask(b"question", "/a%2Fb?n=1")
    pair.move()
    request = pair.requests[0].request
    assert (request.method, request.path, request.query) == ("POST", "/a%2Fb", "n=1")
    assert request.body == b"question"
    pair.answer_all(Response(201, (("Location", "/x"),), b"answer"))
    pair.move()
    result = pair.outcomes[0].result
    assert isinstance(result, Response)
    assert (result.status, result.header("location"), result.body) == (201, "/x", b"answer")


def test_window_of_one_octet_moves_a_body_octet_by_octet() -> None:
    tiny = H2Limits(stream_window_bytes=1)
    pair = ready_pair(client_limits=tiny, server_limits=tiny)
    pair.ask(b"0123456789")
    pair.move()
    pair.answer_all(Response(200, (), b"abcdefghij"))
    pair.move()
    assert pair.outcomes[0].result == Response(200, (("content-length", "10"),), b"abcdefghij")


def test_small_answers_overtake_bulk_and_bulk_is_capped_a_turn() -> None:
    pair = ready_pair()
    bulk, small = pair.ask(path="/bulk"), pair.ask(path="/small")
    pair.move()
    pair.server.respond(bulk, Response(200, (), bytes(900_000)), now=0.0)
    pair.server.respond(small, Response(200, (), b"verdict"), now=0.0)
    assert pair.server.pump()
    sent = b"".join(one.data for one in pair.server_codec.outgoing(0.0))
    assert len(sent) < 80_000
    assert b"verdict" in sent
    pair.outcomes += pair.client.handle(pair.client_codec.receive(sent, now=0.0))
    assert [outcome.stream_id for outcome in pair.outcomes] == [small]
    pair.move()
    assert [outcome.stream_id for outcome in pair.outcomes] == [small, bulk]


def test_small_answer_waits_for_the_connection_window_instead_of_failing() -> None:
    pair = ready_pair(client_limits=H2Limits(connection_window_bytes=65535))
    bulk, small = pair.ask(path="/bulk"), pair.ask(path="/small")
    pair.move()
    pair.server.respond(bulk, Response(200, (), bytes(300_000)), now=0.0)
    while pair.server.pump():
        pass
    pair.server.pump()
    pair.server.respond(small, Response(200, (), b"verdict"), now=0.0)
    pair.move()
    assert {outcome.stream_id for outcome in pair.outcomes} == {bulk, small}


def test_body_over_its_limit_is_413_and_the_rest_is_dropped() -> None:
    pair = ready_pair(body_bytes_max=lambda _method, path: 10 if path == "/small" else 1000)
    pair.ask(bytes(11), "/small")
    pair.ask(bytes(11), "/large")
    pair.ask(bytes(200_000), "/large")
    pair.move()
    statuses = {
        one.stream_id: one.result.status
        for one in pair.outcomes
        if isinstance(one.result, Response)
    }
    assert statuses == {1: 413, 5: 413}
    assert [incoming.stream_id for incoming in pair.requests] == [3]
    pair.answer_all(Response(204))
    pair.move()
    assert pair.client_codec.open_stream() == 7


def test_bodies_that_are_too_many_at_once_are_refused() -> None:
    pair = ready_pair(buffered_bytes_max=1000)
    for stream_id in (1, 3):
        pair.client_codec.send_headers(stream_id, request_fields(), end=False)
        pair.client_codec.send_data(stream_id, bytes(600), end=False)
    pair.to_server()
    assert pair.server.refusals == ["too_many_bytes"]
    pair.client_codec.send_headers(5, request_fields(), end=True)
    pair.client_codec.send_data(1, b"", end=True)
    pair.move()
    assert {incoming.stream_id for incoming in pair.requests} == {1, 5}


def test_answers_that_are_too_many_at_once_are_refused() -> None:
    """A client that asks for much and reads nothing makes nobody keep it all.

    One answer goes beyond the limit, however long: a single object may be longer than that.
    """
    pair = ready_pair(buffered_bytes_max=1_000_000)
    for _ in range(4):
        pair.ask()
    pair.move()
    for incoming in list(pair.requests):
        pair.server.respond(incoming.stream_id, Response(200, (), bytes(600_000)), now=0.0)
    assert pair.server.refusals == ["too_many_bytes"] * 2
    pair.requests.clear()
    pair.move()
    answers = [one.result for one in pair.outcomes if isinstance(one.result, Response)]
    told = [(one.status, one.header("retry-after")) for one in answers]
    assert sorted(told, key=str) == [(200, None)] * 2 + [(503, "1")] * 2


def test_announced_body_over_its_limit_is_413_before_any_octet() -> None:
    pair = ready_pair(body_bytes_max=lambda _method, _path: 10)
    fields = request_fields("PUT", "/", ("content-length", "999999"))
    pair.client_codec.send_headers(1, fields, end=False)
    pair.to_server()
    pair.server.pump()
    kinds = [type(frame) for frame in frames_in(pair.server_codec)]
    assert kinds == [HeadersFrame, DataFrame, RstStreamFrame]


def test_requests_above_the_limit_are_given_back_and_handlers_count_after_a_reset() -> None:
    pair = ready_pair(requests_max=2)
    for _ in range(3):
        pair.ask()
    pair.move()
    assert len(pair.requests) == 2
    assert isinstance(pair.outcomes[0].result, NotProcessed)
    # The client loses interest, but the handlers still run (D-H15).
    pair.client.cancel(1)
    pair.move()
    pair.ask()
    pair.move()
    assert isinstance(pair.outcomes[1].result, NotProcessed)
    with pytest.raises(StreamGone):
        pair.server.respond(1, Response(204), now=0.0)
    pair.ask()
    pair.move()
    assert len(pair.requests) == 3


def test_client_does_not_open_more_streams_than_the_server_allows() -> None:
    pair = ready_pair(server_limits=H2Limits(streams_max=3))
    for _ in range(3):
        pair.ask()
    assert pair.client.start(request_fields(), b"", now=0.0) is None


def test_a_length_without_a_body_is_refused() -> None:
    """RFC 9113 section 8.1.1: nobody gets half a request for a whole one."""
    pair = ready_pair()
    fields = request_fields("POST", "/", ("content-length", "5"))
    stream_id = pair.client.start(fields, b"", now=0.0)
    pair.move()
    assert pair.requests == []
    (outcome,) = pair.outcomes
    assert outcome.stream_id == stream_id and isinstance(outcome.result, Response)
    assert outcome.result.status == 400


def test_a_status_of_any_length_is_the_servers_fault() -> None:
    pair = ready_pair()
    pair.ask()
    pair.client_codec.outgoing(0.0)
    answer = b"\x08\x7f" + bytes((0x80 | (5000 - 127) & 0x7F, (5000 - 127) >> 7)) + b"2" * 5000
    pair.outcomes += pair.client.handle(
        pair.client_codec.receive(headers(1, block=answer), now=0.0)
    )
    result = pair.outcomes[0].result
    assert isinstance(result, Response) and result.status == 502


def test_keepalive_pings_a_silent_peer_and_gives_up_when_it_stays_silent() -> None:
    codec = raw_server()
    assert codec.deadline() == 10.0
    codec.on_deadline(10.0)
    assert any(isinstance(frame, PingFrame) for frame in frames_in(codec))
    assert codec.deadline() == 20.0
    with pytest.raises(HttpProtocolError, match="ping unanswered"):
        codec.on_deadline(20.0)


def test_a_client_that_waits_asks_soon_whether_the_server_is_there() -> None:
    pair = ready_pair()
    assert pair.client_codec.deadline() == 10.0
    pair.ask()
    pair.move()
    assert pair.client_codec.deadline() == 0.5
    pair.answer_all(Response(204))
    pair.move()
    assert pair.client_codec.deadline() == 10.0


def test_slow_reader_is_reset_whatever_it_trickles() -> None:
    pair = ready_pair(
        client_limits=H2Limits(stream_window_bytes=1),
        pace=PaceLimits(grace_s=5.0, bytes_per_s_min=1000),
    )
    pair.ask()
    pair.move()
    pair.server.respond(1, Response(200, (), bytes(100_000)), now=0.0)
    for second in range(12):
        pair.now = float(second)
        pair.server.on_tick(pair.now)
        pair.to_client()
        pair.to_server()
    pair.move()
    assert isinstance(pair.outcomes[0].result, ConnectionLost)


def test_slow_request_body_is_reset() -> None:
    pair = ready_pair(pace=PaceLimits(grace_s=5.0, bytes_per_s_min=1000))
    pair.client_codec.send_headers(1, request_fields(), end=False)
    pair.to_server()
    pair.server.on_tick(5.0)
    assert frames_in(pair.server_codec) == []
    pair.server.on_tick(5.1)
    assert any(isinstance(frame, RstStreamFrame) for frame in frames_in(pair.server_codec))


def test_drain_answers_what_is_in_flight_and_gives_back_what_came_late() -> None:
    pair = ready_pair()
    pair.ask()
    pair.move()
    pair.server.start_drain(0.0)
    late = pair.ask()  # Sent before the client hears of it: still served.
    pair.to_server()
    assert len(pair.requests) == 2
    pair.move()
    assert pair.client.going
    assert pair.client.start(request_fields(), b"", now=0.0) is None
    assert not pair.server.drained
    pair.answer_all(Response(204))
    pair.move()
    assert {one.stream_id for one in pair.outcomes} == {1, late}
    assert pair.server.drained
    assert pair.client.drained


def test_drain_goes_on_when_the_ping_is_never_answered() -> None:
    codec_pair = ready_pair()
    codec_pair.server.start_drain(0.0)
    codec_pair.server.on_tick(0.5)
    assert not codec_pair.server.drained
    codec_pair.server.on_tick(1.5)
    assert codec_pair.server.drained


def test_goaway_gives_back_only_the_streams_above_its_last_id() -> None:
    pair = ready_pair()
    first, second = pair.ask(), pair.ask()
    ended = pair.client.handle([GoAway(first, 0, "")])
    assert [one.stream_id for one in ended] == [second]
    assert isinstance(ended[0].result, NotProcessed)


def test_trailers_and_other_frames_are_ignored() -> None:
    codec = raw_server()
    unknown = b"\x00\x00\x01\xfa\x00\x00\x00\x00\x01x"
    events = codec.receive(unknown + headers(1, end=False), now=0.0)
    assert isinstance(events[0], RequestHeaders)
    trailer = HeadersFrame(1, b"\x00\x01a\x01b", flags=["END_HEADERS", "END_STREAM"])
    assert len(codec.receive(trailer.serialize(), now=0.0)) == 1


@pytest.mark.parametrize(
    "field", [("connection", "close"), ("x", "a\nb"), ("x y", "a"), ("x", "snow ☃")]
)
def test_fields_that_would_break_the_connection_are_our_own_error(field: tuple[str, str]) -> None:
    pair = ready_pair()
    with pytest.raises(ValueError, match=field[0]):
        pair.client.start((*request_fields(), field), b"", now=0.0)
    assert pair.ask() == 1


def test_frames_do_not_dump_their_bodies_into_logs() -> None:
    kept = Frame.__repr__
    try:
        silence_frame_text()
        assert repr(DataFrame(1, b"secret")) == "DataFrame"
    finally:
        Frame.__repr__ = kept  # type: ignore[method-assign]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=5), st.booleans())
def test_garbage_raises_only_the_codecs_own_error(pieces: list[bytes], client: bool) -> None:
    codec = kinds[0](client=client, now=0.0)
    _feed(codec, ([] if client else [PREFACE]) + pieces)


_FRAME = st.tuples(
    st.binary(max_size=60),
    st.integers(0, 12),
    st.integers(0, 255),
    st.sampled_from([0, 1, 2, 3, 5]),
).map(
    lambda part: (
        len(part[0]).to_bytes(3, "big")
        + bytes((part[1], part[2]))
        + part[3].to_bytes(4, "big")
        + part[0]
    )
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_FRAME | st.just(headers(1)) | st.just(headers(3, end=False)), max_size=8))
def test_well_framed_garbage_raises_only_the_codecs_own_error(frames: list[bytes]) -> None:
    _feed(raw_server(), frames)


@settings(max_examples=100, deadline=None)
@given(st.lists(_FRAME, max_size=8))
def test_well_framed_garbage_does_not_break_a_client(frames: list[bytes]) -> None:
    pair = ready_pair()
    pair.ask(b"body")
    pair.client_codec.outgoing(0.0)
    try:
        for frame in frames:
            pair.client.handle(pair.client_codec.receive(frame, now=0.0))
            pair.client.pump()
            pair.client_codec.outgoing(0.0)
    except HttpProtocolError:
        return


@settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=5000),
    st.integers(8, 3000),
    st.lists(st.integers(1, 400), min_size=1, max_size=8),
)
def test_any_cut_of_the_octets_gives_the_same_request(
    body: bytes, window_bytes: int, cuts: list[int]
) -> None:
    pair = ready_pair(server_limits=H2Limits(stream_window_bytes=window_bytes))
    pair.ask(body)
    for turn in range(20_000):
        pair.client.pump()
        data = b"".join(one.data for one in pair.client_codec.outgoing(0.0))
        if not data and not pair.to_client():
            break
        while data:
            size = cuts[turn % len(cuts)]
            events = pair.server_codec.receive(data[:size], now=0.0)
            pair.requests += pair.server.handle(events, now=0.0)
            data = data[size:]
    assert pair.requests[0].request.body == body


def _feed(codec: H2Codec, pieces: list[bytes]) -> None:
    try:
        for piece in pieces:
            codec.receive(piece, now=0.0)
            codec.outgoing(0.0)
    except HttpProtocolError:
        codec.outgoing(0.0)
