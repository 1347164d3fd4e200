"""What the roles of one process share: identities, clients, listeners, caches, admin sockets."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sdcpd import settings
from sdcpd.admin import Admin
from sdcpd.certificates import Certificates
from sdcpd.config import Config
from sdcpd.metrics import Metrics
from sdcpd.protocol.messages import Status
from sdcpd.protocol.problems import WrongRole
from sdcpd.protocol.uris import base_uri_equal
from sdcpd.roles.base import Listener
from sdcpd.roles.peers import PeerTable
from sdcpd.roles.status import StatusReporter
from sdcpd.roles.tasks import Tasks
from sdcpd.same_host import SameHost
from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import Handler, Peer, Request
from sdcpd.transport.http1 import Http1Server
from sdcpd.transport.identity_files import IdentityError
from sdcpd.transport.local_client import LocalClient
from sdcpd.transport.loopback import LoopbackClient
from sdcpd.transport.refusal_log import RefusalLog
from sdcpd.transport.server import Server
from sdcpd.transport.tls import TlsIdentity
from tiers.api import LogStore, Records, Tier
from tiers.build import build_objects, open_etcd_logs, open_etcd_records, open_logs
from tiers.folder import Folder
from tiers.lmdb_records import LmdbRecords
from tiers.resource import MlcResource

log = logging.getLogger("sdcpd")
SESSIONS_BYTES_MAX = 4 << 30  # of open sessions, mostly their prompts; the files are sparse
ENDED_BYTES_MAX = 1 << 30  # of notes on logs whose sessions have ended, some 100 octets each


class StartError(Exception):
    """A role can't start, or go on; the text says which, why and what to do.

    `status` is the exit code.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Instance:
    """A role to run here, its name, and how `--role` wrote the two."""

    role: str
    name: str
    unit: str = ""

    @property
    def label(self) -> str:
        """As people and certificates write it."""
        return f"{self.role} {self.name}"

    def fill(self, template: str) -> Path:
        """A path of the configuration for this instance."""
        unit = self.unit or self.role
        return Path(template.format(role=self.role, name=self.name, instance=unit))


