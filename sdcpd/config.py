"""The configuration: one TOML file a host, checked whole before anything starts.

Every problem is reported at once, each with file and line, what is wrong, and what to write
instead.  Values are frozen once read.
"""

from __future__ import annotations

import difflib
import re
import socket
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from sdcpd.protocol.messages import Action
from sdcpd.protocol.uris import normalize_base_uri
from sdcpd.units import duration_or_never_s, duration_s, percent, rate_per_s, size_octets

DEFAULT_PATH = Path("/etc/sdcpd/sdcpd.toml")
ROLE_NAMES = ("router", "verifier", "drafter")


class ConfigError(Exception):
    """The configuration can't be used; one line of text for each problem."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def _digest(value: object) -> bytes | None:
    if value == "" or value is None:
        return None
    text = str(value).removeprefix("sha256:")
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise ValueError('must be "sha256:" and 64 hexadecimal digits')
    return bytes.fromhex(text)


def _base_uri(value: object) -> str:
    if not isinstance(value, str) or normalize_base_uri(value) is None:
        raise ValueError(f'"{value}" is not a base URI such as "https://gpu1.lab:7443/"')
    return value


def _listen(value: object) -> tuple[str, int]:
    host, _, port = str(value).rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f'"{value}" is not an address such as "0.0.0.0:7443"')
    return host.strip("[]"), int(port)


def _ladder(value: object) -> tuple[int, ...]:
    names = {"reduce": 1, "switch": 2, "self_decode": 3, "fail": 5}
    if not isinstance(value, list) or not value:
        raise ValueError(f"must be a list of {', '.join(names)}")
    unknown = [entry for entry in value if entry not in names]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(names)}")
    return tuple(names[entry] for entry in value)


def _m(value: object) -> int | None:
    if value == "auto":
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 64:
        raise ValueError('must be "auto" or a number from 1 to 64')
    return value


Duration = Annotated[float, BeforeValidator(duration_s)]
DurationOrNever = Annotated[float | None, BeforeValidator(duration_or_never_s)]
Size = Annotated[int, BeforeValidator(size_octets)]
Rate = Annotated[float, BeforeValidator(rate_per_s)]
Percent = Annotated[int, BeforeValidator(percent)]
Digest = Annotated[bytes | None, BeforeValidator(_digest)]
BaseUri = Annotated[str, BeforeValidator(_base_uri)]
Listen = Annotated[tuple[str, int], BeforeValidator(_listen)]
Ladder = Annotated[tuple[int, ...], BeforeValidator(_ladder)]
M = Annotated[int | None, BeforeValidator(_m)]


class Section(BaseModel):
    """A table of the file: no unknown keys, no change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class NodeSection(Section):
    """`[node]`"""

    name: str = ""
    """Name of the instances here; the short host name if empty."""
    trust_domain: str = "sdcp.internal"


class TlsSection(Section):
    """`[tls]`; `{role}` and `{name}` stand for the instance's."""

    ca: str = "/etc/sdcpd/certs/ca.crt"
    cert: str = "/etc/sdcpd/certs/{role}.{name}.crt"
    key: str = "/etc/sdcpd/certs/{role}.{name}.key"


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

    path: Path | None = None
    digest: Digest = None
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    kv_memory: Size = 2 << 30


class RouterSection(Section):
    """`[router]`"""

    listen: Listen = ("0.0.0.0", 7442)
    base_uri: BaseUri
    model: Path | None = None
    """Directory with the target's tokenizer.json and config.json; no weights are needed."""
    sampling_rule: Literal["auto", "race", "rejection"] = "auto"
    m_max: Annotated[int, Field(ge=1, le=64)] = 16
    low_rounds: Annotated[int, Field(ge=1, le=1000)] = 8
    low_ratio: Percent = 0
    fallback: Ladder = (Action.REDUCE, Action.SWITCH, Action.SELF_DECODE, Action.FAIL)
    self_load: Percent = 100
    self_max: Annotated[int, Field(ge=0)] | None = None
    switch_grace: DurationOrNever = 2.0
    progress: Duration = 15.0


