"""The configuration: one TOML file a host, checked whole before anything starts.

Every problem is reported at once, each with file and line, what is wrong, and what to write
instead.  Values are frozen once read.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sdcpd.config_checks import cross_problems
from sdcpd.config_problems import in_order, value_problem
from sdcpd.config_sources import SourceError, Sources, read_sources, text_sources
from sdcpd.config_values import (
    BaseUri,
    BodySize,
    Bucket,
    Device,
    Digest,
    Duration,
    DurationOrNever,
    DurationOrZero,
    Endpoint,
    KeyPrefix,
    Ladder,
    Listen,
    LogSize,
    M,
    Name,
    ObjectSize,
    OptionalPath,
    Percent,
    Predraft,
    Rate,
    S3Endpoint,
    S3Prefix,
    S3Region,
    Share,
    Silence,
    Size,
    Template,
    TrustDomain,
)
from sdcpd.protocol.messages import Action

DEFAULT_PATH = Path("/etc/sdcpd/sdcpd.toml")
ROLE_NAMES = ("router", "verifier", "drafter")


class ConfigError(Exception):
    """The configuration can't be used; one line of text for each problem."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Section(BaseModel):
    """A table of the file: no unknown keys, no change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class NodeSection(Section):
    """`[node]`"""

    name: Name = ""
    """Name of the instances here; the short host name if empty."""
    trust_domain: TrustDomain = "sdcp.internal"
    transport: Literal["auto", "h2", "h3"] = "auto"
    http3: bool = True


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
    trusted: bool = False


class ModelSection(Section):
    """`[verifier.model]` or `[drafter.model]`"""

    path: OptionalPath = None
    digest: Digest = None
    device: Device = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    compile: Literal["auto"] | bool = "auto"
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    kv_memory: Size = 2 << 30


class RouterSection(Section):
    """`[router]`"""

    listen: Listen = ("0.0.0.0", 7442)
    base_uri: BaseUri
    model: OptionalPath = None
    """Directory with the target's tokenizer.json and config.json; no weights are needed."""
    sampling_rule: Literal["auto", "race", "rejection"] = "auto"
    m_max: Annotated[int, Field(ge=1, le=64)] = 16
    low_rounds: Annotated[int, Field(ge=1, le=1000)] = 8
    low_ratio: Percent = 0
    fallback: Ladder = (Action.REDUCE, Action.SWITCH, Action.SELF_DECODE)
    self_load: Percent = 100
    self_max: Annotated[int, Field(ge=0)] | None = None
    switch_grace: DurationOrNever = 2.0
    progress: Duration = 15.0
    failover_after: Duration = 2.0
    kv_objects: bool = False


class VerifierSection(Section):
    """`[verifier]`"""

    listen: Listen = ("0.0.0.0", 7443)
    base_uri: BaseUri
    router: BaseUri
    max_sessions: Annotated[int, Field(ge=1, le=100_000)] = 64
    batch_rows: Annotated[int, Field(ge=16, le=128, multiple_of=16)] = 128
    batch_window: Percent = 15
    round_rate: Rate = 200.0
    self_decode_after: DurationOrNever = 0.5
    drafter_silence: DurationOrNever = 3.0
    output_wait: Duration = 10.0
    enforcing_logs: bool = False
    publish_kv: bool = False
    keep_kv: bool = True
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
    top_k: Annotated[int, Field(ge=1, le=4096)] = 64
    keep_kv: bool = True
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
    local: bool = True
    """Whether processes of one user on one host pass objects through shared memory."""
    local_dir: Template = ""
    """Where their sockets are; beside the admin socket if empty."""
    etcd: EtcdSection = EtcdSection()


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
    allow_anonymous: bool = False
    cors_origins: list[str] = []
    body_max: BodySize = 8 << 20
    """Largest body of a request."""
    sse_ping: DurationOrZero = 5.0
    max_queue: Annotated[int, Field(ge=1, le=100_000)] = 256


class AdminSection(Section):
    """`[admin]`"""

    socket: Template = "/run/sdcpd/{instance}/admin.sock"


class MetricsSection(Section):
    """`[metrics]`"""

    listen: Listen = ("127.0.0.1", 0)
    """Port 0: metrics are at the admin sockets alone."""


class LogSection(Section):
    """`[log]`"""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "text", "json", "journal"] = "auto"
    prompts: bool = False
    """Whether prompts and texts may be logged."""


class Config(Section):
    """The whole file; a section that is absent is a role that does not run here."""

    node: NodeSection = NodeSection()
    tls: TlsSection = TlsSection()
    peers: list[PeerSection] = []
    router: RouterSection | None = None
    verifier: VerifierSection | None = None
    drafter: DrafterSection | None = None
    mlc: MlcSection = MlcSection()
    api: ApiSection | None = None
    admin: AdminSection = AdminSection()
    metrics: MetricsSection = MetricsSection()
    log: LogSection = LogSection()

    def instance_name(self, name: str | None) -> str:
        """The name of an instance: the one given, the node's, or the short host name."""
        return name or self.node.name or socket.gethostname().partition(".")[0]


def load_config(
    path: Path, *, environ: Mapping[str, str] | None = None, settings: Sequence[str] = ()
) -> Config:
    """Read a file, and what goes over it (config_sources.py); raises ConfigError.

    Without `environ` no variable counts.
    """
    try:
        sources = read_sources(path, environ=environ, settings=settings)
    except SourceError as e:
        raise ConfigError(e.problems) from e
    return config_of(sources)


def parse_config(text: str, *, name: str) -> Config:
    """Check the text of a file; raises ConfigError with every problem."""
    try:
        sources = text_sources(text, name=name)
    except SourceError as e:
        raise ConfigError(e.problems) from e
    return config_of(sources)


def config_of(sources: Sources) -> Config:
    """Check what sources say; raises ConfigError with every problem, each with its place."""
    try:
        config = Config.model_validate(sources.raw)
    except ValidationError as e:
        problems = [
            value_problem(error, model=Config, at=sources.where)
            for error in e.errors(include_url=False)
        ]
        raise ConfigError(sorted(problems, key=in_order)) from e
    problems = cross_problems(config, sources.where)
    if problems:
        raise ConfigError(problems)
    return config
