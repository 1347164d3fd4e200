"""The sections of a configuration file: their keys, what each may be, and its default."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt

from sdcpd.config_stores import (
    Bucket,
    Collector,
    Endpoint,
    KeyPrefix,
    S3Endpoint,
    S3Prefix,
    S3Region,
)
from sdcpd.config_values import (
    BaseUri,
    BodySize,
    Device,
    Digest,
    Duration,
    DurationOrNever,
    DurationOrZero,
    Ladder,
    Lease,
    Listen,
    LogSize,
    M,
    Name,
    ObjectSize,
    OptionalPath,
    Percent,
    Predraft,
    Rate,
    Scope,
    Share,
    Silence,
    Size,
    Template,
    TrustDomain,
)
from sdcpd.protocol.messages import Action
from sdcpd.transport.limits import (
    BUFFERED_BYTES_MAX,
    CONNECTIONS_PER_PEER_MAX,
    PENDING_HANDSHAKES_MAX,
    H2Limits,
    PaceLimits,
)
from tiers.sizes import LEASE_S


class Section(BaseModel):
    """A table of the file: no unknown keys, no change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class NodeSection(Section):
    """`[node]`"""

    name: Name = ""
    """Name of the instances here; the short host name if empty."""
    trust_domain: TrustDomain = "sdcp.internal"


class LimitsSection(Section):
    """`[transport.limits]`: what peers may cost an instance"""

    connections_per_peer: Annotated[StrictInt, Field(ge=1, le=10_000)] = CONNECTIONS_PER_PEER_MAX
    """Of one certificate; the oldest goes when there are more."""
    handshakes: Annotated[StrictInt, Field(ge=1, le=100_000)] = PENDING_HANDSHAKES_MAX
    requests: Annotated[StrictInt, Field(ge=1, le=10_000)] = H2Limits().streams_max
    """At once, of one connection."""
    buffered: BodySize = BUFFERED_BYTES_MAX
    """Unfinished bodies of one connection."""
    body_grace: Duration = PaceLimits().grace_s


class TransportSection(Section):
    """`[transport]`: how instances speak with each other"""

    prefer: Literal["auto", "h2", "h3"] = "auto"
    http3: StrictBool = True
    """Whether HTTP/3 is served beside HTTP/2."""
    limits: LimitsSection = LimitsSection()


class TlsSection(Section):
    """`[tls]`"""

    ca: Template = "/etc/sdcpd/certs/ca.crt"
    cert: Template = "/etc/sdcpd/certs/{role}.{name}.crt"
    key: Template = "/etc/sdcpd/certs/{role}.{name}.key"
    crl: Template = ""
    watch: DurationOrZero = 5.0
    """How often the files are looked at; 0: only when told to reload."""
    warn_before: Duration = 14 * 86400.0


class PeerSection(Section):
    """`[[peers]]`: what certificates from elsewhere mean, and whom rule 2 may trust."""

    name: str = ""
    id: str = ""
    roles: list[Literal["router", "verifier", "drafter", "front_end", "admin"]] = []
    base_uri: BaseUri | None = None
    model: Digest = None
    trusted: StrictBool = False
    scopes: list[Scope] | None = None
    """Those for which its cache is trusted, whatever its URIs look like (D-M3)."""


class ModelSection(Section):
    """`[verifier.model]` or `[drafter.model]`"""

    path: OptionalPath = None
    digest: Digest = None
    device: Device = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    threads: Annotated[StrictInt, Field(ge=0, le=1024)] = 0
    compile: Literal["auto"] | StrictBool = "auto"
    tensor_parallel: Annotated[StrictInt, Field(ge=1, le=64)] = 1
    kv_memory: Size = 2 << 30


class RouterSection(Section):
    """`[router]`"""

    listen: Listen = ("0.0.0.0", 7442)
    base_uri: BaseUri
    model: OptionalPath = None
    """Directory with the target's tokenizer.json and config.json; no weights are needed."""
    verifiers: list[BaseUri] = []
    """Those that may serve; empty: all that have a certificate for it."""
    sampling_rule: Literal["auto", "race", "rejection"] = "auto"
    m_max: Annotated[StrictInt, Field(ge=1, le=64)] = 16
    low_rounds: Annotated[StrictInt, Field(ge=1, le=1000)] = 8
    low_ratio: Percent = 0
    fallback: Ladder = (Action.REDUCE, Action.SWITCH, Action.SELF_DECODE)
    self_load: Percent = 100
    self_max: Annotated[StrictInt, Field(ge=0)] | None = None
    switch_grace: DurationOrNever = 2.0
    progress: Duration = 15.0
    failover_after: Duration = 2.0
    kv_objects: StrictBool = False