class Parts:
    """Builds the parts; whatever must be closed is pushed on `stack`, in order of building."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.stack = AsyncExitStack()
        self.tasks = Tasks()
        self.peers = PeerTable(config.node.trust_domain, settings.peer_entries(config))
        self._routes: dict[str, Handler] = {}  # base URIs served in this process
        self.certificates = Certificates()
        self._same_host = SameHost() if config.mlc.local else None
        self._identities: dict[str, TlsIdentity] = {}
        self.on_fatal: Callable[[str], None] = log.critical
        """Told why the process must end."""

    async def objects_tier(self, first: Instance) -> Tier:
        """The process's one cache, named after its first instance, which it asks others as.

        Raises TierError or IdentityError.
        """
        specs = settings.tier_specs(self.config, first.fill)
        remote = any(spec.base is not None for spec in specs)
        client = self.client(self.identity(first)) if remote else None
        tier = await build_objects(specs, client=client)
        self.stack.push_async_callback(tier.aclose)
        return tier

    def identity(self, instance: Instance) -> TlsIdentity:
        """Load an instance's certificate, once; raises IdentityError, also for a wrong role."""
        if (known := self._identities.get(instance.label)) is not None:
            return known
        tls = self.config.tls
        cert = instance.fill(tls.cert)
        identity = TlsIdentity(
            ca=instance.fill(tls.ca),
            cert=cert,
            key=instance.fill(tls.key),
            crl=instance.fill(tls.crl) if tls.crl else None,
        )
        roles = self.peers.identify(_own_peer(identity)).roles
        if instance.role not in roles:
            raise IdentityError(
                f"certificate {cert} does not carry the role {instance.role} of trust "
                f"domain {self.config.node.trust_domain}; issue one with sdcpctl certs issue"
            )
        self.certificates.add(identity)
        self._identities[instance.label] = identity
        return identity

    def client(self, identity: TlsIdentity) -> LoopbackClient:
        """Calls to roles in this process stay in it; the others go over TLS.

        Objects go through shared memory where the other role is on this host.
        """
        http = HttpClient(
            identity, check_peer=self.peers.check_server, transport=self.config.node.transport
        )
        self.certificates.on_renewal(identity, http.renew_connections)
        self.stack.push_async_callback(http.aclose)
        peer = _own_peer(identity)
        if self._same_host is None:
            return LoopbackClient(self._routes, peer, fallback=http)
        local = LocalClient(http)
        self.certificates.on_renewal(identity, local.forget)
        self.stack.push_async_callback(local.aclose)
        return LoopbackClient(self._routes, peer, fallback=local, is_near=local.is_near)

    def check_base_uri(self, instance: Instance, identity: TlsIdentity) -> None:
        """Raise StartError unless the certificate is for the instance's base URI (D-I1)."""
        base_uri = str(getattr(self.config, instance.role).base_uri)
        if not any(base_uri_equal(uri, base_uri) for uri in identity.uris):
            raise StartError(
                f"{instance.label}: its certificate names {', '.join(identity.uris)}, not its "
                f"base_uri {base_uri}; reissue it with sdcpctl certs issue",
                status=78,
            )

    async def serve(
        self,
        instance: Instance,
        listener: Listener,
        identity: TlsIdentity,
        *,
        base_uri: str,
        metrics: Metrics,
    ) -> None:
        """Listen for an instance; raises StartError."""
        host, port = settings.listen_of(self.config, instance.role)
        self.check_base_uri(instance, identity)
        object_max = self.config.mlc.object_max

        def body_bytes_max(method: str, target: str) -> int:
            limit = listener.body_bytes_max(method, target.partition("?")[0])
            # One octet more reaches the role, which answers 413 in its own order of checks.
            return object_max if limit is None else limit + 1

        listener.refusals = RefusalLog(log, metrics.refused)
        server = Server(
            self._announcing(instance, listener, identity, body_bytes_max, metrics),
            identity=identity,
            host=host,
            port=port,
            body_bytes_max=body_bytes_max,
            http3=self.config.node.http3,
            on_refused=metrics.refused,
        )
        metrics.expiry_s = lambda: identity.not_after.timestamp()
        self.certificates.on_renewal(identity, server.drain_connections)
        try:
            await server.start()
        except OSError as e:
            raise StartError(
                f"{instance.label}: cannot listen on {host}:{port}: {reason(e)}; stop the other "
                f"program or choose another [{instance.role}] listen",
                status=1,
            ) from e
        self.stack.push_async_callback(server.aclose, 2.0)
        self._routes[base_uri] = listener.handle
        log.info("%s: listening on %s:%d as %s", instance.label, host, port, base_uri)

    def _announcing(
        self,
        instance: Instance,
        listener: Listener,
        identity: TlsIdentity,
        body_bytes_max: Callable[[str, str], int],
        metrics: Metrics,
    ) -> Handler:
        """The listener's handler, which tells peers on this host of the short way to objects."""
        if self._same_host is None:
            return listener.handle
        server = self._same_host.serve(
            listener.handle,
            directory=settings.local_dir(self.config, instance.fill),
            name=f"{instance.role}.{instance.name}",
            objects_path=f"{listener.base_path}/objects/",
            body_bytes_max=body_bytes_max,
        )
        if server is None:
            return listener.handle
        self.stack.push_async_callback(self._same_host.close, server)
        self.certificates.on_renewal(identity, server.forget_tokens)
        metrics.local_requests = lambda: server.exchanges
        return server.announcing(listener.handle)

    async def logs(self, instance: Instance) -> LogStore:
        """A router's commit logs, on its disk or in etcd; raises TierError."""
        store: LogStore
        if self.config.mlc.commit_log == "etcd":
            store = await open_etcd_logs(settings.etcd(self.config, instance.fill))
        else:
            store = open_logs(instance.fill(self.config.mlc.log_path), self.config.mlc.log_size)
        self.stack.push_async_callback(store.aclose)
        return store

    def mlc(self, base_uri: str, objects: Tier, *, logs: LogStore | None = None) -> MlcResource:
        """The cache's resource below a base URI; a router also serves logs."""
        return MlcResource(
            base_path=urlsplit(base_uri).path.rstrip("/"),
            objects=objects,
            logs=logs,
            authorize=self._authorize_mlc,
            authorize_fence=self._authorize_fence,
            object_bytes_max=self.config.mlc.object_max,
        )

    async def records(self, instance: Instance) -> tuple[Records, Records]:
        """What a router must find again after a restart; raises TierError.

        Its open sessions, and its notes on the logs of others; where its logs are, too.
        """
        path = instance.fill(self.config.mlc.log_path)
        if self.config.mlc.commit_log == "etcd":
            # A second start on this machine must not end the router that runs here.
            folder = Folder(path, setting="[mlc] log_path")
            self.stack.callback(folder.release)
            store = await open_etcd_records(
                settings.etcd(self.config, instance.fill),
                instance.name,
                on_lost=lambda why: self.on_fatal(f"{instance.label}: {why}"),
            )
            self.stack.push_async_callback(store.aclose)
            self.run_until_closed(store.owner.watch(), name="owner of records")
            return store.sessions, store.ended
        sessions = self._records(path / "sessions", bytes_max=SESSIONS_BYTES_MAX)
        return sessions, self._records(path / "ended", bytes_max=ENDED_BYTES_MAX)

    def _records(self, path: Path, *, bytes_max: int) -> LmdbRecords:
        records = LmdbRecords(path, map_bytes=bytes_max, setting="[mlc] log_path")
        self.stack.push_async_callback(records.aclose)
        return records

    def run_until_closed(self, coroutine: Coroutine[Any, Any, None], *, name: str) -> None:
        """Run a task that has ended before anything is closed that was built before it."""
        task = self.tasks.spawn(coroutine, name=name)

        async def end() -> None:
            task.cancel()
            await asyncio.wait([task])

        self.stack.push_async_callback(end)

    def _authorize_mlc(self, request: Request, kind: str, write: bool) -> None:
        """Who may touch the cache (D-M11)."""
        identity = self.peers.identify(request.peer)
        # Nothing tells KV that a drafter made up from a verifier's, so that no drafter writes it.
        ours = write and (kind == "log" or "/target_kv." in request.path)
        allowed = {"router", "verifier"} | (set() if ours else {"drafter"})
        if not identity.roles & allowed:
            raise WrongRole(f"{identity.name} may not {'write' if write else 'read'} {kind}s")

    def _authorize_fence(self, request: Request) -> None:
        """Fences are the router's (D-M11)."""
        self.peers.require(request.peer, "router")

    def bases(self, *own: str) -> tuple[str, ...]:
        """The caches trusted: those configured, and the roles' own."""
        return (*self.config.mlc.bases, *own)

    def report(
        self,
        client: LoopbackClient,
        router: str,
        status: Callable[[], Status],
        *,
        name: str,
        interval_s: float,
    ) -> None:
        """Report to the router until the end, then withdraw."""
        reporter = StatusReporter(client, [router], status, interval_s=interval_s)
        task = self.tasks.spawn(reporter.run(), name=f"status {name}")

        async def withdraw() -> None:
            task.cancel()
            await reporter.withdraw()

        self.stack.push_async_callback(withdraw)

    async def start_admin(self, instance: Instance, admin: Admin) -> None:
        """Open an instance's admin socket; raises StartError."""
        if not self.config.admin.socket:
            return
        path = instance.fill(self.config.admin.socket)
        server = Http1Server(admin.handle, path=path)
        try:
            await server.start()
        except OSError as e:
            raise StartError(
                f"{instance.label}: cannot create the admin socket {path}: {reason(e)}; "
                "set [admin] socket to a path in a writable directory",
                status=1,
            ) from e
        self.stack.push_async_callback(server.aclose)


def reason(error: OSError) -> str:
    """Why a socket can't be had, without the address, which the message has already."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)


def _own_peer(identity: TlsIdentity) -> Peer:
    """How roles in this process see each other."""
    return Peer("loopback", identity.uris, (), "", "")
