"""Requests within one process look like requests over a socket."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcpd.transport.http import ConnectFailed, Request, RequestTimeout, Response
from sdcpd.transport.loopback import LoopbackClient, _normal
from sdcpd.transport.request_head import split_uri
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


PARTS = st.text("abcXYZ019-._~%:/?#&=", max_size=30)
AUTHORITIES = st.sampled_from(["h", "Host.Test", "127.0.0.1:7443", "[::1]:80", "h:443"])


@given(st.sampled_from(["https", "HTTPS"]), AUTHORITIES, PARTS)
def test_a_uri_is_split_as_the_standard_library_splits_it(
    scheme: str, authority: str, rest: str
) -> None:
    """Done by hand, for every output of a session has a URI of its own."""
    uri = f"{scheme}://{authority}/{rest}"
    parts = urlsplit(uri)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    origin, named, found = split_uri(uri)
    assert (origin.host, origin.port) == (parts.hostname, parts.port or 443)
    assert (named, found) == (parts.netloc, target)
    path = parts.path[:-1] if parts.path.endswith("/") else parts.path
    assert _normal(uri) == f"https://{parts.hostname}:{parts.port or 443}{path}"


@pytest.mark.parametrize(
    "uri",
    ["http://h/", "h", "", "https://", "https:///x", "https://u@h/", "ftp://h", "https://h:x/"],
)
def test_what_is_no_https_uri_is_refused(uri: str) -> None:
    with pytest.raises(ValueError):
        split_uri(uri)
