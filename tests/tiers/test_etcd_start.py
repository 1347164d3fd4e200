"""What keeps a router from using an etcd: one sentence that says which, why and what to do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.kit.certs import CertKit
from tests.kit.etcd import EtcdCluster, need_etcd, running_etcd
from tiers.api import LogAppend, StoreFailed, StoreFull, TierError
from tiers.build import etcd_settings, open_etcd_logs

pytest.importorskip("aetcd", reason="the extra etcd is not installed")

import grpc.aio
from aetcd.rpc import rpc_pb2 as pb
from aetcd.rpc import rpc_pb2_grpc

from sdcpd.check import problems_of
from sdcpd.config import parse_config
from sdcpd.dev.plan import free_ports
from sdcpd.parts import Instance
from sdcpd.protocol.commit_log import FenceRecord, encode_record

FENCE = encode_record(FenceRecord(epoch=1))


async def opened(*endpoints: str, **rest: Any) -> Any:
    rest = {"prefix": f"t/{uuid4().hex}", "timeout_s": 5.0} | rest
    return await open_etcd_logs(etcd_settings(endpoints=endpoints, **rest))


async def refusal(*endpoints: str, **rest: Any) -> str:
    with pytest.raises(TierError) as caught:
        await opened(*endpoints, **rest)
    text = str(caught.value)
    assert "\n" not in text and "Traceback" not in text and "grpc_status" not in text
    return text


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> CertKit:
    return CertKit(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def tls_etcd(kit: CertKit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """A member that asks its clients for certificates."""
    leaf = kit.leaf("router", "etcd")
    folder = tmp_path_factory.mktemp("etcd") / "tls"
    with running_etcd(
        folder,
        f"--cert-file={leaf.crt_path}",
        f"--key-file={leaf.key_path}",
        f"--trusted-ca-file={kit.ca}",
        "--client-cert-auth",
    ) as cluster:
        yield cluster


async def test_nobody_listens() -> None:
    first, second = (f"127.0.0.1:{port}" for port in free_ports(2))
    text = await refusal(first, second)
    assert f"etcd at {first} does not answer: nobody listens there: start etcd, or correct" in text
    assert f"etcd at {second} does not answer" in text


async def test_a_name_that_nobody_has() -> None:
    text = await refusal("etcd.invalid:2379")
    assert "its name cannot be resolved: correct [mlc.etcd] endpoints" in text


async def test_one_member_that_answers_is_enough(etcd: EtcdCluster) -> None:
    """The dead one is passed by, and passed by again for each call."""
    dead = [f"127.0.0.1:{port}" for port in free_ports(2)]
    logs = await opened(*dead, *etcd.endpoints)
    tag = await logs.append("a", FENCE, offset=None, if_match=None, create=True)
    assert (await logs.head("a")).etag == tag
    await logs.aclose()


async def test_members_of_another_cluster_are_not_written_to(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    with running_etcd(tmp_path / "other") as other:
        logs = await opened(*etcd.endpoints, *other.endpoints)
        await logs.append("a", FENCE, offset=None, if_match=None, create=True)
        logs._client.turn_from(etcd.endpoints[0])
        with pytest.raises(StoreFailed, match="belongs to another cluster than the other"):
            await logs.append("b", FENCE, offset=None, if_match=None, create=True)
        await logs.append("b", FENCE, offset=None, if_match=None, create=True)
        await logs.aclose()


async def test_tls_with_a_client_certificate(kit: CertKit, tls_etcd: EtcdCluster) -> None:
    leaf = kit.leaf("router", "r0")
    logs = await opened(*tls_etcd.endpoints, ca=kit.ca, cert=leaf.crt_path, key=leaf.key_path)
    await logs.append("a", FENCE, offset=None, if_match=None, create=True)
    assert (await logs.read("a")).data == FENCE
    await logs.aclose()


async def test_certificates_that_do_not_fit(
    kit: CertKit, tls_etcd: EtcdCluster, etcd: EtcdCluster, tmp_path: Path
) -> None:
    (address,) = tls_etcd.endpoints
    stranger = CertKit(tmp_path / "stranger")
    ours, theirs = kit.leaf("router", "r1"), stranger.leaf("router", "r2")
    pair = {"cert": ours.crt_path, "key": ours.key_path}
    wrong_ca = await refusal(address, ca=stranger.ca, **pair)
    assert f"{address} does not answer: its certificate is not of the authority in" in wrong_ca
    none = await refusal(address, ca=kit.ca)
    assert f"{address} does not answer: it " in none and "cert and key" in none
    other = await refusal(address, ca=kit.ca, cert=theirs.crt_path, key=theirs.key_path)
    assert f"{address} does not answer: it " in other and "cert and key" in other
    plain = await refusal(address)
    assert f"{address} does not answer: it closes the connection" in plain
    assert "ca, cert and key are what it wants" in plain
    no_tls = await refusal(*etcd.endpoints, ca=kit.ca, **pair)
    assert "check ca, cert and key in [mlc.etcd], or remove them if it does not speak" in no_tls
    mixed = await refusal(address, ca=kit.ca, cert=ours.crt_path, key=theirs.key_path)
    assert mixed.startswith("[mlc.etcd] cert and key: ") and "are no certificate and its" in mixed


async def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    text = await refusal("127.0.0.1:1", ca=tmp_path / "none.crt")
    assert text.startswith(f"[mlc.etcd] ca: {tmp_path}/none.crt cannot be read (No such file")
    (tmp_path / "no.pem").write_bytes(b"\x30\x82")
    text = await refusal("127.0.0.1:1", ca=tmp_path / "no.pem")
    assert text == f"[mlc.etcd] ca: {tmp_path}/no.pem is no PEM file: name one"
    (tmp_path / "no.pem").write_text(
        "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"
    )
    text = await refusal("127.0.0.1:1", ca=tmp_path / "no.pem")
    assert "no.pem holds no certificate that can be read" in text


async def test_smaller_limits_than_ours(tmp_path: Path) -> None:
    with running_etcd(tmp_path / "small", "--max-txn-ops=64") as cluster:
        text = await refusal(*cluster.endpoints)
    assert "too many operations" in text and "--max-txn-ops" in text


async def test_no_space(tmp_path: Path) -> None:
    """While it runs: refused, readable, deletable; at a start: said so."""
    with running_etcd(tmp_path / "small", f"--quota-backend-bytes={256 << 10}") as cluster:
        logs = await opened(*cluster.endpoints)
        tag = await logs.append("kept", FENCE, offset=None, if_match=None, create=True)
        with pytest.raises(StoreFull, match="NOSPACE"):
            for number in range(100):
                await logs.append(
                    f"log-{number}",
                    record(64 << 10),
                    offset=None,
                    if_match=None,
                    create=True,
                )
        outcomes = await logs.append_many(
            [
                LogAppend(log_id="kept", record_bytes=record(10), if_match=tag),
                LogAppend(log_id="none", record_bytes=record(10), if_match='"old"'),
            ]
        )
        assert [type(outcome).__name__ for outcome in outcomes] == ["StoreFull", "Mismatch"]
        with pytest.raises(StoreFull):
            await logs.put("long", record(3 << 20), if_match=None, if_none_match=True)
        assert (await logs.read("kept")).data == FENCE and await logs.read("long") is None
        await logs.delete("kept")
        assert await logs.head("kept") is None
        await logs.aclose()
        text = await refusal(*cluster.endpoints)
    assert f"etcd at {cluster.endpoints[0]} has no space left (NOSPACE): compact" in text
    assert "etcdctl alarm disarm" in text


def record(size: int) -> bytes:
    from cbor2 import dumps

    return dumps(
        {
            "epoch": 1,
            "round": 1,
            "emitted": [],
            "committed": 0,
            "digest": bytes(32),
            "x": bytes(size),
        }
    )


class Careless(rpc_pb2_grpc.KVServicer):  # type: ignore[misc]
    """Lets every writer win, as a proxy that drops conditions would."""

    async def Range(self, request: Any, context: Any) -> Any:
        return pb.RangeResponse()

    async def Txn(self, request: Any, context: Any) -> Any:
        return pb.TxnResponse(succeeded=True)

    async def DeleteRange(self, request: Any, context: Any) -> Any:
        return pb.DeleteRangeResponse()


@asynccontextmanager
async def served(*services: Any) -> AsyncIterator[str]:
    server = grpc.aio.server()
    for service in services:
        rpc_pb2_grpc.add_KVServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_an_etcd_that_keeps_no_conditions() -> None:
    async with served(Careless()) as address:
        text = await refusal(address)
    assert f"of 16 conditional writes at {address} 16 succeeded where one must" in text


async def test_a_server_that_is_no_etcd() -> None:
    async with served() as address:
        text = await refusal(address)
    assert f"etcd at {address} does not know the calls of etcd 3" in text


async def test_a_member_that_does_not_answer(tmp_path: Path) -> None:
    """One of three that runs has no majority."""
    need_etcd()
    cluster = EtcdCluster(tmp_path / "three", members=3)
    try:
        cluster.start()
        for member in cluster.members[1:]:
            member.kill()
        text = await refusal(cluster.endpoints[0], timeout_s=0.5)
    finally:
        cluster.stop()
    assert f"etcd at {cluster.endpoints[0]} does not answer" in text


def test_nobody_else_needs_grpc() -> None:
    code = "import sys, sdcpd.daemon, tiers.build; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tiers.etcd_client", "tiers.etcd_log"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "aetcd.rpc", None)
    text = await refusal("127.0.0.1:1")
    assert "pip install 'sdcpd[etcd]'" in text


def test_check_config_looks_at_the_files(tmp_path: Path) -> None:
    """`--check-config` with the role says it, without a call to etcd."""
    config = parse_config(
        f"""
        [router]
        base_uri = "https://127.0.0.1:7442/"
        model = "{tmp_path}"
        [mlc]
        commit_log = "etcd"
        [mlc.etcd]
        endpoints = ["127.0.0.1:1"]
        ca = "{tmp_path}/{{name}}.crt"
        """,
        name="x",
    )
    found = problems_of(config, [Instance("router", "r0")])
    assert f"router r0: [mlc.etcd] ca: {tmp_path}/r0.crt cannot be read" in "\n".join(found)
