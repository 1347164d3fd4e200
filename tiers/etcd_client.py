"""Calls to etcd over gRPC: several endpoints, a deadline on each call, and what an error means.

A call goes to one endpoint, and is never repeated here: whether a write may be repeated is for its
caller to say. After a call that got no answer the next one goes to the next endpoint.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
from aetcd.rpc import AuthStub, KVStub
from aetcd.rpc import rpc_pb2 as pb

from tiers.api import TierError
from tiers.etcd_errors import Lost, Refused, TokenRefused, error_of
from tiers.etcd_login import Login

# An operation may take this many calls' time before it is given up: a leader that is lost costs
# one or two deadlines, and the members that are left another second to elect the next.
CALLS_IN_ALL = 5
TOKENS_MAX = 3  # that are tried for one call
PAUSE_S_MIN = 0.02
PAUSE_S_MAX = 0.5

_OPTIONS = (
    # Pages are bounded by octets where they are asked for, not by gRPC's 4 MiB.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A member that was restarted is found again at once, not after up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Pings show a peer that vanished without a word; etcd takes one every 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.enable_http_proxy", 0),
    # Stores in one process don't share connections, so closing one disturbs nobody.
    ("grpc.use_local_subchannel_pool", 1),
)
# A member that has lost its leader says so at once instead of letting the call wait.
_METADATA = (("hasleader", "true"),)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdSettings:
    """`[mlc.etcd]`: endpoints as host:port; with `ca` over TLS; `timeout_s` is that of one call.

    `user` and `password_file` go together, and are for etcd's own authentication.
    """

    endpoints: tuple[str, ...]
    prefix: str = "sdcpd/logs"
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    user: str = ""
    password_file: Path | None = None
    timeout_s: float = 2.0


class _Endpoint:
    """One member's address, and the channel to it, made when first used."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.address = address
        self.known = False
        """Whether it has shown to be of the same cluster as the others."""
        self._credentials = credentials
        self._channel: grpc.aio.Channel | None = None

    def stub(self, kind: Any = KVStub) -> Any:
        if self._channel is None:
            self._channel = (
                grpc.aio.insecure_channel(self.address, options=_OPTIONS)
                if self._credentials is None
                else grpc.aio.secure_channel(self.address, self._credentials, options=_OPTIONS)
            )
        return kind(self._channel)

    async def aclose(self) -> None:
        if self._channel is not None:
            await self._channel.close()


