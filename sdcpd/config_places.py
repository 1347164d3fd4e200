"""What the cache, the logs and the instances of one process may not share; nothing is opened."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sdcpd.protocol.uris import base_uri_equal

if TYPE_CHECKING:
    from sdcpd.config import Config
    from sdcpd.config_sections import MlcSection
    from sdcpd.parts import Instance


def place_problems(config: Config, instances: Sequence[Instance]) -> Iterator[str]:
    """A sentence for each thing that keeps instances from starting in one process."""
    router = next((one for one in instances if one.role == "router"), None)
    logs = router.fill(config.mlc.log_path) if router else None
    # The cache is the process's, and named after the first of them.
    yield from path_problems(config.mlc, instances[0].fill, logs)
    for instance in instances:
        section = getattr(config, instance.role)
        for index, tier in enumerate(config.mlc.tiers):
            if section and tier.base is not None and base_uri_equal(tier.base, section.base_uri):
                yield (
                    f"mlc.tiers[{index}].base is {tier.base}, which is {instance.label} itself:"
                    " take the entry away, or name another instance"
                )
    yield from _more_than_memory(config.mlc)
    if config.traces.ca:
        yield from _unreadable(instances[0].fill(config.traces.ca))


def path_problems(mlc: MlcSection, fill: Callable[[str], Path], logs: Path | None) -> Iterator[str]:
    """What is wrong between the tiers' paths, and between them and the router's logs."""
    paths = [
        (index, _absolute(fill(tier.path)))
        for index, tier in enumerate(mlc.tiers)
        if tier.kind == "lmdb" and tier.path
    ]
    yield from _twice(paths)
    if logs is not None:
        yield from _beside_logs(paths, _absolute(logs))


def _twice(paths: Sequence[tuple[int, Path]]) -> Iterator[str]:
    for at, (index, path) in enumerate(paths):
        for other, known in paths[:at]:
            if path == known:
                yield (
                    f"mlc.tiers[{other}] and [{index}] have the same path {path}: give each its own"
                )


def _beside_logs(paths: Sequence[tuple[int, Path]], logs: Path) -> Iterator[str]:
    for index, path in paths:
        if path.is_relative_to(logs) or logs.is_relative_to(path):
            yield (
                f"mlc.tiers[{index}].path {path} and mlc.log_path {logs} are one directory, or one"
                " holds the other: a cache may be deleted and commit logs may not, so give the tier"
                " a directory elsewhere"
            )


def _more_than_memory(mlc: MlcSection) -> Iterator[str]:
    try:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return
    pinned_bytes = sum(tier.size for tier in mlc.tiers if tier.kind == "pinned")
    if pinned_bytes > memory_bytes > 0:
        yield (
            f"mlc.tiers: pinned tiers take their memory at the start, {pinned_bytes >> 20} MiB, and"
            f" this machine has {memory_bytes >> 20} MiB: give them a smaller size"
        )


def _unreadable(ca: Path) -> Iterator[str]:
    try:
        ca.read_bytes()
    except OSError as e:
        yield f"traces.ca {ca} cannot be read: {e.strerror}; put it there, or name another"


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))
