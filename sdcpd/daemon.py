"""The composition root: the one file that knows every part."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from sdcpd import service, settings
from sdcpd.admin import Admin, DrafterAdmin, RouterAdmin, VerifierAdmin
from sdcpd.config import Config, DrafterSection, VerifierSection
from sdcpd.engine.api import ModelError
from sdcpd.engine.tokenizer import TextModel
from sdcpd.protocol.problems import Forbidden
from sdcpd.protocol.uris import base_uri_equal
from sdcpd.roles.base import Listener
from sdcpd.roles.objects import Objects
from sdcpd.roles.peers import PeerTable
from sdcpd.roles.status import StatusReporter, instance_name
from sdcpd.roles.tasks import Tasks
from sdcpd.transport.client import HttpClient
from sdcpd.transport.http import Handler, Peer, PeerRefused, Request
from sdcpd.transport.http1 import Http1Server
from sdcpd.transport.loopback import LoopbackClient
from sdcpd.transport.server import Server
from sdcpd.transport.tls import IdentityError, TlsIdentity
from tiers.api import Tier, TierError
from tiers.build import build_objects, open_logs
from tiers.resource import MlcResource

if TYPE_CHECKING:
    from sdcpd.engine.api import DraftEngine, TargetEngine
    from sdcpd.roles.drafter import Drafter
    from sdcpd.roles.router import Router
    from sdcpd.roles.verifier import Verifier

log = logging.getLogger("sdcpd")
T = TypeVar("T")


class StartError(Exception):
    """A role can't start; the text says which, why and what to do. `status` is the exit code."""

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


