"""From the configured tiers to the objects that are one (architecture, `[mlc] tiers`)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sdcpd.transport.http import Client
from tiers.api import LogStore, Tier, TierError
from tiers.host import HostTier
from tiers.lmdb_log import LmdbLogStore
from tiers.lmdb_tier import LmdbTier
from tiers.pinned import PinnedTier
from tiers.remote import RemoteTier
from tiers.s3_place import S3Place
from tiers.sizes import SIZE_BYTES_MIN
from tiers.stack import TierStack

if TYPE_CHECKING:
    from tiers.etcd_client import EtcdSettings
    from tiers.etcd_records import EtcdRouterStore

__all__ = [
    "S3Place",
    "TierError",
    "TierSpec",
    "build_objects",
    "etcd_settings",
    "open_etcd_logs",
    "open_etcd_records",
    "open_logs",
]

KINDS = ("pinned", "host", "lmdb", "remote", "s3")


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One entry of `[mlc] tiers`: its budget in octets, and where it lies."""

    kind: Literal["pinned", "host", "lmdb", "remote", "s3"]
    size_bytes: int
    path: Path | None = None
    scope_share: float = 1.0
    """What one scope may hold of it."""
    place: S3Place | None = None
    base: str | None = None
    """Of another instance, whose cache this one is."""

    @property
    def scope_bytes_max(self) -> int:
        """The same in octets."""
        return max(1, int(self.size_bytes * self.scope_share))


async def build_objects(
    specs: Sequence[TierSpec],
    *,
    client: Client | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Tier:
    """Open the tiers, fastest first; if it raises TierError or is cancelled, none is left open.

    `client` is what remote tiers are asked with.
    """
    if not specs:
        raise TierError('[mlc] tiers is empty: give at least {kind = "host", size = "1GiB"}')
    paths = [spec.path for spec in specs if spec.path is not None]
    if len(set(paths)) < len(paths):
        raise TierError("two entries of [mlc] tiers have the same path: give each its own")
    for spec in specs:
        _check(spec)
    if any(spec.kind == "s3" for spec in specs[:-1]):
        raise TierError("[mlc] tiers: the s3 tier is the slowest: put its entry last")
    if specs[0].kind in ("remote", "s3"):
        raise TierError(
            f"[mlc] tiers: the first entry is {specs[0].kind}, which takes only some objects: put"
            ' an entry before it, as in {kind = "host", size = "1GiB"}'
        )
    tiers: list[Tier] = []
    try:
        for spec in specs:
            tiers.append(await _open(spec, client, clock))
    except BaseException:
        for tier in tiers:
            if isinstance(tier, LmdbTier | PinnedTier):
                tier.close()
        raise
    return tiers[0] if len(tiers) == 1 else TierStack(tiers)


def open_logs(path: Path, map_bytes: int) -> LmdbLogStore:
    """Open or create the durable commit logs in a directory of their own; raises TierError."""
    return LmdbLogStore(path, map_bytes=map_bytes)


async def open_etcd_logs(settings: EtcdSettings) -> LogStore:
    """Connect to the commit logs that several routers share in etcd; raises TierError."""
    from tiers.etcd_log import EtcdLogStore

    return await EtcdLogStore.open(settings)


async def open_etcd_records(
    settings: EtcdSettings, name: str, *, on_lost: Callable[[str], None]
) -> EtcdRouterStore:
    """Take over the records of the router of a name; raises TierError.

    `on_lost` is called, with a sentence, when another process has done the same later.
    """
    from tiers.etcd_client import EtcdClient
    from tiers.etcd_owner import EtcdOwner
    from tiers.etcd_records import EtcdRouterStore

    client = EtcdClient(settings)
    owner = EtcdOwner(client, settings.prefix, name, on_lost=on_lost)
    store = EtcdRouterStore(client, owner, prefix=settings.prefix, name=name)
    try:
        await store.open()
    except BaseException:
        await store.aclose()
        raise
    return store


def etcd_settings(
    *,
    endpoints: Sequence[str],
    prefix: str,
    ca: Path | None = None,
    cert: Path | None = None,
    key: Path | None = None,
    user: str = "",
    password_file: Path | None = None,
    timeout_s: float,
) -> EtcdSettings:
    """Check what can be checked without etcd; raises TierError."""
    # What gRPC would print on standard error, errors say in sentences.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        # Only here: nobody else needs gRPC.
        from tiers.etcd_client import EtcdSettings, credentials_of, login_of
    except ImportError as error:
        raise TierError(
            f'[mlc] commit_log = "etcd" needs packages that are not installed ({error}): run'
            " pip install 'sdcpd[etcd]'"
        ) from error
    settings = EtcdSettings(
        endpoints=tuple(endpoints),
        prefix=prefix,
        ca=ca,
        cert=cert,
        key=key,
        user=user,
        password_file=password_file,
        timeout_s=timeout_s,
    )
    credentials_of(settings)
    login_of(settings)
    return settings


def _check(spec: TierSpec) -> None:
    if spec.kind not in KINDS:
        known = ", ".join(f'"{kind}"' for kind in KINDS)
        raise TierError(f'[mlc] tiers: kind "{spec.kind}" is not known: use one of {known}')
    if spec.kind != "remote" and spec.size_bytes < SIZE_BYTES_MIN:
        raise TierError(
            f"[mlc] tiers: size of the {spec.kind} tier is {spec.size_bytes} octets: give at"
            f" least {SIZE_BYTES_MIN}"
        )
    if spec.kind == "lmdb" and spec.path is None:
        raise TierError("[mlc] tiers: the lmdb tier has no path: give a directory on a local disk")
    if spec.kind == "s3" and spec.place is None:
        raise TierError("[mlc] tiers: the s3 tier has no bucket: give the name of one that exists")


async def _open(spec: TierSpec, client: Client | None, clock: Callable[[], float]) -> Tier:
    share = spec.scope_bytes_max
    if spec.base is not None:
        assert client is not None, "given wherever there is a remote tier"
        return RemoteTier(client, spec.base, clock=clock)
    if spec.place is not None:
        return await _open_s3(spec.place, spec, clock)
    if spec.path is not None:
        return LmdbTier(spec.path, spec.size_bytes, scope_bytes_max=share, clock=clock)
    if spec.kind == "pinned":
        return PinnedTier(spec.size_bytes, scope_bytes_max=share, clock=clock)
    return HostTier(spec.size_bytes, scope_bytes_max=share, clock=clock)


async def _open_s3(place: S3Place, spec: TierSpec, clock: Callable[[], float]) -> Tier:
    try:
        # Here, so that nobody else needs the package.
        from tiers.s3_open import open_s3
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "obstore":
            raise
        raise TierError(
            "[mlc] tiers: an s3 tier needs the package obstore: pip install 'sdcpd[s3]'"
        ) from error
    return await open_s3(place, spec.size_bytes, scope_bytes_max=spec.scope_bytes_max, clock=clock)
