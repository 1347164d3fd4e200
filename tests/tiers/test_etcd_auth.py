"""An etcd that asks for users: logging in, and again when it has forgotten the login."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sdcpd.protocol.commit_log import FenceRecord, encode_record
from tests.kit.etcd import EtcdCluster, running_etcd
from tiers.api import StoreFailed, TierError
from tiers.build import etcd_settings, open_etcd_logs, open_etcd_records

pytest.importorskip("aetcd", reason="the extra etcd is not installed")

import grpc.aio
from aetcd.rpc import AuthStub, auth_pb2
from aetcd.rpc import rpc_pb2 as pb

PREFIX = "guarded/logs"
PASSWORD = "correct horse"
Settings = Callable[..., Any]


def fence(epoch: int) -> bytes:
    return encode_record(FenceRecord(epoch=epoch))


async def enable(address: str) -> None:
    """Root, one user for the prefix, and one who may do nothing."""
    async with grpc.aio.insecure_channel(address) as channel:
        auth = AuthStub(channel)
        for name in ("root", "sdcpd", "nobody"):
            await auth.UserAdd(pb.AuthUserAddRequest(name=name, password=PASSWORD))
        for role in ("root", "logs"):
            await auth.RoleAdd(pb.AuthRoleAddRequest(name=role))
        permission = auth_pb2.Permission(
            permType=auth_pb2.Permission.READWRITE,
            key=f"{PREFIX}/".encode(),
            range_end=f"{PREFIX}0".encode(),
        )
        await auth.RoleGrantPermission(
            pb.AuthRoleGrantPermissionRequest(name="logs", perm=permission)
        )
        await auth.UserGrantRole(pb.AuthUserGrantRoleRequest(user="root", role="root"))
        await auth.UserGrantRole(pb.AuthUserGrantRoleRequest(user="sdcpd", role="logs"))
        await auth.AuthEnable(pb.AuthEnableRequest())


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    folder = tmp_path_factory.mktemp("etcd") / "auth"
    with running_etcd(folder, "--bcrypt-cost=4") as cluster:
        asyncio.run(enable(cluster.members[0].address))
        yield cluster


@pytest.fixture
def settings(guarded: EtcdCluster, tmp_path: Path) -> Settings:
    """Those of `user`, with a file that holds `password`."""

    def made(user: str = "sdcpd", password: str = PASSWORD, mode: int = 0o640) -> Any:
        file = tmp_path / "password"
        file.write_text(password + "\n")
        file.chmod(mode)
        return etcd_settings(
            endpoints=guarded.endpoints,
            prefix=PREFIX,
            user=user,
            password_file=file,
            timeout_s=5.0,
        )

    return made


@pytest.mark.parametrize("how", ["forgotten", pytest.param("restart", marks=pytest.mark.slow)])
async def test_logs_and_records_are_kept_for_a_user(
    settings: Settings, guarded: EtcdCluster, how: str
) -> None:
    """A restarted member knows no token: what meets that was not done, and is done again."""
    logs = await open_etcd_logs(settings())
    records = await open_etcd_records(settings(), how, on_lost=pytest.fail)
    tag = await logs.append(how, fence(1), offset=None, if_match=None, create=True)
    await records.sessions.put(b"k", b"v")
    if how == "restart":
        guarded.members[0].kill()
        await asyncio.to_thread(guarded.restart, guarded.members[0])
    else:
        for client in (logs._client, records._client):
            client._login._token = "none.1"
    tags = await asyncio.gather(
        logs.append(how, fence(2), offset=None, if_match=tag),
        *(
            logs.append(f"{how}-{n}", fence(1), offset=None, if_match=None, create=True)
            for n in range(9)
        ),
    )
    assert len(tags) == 10
    content = await logs.read(how)
    assert content is not None and content.data == fence(1) + fence(2)
    await records.sessions.put(b"k", b"w")
    await records.aclose()
    again = await open_etcd_records(settings(), how, on_lost=pytest.fail)
    assert again.sessions.all() == {b"k": b"w"}
    await again.aclose()
    await logs.aclose()


async def test_a_password_that_is_changed_in_its_file_is_taken(
    settings: Settings, guarded: EtcdCluster, tmp_path: Path
) -> None:
    logs = await open_etcd_logs(settings())
    (tmp_path / "password").write_text("none that etcd knows")
    logs._client._login.drop(logs._client._login._token)
    with pytest.raises(StoreFailed, match=r"does not take the login .* correct \[mlc.etcd\] user"):
        await logs.head("a")
    (tmp_path / "password").unlink()
    with pytest.raises(StoreFailed, match=r"password_file .* cannot be read"):
        await logs.head("a")
    settings()
    assert await logs.head("never-there") is None
    await logs.aclose()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"password": "wrong"}, r"does not take the login .* user and password_file"),
        ({"user": "stranger"}, r"does not take the login .* user and password_file"),
        ({"user": "nobody"}, "does not permit .* grant the user of"),
        ({"user": ""}, "does not permit .* user name is empty"),
        ({"mode": 0o644}, r"\[mlc.etcd\] password_file .* can be read by everybody: chmod 0640"),
        ({"password": ""}, "holds no password: put it there on one line"),
    ],
)
async def test_what_keeps_a_user_out_is_said(
    settings: Settings, given: dict[str, Any], text: str
) -> None:
    with pytest.raises(TierError, match=text) as caught:
        await open_etcd_logs(settings(**given))
    said = str(caught.value)
    assert "\n" not in said and PASSWORD not in said and "wrong" not in said


async def test_an_etcd_without_users_is_said(
    etcd: EtcdCluster, tmp_path: Path, settings: Settings
) -> None:
    settings()
    at = etcd_settings(
        endpoints=etcd.endpoints,
        prefix=PREFIX,
        user="sdcpd",
        password_file=tmp_path / "password",
        timeout_s=5.0,
    )
    with pytest.raises(TierError, match=r"has no users .* auth enable, or remove user"):
        await open_etcd_logs(at)
