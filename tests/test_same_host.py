"""Where the local sockets lie, and that a process does without where they cannot."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from sdcpd.config import Config, parse_config
from sdcpd.dev.plan import free_ports
from sdcpd.metrics import Metrics
from sdcpd.parts import Instance, Parts, StartError
from sdcpd.roles.base import Listener
from sdcpd.same_host import OWN_PREFIX, SameHost
from sdcpd.stores import Stores
from sdcpd.transport import local_listener
from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import Request, Response
from sdcpd.transport.local_link import new_socket
from sdcpd.transport.local_listener import is_listened
from sdcpd.transport.local_server import FIELD, LocalServer
from tests.kit.certs import CertKit
from tiers.host import HostTier


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose name leaves room for that of a socket below another."""
    with TemporaryDirectory(prefix="t-") as directory:
        yield Path(directory)


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


async def test_a_directory_may_be_a_link_to_one(short: Path) -> None:
    (short / "real").mkdir()
    (short / "link").symlink_to("real")
    host = SameHost()
    server = serve(host, short / "link")
    assert server is not None and is_listened(short / "real" / "router.r0.objects.sock")
    await host.close(server)
    assert not list((short / "real").iterdir())


def as_if_killed(path: Path) -> None:
    """What a process that was killed leaves: its socket's file."""
    with new_socket() as left:
        left.bind(str(path))
        left.listen()


async def test_a_socket_of_a_process_that_was_killed_is_replaced(tmp_path: Path) -> None:
    as_if_killed(tmp_path / "router.r0.objects.sock")
    host = SameHost()
    again = serve(host, tmp_path)
    assert again is not None and is_listened(again._path)
    await host.close(again)


async def test_a_socket_at_which_somebody_listens_stays_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = SameHost()
    running = serve(host, tmp_path)
    assert running is not None
    assert serve(SameHost(), tmp_path) is None
    assert "another process listens at" in caplog.text and is_listened(running._path)
    await host.close(running)


async def test_a_close_leaves_alone_what_another_has_put_there(tmp_path: Path) -> None:
    host = SameHost()
    first, path = serve(host, tmp_path), tmp_path / "router.r0.objects.sock"
    assert first is not None
    path.unlink()
    second = serve(host, tmp_path)
    assert second is not None
    await host.close(first)
    assert is_listened(path)
    await host.close(second)
    assert not path.exists()


async def test_without_a_directory_there_is_a_private_one_until_the_end() -> None:
    host = SameHost()
    servers = [serve(host, None, name) for name in ("router.r0", "verifier.v0")]
    directory = host._own_directory
    assert directory is not None and directory.stat().st_mode & 0o777 == 0o700
    for server in servers:
        assert server is not None
        await host.close(server)
    assert not directory.exists()
    again = serve(host, None)
    assert again is not None, "a new one is made where it is needed again"
    await host.close(again)


async def test_own_directories_of_processes_that_were_killed_are_removed(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those in which somebody listens or may be about to, nor what has other things in it."""
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    dead, empty, other = (short / f"{OWN_PREFIX}{name}" for name in ("dead", "empty", "other"))
    for directory in (dead, empty, other):
        directory.mkdir()
    as_if_killed(dead / "router.r0.objects.sock")
    as_if_killed(other / "router.r0.objects.sock")
    (other / "notes").write_text("")
    (short / f"{OWN_PREFIX}link").symlink_to(dead)
    alive = SameHost()
    server = serve(alive, None)
    assert server is not None and not dead.exists() and empty.exists() and other.exists()
    next_host = SameHost()
    beside = serve(next_host, None)
    assert beside is not None and is_listened(server._path)
    await next_host.close(beside)
    await alive.close(server)


async def test_directories_of_other_users_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_killed(tmp_path / "router.r0.objects.sock")
    with monkeypatch.context() as context:
        context.setattr(local_listener.os, "geteuid", lambda: 4711)
        local_listener.remove_dead(tmp_path)
    assert tmp_path.exists()
    local_listener.remove_dead(tmp_path)
    assert not tmp_path.exists()


def configured(folder: Path, kit: CertKit) -> Config:
    """A router with a port of its own, and its local socket in the folder."""
    (port,) = free_ports(1)
    base = f"https://127.0.0.1:{port}/"
    leaf = kit.leaf("router", "r0", base_uri=base)
    files = f'ca = "{kit.ca}"\ncert = "{leaf.crt_path}"\nkey = "{leaf.key_path}"'
    return parse_config(
        f"""[node]\ntrust_domain = "test.example"\n[transport]\nhttp3 = false\n[tls]\n{files}
        [mlc]\nlocal_dir = "{folder}"
        [router]\nlisten = "127.0.0.1:{port}"\nbase_uri = "{base}"\nmodel = "/m"\n""",
        name="test",
    )


async def start(parts: Parts) -> str:
    """Listen as a daemon's router does; returns its base URI."""
    assert parts.config.router is not None
    base = parts.config.router.base_uri
    instance = Instance("router", "r0")
    listener = Listener(base, (), peers=parts.peers, mlc=Stores(parts).mlc(base, HostTier(1 << 20)))
    await parts.serve(
        instance,
        listener,
        parts.identity(instance),
        base_uri=base,
        metrics=Metrics("router"),
    )
    return base


async def test_an_instance_that_is_started_twice_by_mistake_leaves_the_first_its_socket(
    tmp_path: Path,
) -> None:
    config = configured(tmp_path, CertKit(tmp_path / "pki"))
    first, second = Parts(config), Parts(config)
    path = tmp_path / "router.r0.objects.sock"
    async with first.stack:
        await start(first)
        before = path.stat().st_ino
        with pytest.raises(StartError, match="cannot listen on"):
            async with second.stack:
                await start(second)
        assert is_listened(path) and path.stat().st_ino == before
    assert not path.exists()


async def test_a_reload_of_certificates_ends_what_was_told_before(tmp_path: Path) -> None:
    kit = CertKit(tmp_path / "pki")
    parts = Parts(configured(tmp_path, kit))
    async with parts.stack, aclosing(HttpClient(kit.identity("drafter", "d0"))) as client:
        uri = f"{await start(parts)}objects/scope/q_rows.a"

        async def told() -> str | None:
            return (await client.request("OPTIONS", uri)).header(FIELD)

        before = await told()
        assert before is not None and await told() == before
        parts.certificates.reload()
        after = await told()
        assert after is not None and after != before


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
