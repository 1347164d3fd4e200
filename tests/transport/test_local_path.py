"""Objects between processes of one host: through shared memory where it works, else over TLS."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from sdcpd.transport import local_link, local_place, local_server, local_serving
from sdcpd.transport.http import Request, RequestTimeout, Response
from sdcpd.transport.local_client import LocalClient
from sdcpd.transport.local_link import LocalLink, new_socket
from sdcpd.transport.local_memory import SharedMemory, create
from sdcpd.transport.local_messages import (
    Answer,
    Ask,
    Message,
    Ready,
    Refused,
    digest_of,
    parse_announcement,
)
from sdcpd.transport.local_place import LINKS_MAX, LocalPlace
from sdcpd.transport.local_tokens import LIFETIME_S, TOKENS_MAX, LocalTokens
from tests.kit.cuda import no_cuda
from tests.kit.http_pair import PEER
from tests.kit.same_host import MIB, Recording, Site, mlc_handler, same_host, turns
from tests.kit.tier_contract import Clock
from tiers.host import HostTier
from tiers.pinned import PinnedTier

ROWS = os.urandom(MIB) * 4
FRESH = (("if-none-match", "*"), ("sdcp-lease", "5000"))


async def put(client: LocalClient, uri: str, octets: bytes = ROWS, **options: float) -> int:
    return (await client.request("PUT", uri, headers=FRESH, body=octets, **options)).status


async def test_octets_of_objects_do_not_travel(tmp_path: Path) -> None:
    async with same_host(tmp_path) as site:
        client, over_tls = await site.ready()
        answer = await client.request("PUT", site.uri("q_rows.a"), headers=FRESH, body=ROWS)
        assert answer.status == 201 and answer.header("location") == "/objects/scope/q_rows.a"
        got = await client.request("GET", site.uri("q_rows.a"))
        assert (got.status, got.body) == (200, ROWS)
        assert got.header("etag") == answer.header("etag")
        assert not over_tls.passed
        assert site.local.exchanges == client.exchanges == 2
        plain = await over_tls.request("GET", site.uri("q_rows.a"))
        assert plain.body == ROWS, "both ways lead to the same"


async def test_the_way_is_found_while_the_first_goes_over_tls(tmp_path: Path) -> None:
    async with same_host(tmp_path) as site:
        client, over_tls = site.client()
        assert not client.is_near(site.base)
        assert await put(client, site.uri("q_rows.a")) == 201
        await asyncio.gather(*client._asking.values())
        assert sorted(over_tls.passed) == ["OPTIONS 0", f"PUT {len(ROWS)}"]
        assert client.is_near(site.base)
        assert await put(client, site.uri("q_rows.b")) == 201
        assert client.exchanges == 1


async def test_what_is_small_or_no_object_goes_as_ever(tmp_path: Path) -> None:
    async with same_host(tmp_path) as site:
        client, over_tls = await site.ready()
        assert await put(client, site.uri("q_rows.a"), b"small") == 201
        await client.request("GET", site.base + "status")
        await client.request("POST", site.uri("q_rows.a"), headers=(("sdcp-lease", "0"),))
        assert over_tls.passed == ["PUT 5", "GET 0", "POST 0"] and not client.exchanges


async def test_the_same_checks_of_who_may_do_what(tmp_path: Path) -> None:
    """A drafter writes no KV, and the admin nothing at all."""
    async with same_host(tmp_path) as site:
        drafter, over_tls = await site.ready()
        assert await put(drafter, site.uri("target_kv.a")) == 403
        assert drafter.exchanges == 1 and not over_tls.passed
        assert (await drafter.request("GET", site.uri("target_kv.a"))).status == 404
        verifier, _ = await site.ready(role="verifier", name="v1")
        assert await put(verifier, site.uri("target_kv.a")) == 201
        assert await put(verifier, site.uri("target_kv.a"), ROWS[1:]) == 412
        assert verifier.exchanges == 2
        admin, _ = site.client("admin", "a0")
        answer = await admin.request("OPTIONS", site.uri("q_rows.a"))
        assert answer.status == 403 and answer.header("sdcp-local") is None
        assert not admin.is_near(site.base)


async def test_only_peers_of_this_host_are_told(tmp_path: Path) -> None:
    async with same_host(tmp_path, is_near=lambda _: False) as site:
        client, _ = site.client()
        answer = await client.request("HEAD", site.uri("q_rows.a"))
        assert answer.status == 404 and answer.header("sdcp-local") is None
        assert await put(client, site.uri("q_rows.a")) == 201 and not client.exchanges


async def test_another_boot_is_another_host(tmp_path: Path) -> None:
    async with same_host(tmp_path) as site:
        client, _ = site.client(boot="0" * 36)
        answer = await client.request("OPTIONS", site.uri("q_rows.a"))
        assert parse_announcement(answer.header("sdcp-local") or "") is not None
        assert not client.is_near(site.base)
        assert await put(client, site.uri("q_rows.a")) == 201 and not client.exchanges


async def test_another_user_is_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with same_host(tmp_path) as site:
        client, over_tls = await site.ready()
        with monkeypatch.context() as context:
            context.setattr(local_link.os, "geteuid", lambda: 4711)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ours, theirs:
                assert not local_link.is_own_user(ours)
            assert await put(client, site.uri("q_rows.a")) == 201
        assert over_tls.passed == [f"PUT {len(ROWS)}"]
    async with same_host(tmp_path / "other", is_allowed=lambda _: False) as site:
        client, over_tls = await site.ready()
        assert await put(client, site.uri("q_rows.a")) == 201
        assert over_tls.passed == [f"PUT {len(ROWS)}"] and not site.local.exchanges


async def test_a_socket_of_another_user_s_is_told_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who listens there would get the token, and the memory with the object."""
    monkeypatch.setattr(local_place, "is_own_user", lambda _: False)
    async with same_host(tmp_path) as site:
        client, over_tls = await site.ready()
        assert await put(client, site.uri("q_rows.a")) == 201
        assert over_tls.passed == [f"PUT {len(ROWS)}"] and not site.local.exchanges


