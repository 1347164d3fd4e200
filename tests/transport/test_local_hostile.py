"""Processes of the same user that are broken or mean: each costs its own connection, nothing else."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.transport import local_memory, local_server, local_serving
from sdcpd.transport.http import Request, Response
from sdcpd.transport.local_memory import BadMemory, attach, create
from sdcpd.transport.local_messages import (
    MESSAGE_BYTES_MAX,
    Answer,
    Ask,
    BadMessage,
    Hello,
    Message,
    Ready,
    Refused,
    decode,
    digest_of,
    encode,
)
from sdcpd.transport.local_server import CONNECTIONS_MAX
from tests.kit.http_pair import PEER
from tests.kit.same_host import MIB, Site, mlc_handler, same_host, turns
from tiers.host import HostTier

TOKEN = "t" * 32
ASK = Ask(TOKEN, "PUT", "/objects/s/a", "host:1", (("a", "b"),), 3)
MESSAGES: tuple[Message, ...] = (
    Hello(TOKEN),
    Ready(),
    ASK,
    Answer(200, (("etag", '"x"'),), 0, digest_of(b"")),
    Refused("why", 7),
)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_survives_its_packet(message: Message) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=200))
def test_no_octets_hurt(packet: bytes) -> None:
    try:
        decode(packet)
    except BadMessage:
        pass


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.sampled_from(MESSAGES), st.data())
def test_no_part_of_a_message_may_be_anything(message: Message, data: st.DataObject) -> None:
    parts = json.loads(encode(message))
    name = data.draw(st.sampled_from(sorted(parts)))
    parts[name] = data.draw(_JSON)
    try:
        assert isinstance(decode(json.dumps(parts).encode()), Message)
    except BadMessage:
        pass


@pytest.mark.parametrize(
    "packet",
    [b"", b"[" * 30_000, b"1" * 5000, b'{"type":[]}', b'{"type":"ready","more":1}', b"{}", b"\xff"],
)
def test_what_is_no_message(packet: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(packet)


def _with(**parts: Any) -> bytes:
    return json.dumps({**json.loads(encode(ASK)), **parts}).encode()


@pytest.mark.parametrize(
    "parts",
    [
        {"method": "DELETE"},
        {"target": "no-slash"},
        {"target": "/a b"},
        {"target": "/\n"},
        {"size_bytes": -1},
        {"size_bytes": True},
        {"size_bytes": 1.0},
        {"headers": [["Upper", "x"]]},
        {"headers": [["a", "x\r\ny"]]},
        {"headers": [["a"]]},
        {"headers": [["a", "b"]] * 200},
        {"token": ""},
    ],
)
def test_what_a_request_may_not_be(parts: dict[str, Any]) -> None:
    with pytest.raises(BadMessage):
        decode(_with(**parts))


class Raw:
    """A process that says what it likes."""

    def __init__(self, site: Site, token: str) -> None:
        self.token = token
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        self.socket.connect(str(site.local._path))
        self.memory, self.fd = create(MIB, name="raw")

    def say(self, packet: bytes, *fds: int) -> None:
        socket.send_fds(self.socket, [packet], list(fds)) if fds else self.socket.send(packet)

    def hello(self) -> None:
        self.say(encode(Hello(self.token)), self.fd)

    def ask(self, **parts: Any) -> None:
        whole = {"token": self.token, "size_bytes": 0, **parts}
        self.say(_with(**whole))

    async def heard(self) -> Message | None:
        """The next message, None if it was closed."""
        loop = asyncio.get_running_loop()
        try:
            packet = await asyncio.wait_for(loop.sock_recv(self.socket, MESSAGE_BYTES_MAX), 10)
        except ConnectionError:
            return None
        return decode(packet) if packet else None

    def close(self) -> None:
        self.socket.close()
        self.memory.close()
        os.close(self.fd)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with same_host(tmp_path) as made:
        yield made


def raw(site: Site) -> Raw:
    return Raw(site, site.local.tokens.issue(PEER))


def sealed(size_bytes: int, seals: int) -> int:
    fd = os.memfd_create("bad", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


BOTH = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


async def _garbage(one: Raw) -> None:
    one.say(b"garbage")


async def _long(one: Raw) -> None:
    one.say(b"x" * (MESSAGE_BYTES_MAX + 100))


async def _no_memory(one: Raw) -> None:
    one.say(encode(Hello(one.token)))


async def _no_token(one: Raw) -> None:
    one.say(encode(Hello(TOKEN)), one.fd)
    assert isinstance(await one.heard(), Refused)


async def _many_descriptors(one: Raw) -> None:
    one.say(encode(Hello(one.token)), *[one.fd] * 50)


async def _no_memory_file(one: Raw) -> None:
    one.say(encode(Hello(one.token)), one.socket.fileno())


async def _may_shrink(one: Raw) -> None:
    fd = sealed(MIB, fcntl.F_SEAL_GROW)
    one.say(encode(Hello(one.token)), fd)
    os.close(fd)


async def _huge(one: Raw) -> None:
    fd = sealed(1 << 40, BOTH)
    one.say(encode(Hello(one.token)), fd)
    os.close(fd)


async def _read_only(one: Raw) -> None:
    fd = sealed(MIB, BOTH | fcntl.F_SEAL_WRITE)
    one.say(encode(Hello(one.token)), fd)
    os.close(fd)


async def _twice(one: Raw) -> None:
    one.hello()
    assert await one.heard() == Ready()
    one.hello()


async def _asks_first(one: Raw) -> None:
    one.ask()


async def _beyond(one: Raw) -> None:
    one.hello()
    assert await one.heard() == Ready()
    one.ask(size_bytes=MIB + 1)


async def _plays_the_server(one: Raw) -> None:
    one.hello()
    assert await one.heard() == Ready()
    one.say(encode(Answer(200, (), 0, digest_of(b""))))


async def _asks_with_memory(one: Raw) -> None:
    one.hello()
    assert await one.heard() == Ready()
    one.say(_with(token=one.token, size_bytes=0), one.fd)


DEEDS = (
    _garbage,
    _long,
    _no_memory,
    _no_token,
    _many_descriptors,
    _no_memory_file,
    _may_shrink,
    _huge,
    _read_only,
    _twice,
    _asks_first,
    _beyond,
    _plays_the_server,
    _asks_with_memory,
)


async def test_each_deed_ends_its_connection_and_no_other(site: Site) -> None:
    """And none leaves a descriptor behind."""
    client, over_tls = await site.ready()
    body = os.urandom(64 << 10)
    assert (await client.request("PUT", site.uri("q_rows.0"), body=body)).status == 201
    before = len(os.listdir("/proc/self/fd"))
    for number, deed in enumerate(DEEDS, start=1):
        one = raw(site)
        await deed(one)
        assert await one.heard() is None, deed.__name__
        one.close()
        answer = await client.request("PUT", site.uri(f"q_rows.{number}"), body=body)
        assert answer.status == 201
    assert client.exchanges == len(DEEDS) + 1 and not over_tls.passed
    assert len(site.local._connections) == 1, "the honest one's"
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_from_a_pool_that_can_run_dry_is_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Huge pages: this system may have none to make such a file of."""
    memory, fd = create(MIB, name="huge")
    attach(fd, bytes_max=MIB).close()
    found = os.fstatvfs(fd)
    parts = (2 << 20, *found[1:])
    monkeypatch.setattr(local_memory.os, "fstatvfs", lambda _: os.statvfs_result(parts))
    with pytest.raises(BadMemory, match="unusual size"):
        attach(fd, bytes_max=MIB)
    memory.close()
    os.close(fd)


