"""What to do with new certificates: which files go to which host, and what its file must say."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

INSTALLED = "/etc/sdcpd/certs"
UNITS = "/usr/lib/systemd/system"
SERVING_ROLES = ("router", "verifier", "drafter")


def next_steps(
    folder: Path, trust_domain: str, pairs: Sequence[tuple[str, str, str | None]]
) -> list[str]:
    """Lines for a person; `pairs` are (role, name, base URI) of certificates in `folder`."""
    if not pairs:
        return [
            "Next: sdcpctl certs issue --out "
            f"{shlex.quote(str(folder))} verifier/v0=https://HOST:7443/ ..."
        ]
    hosts: dict[str, list[tuple[str, str]]] = {}
    for role, name, base_uri in pairs:
        host = urlsplit(base_uri).hostname if base_uri else None
        hosts.setdefault(host or "HOST", []).append((role, name))
    there = {host: who for host, who in hosts.items() if not _is_loopback(host)}
    here = [one for host, who in hosts.items() if host not in there for one in who]
    lines = [f"Keep {folder / 'ca.key'} in one safe place, off the hosts that serve."]
    for host, instances in there.items():
        lines += _there(folder, host, instances)
    if there:
        lines.append(
            "On each of them the configuration file needs "
            f'trust_domain = "{trust_domain}" in [node].'
        )
    if here:
        lines += _here(folder, trust_domain, here)
    return [*lines, f"Check: sdcpctl certs check {shlex.quote(str(folder))}"]


def _there(folder: Path, host: str, instances: Sequence[tuple[str, str]]) -> list[str]:
    """Copy to where the configuration looks by default, readable by the service's group."""
    files = [folder / "ca.crt"]
    for role, name in instances:
        files += [folder / f"{role}.{name}.crt", folder / f"{role}.{name}.key"]
    copy = " ".join(shlex.quote(str(one)) for one in files)
    address = f"[{host}]" if ":" in host else host
    keys = " ".join(f"{INSTALLED}/{role}.{name}.key" for role, name in instances)
    lines = [
        f"Next, for {host}:",
        f"  scp {copy} root@{address}:{INSTALLED}/",
        f"  ssh root@{host} 'chgrp sdcpd {keys} && chmod 0640 {keys}'",
    ]
    return lines + _starting(_serving(instances))


def _starting(serving: Sequence[tuple[str, str]]) -> list[str]:
    """Instances of one name have it from the file; the others from the names of their units."""
    names = {name for _, name in serving}
    if not serving:
        return []
    if len(names) == 1:
        units = " ".join(f"sdcpd@{role}" for role, _ in serving)
        lines = [f'  in its configuration file, in [node]: name = "{serving[0][1]}"']
    else:
        units = " ".join(f"sdcpd@{role}-{name}" for role, name in serving)
        lines = [
            f"  cp -r {UNITS}/sdcpd@router.service.d"
            f" /etc/systemd/system/sdcpd@{role}-{name}.service.d"
            for role, name in serving
            if role == "router"
        ]
    return [*lines, f"  start there: systemctl enable --now {units}"]


def _here(folder: Path, trust_domain: str, instances: Sequence[tuple[str, str]]) -> list[str]:
    """On this host the files can stay where they are."""
    where = folder.resolve()
    lines = [
        "Next, on this host, in the configuration file:",
        "  [node]",
        f'  trust_domain = "{trust_domain}"',
        "  [tls]",
        f'  ca = "{where}/ca.crt"',
        f'  cert = "{where}/{{role}}.{{name}}.crt"',
        f'  key = "{where}/{{role}}.{{name}}.key"',
    ]
    starts = [f"sdcpd --role {role}-{name} -c FILE" for role, name in _serving(instances)]
    return [*lines, f"  start here: {'; '.join(starts)}"] if starts else lines


def _serving(instances: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(role, name) for role, name in instances if role in SERVING_ROLES]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
