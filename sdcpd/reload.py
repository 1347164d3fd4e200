"""A changed configuration while the process runs: what counts at once, and what needs a restart."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sdcpd.config import Config, ConfigError

log = logging.getLogger("sdcpd")

RELOADABLE = (
    "log.level",
    "log.prompts",
    "api.cors_origins",
    "api.hosts",
    "api.max_queue",
    "api.model_aliases",
    "api.sse_ping",
    "router.fallback",
    "router.low_ratio",
    "router.low_rounds",
    "router.m_max",
    "router.sampling_rule",
    "router.self_load",
    "router.self_max",
    "router.verifiers",
    "verifier.drafter_silence",
    "verifier.max_sessions",
    "verifier.output_wait",
    "verifier.round_rate",
    "verifier.self_decode_after",
)
"""Keys that count for what begins after a reload; the files of certificates and keys are read
again as well."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a reload came to."""

    problems: tuple[str, ...] = ()
    """Why nothing was changed, or what of the files of certificates and keys stays as it was."""
    changed: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """As the admin socket tells it."""
        return {
            "ok": not self.problems,
            "problems": list(self.problems),
            "changed": list(self.changed),
            "needs_restart": list(self.needs_restart),
        }


@dataclass
class Reloads:
    """Applies what has changed to whoever has asked to be told."""

    running: Config
    """What this process goes by."""
    read: Callable[[], Config]
    """Raises ConfigError."""
    last: Report = field(default_factory=Report)
    _files: list[Callable[[], list[str]]] = field(default_factory=list)
    _appliers: list[Callable[[Config], None]] = field(default_factory=list)

    def on_reload(self, read_again: Callable[[], list[str]]) -> None:
        """Have files read again at each reload; it returns a sentence for each that is refused."""
        self._files.append(read_again)

    def on_change(self, apply: Callable[[Config], None]) -> None:
        """Call `apply` with the configuration whenever it has changed."""
        self._appliers.append(apply)

    def reload(self) -> Report:
        """Read the files again; one that is wrong changes nothing."""
        refused = tuple(text for read_again in self._files for text in read_again())
        try:
            new = self.read()
        except ConfigError as e:
            self.last = Report(problems=(*e.problems, *refused))
            for problem in e.problems:
                log.error("configuration not reloaded, the old one stays in use: %s", problem)
            return self.last
        differing = differences(self.running, new)
        changed = tuple(
            key
            for key in differing
            if key in RELOADABLE and _has(self.running, key) and _has(new, key)
        )
        self.last = Report(refused, changed, tuple(key for key in differing if key not in changed))
        if changed:
            self.running = _with(self.running, new, changed)
            for apply in self._appliers:
                apply(self.running)
            log.info("configuration reloaded: %s", ", ".join(changed))
        for key in self.last.needs_restart:
            log.warning("%s has changed and counts after a restart", key)
        return self.last


def differences(old: Config, new: Config) -> list[str]:
    """The keys, as section.key, of which the values differ."""
    a, b = flat(old), flat(new)
    return sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))


def flat(config: Config) -> dict[str, Any]:
    """Values by section.key, as a file would have them; lists are values."""
    found: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and prefix not in ("api.model_aliases",):
            for key, inner in value.items():
                add(f"{prefix}.{key}" if prefix else key, inner)
        elif value is not None:
            found[prefix] = value

    add("", config.model_dump(mode="json"))
    return found


def _has(config: Config, key: str) -> bool:
    """Whether the section of a key is there; one that comes or goes needs a restart."""
    return getattr(config, key.partition(".")[0]) is not None


def _with(old: Config, new: Config, keys: tuple[str, ...]) -> Config:
    """The old configuration with some keys of the new one."""
    sections: dict[str, dict[str, Any]] = {}
    for key in keys:
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = getattr(getattr(new, section), name)
    return old.model_copy(
        update={
            section: getattr(old, section).model_copy(update=values)
            for section, values in sections.items()
        }
    )
