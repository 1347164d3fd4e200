"""Requests within one process look like requests over a socket."""

from __future__ import annotations

import asyncio

import pytest

from sdcpd.transport.http import ConnectFailed, Request, RequestTimeout, Response
from sdcpd.transport.loopback import LoopbackClient
from sdcpd.transport.tuning import tune_process
from tests.kit.http_pair import PEER


async def echo(request: Request) -> Response:
    assert request.peer is PEER
    return Response(200, (), f"{request.authority} {request.path} {request.query}".encode())


async def test_routes_by_base_uri_as_d_h5_compares_them() -> None:
    async def nested(request: Request) -> Response:
        return Response(201)

    client = LoopbackClient({"https://Host:443/": echo, "https://host/deep": nested}, PEER)
    answer = await client.request("GET", "https://host/a%2Fb?n=1")
    assert answer.body == b"host /a%2Fb n=1"
    assert (await client.request("GET", "https://host/deep/x")).status == 201
    assert (await client.request("GET", "https://host/deeper")).status == 200
    with pytest.raises(ConnectFailed, match="no instance in this process"):
        await client.request("GET", "https://other/")


async def test_what_it_does_not_know_goes_to_the_fallback() -> None:
    inner = LoopbackClient({"https://other/": echo}, PEER)
    outer = LoopbackClient({"https://host/": echo}, PEER, fallback=inner)
    assert (await outer.request("GET", "https://other/x")).body == b"other /x "


async def test_handler_errors_and_head_are_as_on_a_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(request: Request) -> Response:
        raise RuntimeError("secret")

    client = LoopbackClient({"https://host/": broken, "https://fine/": echo}, PEER)
    answer = await client.request("GET", "https://host/")
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert (await client.request("HEAD", "https://fine/")).body == b""


async def test_d_h15_handler_outlives_a_caller_that_gives_up() -> None:
    release, finished = asyncio.Event(), asyncio.Event()

    async def slow(request: Request) -> Response:
        await release.wait()
        finished.set()
        return Response(204)

    client = LoopbackClient({"https://host/": slow}, PEER)
    with pytest.raises(RequestTimeout):
        await client.request("GET", "https://host/", timeout_s=0.05)
    release.set()
    await client.aclose()
    assert finished.is_set()


def test_process_tuning_says_whether_the_allocator_took_it() -> None:
    assert isinstance(tune_process(), bool)