async def test_what_may_not_be_asked_is_refused_and_the_link_stays(site: Site) -> None:
    one = raw(site)
    one.hello()
    assert await one.heard() == Ready()
    for parts in (
        {"target": "/sessions"},
        {"target": "/"},
        {"token": TOKEN},
    ):
        one.ask(**parts)
        assert isinstance(await one.heard(), Refused), parts
    for target in ("/objects/../sessions", "/objects/s/%2e%2e/x", "/objects/s"):
        one.ask(target=target)
        answer = await one.heard()
        assert isinstance(answer, Answer) and answer.status == 404, target
    one.ask(target="/objects/s/q_rows.a")
    answer = await one.heard()
    assert isinstance(answer, Answer) and answer.status == 201
    one.close()


async def test_who_says_nothing_is_closed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_serving, "HELLO_S", 0.01)
    one = raw(site)
    assert await one.heard() is None
    one.close()
    monkeypatch.setattr(local_serving, "IDLE_S", 0.01)
    other = raw(site)
    other.hello()
    assert await other.heard() == Ready()
    assert await other.heard() is None
    other.close()


async def test_connections_are_bounded_and_the_others_go_over_tls(site: Site) -> None:
    one = raw(site)
    crowd = []
    for _ in range(CONNECTIONS_MAX + 5):
        crowd.append(Raw(site, one.token))
        await turns()
    client, over_tls = await site.ready()
    body = os.urandom(64 << 10)
    assert (await client.request("PUT", site.uri("q_rows.a"), body=body)).status == 201
    assert over_tls.passed == [f"PUT {len(body)}"]
    assert len(site.local._connections) == CONNECTIONS_MAX
    for other in (one, *crowd):
        other.close()


