"""What is wrong between the keys of a configuration file, each of them right by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sdcpd.config_places import path_problems
from sdcpd.config_tiers import tier_problems

if TYPE_CHECKING:
    from sdcpd.config import Config
    from sdcpd.config_sections import MlcSection, TracesSection


def cross_problems(config: Config, where: Callable[[tuple[str, ...]], str]) -> list[str]:
    """One line for each thing that no single key can tell; `where` tells the place of a value."""

    def at(*path: str) -> str:
        return where(path)

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
    # As the file has them: filled in for an instance, more of them may be one (check.py).
    logs = Path(config.mlc.log_path) if config.router else None
    between = path_problems(config.mlc, Path, logs)
    tiers = [*tier_problems(config.mlc.tiers), *between]
    problems += [f"{at('mlc', 'tiers')}: {text}" for text in tiers]
    problems += [f"{at('mlc', *key)}: {text}" for key, text in _etcd_problems(config.mlc)]
    problems += [f"{at(*key)}: {text}" for key, text in _peer_problems(config)]
    problems += [f"{at('traces', key)}: {text}" for key, text in _traces_problems(config.traces)]
    api = config.api
    for key, other in (("cert", "key"), ("key", "cert")):
        if api and getattr(api.tls, key) and not getattr(api.tls, other):
            problems.append(
                f"{at('api', 'tls', key)}: api.tls.{other} is missing; HTTPS needs both cert and"
                " key, and without either the API speaks plain HTTP"
            )
    if api and not api.allow_anonymous and api.keys_file is None and not _loopback(api.listen[0]):
        problems.append(
            f"{at('api', 'listen')}: api.listen is open to the network and no key is asked for; "
            "set api.keys_file, or api.allow_anonymous = true if that is wanted"
        )
    return problems


def _peer_problems(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """What is wrong between the keys of one of `[[peers]]`: its path, and what to write instead."""
    for number, peer in enumerate(config.peers):
        if peer.scopes is not None and peer.base_uri is None:
            yield (
                ("peers", str(number), "scopes"),
                "peers.scopes is of no use without peers.base_uri, whose cache is meant; set that"
                " as well",
            )


def _etcd_problems(mlc: MlcSection) -> Iterator[tuple[tuple[str, ...], str]]:
    """What is wrong between the keys of `[mlc.etcd]`: its path, and what to write instead."""
    etcd = mlc.etcd
    if mlc.commit_log == "etcd" and not etcd.endpoints:
        yield (
            ("commit_log",),
            'mlc.etcd.endpoints is missing; mlc.commit_log = "etcd" needs the members of a '
            'cluster, as in endpoints = ["etcd1.lab:2379"]',
        )
    for key, needs in (
        ("cert", ("key", "ca")),
        ("key", ("cert", "ca")),
        ("user", ("password_file",)),
        ("password_file", ("user",)),
    ):
        without = [f"mlc.etcd.{need}" for need in needs if not getattr(etcd, need)]
        if getattr(etcd, key) and without:
            yield (
                ("etcd", key),
                f"mlc.etcd.{key} is of no use without {' and '.join(without)}; set that as well",
            )


def _traces_problems(traces: TracesSection) -> Iterator[tuple[str, str]]:
    """What is wrong with `[traces]`: a key, and what to do."""
    if traces.endpoint and not _installed("opentelemetry.exporter.otlp.proto.http"):
        yield (
            "endpoint",
            "traces.endpoint needs a package that is not installed: pip install 'sdcpd[otel]'",
        )
    if traces.ca and not traces.endpoint.startswith("https:"):
        yield (
            "ca",
            "traces.ca is of no use without an endpoint that begins with https://; set that too",
        )


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # what it lies in
        return False


def _loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"