async def test_another_user_that_reaches_the_socket_is_not_served(tmp_path: Path) -> None:
    """Only root can try it in earnest: a child of nobody's connects and hears the end."""
    if os.geteuid() != 0:
        return
    async with same_host(tmp_path) as site:
        path = site.local._path
        path.parent.chmod(0o755)
        path.chmod(0o666)
        child = os.fork()
        if child == 0:
            os._exit(_heard_as_nobody(path))
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert not site.local._connections


def _heard_as_nobody(path: Path) -> int:
    """0 if the connection was closed at once."""
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.settimeout(20)
            other.connect(str(path))
            return len(other.recv(10))
    except ConnectionResetError:
        return 0
    except OSError:
        return 1


async def test_an_old_token_is_renewed_over_tls(tmp_path: Path) -> None:
    clock = Clock()
    async with same_host(tmp_path, clock=clock) as site:
        client, over_tls = await site.ready(clock=clock)
        clock.now += 2 * LIFETIME_S
        assert await put(client, site.uri("q_rows.a")) == 201
        assert over_tls.passed == ["OPTIONS 0"] and client.exchanges == 1
        clock.now += LIFETIME_S / 2 - 1
        assert await put(client, site.uri("q_rows.b")) == 201
        await asyncio.gather(*client._asking.values())
        assert over_tls.passed == ["OPTIONS 0"] * 2, "asked before it is too old"


async def test_a_reload_of_certificates_has_everybody_show_them_again(tmp_path: Path) -> None:
    async with same_host(tmp_path) as site:
        client, over_tls = await site.ready()
        assert await put(client, site.uri("q_rows.a")) == 201
        site.local.forget_tokens()
        assert await put(client, site.uri("q_rows.b")) == 201
        await asyncio.gather(*client._asking.values())
        assert sorted(over_tls.passed) == ["OPTIONS 0", f"PUT {len(ROWS)}"]
        assert await put(client, site.uri("q_rows.c")) == 201
        assert client.exchanges == 2
        client.forget()
        assert not client.is_near(site.base)


