"""The HTTP/1.1 server over real sockets: what it takes, what it refuses, and who has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcpd.transport import http1
from sdcpd.transport.http import Request, Response
from sdcpd.transport.http1 import Http1Server, StreamingResponse


@dataclass
class Pieces:
    """A body that a test feeds; None ends it."""

    queue: asyncio.Queue[bytes | Exception | None] = field(default_factory=asyncio.Queue)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)

    async def __anext__(self) -> bytes:
        self.waiting.set()
        piece = await self.queue.get()
        if isinstance(piece, Exception):
            raise piece
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        self.closed.set()


@dataclass
class Site:
    """A handler with a resource for each case, and a client's end of one connection."""

    pieces: Pieces = field(default_factory=Pieces)
    requests: list[Request] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def handle(self, request: Request) -> Response | StreamingResponse:
        self.requests.append(request)
        match request.path:
            case "/wait":
                self.begun.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    self.cancelled.set()
            case "/stream":
                return StreamingResponse(200, (("content-type", "x/y"),), self.pieces)
            case "/fail":
                raise RuntimeError("a bug")
            case "/bad-field":
                return Response(200, (("x-field", "a\nb"),))
            case "/none":
                return Response(204)
        return Response(200, (), request.method.encode() + b" " + request.body)

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def aclose(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)

    async def ask(self, octets: bytes) -> bytes:
        """Everything that comes back until the server closes."""
        reader, writer = await self.open()
        writer.write(octets)
        return await reader.read()


@asynccontextmanager
async def site(**options: object) -> AsyncIterator[Site]:
    made = Site()
    server = Http1Server(made.handle, **options)  # type: ignore[arg-type]
    made.port = await server.start()
    try:
        yield made
    finally:
        await server.aclose()
        await made.aclose()


def get(path: str = "/", *, more: str = "", close: bool = True) -> bytes:
    end = "connection: close\r\n" if close else ""
    return f"GET {path} HTTP/1.1\r\nhost: h\r\n{more}{end}\r\n".encode()


def post(body: bytes, *, path: str = "/", more: str = "connection: close\r\n") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: h\r\ncontent-length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


async def one(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of one response with a content-length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1])
        for line in head.split(b"\r\n")
        if line.startswith(b"content-length")
    )
    return head, await reader.readexactly(length)


