"""What is asked of etcd before anything relies on it: that of many writers one wins."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from aetcd.rpc import rpc_pb2 as pb

from tiers.api import TierError, TierUnreachable
from tiers.etcd_client import EtcdClient, EtcdSettings
from tiers.etcd_errors import EtcdError, Lost
from tiers.etcd_requests import APPEND_OPS_MAX, GROUP_MAX, kv_absent, put

RACERS = 16


async def check_start(client: EtcdClient, settings: EtcdSettings) -> None:
    """Race for a key at the first endpoint that answers; raises TierError."""
    failures: list[str] = []
    for _ in settings.endpoints:
        try:
            await _check_one(client, settings.prefix)
        except Lost as lost:
            failures.append(str(lost))
        except EtcdError as error:
            raise TierError(f"the commit logs cannot be kept: {error}") from error
        else:
            return
    raise TierUnreachable(f"the commit logs cannot be kept: {'; '.join(dict.fromkeys(failures))}")


async def _check_one(client: EtcdClient, prefix: str) -> None:
    address = client.address
    # No log has a dot in its name.
    key = f"{prefix}/.probe/{secrets.token_hex(16)}".encode()
    await client.txn(_largest_group(key))
    answers = await asyncio.gather(
        *(client.txn(_race(key, number)) for number in range(RACERS)), return_exceptions=True
    )
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    await client.delete_range(pb.DeleteRangeRequest(key=key))
    winners = sum(answer.succeeded for answer in answers if not isinstance(answer, BaseException))
    if winners != 1:
        raise TierError(
            f"the commit logs cannot be kept: of {RACERS} conditional writes at {address}"
            f" {winners} succeeded where one must, so it would not keep an old writer out: name"
            " members of an etcd 3.4 or newer in [mlc.etcd] endpoints"
        )


def _race(key: bytes, number: int) -> Any:
    return pb.TxnRequest(compare=[kv_absent(key)], success=[put(key, b"%d" % number)])


def _largest_group(key: bytes) -> Any:
    """A group as large as they come, which only reads: refused where limits are set lower."""
    read = pb.RequestOp(request_range=pb.RangeRequest(key=key))
    inner = pb.RequestOp(request_txn=pb.TxnRequest(success=[read] * APPEND_OPS_MAX))
    return pb.TxnRequest(success=[inner] * GROUP_MAX + [read])
