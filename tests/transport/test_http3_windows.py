"""QUIC's windows move with what has arrived in order, and do not grow for what has not."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
from aioquic.h3.connection import H3Connection
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet import QuicStreamFrame
from aioquic.quic.stream import QuicStreamReceiver

from sdcpd.transport.h3_codec import H3Codec
from sdcpd.transport.http import RequestHeaders, StreamGone
from sdcpd.transport.limits import H3Limits
from sdcpd.transport.quic_tls import MutualQuic, configuration, demand_certificates
from tests.kit.certs import CertKit
from tests.kit.quic import GET

LIMITS = H3Limits()
CLIENT, SERVER = ("127.0.0.1", 1), ("127.0.0.1", 2)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> CertKit:
    return CertKit(tmp_path_factory.mktemp("pki"))


class Pair:
    """Two connections whose datagrams a test carries."""

    def __init__(self, kit: CertKit) -> None:
        self.now = 0.0
        self.client = MutualQuic(
            configuration=configuration(kit.identity("drafter", "d0"), server_name="127.0.0.1")
        )
        self.client.peer_check = lambda leaf, chain: None
        self.client.connect(SERVER, now=0.0)
        server = QuicConnection(
            configuration=configuration(kit.identity("verifier", "v0")),
            original_destination_connection_id=self.client.original_destination_connection_id,
        )
        self.server = demand_certificates(server)
        self.server.peer_check = lambda leaf, chain: None
        self.received = 0

    def turn(self, lose: Callable[[bytes], bool] = lambda _: False) -> bool:
        """Carry what both have to say; returns whether anything moved."""
        self.now += 0.001
        moved = False
        for data, _ in self.client.datagrams_to_send(now=self.now):
            moved = True
            if not lose(data):
                self.server.receive_datagram(data, CLIENT, now=self.now)
        while (event := self.server.next_event()) is not None:
            self.server.note(event)
            self.received += len(getattr(event, "data", b"") or b"")
        for data, _ in self.server.datagrams_to_send(now=self.now):
            moved = True
            self.client.receive_datagram(data, SERVER, now=self.now)
        while self.client.next_event() is not None:
            continue
        return moved

    def established(self) -> Pair:
        while self.turn():
            continue
        return self


def test_a_gap_does_not_open_the_window(kit: CertKit) -> None:
    """One octet far ahead of the others must not make the receiver allocate what lies between."""
    pair = Pair(kit).established()
    take = QuicStreamReceiver.handle_frame

    def all_but_the_first(self: QuicStreamReceiver, frame: QuicStreamFrame) -> object:
        return take(self, frame) if frame.offset else None

    stream = pair.client.get_next_available_stream_id()
    pair.client.send_stream_data(stream, bytes(16 << 20), end_stream=True)
    with patch.object(QuicStreamReceiver, "handle_frame", all_but_the_first):
        for _ in range(3000):
            if not pair.turn():
                break
    state = pair.server._streams[stream]
    assert pair.received == 0
    assert state.receiver.highest_offset > LIMITS.stream_window_bytes - 2000, "all that it may send"
    assert state.max_stream_data_local == LIMITS.stream_window_bytes
    assert len(state.receiver._buffer) <= LIMITS.stream_window_bytes


def test_a_long_body_goes_through_windows_that_stay_as_they_are(kit: CertKit) -> None:
    pair = Pair(kit).established()
    stream = pair.client.get_next_available_stream_id()
    pair.client.send_stream_data(stream, bytes(12 << 20), end_stream=True)
    highest = 0
    while pair.received < 12 << 20:
        assert pair.turn()
        state = pair.server._streams.get(stream)
        if state is not None:
            ahead = state.max_stream_data_local - state.receiver.starting_offset()
            highest = max(highest, ahead)
        total = pair.server._local_max_data.value - pair.server.delivered_bytes
        assert total <= LIMITS.connection_window_bytes
    assert highest <= LIMITS.stream_window_bytes


def test_streams_that_are_reset_give_their_window_back(kit: CertKit) -> None:
    """Or a connection would stand still after enough of them."""
    pair = Pair(kit).established()
    for _ in range(40):
        stream = pair.client.get_next_available_stream_id()
        pair.client.send_stream_data(stream, bytes(256 << 10))
        for _ in range(20):
            pair.turn()
        pair.client.reset_stream(stream, 0x10C)
        pair.server.stop_stream(stream, 0x10C)
        for _ in range(5):
            pair.turn()
    before = pair.received
    stream = pair.client.get_next_available_stream_id()
    pair.client.send_stream_data(stream, bytes(1000), end_stream=True)
    for _ in range(20):
        pair.turn()
    assert pair.received == before + 1000


def test_an_answer_on_a_stream_that_the_library_has_forgotten(kit: CertKit) -> None:
    """Of a client that gave its request up while the link was cut."""
    pair = Pair(kit).established()
    codec = H3Codec(pair.server, client=False, now=pair.now, next_event=pair.server.next_event)
    client = H3Connection(pair.client)
    stream = pair.client.get_next_available_stream_id()
    client.send_headers(stream, GET, end_stream=True)
    for data, _ in pair.client.datagrams_to_send(now=pair.now):
        events = codec.receive(data, now=pair.now, address=CLIENT)
    assert any(isinstance(event, RequestHeaders) for event in events)
    pair.server._streams.pop(stream)
    with pytest.raises(StreamGone):
        codec.send_headers(stream, ((":status", "204"),), end=True)
