"""From sections of the configuration to what each part takes; no decisions here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdcpd.config import Config
from sdcpd.config_sections import (
    ApiSection,
    DrafterSection,
    ModelSection,
    TierSection,
    VerifierSection,
)
from sdcpd.protocol.drafter import DrafterSettings
from sdcpd.protocol.instances import Permitted
from sdcpd.protocol.router import RouterSettings
from sdcpd.protocol.verifier_state import VerifierSettings
from sdcpd.roles.contracts import RouterConfig
from sdcpd.roles.drafter import DrafterConfig
from sdcpd.roles.frontend import ApiSettings
from sdcpd.roles.peers import PeerEntry
from sdcpd.roles.verifier import VerifierConfig
from sdcpd.transport.limits import H2Limits, PaceLimits, ServerLimits
from sdcpd.units import duration_text
from tiers.build import S3Place, TierSpec, etcd_settings

if TYPE_CHECKING:
    from tiers.etcd_client import EtcdSettings


def peer_entries(config: Config) -> list[PeerEntry]:
    """`[[peers]]` as the peer table takes them."""
    return [
        PeerEntry(p.id, frozenset(p.roles), p.base_uri, p.model, p.trusted)
        for p in config.peers
        if p.id
    ]


def permitted(config: Config) -> dict[str, Permitted]:
    """What the operator says of instances, by base URI."""
    return {p.base_uri: Permitted(p.model, p.trusted) for p in config.peers if p.base_uri}


def scoped_caches(config: Config) -> dict[str, frozenset[bytes]]:
    """Caches that are trusted for some scopes alone, by base URI (D-M3)."""
    return {
        p.base_uri: frozenset(p.scopes) for p in config.peers if p.base_uri and p.scopes is not None
    }


def server_bounds(config: Config) -> tuple[H2Limits, ServerLimits, PaceLimits]:
    """`[transport.limits]` as a server takes them."""
    limits = config.transport.limits
    return (
        H2Limits(streams_max=limits.requests),
        ServerLimits(limits.connections_per_peer, limits.handshakes, limits.buffered),
        PaceLimits(grace_s=limits.body_grace),
    )


def tier_specs(config: Config, fill: Callable[[str], Path]) -> list[TierSpec]:
    """`[mlc] tiers`; `fill` puts the instance's names into a path."""
    return [
        TierSpec(
            tier.kind,
            tier.size,
            fill(tier.path) if tier.path else None,
            scope_share=config.mlc.scope_max / 100,
            place=_s3_place(tier, fill),
            base=tier.base,
        )
        for tier in config.mlc.tiers
    ]


def local_dir(config: Config, fill: Callable[[str], Path]) -> Path | None:
    """Where `[mlc] local_dir` has the sockets, or beside the admin socket; None for neither."""
    if config.mlc.local_dir:
        return fill(config.mlc.local_dir)
    return fill(config.admin.socket).parent if config.admin.socket else None


def etcd(config: Config, fill: Callable[[str], Path]) -> EtcdSettings:
    """`[mlc.etcd]`; raises TierError for files that cannot be used."""
    section = config.mlc.etcd

    def file(path: str) -> Path | None:
        return fill(path) if path else None

    return etcd_settings(
        endpoints=section.endpoints,
        prefix=section.prefix,
        ca=file(section.ca),
        cert=file(section.cert),
        key=file(section.key),
        user=section.user,
        password_file=file(section.password_file),
        timeout_s=section.timeout,
    )


def _s3_place(tier: TierSection, fill: Callable[[str], Path]) -> S3Place | None:
    if tier.kind != "s3":
        return None
    assert tier.bucket is not None, "checked with the configuration"
    key_id, secret = tier.access_key_id_file, tier.secret_access_key_file
    return S3Place(
        bucket=tier.bucket,
        prefix=tier.prefix,
        endpoint=tier.endpoint,
        region=tier.region,
        access_key_id_file=fill(key_id) if key_id else None,
        secret_access_key_file=fill(secret) if secret else None,
    )


def listen_of(config: Config, role: str) -> tuple[str, int]:
    """Host and port that a role listens on."""
    section = getattr(config, role)
    host, port = section.listen
    return str(host), int(port)


def router_config(config: Config, *, tokenizer: bytes) -> RouterConfig:
    """`[router]`, with what the peers table permits."""
    section = config.router
    assert section is not None, "the role is only started with its section"
    return RouterConfig(
        section.base_uri,
        tokenizer,
        machine=RouterSettings(section.switch_grace, section.progress, section.failover_after),
        verifiers=tuple(section.verifiers),
        sampling_rule=section.sampling_rule,
        m_max=section.m_max,
        low_rounds=section.low_rounds,
        low_ratio=section.low_ratio or None,
        fallback=section.fallback,
        self_load=section.self_load,
        self_max=section.self_max,
        permitted=permitted(config),
        kv_objects=section.kv_objects,
    )


def verifier_config(section: VerifierSection) -> VerifierConfig:
    """`[verifier]`"""
    return VerifierConfig(
        section.base_uri,
        section.router,
        max_sessions=section.max_sessions,
        machine=VerifierSettings(section.self_decode_after, section.drafter_silence),
        round_rate=section.round_rate,
        output_wait_s=section.output_wait,
        enforcing_logs=section.enforcing_logs,
        publish_kv=section.publish_kv,
        engine_silence_s=section.engine_silence,
    )


def drafter_config(section: DrafterSection) -> DrafterConfig:
    """`[drafter]`"""
    return DrafterConfig(
        section.base_uri,
        machine=DrafterSettings(section.m, predraft=section.predraft),
        status_ttl_s=section.status_ttl,
        engine_silence_s=section.engine_silence,
    )


def model_settings(section: ModelSection) -> dict[str, Any]:
    """`[verifier.model]` or `[drafter.model]`, as the engine's ModelSettings takes it."""
    assert section.path is not None, "checked with the configuration"
    return {
        "path": section.path,
        "device": section.device,
        "dtype": section.dtype,
        "threads": section.threads,
        "compile": section.compile,
        "tensor_parallel": section.tensor_parallel,
        "kv_octets_max": section.kv_memory,
        "model": section.digest,
    }


def api_settings(section: ApiSection, config: Config) -> ApiSettings:
    """`[api]`, with what else a front end must know."""
    return ApiSettings(
        model_name=section.model_name,
        model_aliases=section.model_aliases,
        hosts=tuple(section.hosts),
        keys_file=section.keys_file,
        allow_anonymous=section.allow_anonymous,
        cors_origins=tuple(section.cors_origins),
        hosts_loopback_only=section.listen[0] in ("127.0.0.1", "localhost", "::1"),
        sse_ping_s=section.sse_ping,
        max_queue=section.max_queue,
        log_kept=duration_text(config.mlc.log_retention),
        log_prompts=config.log.prompts,
    )
