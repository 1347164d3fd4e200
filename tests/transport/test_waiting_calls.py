"""Calls above the server's limit of streams: whoever can go goes, and nobody is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import ConnectFailed, Request, Response
from sdcpd.transport.limits import H2Limits
from tests.kit.certs import CertKit
from tests.kit.serving import serving

LIMIT = 10


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> CertKit:
    return CertKit(tmp_path_factory.mktemp("pki"))


class Gate:
    """A handler that answers in waves: all that are there, together."""

    def __init__(self, size: int) -> None:
        self.size, self.inside, self.waves = size, 0, 0
        self._open = asyncio.Event()

    async def __call__(self, request: Request) -> Response:
        self.inside += 1
        if self.inside == self.size:
            self.waves += 1
            self.inside = 0
            self._open.set()
            self._open = asyncio.Event()
        else:
            await self._open.wait()
        return Response(204)


@asynccontextmanager
async def connected(
    kit: CertKit,
    handle: Callable[[Request], object],
    streams_max: int,
    *,
    connections_max: int = 1,
) -> AsyncIterator[tuple[HttpClient, str]]:
    limits = H2Limits(streams_max=streams_max)
    async with serving(kit, handle, limits=limits) as (_, port):  # type: ignore[arg-type]
        client = HttpClient(
            kit.identity("router", "r0"), transport="h2", connections_max=connections_max
        )
        yield client, f"https://127.0.0.1:{port}/"
        await client.aclose()


async def test_streams_that_become_free_together_are_used_together(kit: CertKit) -> None:
    """Each wave ends only when the limit is reached: one stream less, and it would hang."""
    gate = Gate(LIMIT)
    async with connected(kit, gate, LIMIT) as (client, uri):
        async with asyncio.timeout(20):
            await asyncio.gather(*(client.request("GET", uri) for _ in range(5 * LIMIT)))
    assert gate.waves == 5


async def test_a_call_that_fails_or_is_given_up_passes_its_turn_on(kit: CertKit) -> None:
    """On an idle connection nothing else would wake the others before the next ping."""
    entered, leave = asyncio.Event(), asyncio.Event()

    async def handle(request: Request) -> Response:
        if request.path == "/held":
            entered.set()
            await leave.wait()
        return Response(204)

    async with connected(kit, handle, 1) as (client, uri):
        held = asyncio.ensure_future(client.request("GET", f"{uri}held"))
        await entered.wait()
        bad = asyncio.ensure_future(client.request("GET", uri, headers=(("x", "a\nb"),)))
        given_up = asyncio.ensure_future(client.request("GET", uri))
        good = [asyncio.ensure_future(client.request("GET", uri)) for _ in range(3)]
        (connection,) = client._connections
        while len(connection._waiting) < 5:
            await asyncio.sleep(0)
        leave.set()
        await held
        given_up.cancel()
        async with asyncio.timeout(5):
            assert [one.status for one in await asyncio.gather(*good)] == [204] * 3
        with pytest.raises(ValueError, match="line break"):
            await bad


async def test_more_calls_than_streams_take_another_connection(kit: CertKit) -> None:
    """Long polls hold a stream each; a call beside them must not wait until one of them ends."""
    gate = Gate(3 * LIMIT)
    async with connected(kit, gate, LIMIT, connections_max=3) as (client, uri):
        async with asyncio.timeout(20):
            await asyncio.gather(*(client.request("GET", uri) for _ in range(6 * LIMIT)))
        assert len(client._connections) == 3
    assert gate.waves == 2


async def test_calls_go_on_where_no_other_connection_can_be_had(kit: CertKit) -> None:
    """A server that lets nobody in any more still serves those that it has let in."""
    leave = asyncio.Event()

    async def handle(request: Request) -> Response:
        if request.path == "/held":
            await leave.wait()
        return Response(204)

    async with connected(kit, handle, 1, connections_max=2) as (client, uri):
        held = asyncio.ensure_future(client.request("GET", f"{uri}held"))
        while not client._connections or next(iter(client._connections)).has_room:
            await asyncio.sleep(0)

        async def refused(*_: object) -> None:
            raise ConnectFailed("nobody is let in")

        client._connect_somehow = refused  # type: ignore[method-assign, assignment]
        call = asyncio.ensure_future(client.request("GET", uri))
        (connection,) = client._connections
        async with asyncio.timeout(5):
            while not connection._waiting:
                await asyncio.sleep(0)
            leave.set()
            assert (await call).status == (await held).status == 204
