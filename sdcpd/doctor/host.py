"""What an instance needs of its host: certificates, models, disks, ports, limits, devices."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from sdcpd.doctor.finding import FAIL, OK, WARN, Finding
from sdcpd.units import duration_text, size_value

if TYPE_CHECKING:
    from sdcpd.config import Config
    from sdcpd.config_sections import ModelSection
    from sdcpd.parts import Instance

FILES_MIN = 8192
FREE_MIN = 1 << 30
GPU_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm")
OPEN_TO_OTHERS = 0o037


def host_findings(config: Config, instances: list[Instance]) -> Iterator[Finding]:
    """Everything about the instances that a host's file has."""
    yield from _certificates(config, instances)
    for instance in instances:
        yield from _models(config, instance)
    yield from _disks(config, instances)
    yield from _keys(config)
    yield from _limits(config)


def port_findings(config: Config, instance: Instance, *, running: bool) -> Iterator[Finding]:
    """Whether an instance that does not run could listen."""
    if running:
        return
    places = [(getattr(config, instance.role).listen, f"{instance.role}.listen")]
    if instance.role == "router" and config.api is not None:
        places.append((config.api.listen, "api.listen"))
    for (host, port), key in places:
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        except OSError as e:
            why = os.strerror(e.errno) if e.errno else str(e)
            yield Finding(
                "ports",
                FAIL,
                f"{key} {host}:{port} cannot be listened on: {why}.  Stop the other program (ss"
                f" -ltnp 'sport = :{port}'), or choose another address",
            )
        else:
            yield Finding("ports", OK, f"{key} {host}:{port} is free")


def _certificates(config: Config, instances: list[Instance]) -> Iterator[Finding]:
    from sdcpd.parts import Parts, StartError
    from sdcpd.transport.identity_files import IdentityError

    parts = Parts(config)
    for instance in instances:
        try:
            identity = parts.identity(instance)
            parts.check_base_uri(instance, identity)
        except (IdentityError, StartError) as e:
            text = str(e).removeprefix(f"{instance.label}: ")
            if isinstance(e.__cause__, OSError):
                text += ".  Put it there, or name another in [tls]"
            yield Finding("tls", FAIL, f"{instance.label}: {text}")
            continue
        left_s = (identity.not_after - datetime.now(UTC)).total_seconds()
        text = f"{instance.label}: {identity.uris[0]}, {duration_text(left_s)} left"
        if left_s < config.tls.warn_before:
            text += f".  Run: sdcpctl certs renew {instance.role}/{instance.name}, and copy it here"
            yield Finding("tls", WARN, text)
        else:
            yield Finding("tls", OK, text)
        if instance.role == "router":
            yield from _api_certificate(config, instance)
    for folder in sorted({instance.fill(config.tls.ca).parent for instance in instances}):
        if (folder / "ca.key").exists():
            yield Finding(
                "tls",
                WARN,
                f"{folder}/ca.key is on this host: whoever has it is any instance.  Move it to"
                " where certificates are made",
            )


def _api_certificate(config: Config, instance: Instance) -> Iterator[Finding]:
    from sdcpd.api_server import https_identity
    from sdcpd.transport.identity_files import IdentityError

    try:
        identity = https_identity(config, instance)
    except IdentityError as e:
        yield Finding("api", FAIL, f"[api.tls]: {e}.  Put a pair there that fits")
        return
    if identity is None:
        return
    left_s = (identity.not_after - datetime.now(UTC)).total_seconds()
    text = f"[api.tls]: {', '.join(identity.uris)}, {duration_text(left_s)} left"
    if left_s < config.tls.warn_before:
        yield Finding("api", WARN, f"{text}.  {identity.renewal.capitalize()}")
    else:
        yield Finding("api", OK, text)


def _models(config: Config, instance: Instance) -> Iterator[Finding]:
    from sdcpd.check import model_problems

    problems = model_problems(config, instance.role)
    yield from (Finding("model", FAIL, f"{instance.label}: {text}") for text in problems)
    section = getattr(getattr(config, instance.role), "model", None)
    if instance.role != "router" and section is not None and section.path is not None:
        if not problems:
            yield Finding("model", OK, f"{instance.label}: {section.path}")
        yield from _device(instance, section)


def _device(instance: Instance, section: ModelSection) -> Iterator[Finding]:
    missing = [node for node in GPU_NODES if not Path(node).exists()]
    if section.device.startswith("cuda") and missing:
        yield Finding(
            "gpu",
            FAIL,
            f"{instance.label}: device = {section.device!r} and there is no"
            f" {', '.join(missing)}.  Load the driver (nvidia-modprobe -c 0 -u), or set device ="
            ' "auto"',
        )
    on_gpu = section.device.startswith("cuda") or (section.device == "auto" and not missing)
    compiles = section.compile is True or (section.compile == "auto" and on_gpu)
    if compiles and not any(map(shutil.which, ("g++", "c++", "clang++"))):
        yield Finding(
            "gpu",
            FAIL,
            f"{instance.label}: passes are compiled and there is no C++ compiler.  Install g++, or"
            " set compile = false",
        )


def _disks(config: Config, instances: list[Instance]) -> Iterator[Finding]:
    places: dict[Path, str] = {}
    for instance in instances:
        if instance.role == "router" and config.mlc.commit_log == "lmdb":
            places[instance.fill(config.mlc.log_path)] = "mlc.log_path"
        for tier in config.mlc.tiers:
            if tier.kind == "lmdb" and tier.path:
                places[instance.fill(tier.path)] = "a tier of mlc.tiers"
    for path, what in places.items():
        there = next(one for one in (path, *path.parents) if one.exists())
        if not os.access(there, os.W_OK | os.X_OK):
            yield Finding(
                "disk",
                FAIL,
                f"{what} {path} cannot be written by uid {os.getuid()}.  Run: chown -R sdcpd"
                f" {there}, or choose another path",
            )
            continue
        free = shutil.disk_usage(there).free
        text = f"{what} {path}: {size_value(free >> 20 << 20)} free"
        if free < FREE_MIN:
            yield Finding("disk", WARN, f"{text}.  Make room: logs that fill it end sessions")
        else:
            yield Finding("disk", OK, text)


def _keys(config: Config) -> Iterator[Finding]:
    if config.api is None or config.api.keys_file is None:
        return
    from sdcpd.roles.api_access import Keys, KeysError

    path = config.api.keys_file
    try:
        Keys(path)
    except KeysError as e:
        yield Finding("api", FAIL, f"{e}.  Make a key with: sdcpctl keys add NAME --file {path}")
        return
    mode = path.stat().st_mode & 0o777
    if mode & OPEN_TO_OTHERS:
        text = f"{path} is open to others (mode {mode:04o}).  Run: chmod 0640 {path}"
        yield Finding("api", WARN, text)
    else:
        yield Finding("api", OK, f"{path} can be read")


def _limits(config: Config) -> Iterator[Finding]:
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # sdcpd goes up to it by itself
    if files != resource.RLIM_INFINITY and files < FILES_MIN:
        yield Finding(
            "limits",
            WARN,
            f"this shell allows {files} open files; each peer and client is one.  The unit sets"
            " LimitNOFILE; by hand: ulimit -n 65536",
        )
    pinned = sum(tier.size for tier in config.mlc.tiers if tier.kind == "pinned")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if pinned and locked != resource.RLIM_INFINITY and locked < pinned:
        yield Finding(
            "limits",
            WARN,
            f"pinned tiers want {size_value(pinned)} and this shell may lock {size_value(locked)}. "
            " The unit sets LimitMEMLOCK; by hand: ulimit -l unlimited",
        )
