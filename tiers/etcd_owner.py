"""Which process is the router of a name, where routers keep their records in etcd (D-F5, D-Z8).

The key `<prefix>/.router/<name>` holds what the process that started last wrote there. Every write
of records holds only while it does, so that of two processes of one name the older can write
nothing more from then on; it finds out with its next write, or when it looks, and has to end. No
lease: a router that etcd does not reach for a while has lost nothing, and one that is killed need
not be waited for.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from aetcd.rpc import rpc_pb2 as pb

from tiers.api import TierError
from tiers.etcd_client import EtcdClient
from tiers.etcd_errors import EtcdError, Lost
from tiers.etcd_requests import at_revision, put, value_is

LOOK_S = 5.0
NONCE_BYTES = 16


class OwnerLost(TierError):
    """Another process has taken the router's name over; nothing was written."""


class EtcdOwner:
    """This process's claim to a router's records."""

    def __init__(
        self, client: EtcdClient, prefix: str, name: str, *, on_lost: Callable[[str], None]
    ) -> None:
        """`on_lost` is called once, with a sentence for a person."""
        self._client = client
        self._key = f"{prefix}/.router/{name}".encode()
        self._on_lost = on_lost
        self._lost: str | None = None
        # The rest is for those who look at the key.
        here = f"{secrets.token_hex(NONCE_BYTES)} {socket.gethostname()} {os.getpid()}"
        self._value = here.encode()

    async def claim(self) -> None:
        """Be the router of the name from now on, whoever was; raises EtcdError."""
        budget, revision = self._client.budget(), 0
        while not budget.spent:
            request = pb.TxnRequest(
                compare=[at_revision(self._key, revision)],
                success=[put(self._key, self._value)],
                failure=[self.read],
            )
            answer = await self._client.patiently(partial(self._client.txn, request), budget)
            found = [] if answer.succeeded else answer.responses[0].response_range.kvs
            if answer.succeeded or (found and bytes(found[0].value) == self._value):
                return
            # On what was seen, so that a request that comes late takes nothing from others.
            revision = found[0].mod_revision if found else 0
        raise Lost("the router's name is taken over by others all the time")

    @property
    def held(self) -> Any:
        """The condition that the claim still stands."""
        return value_is(self._key, self._value)

    @property
    def read(self) -> Any:
        """The read whose answer `check` takes."""
        return pb.RequestOp(request_range=pb.RangeRequest(key=self._key))

    def check(self, found: Any) -> None:
        """Take the keys that were read; raises OwnerLost."""
        if found and bytes(found[0].value) == self._value:
            return
        if self._lost is None:
            self._lost = _sentence(bytes(found[0].value) if found else b"")
            self._on_lost(self._lost)
        self.check_not_lost()

    def check_not_lost(self) -> None:
        """Raise OwnerLost if that is known already."""
        if self._lost is not None:
            raise OwnerLost(self._lost)

    async def watch(self) -> None:
        """Look from time to time, so that a router that writes nothing ends as well."""
        while self._lost is None:
            await asyncio.sleep(LOOK_S)  # a clock tick, not a wait for something
            try:
                answer = await self._client.range(pb.RangeRequest(key=self._key))
                self.check(answer.kvs)
            except (EtcdError, OwnerLost):
                continue  # what etcd does not tell now, it tells the next time


def _sentence(value: bytes) -> str:
    _, _, where = value.decode(errors="replace").partition(" ")
    host, _, pid = where.partition(" ")
    who = f"process {pid} at {host}" if host.isprintable() and pid.isdigit() else "somebody else"
    return (
        f"its records in etcd are another's now: {who} has started as the router of this name and"
        " has taken its sessions up: let one of the two run, or give each a name of its own"
    )
