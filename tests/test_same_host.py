"""Where the local sockets lie, and that a process does without where they cannot."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from sdcpd.same_host import SameHost
from sdcpd.transport.http import Request, Response
from sdcpd.transport.local_server import LocalServer


async def handler(_: Request) -> Response:
    return Response(204)


def serve(host: SameHost, directory: Path | None, name: str = "router.r0") -> LocalServer | None:
    return host.serve(
        handler,
        directory=directory,
        name=name,
        objects_path="/objects/",
        body_bytes_max=lambda *_: 1,
    )


async def test_a_socket_is_where_it_was_asked_for_and_only_its_owner_s(tmp_path: Path) -> None:
    host = SameHost()
    directory = tmp_path / "new"
    server = serve(host, directory)
    path = directory / "router.r0.objects.sock"
    assert server is not None and path.is_socket() and path.stat().st_mode & 0o777 == 0o600
    await host.close(server)
    assert not path.exists() and directory.exists()


async def test_a_socket_of_a_process_that_was_killed_is_replaced(tmp_path: Path) -> None:
    host = SameHost()
    left = serve(host, tmp_path)
    assert left is not None
    again = serve(host, tmp_path)
    assert again is not None
    await host.close(again)
    await host.close(left)


async def test_without_a_directory_there_is_a_private_one_until_the_end() -> None:
    host = SameHost()
    servers = [serve(host, None, name) for name in ("router.r0", "verifier.v0")]
    directory = host._own_directory
    assert directory is not None and directory.stat().st_mode & 0o777 == 0o700
    for server in servers:
        assert server is not None
        await host.close(server)
    assert not directory.exists()


@pytest.mark.parametrize("flaw", ["long", "file in the way", 'quo"te'])
async def test_where_there_can_be_none_it_is_said_once(
    flaw: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / ("x" * 100 if flaw == "long" else flaw)
    if flaw == "file in the way":
        directory.write_text("")
    with caplog.at_level(logging.INFO):
        assert serve(SameHost(), directory) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "[mlc] local_dir" in record.getMessage()