def test_tokens_are_bounded_and_end() -> None:
    clock = Clock()
    tokens = LocalTokens(clock=clock)
    first = tokens.issue(PEER)
    assert tokens.issue(PEER) == first
    clock.now += LIFETIME_S * 0.6
    second = tokens.issue(PEER)
    assert second != first and tokens.peer(first) == PEER
    clock.now += LIFETIME_S * 0.5
    assert tokens.peer(first) is None and tokens.peer(second) == PEER
    for number in range(2 * TOKENS_MAX):
        tokens.issue(replace(PEER, fingerprint=str(number)))
    assert len(tokens) == TOKENS_MAX and tokens.peer(second) is None
    tokens.forget()
    assert not len(tokens)


async def test_larger_objects_get_a_larger_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_place, "MEMORY_BYTES_MIN", 64 << 10)
    async with same_host(tmp_path) as site:
        client, over_tls = await site.ready()
        assert await put(client, site.uri("q_rows.a")) == 201
        assert client.exchanges == 1
        other, over_tls = await site.ready()
        got = await other.request("GET", site.uri("q_rows.a"))
        assert got.body == ROWS and over_tls.passed == ["GET 0"], "it did not fit"
        got = await other.request("GET", site.uri("q_rows.a"))
        assert got.body == ROWS and other.exchanges == 1


async def test_many_at_once_share_a_few_links(tmp_path: Path) -> None:
    async with same_host(tmp_path) as site:
        client, over_tls = await site.ready()
        uris = [site.uri(f"q_rows.{n}") for n in range(20)]
        bodies = [os.urandom(32 << 10) for _ in uris]
        assert await asyncio.gather(*map(put, [client] * 20, uris, bodies)) == [201] * 20
        answers = await asyncio.gather(*(client.request("GET", uri) for uri in uris))
        assert [answer.body for answer in answers] == bodies
        assert client.exchanges == 40 and not over_tls.passed
        assert len(site.local._connections) <= local_place.LINKS_MAX


async def test_who_gives_up_in_the_middle_gets_another_link(tmp_path: Path) -> None:
    held, entered = asyncio.Event(), asyncio.Event()
    inner = mlc_handler("https://127.0.0.1/", HostTier(64 * MIB))

    async def handler(request: Request) -> Response:
        if request.path.endswith("held"):
            entered.set()
            await held.wait()
        return await inner(request)

    async with same_host(tmp_path, handler=handler) as site:
        client, _ = await site.ready()
        task = asyncio.create_task(put(client, site.uri("q_rows.held")))
        await entered.wait()
        task.cancel()
        await asyncio.wait([task])
        assert await put(client, site.uri("q_rows.a"), ROWS[::-1]) == 201
        held.set()
        got = await client.request("GET", site.uri("q_rows.a"))
        assert got.body == ROWS[::-1]
        assert (await client.request("GET", site.uri("q_rows.held"))).body == ROWS, "it went on"


async def test_links_in_use_end_with_what_they_carry_once_the_place_is_forgotten(
    tmp_path: Path,
) -> None:
    held, entered = asyncio.Event(), asyncio.Event()

    async def handler(request: Request) -> Response:
        if request.method == "PUT":
            entered.set()
            await held.wait()
        return Response(204)

    async with same_host(tmp_path, handler=handler) as site:
        client, over_tls = await site.ready()
        task = asyncio.create_task(put(client, site.uri("q_rows.a")))
        await entered.wait()
        client.forget()
        held.set()
        assert await task == 204 and not over_tls.passed
        while site.local._connections:
            await turns()
        assert not client.is_near(site.base)


async def test_what_was_done_and_not_answered_is_no_conflict(tmp_path: Path) -> None:
    """The answer is lost, so it is done again over TLS, where the same octets are there."""
    inner = mlc_handler("https://127.0.0.1/", HostTier(64 * MIB))
    lose = True

    async def handler(request: Request) -> Response:
        nonlocal lose
        answer = await inner(request)
        if request.method == "PUT" and lose:
            lose = False
            for connection in list(site.local._connections):
                connection._close("the test wants it")
        return answer

    async with same_host(tmp_path, handler=handler) as site:
        client, over_tls = await site.ready()
        assert await put(client, site.uri("q_rows.a")) == 204
        assert over_tls.passed == [f"PUT {len(ROWS)}"] and client.failures == 1


