"""The composition root: which roles run in this process, from start to stop."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio

from sdcpd import service, settings
from sdcpd.admin import DrafterAdmin, RouterAdmin, VerifierAdmin
from sdcpd.admin_logs import LogsAdmin
from sdcpd.api_server import api_uri, start_api
from sdcpd.config import Config
from sdcpd.config_places import place_problems
from sdcpd.engines import draft_engine, target_engine, text_model
from sdcpd.metrics import Metrics
from sdcpd.metrics_server import start_monitoring
from sdcpd.parts import Instance, Parts, StartError
from sdcpd.reload import RELOADABLE, Reloads, flat
from sdcpd.roles.health import Level
from sdcpd.roles.status import instance_name
from sdcpd.stores import Stores
from sdcpd.transport.identity_files import IdentityError
from tiers.api import Tier, TierError, TierUnreachable

log = logging.getLogger("sdcpd")
__all__ = ["Daemon", "Instance", "StartError"]


class Daemon:
    """Starts the roles asked for, and stops them in the reverse order."""

    def __init__(
        self,
        config: Config,
        instances: list[Instance],
        *,
        read: Callable[[], Config] | None = None,
    ) -> None:
        """`read` reads the configuration again; raises ConfigError."""
        self._config = config
        self._reloads = Reloads(config, read or (lambda: config))
        self._reloads.on_reload(lambda: self._parts.certificates.reload())
        self._reloads.on_change(lambda new: logging.getLogger().setLevel(new.log.level.upper()))
        self._instances = instances
        self._parts = Parts(config)
        self._stores = Stores(self._parts)
        self._parts.on_fatal = self._end
        self._parts.reloaded = lambda: not self._reloads.last.problems
        self._parts.process_resources = {
            ("GET", "/cache"): self._stores.tell_cache,
            ("GET", "/cache/objects"): self._stores.list_cache,
            ("POST", "/cache/gc"): self._stores.let_go_of_cache,
            ("GET", "/config"): self._tell_config,
            ("POST", "/reload"): self._reload_asked,
        }
        self._running: anyio.CancelScope
        self._fatal: StartError | None = None
        self._ready = False

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT, which end a start as well.

        Raises StartError, also where what runs can't go on.
        """
        heard = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        # Heard to the end: a second signal must not cut short what the first has begun.
        with anyio.open_signal_receiver(*heard) as signals:
            async with self._parts.stack:
                self._parts.stack.push_async_callback(self._parts.tasks.aclose)
                with anyio.CancelScope() as self._running:
                    self._parts.tasks.spawn(self._obey(signals), name="signals")
                    await self._start_all()
                    await anyio.sleep_forever()
                self._ready = False  # a reload that comes now must not say READY=1
                service.notify("STOPPING=1")
                log.info("stopping")
        if self._fatal is not None:
            raise self._fatal

    async def _obey(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            if number == signal.SIGHUP:
                self._reload()
            else:
                self._running.cancel()

    def _end(self, why: str) -> None:
        # With the status of what must be changed first: restarted, it would end somebody else.
        self._fatal = StartError(why, status=78)
        self._running.cancel()

    def _reload(self) -> None:
        # Before the start is over, READY=1 would say that it is.
        if self._ready:
            service.notify_reloading()
        self._reloads.reload()
        if self._ready:
            service.notify("READY=1")

    async def _reload_asked(self, _: dict[str, Any]) -> dict[str, Any]:
        self._reload()
        return self._reloads.last.as_json()

    async def _tell_config(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"config": flat(self._reloads.running), "reloadable": list(RELOADABLE)}

    async def _start_all(self) -> None:
        if problems := list(place_problems(self._config, self._instances)):
            raise StartError("; ".join(problems), status=78)
        await start_monitoring(self._parts, started=lambda: self._ready)
        try:
            objects = await self._stores.objects_tier(self._instances[0])
        except (TierError, IdentityError) as e:
            raise StartError(str(e), status=78) from e
        # The router first: the others report to it as soon as they are up.
        for instance in sorted(self._instances, key=lambda i: i.role != "router"):
            await self._start(instance, objects)
        tls = self._config.tls
        self._parts.tasks.spawn(
            self._parts.certificates.watch(every_s=tls.watch, warn_before_s=tls.warn_before),
            name="certificates",
        )
        self._ready = True
        labels = ", ".join(i.label for i in self._instances)
        service.notify(f"STATUS=serving as {labels}\nREADY=1")
        self._parts.tasks.spawn(service.keep_watch(self._parts.healths.values()), name="watch")
        log.info("ready: %s", labels)

    async def _start(self, instance: Instance, objects: Tier) -> None:
        service.notify_starting(f"starting {instance.label}")
        self._parts.health(instance).watch("cache", Level.DEGRADED, self._stores.cache_check)
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
            # What does not answer may be back when the supervisor starts this anew.
            status = 1 if isinstance(e, TierUnreachable) else 78
            raise StartError(f"{instance.label}: {e}", status=status) from e

    # ---- parts shared by the roles

    async def _start_router(self, instance: Instance, objects: Tier) -> None:
        from sdcpd.roles.log_retention import LogRetention
        from sdcpd.roles.router import Router

        section = self._config.router
        assert section is not None, "checked by the command line"
        identity = self._parts.identity(instance)
        client = self._parts.client(identity)
        text = text_model(self._config)
        logs = await self._stores.logs(instance)
        mlc = self._stores.mlc(section.base_uri, objects, logs=logs)
        sessions, ended = await self._stores.records(instance)
        router = Router(
            settings.router_config(self._config, tokenizer=text.digest),
            client=client,
            objects=self._parts.objects(client, own=section.base_uri),
            peers=self._parts.peers,
            mlc=mlc,
            records=sessions,
            health=self._parts.health(instance),
        )
        self._parts.stack.push_async_callback(router.aclose)
        self._reloads.on_change(
            lambda new: router.configure(settings.router_config(new, tokenizer=text.digest))
        )
        router.restore()
        retention = LogRetention(
            logs,
            ended,
            open_logs=router.open_logs,
            retention_s=self._config.mlc.log_retention,
        )
        self._parts.run_until_closed(retention.run(), name="log retention")
        metrics = Metrics.of_router(router)
        metrics.cache = objects.stats
        await self._parts.serve(
            instance, router.listener, identity, base_uri=section.base_uri, metrics=metrics
        )
        self._parts.tasks.spawn(router.run(), name="router")
        await self._parts.start_admin(
            instance,
            RouterAdmin(
                instance.name,
                router,
                text,
                api=api_uri(self._config),
                metrics=metrics,
                logs=LogsAdmin(logs, retention=retention),
            ),
        )
        metrics.api = await start_api(self._parts, self._reloads, router, text, instance)

    async def _start_verifier(self, instance: Instance, objects: Tier) -> None:
        from sdcpd.roles.verifier import Verifier

        section = self._config.verifier
        assert section is not None, "checked by the command line"
        identity = self._parts.identity(instance)
        client = self._parts.client(identity)
        mlc = self._stores.mlc(section.base_uri, objects)
        begin = time.monotonic()
        engine = await target_engine(section)
        load_s = time.monotonic() - begin
        self._parts.stack.push_async_callback(engine.aclose)
        verifier = Verifier(
            settings.verifier_config(section),
            engine=engine,
            client=client,
            objects=self._parts.objects(client, own=section.base_uri, router=section.router),
            peers=self._parts.peers,
            mlc=mlc,
            name=instance_name(instance.name),
            status_ttl_s=section.status_ttl,
            kv_tier=objects if section.keep_kv else None,
            health=self._parts.health(instance),
            tracer=self._parts.tracer(instance),
        )
        self._parts.stack.push_async_callback(verifier.aclose)
        self._reloads.on_change(
            lambda new: verifier.configure(settings.verifier_config(new.verifier or section))
        )
        metrics = Metrics.of_verifier(verifier)
        metrics.cache, metrics.batches = objects.stats, engine.batches
        metrics.model, metrics.model_load_s = engine.info.name, load_s
        await self._parts.serve(
            instance, verifier.listener, identity, base_uri=section.base_uri, metrics=metrics
        )
        self._parts.report(
            client,
            section.router,
            verifier.status,
            identity=identity,
            name=verifier.instance,
            interval_s=section.status_ttl / 3,
        )
        await self._parts.start_admin(
            instance, VerifierAdmin(instance.name, verifier, metrics=metrics)
        )

    async def _start_drafter(self, instance: Instance, objects: Tier) -> None:
        from sdcpd.roles.drafter import Drafter

        section = self._config.drafter
        assert section is not None, "checked by the command line"
        identity = self._parts.identity(instance)
        client = self._parts.client(identity)
        begin = time.monotonic()
        engine = await draft_engine(section)
        load_s = time.monotonic() - begin
        self._parts.stack.push_async_callback(engine.aclose)
        drafter = Drafter(
            settings.drafter_config(section),
            engine=engine,
            client=client,
            objects=self._parts.objects(client, own=section.base_uri, router=section.router),
            peers=self._parts.peers,
            mlc=self._stores.mlc(section.base_uri, objects),
            name=instance_name(instance.name),
            kv_tier=objects if section.keep_kv else None,
            kv_owner=self._parts.name_of(identity),
            health=self._parts.health(instance),
            tracer=self._parts.tracer(instance),
        )
        self._parts.stack.push_async_callback(drafter.aclose)
        metrics = Metrics.of_drafter(drafter)
        metrics.cache, metrics.model_load_s = objects.stats, load_s
        await self._parts.serve(
            instance, drafter.listener, identity, base_uri=section.base_uri, metrics=metrics
        )
        self._parts.report(
            client,
            section.router,
            drafter.status,
            identity=identity,
            name=drafter.instance,
            interval_s=section.status_interval,
        )
        await self._parts.start_admin(
            instance, DrafterAdmin(instance.name, drafter, metrics=metrics)
        )