class Daemon:
    """Starts the roles asked for, and stops them in the reverse order."""

    def __init__(self, config: Config, instances: list[Instance]) -> None:
        self._config = config
        self._instances = instances
        self._tasks = Tasks()
        self._stack = AsyncExitStack()
        self._peers = PeerTable(config.node.trust_domain, settings.peer_entries(config))
        self._routes: dict[str, Handler] = {}  # base URIs served in this process
        self._identities: list[TlsIdentity] = []

    async def run(self, *, started: Callable[[], Awaitable[None]] | None = None) -> None:
        """Run until SIGTERM or SIGINT; raises StartError."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        async with self._stack:
            self._stack.push_async_callback(self._tasks.aclose)
            objects = self._objects_tier()
            self._stack.push_async_callback(objects.aclose)
            # The router first: the others report to it as soon as they are up.
            for instance in sorted(self._instances, key=lambda i: i.role != "router"):
                await self._start(instance, objects)
            service.notify("READY=1")
            log.info("ready: %s", ", ".join(i.label for i in self._instances))
            if started is not None:
                await started()
            await stop.wait()
            service.notify("STOPPING=1")
            log.info("stopping")

    def _reload(self) -> None:
        """SIGHUP: take new certificates; those that do not fit leave the old ones in use."""
        service.notify_reloading()
        for identity in self._identities:
            try:
                identity.reload()
            except IdentityError as e:
                log.error("certificates not reloaded, the old ones stay in use: %s", e)
            else:
                log.info("certificates reloaded: %s", ", ".join(identity.uris))
        service.notify("READY=1")

    async def _start(self, instance: Instance, objects: Tier) -> None:
        try:
            match instance.role:
                case "router":
                    await self._start_router(instance, objects)
                case "verifier":
                    await self._start_verifier(instance, objects)
                case "drafter":
                    await self._start_drafter(instance, objects)
        except IdentityError as e:
            unreadable = isinstance(e.__cause__, OSError)
            hint = "; put it there, or name another in [tls]" if unreadable else ""
            raise StartError(f"{instance.label}: {e}{hint}", status=78) from e
        except TierError as e:
            raise StartError(f"{instance.label}: {e}", status=78) from e

    # ---- parts shared by the roles

    def _objects_tier(self) -> Tier:
        try:
            # A process has one cache, which is named after its first instance.
            fill = self._instances[0].fill
            return build_objects(settings.tier_specs(self._config, fill))
        except TierError as e:
            raise StartError(str(e), status=78) from e

    def _identity(self, instance: Instance) -> TlsIdentity:
        tls = self._config.tls

        cert = instance.fill(tls.cert)
        identity = TlsIdentity(ca=instance.fill(tls.ca), cert=cert, key=instance.fill(tls.key))
        roles = self._peers.identify(_own_peer(identity)).roles
        if instance.role not in roles:
            raise IdentityError(
                f"certificate {cert} does not carry the role {instance.role} of trust "
                f"domain {self._config.node.trust_domain}; issue one with sdcpctl certs issue"
            )
        self._identities.append(identity)
        return identity

    def _client(self, identity: TlsIdentity) -> LoopbackClient:
        """Calls to roles in this process stay in it; the others go over TLS."""
        http = HttpClient(identity, check_peer=self._check_server)
        self._stack.push_async_callback(http.aclose)
        return LoopbackClient(self._routes, _own_peer(identity), fallback=http)

    def _check_server(self, peer: Peer, authority: str) -> None:
        """A server must be an instance whose base URI is the one called (D-I1, D-I2)."""
        identity = self._peers.identify(peer)
        if not identity.roles:
            raise PeerRefused(f"{authority} shows a certificate without a role of this cluster")
        if not any(_authority(base) == authority for base in identity.bases):
            raise PeerRefused(
                f"{authority} is {identity.name}, whose certificate is for "
                f"{', '.join(identity.bases) or 'no base URI'}; fix base_uri or reissue"
            )

    async def _serve(
        self, instance: Instance, listener: Listener, identity: TlsIdentity, base_uri: str
    ) -> None:
        host, port = settings.listen_of(self._config, instance.role)
        if not any(base_uri_equal(uri, base_uri) for uri in identity.uris):
            raise StartError(
                f"{instance.label}: its certificate names {', '.join(identity.uris)}, not its "
                f"base_uri {base_uri}; reissue it with sdcpctl certs issue",
                status=78,
            )
        object_max = self._config.mlc.object_max

        def body_bytes_max(method: str, target: str) -> int:
            limit = listener.body_bytes_max(method, target.partition("?")[0])
            # One octet more reaches the role, which answers 413 in its own order of checks.
            return object_max if limit is None else limit + 1

        server = Server(
            listener.handle, identity=identity, host=host, port=port, body_bytes_max=body_bytes_max
        )
        try:
            await server.start()
        except OSError as e:
            raise StartError(
                f"{instance.label}: cannot listen on {host}:{port}: {_reason(e)}; stop the other "
                f"program or choose another [{instance.role}] listen",
                status=1,
            ) from e
        self._stack.push_async_callback(server.aclose, 2.0)
        self._routes[base_uri] = listener.handle
        log.info("%s: listening on %s:%d as %s", instance.label, host, port, base_uri)

    def _mlc(self, base_uri: str, objects: Tier, *, logs: Path | None = None) -> MlcResource:
        store = None
        if logs is not None:
            store = open_logs(logs, self._config.mlc.log_size)
            self._stack.push_async_callback(store.aclose)
        return MlcResource(
            base_path=urlsplit(base_uri).path.rstrip("/"),
            objects=objects,
            logs=store,
            authorize=self._authorize_mlc,
            authorize_fence=self._authorize_fence,
            object_bytes_max=self._config.mlc.object_max,
        )

    def _authorize_mlc(self, request: Request, kind: str, write: bool) -> None:
        """Who may touch the cache (D-M11)."""
        identity = self._peers.identify(request.peer)
        allowed = {"router", "verifier"} | (set() if kind == "log" and write else {"drafter"})
        if not identity.roles & allowed:
            raise Forbidden(f"{identity.name} may not {'write' if write else 'read'} {kind}s")

    def _authorize_fence(self, request: Request) -> None:
        """Fences are the router's (D-M11)."""
        self._peers.require(request.peer, "router")

    def _bases(self, *own: str) -> tuple[str, ...]:
        return (*self._config.mlc.bases, *own)

    def _report(self, client: LoopbackClient, role: Verifier | Drafter, interval_s: float) -> None:
        """Report to the router until the end, then withdraw."""
        section = self._config.verifier if role.status().role == 2 else self._config.drafter
        assert section is not None
        reporter = StatusReporter(client, [section.router], role.status, interval_s=interval_s)
        task = self._tasks.spawn(reporter.run(), name=f"status {role.instance}")

        async def withdraw() -> None:
            task.cancel()
            await reporter.withdraw()

        self._stack.push_async_callback(withdraw)

    # ---- roles

    async def _start_router(self, instance: Instance, objects: Tier) -> None:
        from sdcpd.roles.router import Router

        section = self._config.router
        assert section is not None, "checked by the command line"
        identity = self._identity(instance)
        client = self._client(identity)
        text = self._text_model()
        logs = instance.fill(self._config.mlc.log_path)
        mlc = self._mlc(section.base_uri, objects, logs=logs)
        router = Router(
            settings.router_config(self._config, tokenizer=text.digest),
            client=client,
            objects=Objects(client, bases=self._bases(section.base_uri), own=section.base_uri),
            peers=self._peers,
            mlc=mlc,
        )
        self._stack.push_async_callback(router.aclose)
        await self._serve(instance, router.listener, identity, section.base_uri)
        self._tasks.spawn(router.run(), name="router")
        await self._start_admin(
            instance, RouterAdmin(instance.name, router, text, api=self._api_uri())
        )
        await self._start_api(router, text)

    async def _start_verifier(self, instance: Instance, objects: Tier) -> None:
        from sdcpd.roles.verifier import Verifier

        section = self._config.verifier
        assert section is not None, "checked by the command line"
        identity = self._identity(instance)
        client = self._client(identity)
        mlc = self._mlc(section.base_uri, objects)
        engine = await self._target(section)
        self._stack.push_async_callback(engine.aclose)
        bases = self._bases(section.router, section.base_uri)
        verifier = Verifier(
            settings.verifier_config(section),
            engine=engine,
            client=client,
            objects=Objects(client, bases=bases, own=section.base_uri),
            peers=self._peers,
            mlc=mlc,
            name=instance_name(instance.name),
            status_ttl_s=section.status_ttl,
        )
        self._stack.push_async_callback(verifier.aclose)
        await self._serve(instance, verifier.listener, identity, section.base_uri)
        self._report(client, verifier, section.status_ttl / 3)
        await self._start_admin(instance, VerifierAdmin(instance.name, verifier))

    async def _start_drafter(self, instance: Instance, objects: Tier) -> None:
        from sdcpd.roles.drafter import Drafter

        section = self._config.drafter
        assert section is not None, "checked by the command line"
        identity = self._identity(instance)
        client = self._client(identity)
        engine = await self._draft_engine(section)
        self._stack.push_async_callback(engine.aclose)
        bases = self._bases(section.router, section.base_uri)
        drafter = Drafter(
            settings.drafter_config(section),
            engine=engine,
            client=client,
            objects=Objects(client, bases=bases, own=section.base_uri),
            peers=self._peers,
            mlc=self._mlc(section.base_uri, objects),
            name=instance_name(instance.name),
        )
        self._stack.push_async_callback(drafter.aclose)
        await self._serve(instance, drafter.listener, identity, section.base_uri)
        self._report(client, drafter, section.status_interval)
        await self._start_admin(instance, DrafterAdmin(instance.name, drafter))

    # ---- engines

    async def _target(self, section: VerifierSection) -> TargetEngine:
        load = _engine_loader()
        model = load.ModelSettings(**settings.model_settings(section.model))
        return await self._loading(
            lambda: load.load_target(model, rows_max=section.batch_rows, report=_progress)
        )

    async def _draft_engine(self, section: DrafterSection) -> DraftEngine:
        if section.kind == "ngram":
            from sdcpd.engine.ngram import NgramDrafter

            return NgramDrafter()
        load = _engine_loader()
        model = load.ModelSettings(**settings.model_settings(section.model))
        return await self._loading(
            lambda: load.load_drafter(model, top_k=section.top_k, report=_progress)
        )

    async def _loading(self, load: Callable[[], T]) -> T:
        """Load in a thread: the event loop goes on answering meanwhile."""
        try:
            return await asyncio.get_running_loop().run_in_executor(None, load)
        except ModelError as e:
            raise StartError(str(e), status=78) from e

    # ---- what clients and operators talk to

    def _text_model(self) -> TextModel:
        config = self._config
        path = config.router.model if config.router else None
        if path is None and config.verifier is not None:
            path = config.verifier.model.path
        assert path is not None, "checked with the configuration"
        try:
            return TextModel.load(path, name=config.api.model_name if config.api else "")
        except ModelError as e:
            raise StartError(str(e), status=78) from e

    async def _start_admin(self, instance: Instance, admin: Admin) -> None:
        if not self._config.admin.socket:
            return
        path = instance.fill(self._config.admin.socket)
        server = Http1Server(admin.handle, path=path)
        try:
            await server.start()
        except OSError as e:
            raise StartError(
                f"{instance.label}: cannot create the admin socket {path}: {_reason(e)}; "
                "set [admin] socket to a path in a writable directory",
                status=1,
            ) from e
        self._stack.push_async_callback(server.aclose)

    async def _start_api(self, router: Router, text: TextModel) -> None:
        section = self._config.api
        if section is None:
            return
        from sdcpd.roles.api_access import KeysError
        from sdcpd.roles.frontend import FrontEnd

        try:
            front_end = FrontEnd(router, text, settings.api_settings(section))
        except KeysError as e:
            raise StartError(f"[api] keys_file: {e}", status=78) from e
        self._stack.push_async_callback(front_end.aclose)
        host, port = section.listen
        server = Http1Server(front_end.handle, host=host, port=port, refuse=front_end.refuse)
        try:
            await server.start()
        except OSError as e:
            raise StartError(
                f"API: cannot listen on {host}:{port}: {_reason(e)}; stop the other program or "
                "choose another [api] listen",
                status=1,
            ) from e
        self._stack.push_async_callback(server.aclose)
        log.info("API: %s", self._api_uri())

    def _api_uri(self) -> str | None:
        section = self._config.api
        if section is None:
            return None
        host, port = section.listen
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def _reason(error: OSError) -> str:
    """Why a socket can't be had, without the address, which the message has already."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)


def _engine_loader() -> Any:
    """The module that needs torch, loaded only by roles that have a model."""
    try:
        from sdcpd.engine import load
    except ImportError as e:
        raise StartError(
            f"this role needs the engine, and {e.name} is not installed here; "
            "install it with: pip install 'sdcpd[engine]'",
            status=78,
        ) from e
    return load


def _progress(text: str) -> None:
    service.notify(f"STATUS={text}")
    log.info("%s", text)


def _authority(base_uri: str) -> str:
    """host:port of a base URI, the default port made explicit."""
    parts = urlsplit(base_uri)
    host = parts.hostname or ""
    return f"{f'[{host}]' if ':' in host else host}:{parts.port or 443}"


def _own_peer(identity: TlsIdentity) -> Peer:
    """How roles in this process see each other."""
    return Peer("loopback", identity.uris, (), "", "")
