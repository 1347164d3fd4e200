"""Appends that are too large for one request: rows are written behind the end of the log first.

There nobody reads them. They become part of the log by one transaction on its head, like any
append, so a reader sees all of them or none. The key `put` says whose rows lie there: a writer that
finds another's name in it, or the head changed, has written nothing.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from aetcd.rpc import rpc_pb2 as pb

from tiers.api import StoreFailed, StoreFull
from tiers.etcd_client import Budget, EtcdClient
from tiers.etcd_errors import NoSpace
from tiers.etcd_ops import Append, Staged, checked
from tiers.etcd_reader import EtcdReader
from tiers.etcd_requests import (
    ROW_BYTES_MAX,
    Keys,
    put,
    unchanged,
    value_is,
)

NONCE_BYTES = 16


class Stager:
    """Puts the rows of large appends into place; raises EtcdError and LogError."""

    def __init__(self, client: EtcdClient, reader: EtcdReader, prefix: str) -> None:
        self._client = client
        self._reader = reader
        self._prefix = prefix

    async def stage(self, append: Append) -> Append:
        """Return the append with its rows in etcd, or as it is if it fits into a request."""
        if len(append.octets) <= ROW_BYTES_MAX:
            return append
        old = await self._reader.state(append.log_id, self._client.budget())
        checked(append, old)
        octets = append.octets
        starts = range(0, len(octets), ROW_BYTES_MAX)
        rows = tuple(octets[start : start + ROW_BYTES_MAX] for start in starts)
        staged = Staged(nonce=secrets.token_bytes(NONCE_BYTES), old=old, rows=rows)
        await self._write_rows(Keys(self._prefix, append.log_id), staged)
        return replace(append, staged=staged)

    async def _write_rows(self, keys: Keys, staged: Staged) -> None:
        budget = self._client.budget()
        first = staged.old.head.rows if staged.old.head else 0
        for index, row in enumerate(staged.rows):
            compare = [unchanged(keys, staged.old)]
            writes = [put(keys.row(first + index), row)]
            if index == 0:
                writes.append(put(keys.put, staged.nonce))
            else:
                compare.append(value_is(keys.put, staged.nonce))
            request = pb.TxnRequest(compare=compare, success=writes)
            await self._write(request, budget)

    async def _write(self, request: pb.TxnRequest, budget: Budget) -> None:
        # May be repeated: under the same name the same octets go to the same place.
        try:
            answer = await self._client.patiently(lambda: self._client.txn(request), budget)
        except NoSpace as full:
            raise StoreFull(str(full)) from full
        if not answer.succeeded:
            raise StoreFailed("the log was changed while a long append was being written")
