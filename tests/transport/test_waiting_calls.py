"""Calls above the server's limit of streams: whoever can go goes, and nobody is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import Request, Response
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
    kit: CertKit, handle: Callable[[Request], object], streams_max: int
) -> AsyncIterator[tuple[HttpClient, str]]:
    limits = H2Limits(streams_max=streams_max)
    async with serving(kit, handle, limits=limits) as (_, port):  # type: ignore[arg-type]
        client = HttpClient(kit.identity("router", "r0"), transport="h2")
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