class EtcdClient:
    """The calls that the log store makes; every one raises EtcdError."""

    def __init__(self, settings: EtcdSettings) -> None:
        """Connects with the first call; raises TierError for files that cannot be read."""
        credentials = credentials_of(settings)
        self._endpoints = [_Endpoint(address, credentials) for address in settings.endpoints]
        self._current = 0
        self._prefix = settings.prefix.encode()
        self._login = login_of(settings)
        self._cluster: int | None = None
        self._timeout_s = settings.timeout_s

    @property
    def address(self) -> str:
        """The endpoint that the next call goes to."""
        return self._endpoints[self._current].address

    @property
    def patience_s(self) -> float:
        """How long one operation may take, all its calls together."""
        return CALLS_IN_ALL * self._timeout_s

    def budget(self) -> Budget:
        """Return the time that an operation has which begins now."""
        return Budget(self.patience_s)

    async def txn(self, request: Any) -> Any:
        """Send one transaction, once; after Lost it may have happened, or may still."""
        return await self._call("Txn", request)

    async def range(self, request: Any) -> Any:
        """Read a range of keys; raises Compacted for a revision that is gone."""
        return await self._call("Range", request)

    async def delete_range(self, request: Any) -> Any:
        """Delete a range of keys, once."""
        return await self._call("DeleteRange", request)

    async def patiently(self, call: Callable[[], Awaitable[T]], budget: Budget) -> T:
        """Repeat a call that may be repeated until there is an answer; raises the last Lost."""
        while True:
            try:
                return await call()
            except Lost:
                if budget.spent:
                    raise
                await budget.pause()

    async def aclose(self) -> None:
        """Close all connections."""
        for endpoint in self._endpoints:
            await endpoint.aclose()

    def turn_from(self, address: str) -> None:
        """Go on with the next endpoint, unless that was done already."""
        if self.address == address:
            self._current = (self._current + 1) % len(self._endpoints)

    async def _call(self, method: str, request: Any) -> Any:
        endpoint = self._endpoints[self._current]
        if not endpoint.known:
            # Before anything is written there: a fence in another cluster would fence nobody.
            probe = pb.RangeRequest(key=self._prefix + b"/.", count_only=True)
            self._check_cluster(endpoint, await self._send(endpoint, "Range", probe))
        return await self._send(endpoint, method, request)

    async def _send(self, endpoint: _Endpoint, method: str, request: Any) -> Any:
        stub = endpoint.stub()
        if self._login is None:
            return await self._send_once(endpoint, getattr(stub, method), request, _METADATA)
        token = ""
        for _ in range(TOKENS_MAX):
            token = await self._login.token(partial(self._authenticate, endpoint))
            metadata = (*_METADATA, ("token", token))
            try:
                return await self._send_once(endpoint, getattr(stub, method), request, metadata)
            except TokenRefused:
                self._login.drop(token)
        raise Refused(f"etcd at {endpoint.address} does not know the tokens that it gives out")

    async def _send_once(self, endpoint: _Endpoint, call: Any, request: Any, metadata: Any) -> Any:
        try:
            return await call(request, timeout=self._timeout_s, metadata=metadata)
        except grpc.aio.AioRpcError as failure:
            error = error_of(failure, endpoint.address)
            if isinstance(error, Lost):
                self.turn_from(endpoint.address)
            raise error from None

    async def _authenticate(self, endpoint: _Endpoint, user: str, password: str) -> str:
        request = pb.AuthenticateRequest(name=user, password=password)
        call = endpoint.stub(AuthStub).Authenticate
        answer = await self._send_once(endpoint, call, request, _METADATA)
        return str(answer.token)

    def _check_cluster(self, endpoint: _Endpoint, answer: Any) -> None:
        cluster = answer.header.cluster_id
        if self._cluster is None:
            self._cluster = cluster
        if cluster != self._cluster:
            self.turn_from(endpoint.address)
            raise Refused(
                f"etcd at {endpoint.address} belongs to another cluster than the other endpoints:"
                " name members of one cluster in [mlc.etcd] endpoints"
            )
        endpoint.known = True


class Budget:
    """The time that is left to an operation, and the pauses between its calls."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._pause_s = PAUSE_S_MIN

    @property
    def spent(self) -> bool:
        """Whether there is no time for another call."""
        return time.monotonic() >= self._end

    async def pause(self) -> None:
        """Wait before a repetition, each time longer: members that elect a leader need a second."""
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)


def credentials_of(settings: EtcdSettings) -> grpc.ChannelCredentials | None:
    """Read the files for TLS; raises TierError, None without `ca`."""
    if settings.ca is None:
        return None
    ca = _octets("ca", settings.ca)
    cert = _octets("cert", settings.cert) if settings.cert else None
    key = _octets("key", settings.key) if settings.key else None
    _check_files(settings)
    return grpc.ssl_channel_credentials(ca, private_key=key, certificate_chain=cert)


def login_of(settings: EtcdSettings) -> Login | None:
    """The user to log in as; raises TierError for a password that cannot be read."""
    if not settings.user or settings.password_file is None:
        return None
    return Login(settings.user, settings.password_file)


def _octets(setting: str, path: Path) -> bytes:
    try:
        octets = path.read_bytes()
    except OSError as error:
        raise TierError(
            f"[mlc.etcd] {setting}: {path} cannot be read ({error.strerror}): name a PEM file that"
            " this user may read"
        ) from error
    if b"-----BEGIN" not in octets:
        raise TierError(f"[mlc.etcd] {setting}: {path} is no PEM file: name one")
    return octets


def _check_files(settings: EtcdSettings) -> None:
    """Have OpenSSL read the files: gRPC would only say, with the first call, that it can't."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(settings.ca)
    except ssl.SSLError as error:
        raise TierError(
            f"[mlc.etcd] ca: {settings.ca} holds no certificate that can be read: name another"
        ) from error
    if settings.cert is None:
        return
    try:
        # A key with a password would have it asked for at the terminal.
        context.load_cert_chain(settings.cert, settings.key, password=lambda: b"")
    except (ssl.SSLError, OSError) as error:
        raise TierError(
            f"[mlc.etcd] cert and key: {settings.cert} and {settings.key} are no certificate and"
            " its key without a password: name a pair"
        ) from error