class VerifierSection(Section):
    """`[verifier]`"""

    listen: Listen = ("0.0.0.0", 7443)
    base_uri: BaseUri
    router: BaseUri
    max_sessions: Annotated[int, Field(ge=1, le=100_000)] = 64
    batch_rows: Annotated[int, Field(ge=16, le=128, multiple_of=16)] = 128
    round_rate: Rate = 200.0
    self_decode_after: DurationOrNever = 0.5
    drafter_silence: DurationOrNever = 3.0
    output_wait: Duration = 10.0
    enforcing_logs: bool = False
    status_ttl: Duration = 3.0
    model: ModelSection = ModelSection()


class DrafterSection(Section):
    """`[drafter]`"""

    listen: Listen = ("0.0.0.0", 7444)
    base_uri: BaseUri
    router: BaseUri
    kind: Literal["model", "ngram"] = "model"
    m: M = None
    top_k: Annotated[int, Field(ge=1, le=4096)] = 64
    status_interval: Duration = 1.0
    status_ttl: Duration = 3.0
    model: ModelSection = ModelSection()


class TierSection(Section):
    """One entry of `[mlc] tiers`"""

    kind: Literal["host", "lmdb"]
    size: Size
    path: Path | None = None


def _host_tier(size: str) -> TierSection:
    return TierSection.model_validate({"kind": "host", "size": size})


class MlcSection(Section):
    """`[mlc]`"""

    bases: list[BaseUri] = []
    tiers: list[TierSection] = Field(default_factory=lambda: [_host_tier("256MiB")])
    log_path: Path = Path("/var/lib/sdcpd/router/logs")
    log_size: Size = 16 << 30
    object_max: Size = 256 << 20


class ApiSection(Section):
    """`[api]`: the OpenAI-compatible listener of the router"""

    listen: Listen = ("127.0.0.1", 8000)
    model_name: str = ""
    """What clients call the model; the name of `[router] model`'s directory if empty."""
    keys_file: Path | None = None
    allow_anonymous: bool = False
    cors_origins: list[str] = []
    sse_ping: Duration = 5.0
    max_queue: Annotated[int, Field(ge=1, le=100_000)] = 256


class AdminSection(Section):
    """`[admin]`"""

    socket: str = "/run/sdcpd/{role}/admin.sock"


class LogSection(Section):
    """`[log]`"""

    level: Literal["debug", "info", "warning", "error"] = "info"


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
    log: LogSection = LogSection()

    def instance_name(self, name: str | None) -> str:
        """The name of an instance: the one given, the node's, or the short host name."""
        return name or self.node.name or socket.gethostname().partition(".")[0]


def load_config(path: Path) -> Config:
    """Read and check a file; raises ConfigError with every problem."""
    try:
        text = path.read_text("utf-8")
    except OSError as e:
        raise ConfigError([f"{path}: {e.strerror}; name a readable file with -c FILE"]) from e
    except UnicodeDecodeError as e:
        raise ConfigError([f"{path}: not UTF-8 text at octet {e.start}; save it as UTF-8"]) from e
    return parse_config(text, name=str(path))