class VerifierSection(Section):
    """`[verifier]`"""

    listen: Listen = ("0.0.0.0", 7443)
    base_uri: BaseUri
    router: BaseUri
    max_sessions: Annotated[StrictInt, Field(ge=1, le=100_000)] = 64
    batch_rows: Annotated[StrictInt, Field(ge=16, le=128, multiple_of=16)] = 128
    batch_window: Percent = 15
    round_rate: Rate = 200.0
    self_decode_after: DurationOrNever = 0.5
    drafter_silence: DurationOrNever = 3.0
    output_wait: Duration = 10.0
    enforcing_logs: StrictBool = False
    publish_kv: StrictBool = False
    keep_kv: StrictBool = True
    status_ttl: Duration = 3.0
    engine_silence: Silence = 20.0
    model: ModelSection = ModelSection()


class DrafterSection(Section):
    """`[drafter]`"""

    listen: Listen = ("0.0.0.0", 7444)
    base_uri: BaseUri
    router: BaseUri
    kind: Literal["model", "ngram"] = "model"
    m: M = None
    predraft: Predraft = None
    top_k: Annotated[StrictInt, Field(ge=1, le=4096)] = 64
    keep_kv: StrictBool = True
    status_interval: Duration = 1.0
    status_ttl: Duration = 3.0
    engine_silence: Silence = 20.0
    model: ModelSection = ModelSection()


class TierSection(Section):
    """One entry of `[mlc] tiers`"""

    kind: Literal["pinned", "host", "lmdb", "remote", "s3"]
    size: Size = 0
    """0 where it is not given: a remote tier has none."""
    base: BaseUri | None = None
    path: Template | None = None
    bucket: Bucket | None = None
    prefix: S3Prefix = "sdcpd"
    endpoint: S3Endpoint = ""
    region: S3Region = ""
    access_key_id_file: Template | None = None
    secret_access_key_file: Template | None = None


def _host_tier(size: str) -> TierSection:
    return TierSection.model_validate({"kind": "host", "size": size})


class EtcdSection(Section):
    """`[mlc.etcd]`: the commit logs that several routers share"""

    endpoints: list[Endpoint] = []
    prefix: KeyPrefix = "sdcpd/logs"
    ca: Template = ""
    """With it the endpoints are spoken to over TLS."""
    cert: Template = ""
    key: Template = ""
    user: str = ""
    password_file: Template = ""
    timeout: Duration = 2.0
    """Of one call; an operation is given up after five times as long."""


class MlcSection(Section):
    """`[mlc]`"""

    bases: list[BaseUri] = []
    tiers: list[TierSection] = Field(default_factory=lambda: [_host_tier("256MiB")])
    commit_log: Literal["lmdb", "etcd"] = "lmdb"
    log_path: Template = "/var/lib/sdcpd/{instance}/logs"
    log_size: LogSize = 16 << 30
    log_retention: Duration = 3600.0
    """How long a log is kept after its session has ended."""
    object_max: ObjectSize = 256 << 20
    scope_max: Share = 100
    lease: Lease = LEASE_S
    """How long a drafter's rows are kept for it at a time; renewed at half time (D-M10)."""
    local: StrictBool = True
    """Whether processes of one user on one host pass objects through shared memory."""
    local_dir: Template = ""
    """Where their sockets are; beside the admin socket if empty."""
    etcd: EtcdSection = EtcdSection()


class ApiTlsSection(Section):
    """`[api.tls]`: what clients see of the API's listener"""

    cert: Template = ""
    """With it and `key` the API speaks HTTPS."""
    key: Template = ""


class ApiSection(Section):
    """`[api]`: the OpenAI-compatible listener of the router"""

    listen: Listen = ("127.0.0.1", 8000)
    model_name: str = ""
    """What clients call the model; the name of `[router] model`'s directory if empty."""
    model_aliases: dict[str, str] = {}
    """Other names that clients may use, and which model they stand for."""
    hosts: list[str] = []
    """Names beside those of loopback that a loopback listener answers to."""
    keys_file: OptionalPath = None
    allow_anonymous: StrictBool = False
    cors_origins: list[str] = []
    body_max: BodySize = 8 << 20
    """Largest body of a request."""
    sse_ping: DurationOrZero = 5.0
    max_queue: Annotated[StrictInt, Field(ge=1, le=100_000)] = 256
    tls: ApiTlsSection = ApiTlsSection()


class AdminSection(Section):
    """`[admin]`"""

    socket: Template = "/run/sdcpd/{instance}/admin.sock"


class MetricsSection(Section):
    """`[metrics]`"""

    listen: Listen = ("127.0.0.1", 0)
    """Port 0: metrics are at the admin sockets alone."""


class TracesSection(Section):
    """`[traces]`"""

    endpoint: Collector = ""
    """Where spans are sent, over OTLP/HTTP; empty: nowhere."""
    sample: Percent = 100
    """Of requests that come without a trace of their own."""
    ca: Template = ""
    """Whose certificate the collector has, with https; empty: one of the usual authorities."""


class LogSection(Section):
    """`[log]`"""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "text", "json", "journal"] = "auto"
    prompts: StrictBool = False
    """Whether prompts and texts may be logged."""
