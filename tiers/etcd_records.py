"""A router's own records in etcd, so that it can go on at any machine (D-F5, D-M3, D-Z8).

`<prefix>/.<kind>/<router>/<key>` holds a record, its key in base64url. One that is too large for a
request lies in parts at `<prefix>/.parts/<kind>/<router>/<key>/<generation>/<number>`; they are
written first, and count when the record names their generation. Every write holds only while this
process is the router (etcd_owner.py) and the record is as it was last seen, so that a request that
was given up can't undo a later one by coming late.
"""

from __future__ import annotations

import base64
import binascii
import logging
import secrets
import struct
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from typing import Any

import xxhash
from aetcd.rpc import kv_pb2 as kv
from aetcd.rpc import rpc_pb2 as pb

from tiers.api import TierError, TierUnreachable
from tiers.etcd_client import Budget, EtcdClient
from tiers.etcd_errors import EtcdError, Lost
from tiers.etcd_owner import EtcdOwner
from tiers.etcd_requests import ROW_BYTES_MAX, at_revision, delete_key, put

log = logging.getLogger("sdcpd.mlc")
PAGE_RECORDS, PAGE_KEYS = 16, 4096  # of up to 1 MiB each; without their values
_WHOLE, _PARTED = b"\0", b"\1"
_PARTS = struct.Struct(">8sI16s")  # generation, number of parts, checksum of all
_NUMBER = struct.Struct(">I")