async def test_requests_follow_each_other_on_one_connection() -> None:
    async with site() as s:
        reader, writer = await s.open()
        for body in (b"a", b"", b"b" * 100_000):
            writer.write(post(body, more=""))
            head, answer = await one(reader)
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"\r\ndate: " in head
            assert answer == b"POST " + body


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with site() as s:
        answer = await s.ask(
            post(b"1", more="") + get(close=False) + post(b"2", more="") + get("/none")
        )
        bodies = [part.partition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 ")[1:]]
        assert bodies == [b"POST 1", b"GET ", b"POST 2", b""]


async def test_octet_by_octet_is_the_same_request() -> None:
    async with site() as s:
        reader, writer = await s.open()
        for octet in post(b"slow"):
            writer.write(bytes([octet]))
            await writer.drain()
        assert (await reader.read()).endswith(b"POST slow")


async def test_chunked_bodies_come_whole() -> None:
    async with site() as s:
        head = (
            b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        )
        assert (await s.ask(head + b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n")).endswith(b"POST abc")


async def test_expecting_clients_are_told_to_go_on() -> None:
    async with site() as s:
        reader, writer = await s.open()
        request = post(b"body", more="expect: 100-continue\r\nconnection: close\r\n")
        writer.write(request[:-4])
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 \r\n\r\n"
        writer.write(b"body")
        assert (await reader.read()).endswith(b"POST body")


async def test_a_body_that_is_too_large_is_refused_before_it_is_sent() -> None:
    async with site(body_bytes_max=10) as s:
        request = post(b"x" * 11, more="expect: 100-continue\r\n")
        reader, writer = await s.open()
        writer.write(request[:-11])
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"\r\nconnection: close\r\n" in answer
        assert (await s.ask(post(b"x" * 10))).startswith(b"HTTP/1.1 200 ")
        assert len(s.requests) == 1


async def test_a_client_that_sends_on_still_reads_why_it_was_refused() -> None:
    """A reset would destroy the answer: the rest is read and dropped."""
    async with site(body_bytes_max=10) as s:
        assert (await s.ask(post(b"x" * 4_000_000))).startswith(b"HTTP/1.1 413 ")
        head = b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"
        chunks = b"5\r\nabcde\r\n" * 100_000
        assert (await s.ask(head + chunks)).startswith(b"HTTP/1.1 413 ")
        assert not s.requests


@pytest.mark.parametrize(
    ("octets", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),  # a TLS client
        (b"what\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),  # HTTP/2 without having asked
        (b"GET / HTTP/1.1\r\nhost: h\r\nbad name: x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: -1\r\n\r\n", 400),
        (
            b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n"
            b"\r\n0\r\n\r\n",
            400,
        ),
        (b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: gzip\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET /" + b"a" * 70_000, 431),
        (b"GET / HTTP/1.1\r\nhost: h\r\nx: " + b"a" * 70_000, 431),
    ],
)
async def test_what_is_not_http_is_refused(octets: bytes, status: int) -> None:
    def refuse(status: int, text: str) -> Response:
        return Response(status, (("x-worded", "yes"),), text.encode())

    async with site(refuse=refuse) as s:
        answer = await s.ask(octets)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b"\r\nx-worded: yes\r\n" in answer
        assert not s.requests


@pytest.mark.parametrize("octets", [b"0x5\r\n", b"f" * 30 + b"\r\n", b"20\r\n" + b"a" * 32])
async def test_a_refusal_of_head_has_no_body(
    octets: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Its body is bad or too large; the next one, which is no request, is told why again."""
    async with site(body_bytes_max=10) as s:
        head = b"HEAD / HTTP/1.1\r\nhost: h\r\n"
        answer = await s.ask(head + b"transfer-encoding: chunked\r\n\r\n" + octets)
        assert answer.startswith(b"HTTP/1.1 4") and answer.endswith(b"\r\n\r\n")
        assert b"content-length: 0" not in answer
        _, _, second = (await s.ask(head + b"\r\nwhat\r\n\r\n")).partition(b"\r\n\r\n")
        assert second.startswith(b"HTTP/1.1 400 ") and not second.endswith(b"\r\n\r\n")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_request_cut_short_is_dropped() -> None:
    async with site() as s:
        reader, writer = await s.open()
        writer.write(post(b"0123456789")[:-5])
        writer.write_eof()
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        assert not s.requests


async def test_slow_requests_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "READ_S", 0.05)
    async with site() as s:
        assert (await s.ask(b"GET / HT")).startswith(b"HTTP/1.1 408 ")
        assert (await s.ask(post(b"0123456789")[:-5])).startswith(b"HTTP/1.1 408 ")
        assert not s.requests


async def test_idle_connections_are_closed_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "IDLE_S", 0.05)
    async with site() as s:
        assert await s.ask(b"") == b""


async def test_too_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "CONNECTIONS_MAX", 1)
    async with site() as s:
        _, writer = await s.open()
        writer.write(get("/wait"))
        await s.begun.wait()
        assert (await s.ask(get())).startswith(b"HTTP/1.1 503 ")


async def test_head_is_get_without_its_body() -> None:
    async with site() as s:
        answer = await s.ask(b"HEAD / HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"content-length: 5\r\n" in answer
        assert answer.endswith(b"\r\n\r\n")
        stream = b"HEAD /stream HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n"
        assert (await s.ask(stream)).endswith(b"\r\n\r\n")
        await s.pieces.closed.wait()


async def test_older_and_upgrading_clients_get_plain_answers() -> None:
    """Connection: close, HTTP/1.0 and an offered upgrade are no departure of the client."""
    async with site() as s:
        assert (await s.ask(b"GET / HTTP/1.0\r\n\r\n")).endswith(b"GET ")
        upgrade = "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n"
        reader, writer = await s.open()
        writer.write(get(more=upgrade, close=False))
        assert (await one(reader))[1] == b"GET "
        writer.close()
        s.pieces.queue.put_nowait(b"x")
        s.pieces.queue.put_nowait(None)
        answer = await s.ask(b"GET /stream HTTP/1.0\r\n\r\n")
        assert b"chunked" not in answer
        assert answer.endswith(b"\r\n\r\nx")


async def test_the_target_may_be_absolute() -> None:
    async with site() as s:
        await s.ask(b"GET http://other:1/a?b HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
        await s.ask(get("/a%2Fb?c?d"))
        assert [(r.authority, r.path, r.query) for r in s.requests] == [
            ("other:1", "/a", "b"),
            ("h", "/a%2Fb", "c?d"),
        ]


async def test_a_handler_that_fails_is_answered_500(caplog: pytest.LogCaptureFixture) -> None:
    async with site() as s:
        reader, writer = await s.open()
        writer.write(get("/fail", close=False))
        head, _ = await one(reader)
        assert head.startswith(b"HTTP/1.1 500 ")
        assert "a bug" in caplog.text
        writer.write(get(close=False))
        assert (await one(reader))[1] == b"GET "
        assert await s.ask(get("/bad-field")) == b""


@pytest.mark.parametrize("pipelined", [b"", get(), b"\r\n"])
async def test_a_client_that_goes_cancels_the_handler(pipelined: bytes) -> None:
    async with site() as s:
        _, writer = await s.open()
        writer.write(get("/wait", close=False) + pipelined)
        await s.begun.wait()
        writer.close()
        await asyncio.wait_for(s.cancelled.wait(), 1)


async def test_a_stream_sends_each_piece_at_once() -> None:
    async with site() as s:
        reader, writer = await s.open()
        writer.write(get("/stream", close=False))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head.lower()
        for piece in (b"one", b"", b"two"):
            s.pieces.queue.put_nowait(piece)
            if piece:
                assert await reader.readuntil(piece + b"\r\n")
        s.pieces.queue.put_nowait(None)
        assert await reader.readuntil(b"0\r\n\r\n")
        await s.pieces.closed.wait()
        writer.write(get())
        assert (await reader.read()).endswith(b"GET ")


@pytest.mark.parametrize("when", ["before the first piece", "between pieces"])
async def test_a_client_that_goes_closes_the_stream(when: str) -> None:
    async with site() as s:
        reader, writer = await s.open()
        writer.write(get("/stream"))
        await s.pieces.waiting.wait()
        if when == "between pieces":
            s.pieces.queue.put_nowait(b"one")
            await reader.readuntil(b"one")
        writer.transport.abort()
        await asyncio.wait_for(s.pieces.closed.wait(), 1)


async def test_a_client_that_does_not_read_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "WRITE_S", 0.1)
    async with site() as s:
        _, writer = await s.open()
        writer.write(get("/stream"))
        for _ in range(40):
            s.pieces.queue.put_nowait(b"x" * 1_000_000)
        await asyncio.wait_for(s.pieces.closed.wait(), 5)
        assert s.pieces.queue.qsize() > 0


async def test_a_stream_that_fails_is_cut_not_ended(caplog: pytest.LogCaptureFixture) -> None:
    async with site() as s:
        s.pieces.queue.put_nowait(b"one")
        s.pieces.queue.put_nowait(RuntimeError("a bug"))
        reader, writer = await s.open()
        writer.write(get("/stream"))
        received = b""
        try:
            while octets := await reader.read(1000):
                received += octets
        except ConnectionError:
            pass
        assert b"one" in received
        assert b"0\r\n\r\n" not in received
        assert "a bug" in caplog.text
        assert s.pieces.closed.is_set()


async def test_closing_the_server_ends_handlers_and_streams() -> None:
    async with site() as s:
        for path in ("/wait", "/stream"):
            _, writer = await s.open()
            writer.write(get(path))
        await s.begun.wait()
        await s.pieces.waiting.wait()
    assert s.cancelled.is_set()
    assert s.pieces.closed.is_set()


async def test_unix_socket_is_for_its_group_only(tmp_path: Path) -> None:
    path = tmp_path / "run" / "admin.sock"
    async with site(path=path):
        assert path.stat().st_mode & 0o777 == 0o660
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(get())
        assert (await reader.read()).endswith(b"GET ")
        writer.close()
    assert not path.exists()


def test_any_octets_get_an_answer_or_a_close() -> None:
    """Whatever is sent, the next client is served."""
    pieces = st.lists(
        st.one_of(
            st.binary(max_size=30),
            st.sampled_from(
                [b"GET / HTTP/1.1\r\n", b"host: h\r\n", b"\r\n", post(b"abc", more=""), b"0\r\n"]
            ),
        ),
        max_size=8,
    )
    with asyncio.Runner() as runner:
        made = Site()
        server = Http1Server(made.handle)
        made.port = runner.run(server.start())

        async def send(octets: bytes) -> bytes:
            reader, writer = await made.open()
            writer.write(octets)
            writer.write_eof()
            return await reader.read()

        @settings(max_examples=60, deadline=None)
        @given(pieces)
        def check(parts: list[bytes]) -> None:
            answer = runner.run(asyncio.wait_for(send(b"".join(parts)), 5))
            assert answer == b"" or answer.startswith(b"HTTP/1.1 ")

        check()
        assert runner.run(made.ask(get())).endswith(b"GET ")
        runner.run(server.aclose())
        runner.run(made.aclose())
