"""What a process keeps: its cache, and a router's commit logs and records."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sdcpd import settings
from sdcpd.admin_resources import AdminError
from sdcpd.protocol.problems import WrongRole
from sdcpd.roles.health import Check, Level, cache_check
from sdcpd.roles.prefix_kv import draft_kind
from sdcpd.transport.http import Request
from tiers.api import LogStore, Records, Tier
from tiers.build import build_objects, open_etcd_logs, open_etcd_records, open_logs
from tiers.folder import Folder
from tiers.listing import let_go, sums
from tiers.lmdb_records import LmdbRecords
from tiers.resource import MlcResource
from tiers.watched import WatchedLogs, WatchedRecords

if TYPE_CHECKING:
    from sdcpd.parts import Instance, Parts

SESSIONS_BYTES_MAX = 4 << 30  # of open sessions, mostly their prompts; the files are sparse
ENDED_BYTES_MAX = 1 << 30  # of notes on logs whose sessions have ended, some 100 octets each

# Where another instance's tier keeps KV here (tiers/remote.py): no scope of a session or tenant.
_KEPT_KV = re.compile(r"/objects/kv(?:_[A-Za-z0-9_-]{22})?/")


class Stores:
    """Opens what is kept, as configured; it is closed with the parts."""

    _cache: Tier

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.cache_check: Check = lambda: None
        """Of the process's one cache."""

    async def objects_tier(self, first: Instance) -> Tier:
        """The process's one cache, named after its first instance, which it asks others as.

        Raises TierError or IdentityError.
        """
        specs = settings.tier_specs(self._parts.config, first.fill)
        remote = any(spec.base is not None for spec in specs)
        client = self._parts.client(self._parts.identity(first)) if remote else None
        tier = await build_objects(specs, client=client)
        self._parts.stack.push_async_callback(tier.aclose)
        self.cache_check = cache_check(tier.stats)
        self._cache = tier
        return tier

    async def tell_cache(self, _: dict[str, Any]) -> dict[str, Any]:
        """The process's cache, tier by tier, for the admin sockets."""
        stats = self._cache.stats()
        tiers = [asdict(replace(one, meter=None)) for one in stats.parts or (stats,)]
        return {"tiers": [{k: v for k, v in one.items() if k != "meter"} for one in tiers]}

    async def list_cache(self, _: dict[str, Any]) -> dict[str, Any]:
        """What the process's cache holds, by tier, scope and kind."""
        return {"holdings": [asdict(one) for one in await sums(self._cache)]}

    async def let_go_of_cache(self, body: dict[str, Any]) -> dict[str, Any]:
        """Delete what no lease holds: all, or what is of a `scope` or a `kind`."""
        only = {name: body[name] for name in ("scope", "kind") if body.get(name) is not None}
        if not all(isinstance(value, str) for value in only.values()):
            raise AdminError("scope and kind are text")
        objects, octets = await let_go(self._cache, **only)
        return {"objects": objects, "bytes": octets}

    async def logs(self, instance: Instance) -> LogStore:
        """A router's commit logs, on its disk or in etcd; raises TierError."""
        store: LogStore
        if self._parts.config.mlc.commit_log == "etcd":
            store = await open_etcd_logs(settings.etcd(self._parts.config, instance.fill))
        else:
            store = open_logs(
                instance.fill(self._parts.config.mlc.log_path), self._parts.config.mlc.log_size
            )
        self._parts.stack.push_async_callback(store.aclose)
        logs = WatchedLogs(store, **self._noted(instance, "commit logs"))
        self._parts.run_until_closed(logs.run(), name="commit logs")
        return logs

    def _noted(self, instance: Instance, name: str) -> dict[str, Any]:
        """What is told when a store of the router fails, and when it works again."""
        health, mlc = self._parts.health(instance), self._parts.config.mlc
        where, hint = "etcd", "see [mlc.etcd]"
        if mlc.commit_log == "lmdb":
            where, hint = str(instance.fill(mlc.log_path)), "see that disk and [mlc] log_size"

        def failed(why: str) -> None:
            text = f"the {name} in {where} cannot be used, and no text is written without them"
            health.note(name, Level.UNREADY, f"{text}: {why}; {hint}")

        return {"failed": failed, "worked": lambda: health.clear(name)}

    def _watched(self, instance: Instance, records: Records) -> Records:
        watched = WatchedRecords(records, **self._noted(instance, "records of open sessions"))
        self._parts.run_until_closed(watched.run(), name="records")
        return watched

    async def records(self, instance: Instance) -> tuple[Records, Records]:
        """What a router must find again after a restart; raises TierError.

        Its open sessions, and its notes on the logs of others; where its logs are, too.
        """
        path = instance.fill(self._parts.config.mlc.log_path)
        if self._parts.config.mlc.commit_log == "etcd":
            # A second start on this machine must not end the router that runs here.
            folder = Folder(path, setting="[mlc] log_path")
            self._parts.stack.callback(folder.release)
            store = await open_etcd_records(
                settings.etcd(self._parts.config, instance.fill),
                instance.name,
                on_lost=lambda why: self._parts.on_fatal(f"{instance.label}: {why}"),
            )
            self._parts.stack.push_async_callback(store.aclose)
            self._parts.run_until_closed(store.owner.watch(), name="owner of records")
            return self._watched(instance, store.sessions), store.ended
        sessions = self._records(path / "sessions", bytes_max=SESSIONS_BYTES_MAX)
        ended = self._records(path / "ended", bytes_max=ENDED_BYTES_MAX)
        return self._watched(instance, sessions), ended

    def _records(self, path: Path, *, bytes_max: int) -> LmdbRecords:
        records = LmdbRecords(path, map_bytes=bytes_max, setting="[mlc] log_path")
        self._parts.stack.push_async_callback(records.aclose)
        return records

    def mlc(self, base_uri: str, objects: Tier, *, logs: LogStore | None = None) -> MlcResource:
        """The cache's resource below a base URI; a router also serves logs."""
        return MlcResource(
            base_path=urlsplit(base_uri).path.rstrip("/"),
            objects=objects,
            logs=logs,
            authorize=self._authorize_mlc,
            authorize_fence=self._authorize_fence,
            object_bytes_max=self._parts.config.mlc.object_max,
        )

    def _authorize_mlc(self, request: Request, kind: str, write: bool) -> None:
        """Who may touch the cache (D-M11)."""
        identity = self._parts.peers.identify(request.peer)
        # Nothing tells KV that a drafter made up from a verifier's, so that no drafter writes it.
        ours = write and (kind == "log" or "/target_kv." in request.path)
        allowed = {"router", "verifier"} | (set() if ours else {"drafter"})
        if not identity.roles & allowed:
            raise WrongRole(f"{identity.name} may not {'write' if write else 'read'} {kind}s")
        kept = _KEPT_KV.search(request.path) if write else None
        if kept is None or identity.roles & {"router", "verifier"}:
            return
        if not request.path[kept.end() :].startswith(draft_kind(identity.name) + "."):
            raise WrongRole(f"{identity.name} may not write the KV that another instance keeps")

    def _authorize_fence(self, request: Request) -> None:
        """Fences are the router's (D-M11)."""
        self._parts.peers.require(request.peer, "router")