async def test_what_lies_in_the_arena_is_copied_once_and_held_no_longer(tmp_path: Path) -> None:
    tier = PinnedTier(16 * MIB, runtime=no_cuda)
    async with same_host(tmp_path, tier=tier) as site:
        client, over_tls = await site.ready()
        uri = site.uri("q_rows.a")
        assert await put(client, uri) == 201
        got = await client.request("GET", uri)
        assert got.body == ROWS and isinstance(got.body, bytes)
        part = await client.request("GET", uri, headers=(("range", "bytes=10-19"),))
        assert (part.status, part.body) == (206, ROWS[10:20])
        assert not over_tls.passed and client.exchanges == 3
        plain = await over_tls.request("GET", uri)
        assert plain.body == ROWS
        assert await put(client, uri) == 412, "there already"
        assert (await client.request("PUT", uri, body=ROWS)).status == 204
        await client.request("DELETE", uri)
        await turns()
        gc.collect()
        assert tier._arena.held_bytes() == 0


Fault = Callable[[LocalLink, Message], object]


def _answers(message: Message) -> Fault:
    return lambda link, asked: link.send(message if isinstance(asked, Ask) else Ready())


def _closes_when_asked(link: LocalLink, asked: Message) -> None:
    if isinstance(asked, Ask):
        link.close()
    else:
        link.send(Ready())


def _answers_out_of_turn(link: LocalLink, _: Message) -> None:
    link.send(Ready())
    link.send(Ready())


FAULTS: dict[str, Fault] = {
    "closes at once": lambda link, _: link.close(),
    "closes when asked": _closes_when_asked,
    "never says hello": lambda _link, _: None,
    "says garbage": lambda link, _: link._socket.send(b"garbage"),
    "answers out of turn": _answers_out_of_turn,
    "refuses": _answers(Refused("no")),
    "other octets": _answers(Answer(200, (), 10, "0" * 32)),
    "too many octets": _answers(Answer(200, (), 1 << 40, digest_of(b""))),
    "a wrong message": _answers(Ready()),
}


@asynccontextmanager
async def faulty(client: LocalClient, site: Site, fault: Fault) -> AsyncIterator[None]:
    """Have the client find another server at the local socket."""
    links: list[LocalLink] = []
    loop = asyncio.get_running_loop()

    def accept() -> None:
        came, _ = listener.accept()
        came.setblocking(False)

        def received(message: Message, fd: int | None) -> None:
            if fd is not None:
                os.close(fd)
            fault(link, message)

        link = LocalLink(came, received=received, lost=lambda _: None)
        links.append(link)

    path = site.local._path.with_name("fake.sock")
    with new_socket() as listener:
        listener.bind(str(path))
        listener.listen()
        loop.add_reader(listener.fileno(), accept)
        place = place_of(client, site)
        place.announced = replace(place.announced, path=str(path))
        yield
        loop.remove_reader(listener.fileno())
    for link in links:
        link.close()


def place_of(client: LocalClient, site: Site) -> LocalPlace:
    place = client._origins[site.base.rstrip("/")].place
    assert place is not None
    return place


@pytest.mark.parametrize("fault", FAULTS)
async def test_whatever_fails_goes_over_tls(fault: str, tmp_path: Path) -> None:
    few = ROWS[: 32 << 10]
    async with same_host(tmp_path) as site:
        client, _ = await site.ready()
        async with faulty(client, site, FAULTS[fault]):
            assert await put(client, site.uri("q_rows.a"), few, timeout_s=2.0) == 201
            got = await client.request("GET", site.uri("q_rows.a"), timeout_s=2.0)
        assert got.body == few and not client.exchanges


