"""The configuration: one TOML file a host, checked whole before anything starts.

Every problem is reported at once, each with file and line, what is wrong, and what to write
instead.  Values are frozen once read.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field, ValidationError

from sdcpd.config_checks import cross_problems
from sdcpd.config_problems import in_order, value_problem
from sdcpd.config_sections import (
    AdminSection,
    ApiSection,
    DrafterSection,
    LogSection,
    MetricsSection,
    MlcSection,
    NodeSection,
    PeerSection,
    RouterSection,
    Section,
    TlsSection,
    TracesSection,
    TransportSection,
    VerifierSection,
)
from sdcpd.config_sources import SourceError, Sources, read_sources, text_sources

DEFAULT_PATH = Path("/etc/sdcpd/sdcpd.toml")
ROLE_NAMES = ("router", "verifier", "drafter")


class ConfigError(Exception):
    """The configuration can't be used; one line of text for each problem."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Config(Section):
    """The whole file; a section that is absent is a role that does not run here."""

    node: NodeSection = NodeSection()
    tls: TlsSection = TlsSection()
    transport: TransportSection = TransportSection()
    peers: list[PeerSection] = Field(default_factory=list)
    router: RouterSection | None = None
    verifier: VerifierSection | None = None
    drafter: DrafterSection | None = None
    mlc: MlcSection = MlcSection()
    api: ApiSection | None = None
    admin: AdminSection = AdminSection()
    metrics: MetricsSection = MetricsSection()
    traces: TracesSection = TracesSection()
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