async def test_what_is_written_after_asking_is_not_seen(tmp_path: Path) -> None:
    """The body is the server's own before anything looks at it."""
    entered, go_on = asyncio.Event(), asyncio.Event()
    inner = mlc_handler("https://127.0.0.1/", HostTier(64 * MIB))
    bodies: list[bytes] = []

    async def handler(request: Request) -> Response:
        if request.method == "PUT":
            entered.set()
            await go_on.wait()
            bodies.append(request.body)
        return await inner(request)

    async with same_host(tmp_path, handler=handler) as site:
        one = raw(site)
        one.hello()
        assert await one.heard() == Ready()
        one.memory.write(0, b"honest")
        one.ask(size_bytes=6, target="/objects/s/q_rows.a")
        await entered.wait()
        one.memory.write(0, b"wicked")
        go_on.set()
        answer = await one.heard()
        assert isinstance(answer, Answer) and answer.status == 201
        assert bodies == [b"honest"]
        one.close()


async def test_bodies_that_wait_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_server, "BODIES_BYTES_MAX", 100 << 10)
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def handler(request: Request) -> Response:
        if request.path.endswith("held"):
            entered.set()
            await go_on.wait()
        return Response(204)

    async with same_host(tmp_path, handler=handler) as site:
        client, over_tls = await site.ready()
        body = bytes(64 << 10)
        held = asyncio.create_task(client.request("PUT", site.uri("held"), body=body))
        await entered.wait()
        assert (await client.request("PUT", site.uri("q_rows.a"), body=body)).status == 204
        assert over_tls.passed == [f"PUT {len(body)}"]
        go_on.set()
        assert (await held).status == 204
        assert (await client.request("PUT", site.uri("q_rows.a"), body=body)).status == 204
        assert client.exchanges == 2


async def test_two_questions_at_once_are_one_too_many(tmp_path: Path) -> None:
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def handler(request: Request) -> Response:
        if request.method == "PUT":
            entered.set()
            await go_on.wait()
        return Response(204)

    async with same_host(tmp_path, handler=handler) as site:
        one = raw(site)
        one.hello()
        assert await one.heard() == Ready()
        one.ask(target="/objects/s/q_rows.a")
        await entered.wait()
        one.ask(target="/objects/s/q_rows.b")
        assert await one.heard() is None
        go_on.set()
        one.close()


async def test_a_handler_that_fails_is_an_error_of_the_server_s(tmp_path: Path) -> None:
    async def handler(request: Request) -> Response:
        if request.method == "PUT":
            raise RuntimeError("the test wants it")
        return Response(204)

    async with same_host(tmp_path, handler=handler) as site:
        client, _ = await site.ready()
        answer = await client.request("PUT", site.uri("q_rows.a"), body=bytes(64 << 10))
        assert answer.status == 500 and client.exchanges == 1


async def test_a_close_lets_a_handler_finish(tmp_path: Path) -> None:
    entered, done = asyncio.Event(), asyncio.Event()

    async def handler(request: Request) -> Response:
        if request.method == "PUT":
            entered.set()
            await asyncio.sleep(0.01)
            done.set()
        return Response(204)

    async with same_host(tmp_path, handler=handler) as site:
        client, _ = await site.ready()
        put = asyncio.create_task(client.request("PUT", site.uri("q_rows.a"), body=bytes(64 << 10)))
        await entered.wait()
        await site.local.aclose()
        assert done.is_set()
        assert (await put).status == 204