async def test_all_of_the_time_is_the_server_s_once_it_was_asked(tmp_path: Path) -> None:
    """It may be at it, as over TLS, where nobody would ask a second time either."""

    asked_for: list[str] = []

    def answers_once(link: LocalLink, asked: Message) -> None:
        if not isinstance(asked, Ask):
            link.send(Ready())
            return
        asked_for.append(asked.target)
        if len(asked_for) == 1:
            link.send(Answer(204, (), 0, digest_of(b"")))

    async with same_host(tmp_path) as site:
        client, over_tls = await site.ready()
        async with faulty(client, site, answers_once):
            assert await put(client, site.uri("q_rows.0")) == 204
            with pytest.raises(RequestTimeout, match="it may have been processed"):
                await put(client, site.uri("q_rows.a"), timeout_s=0.3)
            assert not over_tls.passed
            assert await put(client, site.uri("q_rows.a")) == 201, "the next is not held up"
            assert over_tls.passed == [f"PUT {len(ROWS)}"] and len(asked_for) == 2


async def test_who_finds_all_links_in_use_does_not_wait_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = asyncio.Event()

    async def handler(request: Request) -> Response:
        if request.path.endswith("held"):
            await go_on.wait()
        return Response(204)

    async with same_host(tmp_path, handler=handler) as site:
        client, over_tls = await site.ready()
        held = [asyncio.create_task(put(client, site.uri("held"))) for _ in range(LINKS_MAX)]
        while site.local._bodies_bytes < LINKS_MAX * len(ROWS):
            await turns()
        monkeypatch.setattr(local_place, "EARLY_S", 0.01)
        assert await put(client, site.uri("q_rows.a")) == 204
        assert over_tls.passed == [f"PUT {len(ROWS)}"] and client.is_near(site.base)
        go_on.set()
        assert await asyncio.gather(*held) == [204] * LINKS_MAX and len(over_tls.passed) == 1


async def test_memory_of_a_link_that_the_server_closed_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_serving, "IDLE_S", 0.01)
    async with same_host(tmp_path) as site:
        client, over_tls = await site.ready()
        assert await put(client, site.uri("q_rows.a")) == 201
        (link,) = place_of(client, site)._idle
        async with asyncio.timeout(10):
            while not link._memory._map.closed:
                await turns()
        assert await put(client, site.uri("q_rows.b")) == 201
        assert client.exchanges == 2 and not over_tls.passed


async def test_a_server_that_fails_costs_no_memory_for_every_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left alone for a second, then for two, until it answers."""
    made: list[int] = []

    def counting(size_bytes: int, *, name: str) -> tuple[SharedMemory, int]:
        made.append(size_bytes)
        return create(size_bytes, name=name)

    monkeypatch.setattr(local_place, "create", counting)
    clock, few = Clock(), ROWS[: 32 << 10]
    async with same_host(tmp_path) as site:
        client, _ = await site.ready(clock=clock)
        monkeypatch.setattr(local_server, "CONNECTIONS_MAX", 0)

        async def tries() -> int:
            made.clear()
            for _ in range(3):
                await client.request("PUT", site.uri("q_rows.a"), body=few)
            return len(made)

        assert await tries() == 1 and not client.is_near(site.base)
        for waited_s, tried in ((0.9, 0), (0.1, 1), (1.9, 0), (0.1, 1), (4.0, 1)):
            clock.now += waited_s
            assert await tries() == tried, f"after another {waited_s} s"
        monkeypatch.setattr(local_server, "CONNECTIONS_MAX", 1)
        clock.now += 8
        assert await tries() == 1 and client.is_near(site.base) and client.exchanges == 3


async def test_a_server_that_is_gone_is_not_tried_again_and_again(tmp_path: Path) -> None:
    clock = Clock()
    async with same_host(tmp_path) as site:
        client, over_tls = await site.ready(clock=clock)
        await site.local.aclose()
        for name in ("q_rows.a", "q_rows.b"):
            assert await put(client, site.uri(name)) == 201
        assert client.failures == 1 and not client.is_near(site.base)
        assert isinstance(over_tls, Recording) and len(over_tls.passed) == 2
