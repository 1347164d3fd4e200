"""Three members of etcd, and the one that leads is killed under load: Section 6.8, D-M6."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sdcpd.protocol.commit_log import CommitRecord, decode_log, encode_record
from tests.kit.etcd import EtcdCluster, Member, running_etcd
from tiers.api import StoreFailed

pytest.importorskip("aetcd", reason="the extra etcd is not installed")

import grpc.aio
from aetcd.rpc import MaintenanceStub
from aetcd.rpc import rpc_pb2 as pb

from tiers.etcd_client import EtcdSettings
from tiers.etcd_log import EtcdLogStore

LOGS = 16
BEFORE, AFTER = 60, 120
"""Records of a log before the leader is killed, and in all."""


class Writer:
    """The one writer of a log: appends round after round, and keeps what it was told."""

    def __init__(self, logs: EtcdLogStore, log_id: str) -> None:
        self._logs = logs
        self.log_id = log_id
        self.acknowledged: list[bytes] = []
        self.unknown = 0
        self._tag: str | None = None

    async def run(self, rounds: int) -> None:
        """Append until so many rounds are there; an outcome that is unknown is looked up (D-P17)."""
        while len(self.acknowledged) < rounds:
            record = commit(len(self.acknowledged) + 1)
            try:
                self._tag = await self._logs.append(
                    self.log_id, record, offset=None, if_match=self._tag, create=self._tag is None
                )
            except StoreFailed:
                self.unknown += 1
                await self._look_up(record)
            else:
                self.acknowledged.append(record)

    async def _look_up(self, record: bytes) -> None:
        content = await self._logs.read(self.log_id)
        data, self._tag = (content.data, content.etag) if content else (b"", None)
        before = b"".join(self.acknowledged)
        assert data in (before, before + record)
        if data != before:
            self.acknowledged.append(record)


def commit(round_number: int) -> bytes:
    return encode_record(
        CommitRecord(epoch=1, round=round_number, emitted=(7,), committed=1, digest=bytes(32))
    )


async def leader_of(cluster: EtcdCluster) -> Member:
    for member in cluster.members:
        async with grpc.aio.insecure_channel(member.address) as channel:
            status = await MaintenanceStub(channel).Status(pb.StatusRequest(), timeout=5)
        if status.leader == status.header.member_id:
            return member
    raise AssertionError("no member leads")


@pytest.mark.slow
@pytest.mark.parametrize("back", [False, True])
async def test_the_leader_is_killed_under_load(tmp_path: Path, back: bool) -> None:
    """Every acknowledged record is there once, in order; `back`: it returns, and the next dies."""
    with running_etcd(tmp_path / "three", members=3) as cluster:
        leader = await leader_of(cluster)
        others = [member.address for member in cluster.members if member is not leader]
        logs = await EtcdLogStore.open(
            EtcdSettings(endpoints=(leader.address, *others), prefix="logs", timeout_s=1.0)
        )
        writers = [Writer(logs, f"log-{number}") for number in range(LOGS)]
        await asyncio.gather(*(writer.run(BEFORE) for writer in writers))
        load = asyncio.gather(*(writer.run(AFTER) for writer in writers))
        await asyncio.to_thread(leader.kill)
        await load
        if back:
            await asyncio.to_thread(cluster.restart, leader)
            load = asyncio.gather(*(writer.run(2 * AFTER) for writer in writers))
            await asyncio.to_thread((await leader_of(cluster)).kill)
            await load
        for writer in writers:
            content = await logs.read(writer.log_id)
            assert content is not None and content.data == b"".join(writer.acknowledged)
            rounds = [
                one.round for one in decode_log(content.data) if isinstance(one, CommitRecord)
            ]
            assert rounds == list(range(1, len(writer.acknowledged) + 1))
        await logs.aclose()