class EtcdRecords:
    """Records of one kind; `all` tells what was there when they were opened, once."""

    def __init__(
        self, client: EtcdClient, owner: EtcdOwner, *, prefix: str, kind: str, name: str
    ) -> None:
        """`load` comes before anything else."""
        self._client, self._owner = client, owner
        self._everyones = f"{prefix}/.{kind}/".encode()
        self._own = self._everyones + f"{name}/".encode()
        self._parts = f"{prefix}/.parts/{kind}/{name}/".encode()
        self._found: dict[bytes, bytes] | None = None
        self._revisions: dict[bytes, int] = {}
        self._parted: set[bytes] = set()

    async def load(self) -> None:
        """Read what an earlier process left; raises EtcdError."""
        self._found = {}
        generations: dict[bytes, bytes] = {}  # by label, as they stand in keys
        async for one in self._pages(self._own, limit=PAGE_RECORDS):
            label = bytes(one.key)[len(self._own) :]
            key, value = _key_of(label), bytes(one.value)
            self._revisions[key] = one.mod_revision
            if value[:1] == _PARTED and len(value) == 1 + _PARTS.size:
                generations[label] = _PARTS.unpack(value[1:])[0].hex().encode()
                self._parted.add(key)
                value = await self._joined(label, value[1:])
            else:
                value = value[1:]
            self._found[key] = value
        await self._clear_parts(generations)

    def all(self) -> Mapping[bytes, bytes]:
        """See Records. To be called once: what was found is not kept in memory."""
        assert self._found is not None, "loaded, and not asked for before"
        found, self._found = self._found, None
        return found

    async def keys_of_all(self) -> Set[bytes]:
        """See Records: of all routers that have this prefix."""
        try:
            keys = self._pages(self._everyones, limit=PAGE_KEYS, keys_only=True)
            return {_key_of(bytes(one.key).rpartition(b"/")[2]) async for one in keys}
        except EtcdError as error:
            raise TierError(f"the records in etcd cannot be read: {error}") from error

    async def put(self, key: bytes, value: bytes) -> None:
        """See Records."""
        head, keep = _WHOLE + value, b""
        try:
            if len(head) > ROW_BYTES_MAX:
                head, keep = await self._put_parts(key, value)
            old = self._clearing(key, keep) if key in self._parted else []
            if keep:
                self._parted.add(key)
            await self._write(key, head, [put(self._own + _label(key), head), *old])
        except EtcdError as error:
            raise TierError(f"a record in etcd cannot be written: {error}") from error
        if not keep:
            self._parted.discard(key)

    async def delete(self, key: bytes) -> None:
        """See Records."""
        old = self._clearing(key, b"") if key in self._parted else []
        try:
            await self._write(key, None, [delete_key(self._own + _label(key)), *old])
        except EtcdError as error:
            raise TierError(f"a record in etcd cannot be removed: {error}") from error
        self._parted.discard(key)

    async def _write(self, key: bytes, wanted: bytes | None, operations: Sequence[Any]) -> None:
        name, budget = self._own + _label(key), self._client.budget()
        look = pb.RequestOp(request_range=pb.RangeRequest(key=name))
        while True:
            self._owner.check_not_lost()
            compare = [self._owner.held, at_revision(name, self._revisions.get(key, 0))]
            request = pb.TxnRequest(
                compare=compare, success=operations, failure=[self._owner.read, look]
            )
            answer = await self._txn(request, budget)
            if answer.succeeded:
                self._saw(key, 0 if wanted is None else answer.header.revision)
                return
            self._owner.check(answer.responses[0].response_range.kvs)
            found = answer.responses[1].response_range.kvs
            self._saw(key, found[0].mod_revision if found else 0)
            # What was repeated, or given up before, has happened after all.
            if (bytes(found[0].value) if found else None) == wanted:
                return

    async def _put_parts(self, key: bytes, value: bytes) -> tuple[bytes, bytes]:
        """Write the parts; returns the record that names them, and their generation."""
        generation, budget = secrets.token_bytes(8), self._client.budget()
        starts = range(0, len(value), ROW_BYTES_MAX)
        for number, start in enumerate(starts):
            name = self._part(_label(key), generation, number)
            request = pb.TxnRequest(
                compare=[self._owner.held],
                success=[put(name, value[start : start + ROW_BYTES_MAX])],
                failure=[self._owner.read],
            )
            answer = await self._txn(request, budget)
            if not answer.succeeded:
                self._owner.check(answer.responses[0].response_range.kvs)
        digest = xxhash.xxh3_128_digest(value)
        return _PARTED + _PARTS.pack(generation, len(starts), digest), generation

    async def _joined(self, label: bytes, described: bytes) -> bytes:
        generation, count, digest = _PARTS.unpack(described)
        parts = []
        for number in range(count):
            request = pb.RangeRequest(key=self._part(label, generation, number))
            answer = await self._range(request)
            parts += [bytes(one.value) for one in answer.kvs]
        value = b"".join(parts)
        # Who decodes it says that it is damaged, and of what session.
        return value if xxhash.xxh3_128_digest(value) == digest else b""

    async def _clear_parts(self, generations: Mapping[bytes, bytes]) -> None:
        """Delete what a process left that died while it wrote them."""
        stale = set()
        async for one in self._pages(self._parts, limit=PAGE_KEYS, keys_only=True):
            label, _, rest = bytes(one.key)[len(self._parts) :].partition(b"/")
            if rest.partition(b"/")[0] != generations.get(label):
                stale.add(bytes(one.key))
        for name in stale:
            request = pb.TxnRequest(compare=[self._owner.held], success=[delete_key(name)])
            await self._txn(request, self._client.budget())
        if stale:
            log.info("%d parts of unfinished records in etcd deleted", len(stale))

    def _clearing(self, key: bytes, generation: bytes) -> list[Any]:
        """Operations that delete the parts of a record but those of a generation."""
        begin, end = self._parts + _label(key) + b"/", self._parts + _label(key) + b"0"
        if not generation:
            return [_delete_range(begin, end)]
        kept = begin + generation.hex().encode()
        return [_delete_range(begin, kept), _delete_range(kept + b"0", end)]

    def _part(self, label: bytes, generation: bytes, number: int) -> bytes:
        name = self._parts + label + b"/" + generation.hex().encode() + b"/"
        return name + _NUMBER.pack(number)

    def _saw(self, key: bytes, revision: int) -> None:
        if revision:
            self._revisions[key] = revision
        else:
            self._revisions.pop(key, None)

    async def _pages(
        self, prefix: bytes, *, limit: int, keys_only: bool = False
    ) -> AsyncIterator[kv.KeyValue]:
        start, end = prefix, prefix[:-1] + b"0"
        while True:
            request = pb.RangeRequest(key=start, range_end=end, limit=limit, keys_only=keys_only)
            answer = await self._range(request)
            for one in answer.kvs:
                yield one
            if not answer.more:
                return
            start = bytes(answer.kvs[-1].key) + b"\0"

    async def _range(self, request: Any) -> Any:
        return await self._client.patiently(
            lambda: self._client.range(request), self._client.budget()
        )

    async def _txn(self, request: Any, budget: Budget) -> Any:
        return await self._client.patiently(lambda: self._client.txn(request), budget)


class EtcdRouterStore:
    """All that a router keeps in etcd beside the logs: the same names of records as on a disk."""

    def __init__(self, client: EtcdClient, owner: EtcdOwner, *, prefix: str, name: str) -> None:
        """Use `open`."""
        self._client, self.owner = client, owner
        self.sessions = EtcdRecords(client, owner, prefix=prefix, kind="sessions", name=name)
        self.ended = EtcdRecords(client, owner, prefix=prefix, kind="ended", name=name)

    async def open(self) -> None:
        """Become the router of the name, then read what the one before left; raises TierError."""
        try:
            await self.owner.claim()
            await self.sessions.load()
            await self.ended.load()
        except Lost as lost:
            raise TierUnreachable(f"the router's records cannot be kept: {lost}") from lost
        except EtcdError as error:
            raise TierError(f"the router's records cannot be kept: {error}") from error

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _delete_range(begin: bytes, end: bytes) -> Any:
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=begin, range_end=end))


def _label(key: bytes) -> bytes:
    return base64.urlsafe_b64encode(key).rstrip(b"=")


def _key_of(label: bytes) -> bytes:
    try:
        return base64.urlsafe_b64decode(label + b"=" * (-len(label) % 4))
    except binascii.Error:
        return label  # somebody else's: no record that a router could decode
