"""What the roles of one process share: identities, clients, listeners, admin sockets."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sdcpd import settings
from sdcpd.admin_resources import Admin, Resource
from sdcpd.certificates import Certificates, expiries
from sdcpd.config import Config
from sdcpd.metrics import Metrics
from sdcpd.protocol.messages import Status
from sdcpd.protocol.uris import base_uri_equal
from sdcpd.roles.base import Listener
from sdcpd.roles.health import Health
from sdcpd.roles.objects import Objects
from sdcpd.roles.peers import PeerTable
from sdcpd.roles.status import StatusReporter
from sdcpd.roles.tasks import Tasks
from sdcpd.same_host import SameHost
from sdcpd.tracers import Tracers
from sdcpd.traces import Tracer
from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import Handler, Peer, Request, Response
from sdcpd.transport.http1 import Http1Server
from sdcpd.transport.https import HttpsIdentity
from sdcpd.transport.identity_files import IdentityError
from sdcpd.transport.limits import CONNECTIONS_PER_SERVER_MAX
from sdcpd.transport.local_client import LocalClient
from sdcpd.transport.loopback import LoopbackClient
from sdcpd.transport.refusal_log import RefusalLog
from sdcpd.transport.server import Server
from sdcpd.transport.tls import TlsIdentity

log = logging.getLogger("sdcpd")


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
        self._tracers = Tracers(config.traces, self.stack)
        self._identities: dict[str, TlsIdentity] = {}
        self.on_fatal: Callable[[str], None] = log.critical
        """Told why the process must end."""
        self.process_resources: Mapping[tuple[str, str], Resource] = {}
        """What every admin socket has beside its instance's own."""
        self.healths: dict[str, Health] = {}
        """Of each instance, by its label."""
        self.api_certificate: HttpsIdentity | None = None
        """What clients see of the API, where it speaks HTTPS."""
        self.metrics: list[Metrics] = []
        """Of each instance that serves."""
        self.reloaded: Callable[[], bool] = lambda: True
        """Whether the last reload of the configuration found nothing wrong."""

    def health(self, instance: Instance) -> Health:
        """The one health of an instance."""
        return self.healths.setdefault(instance.label, Health(instance.label))

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
            identity,
            check_peer=self.peers.check_server,
            transport=self.config.transport.prefer,
            connections_max=CONNECTIONS_PER_SERVER_MAX,
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

    def tracer(self, instance: Instance) -> Tracer | None:
        """What an instance tells its spans to, if somebody takes them."""
        ca = self.config.traces.ca
        return self._tracers.of(instance.role, instance.name, ca=instance.fill(ca) if ca else None)

    def name_of(self, identity: TlsIdentity) -> str:
        """An instance of this process as its peers name it."""
        return self.peers.identify(_own_peer(identity)).name

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
        handler: Handler = listener.handle

        async def handle(request: Request) -> Response:
            return await handler(request)

        limits, bounds, pace = settings.server_bounds(self.config)
        server = Server(
            handle,
            identity=identity,
            host=host,
            port=port,
            body_bytes_max=body_bytes_max,
            http3=self.config.transport.http3,
            limits=limits,
            bounds=bounds,
            pace=pace,
            on_refused=metrics.refused,
        )
        metrics.expiries = lambda: expiries(identity) | self._api_expiry(instance)
        metrics.ready = lambda: self.health(instance).ready
        metrics.reloaded = lambda: self.reloaded()
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
        # Not before: an instance that is started twice by mistake must end at its port.
        handler = self._announcing(instance, listener, identity, body_bytes_max, metrics)
        self._routes[base_uri] = listener.handle
        self.metrics.append(metrics)
        log.info("%s: listening on %s:%d as %s", instance.label, host, port, base_uri)

    def _api_expiry(self, instance: Instance) -> dict[str, float]:
        if instance.role != "router" or self.api_certificate is None:
            return {}
        return {"api": self.api_certificate.not_after.timestamp()}

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

    def run_until_closed(self, coroutine: Coroutine[Any, Any, None], *, name: str) -> None:
        """Run a task that has ended before anything is closed that was built before it."""
        task = self.tasks.spawn(coroutine, name=name)

        async def end() -> None:
            task.cancel()
            await asyncio.wait([task])

        self.stack.push_async_callback(end)

    def objects(self, client: LoopbackClient, *, own: str, router: str | None = None) -> Objects:
        """Objects of the caches trusted: those configured, the router's, and the one `own`."""
        return Objects(
            client,
            bases=(*self.config.mlc.bases, *([router] if router else []), own),
            own=own,
            is_near=client.is_near,
            scoped=settings.scoped_caches(self.config),
            lease_s=self.config.mlc.lease,
        )

    def report(
        self,
        client: LoopbackClient,
        router: str,
        status: Callable[[], Status],
        *,
        identity: TlsIdentity,
        name: str,
        interval_s: float,
    ) -> None:
        """Report to the router until the end, then withdraw."""

        def whole() -> Status:
            return replace(status(), certificate_until=int(identity.not_after.timestamp()))

        reporter = StatusReporter(client, [router], whole, interval_s=interval_s)
        task = self.tasks.spawn(reporter.run(), name=f"status {name}")

        async def withdraw() -> None:
            task.cancel()
            await reporter.withdraw()

        self.stack.push_async_callback(withdraw)

    async def start_admin(self, instance: Instance, admin: Admin) -> None:
        """Open an instance's admin socket; raises StartError."""
        admin.add(self.process_resources)
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