def parse_config(text: str, *, name: str) -> Config:
    """Check the text of a file; raises ConfigError with every problem."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        match = re.search(r"\(at line (\d+)", str(e))
        where = f"{name}:{match[1]}" if match else name
        raise ConfigError([f"{where}: not valid TOML: {e}"]) from e
    try:
        config = Config.model_validate(raw)
    except ValidationError as e:
        problems = [_problem(error, text, name) for error in e.errors(include_url=False)]
        raise ConfigError(sorted(problems, key=_line_of)) from e
    problems = list(_cross_checks(config, text, name))
    if problems:
        raise ConfigError(problems)
    return config


def _cross_checks(config: Config, text: str, name: str) -> list[str]:
    """What no single key can tell."""

    def at(*path: str) -> str:
        return f"{name}:{find_line(text, path)}"

    problems = []
    if config.drafter and config.drafter.status_ttl <= config.drafter.status_interval:
        problems.append(
            f"{at('drafter', 'status_ttl')}: drafter.status_ttl must be longer than "
            "drafter.status_interval, else the drafter expires between reports"
        )
    if (
        config.router
        and config.router.model is None
        and not (config.verifier and config.verifier.model.path)
    ):
        problems.append(
            f"{at('router')}: router.model is missing; set it to a directory with the target's "
            "tokenizer.json and config.json (weights are not needed there)"
        )
    if config.verifier and config.verifier.model.path is None:
        problems.append(
            f"{at('verifier')}: verifier.model.path is missing; add [verifier.model] with "
            'path = "DIRECTORY" (config.json, *.safetensors, tokenizer.json)'
        )
    if config.drafter and config.drafter.kind == "model" and config.drafter.model.path is None:
        problems.append(
            f"{at('drafter')}: drafter.model.path is missing; add [drafter.model] with path, "
            'or set kind = "ngram", which needs no model'
        )
    for index, tier in enumerate(config.mlc.tiers):
        if tier.kind == "lmdb" and tier.path is None:
            problems.append(f"{at('mlc', 'tiers')}: mlc.tiers[{index}]: an lmdb tier needs a path")
    api = config.api
    if api and not api.allow_anonymous and api.keys_file is None and not _loopback(api.listen[0]):
        problems.append(
            f"{at('api', 'listen')}: the API would be open to the network without a key; set "
            "api.keys_file, or api.allow_anonymous = true if that is wanted"
        )
    return problems


def _loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


def _problem(error: Any, text: str, name: str) -> str:
    path = tuple(str(part) for part in error["loc"])
    where = f"{name}:{find_line(text, path)}"
    dotted = ".".join(part for part in path if not part.startswith("function-"))
    section = f"[{'.'.join(path[:-1])}]" if len(path) > 1 else "the file"
    if error["type"] == "extra_forbidden":
        return f'{where}: unknown key "{path[-1]}" in {section}{_did_you_mean(path)}'
    if error["type"] == "missing":
        return f'{where}: key "{path[-1]}" is missing in {section}'
    reason = str(error["msg"]).removeprefix("Value error, ")
    given = error["input"]
    shown = f" = {given!r}" if isinstance(given, str | int | float | bool) else ""
    return f"{where}: {dotted}{shown}: {reason[:1].lower()}{reason[1:]}"


def _did_you_mean(path: tuple[str, ...]) -> str:
    fields: dict[str, FieldInfo] = Config.model_fields
    for part in path[:-1]:
        if part.isdigit():
            continue
        info = fields.get(part)
        section = _section_type(info.annotation) if info else None
        if section is None:
            return ""
        fields = section.model_fields
    close = difflib.get_close_matches(path[-1], list(fields), n=1)
    if close:
        return f'; did you mean "{close[0]}"?'
    return f"; known are {', '.join(fields)}"


def _section_type(annotation: Any) -> type[Section] | None:
    """The Section inside an annotation such as `RouterSection | None` or `list[PeerSection]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        if (found := _section_type(inner)) is not None:
            return found
    return None


def _line_of(problem: str) -> int:
    match = re.search(r":(\d+): ", problem)
    return int(match[1]) if match else 0


def find_line(text: str, path: tuple[str, ...]) -> int:
    """The line of a key, or of the nearest thing above it that is found; tomllib does not tell."""
    index = next((int(part) for part in path if part.isdigit()), 0)
    keys = [part for part in path if not part.isdigit()]
    lines = _index_lines(text)
    for end in range(len(keys), 0, -1):
        for table, key in ((".".join(keys[: end - 1]), keys[end - 1]), (".".join(keys[:end]), "")):
            for occurrence in (index, 0):
                if (table, occurrence, key) in lines:
                    return lines[table, occurrence, key]
    return 1


def _index_lines(text: str) -> dict[tuple[str, int, str], int]:
    """Line numbers by (table, which one of its name, key); the key of a header is empty."""
    lines: dict[tuple[str, int, str], int] = {}
    table, counts = "", dict[str, int]()
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*([^\]]+?)\s*\]+", line):
            table = header[1]
            counts[table] = counts.get(table, -1) + 1
            lines.setdefault((table, counts[table], ""), number)
        elif key := re.match(r"\s*([A-Za-z0-9_-]+)\s*=", line):
            lines.setdefault((table, counts.get(table, 0), key[1]), number)
    return lines


def host_of(base_uri: str) -> str:
    """The host part of a base URI."""
    return urlsplit(base_uri).hostname or ""
