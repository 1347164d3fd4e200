"""Whether an instance reaches those that it calls, and what it hears from who runs here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sdcpd.doctor.finding import FAIL, OK, WARN, Finding
from sdcpd.units import duration_text

if TYPE_CHECKING:
    from sdcpd.config import Config
    from sdcpd.parts import Instance

ACCEPT_MIN = 0.3
CERTIFICATE_LEFT_S = 14 * 86400
JOURNAL = "journalctl -u 'sdcpd@{role}*' -n 50"
TERMINAL = "the terminal of sdcpd dev has it"


def path_findings(config: Config, instance: Instance) -> Iterator[Finding]:
    """A handshake with the router, as the instance would make it."""
    from certs.files import CertsError
    from certs.probe import probe_peer

    router = getattr(getattr(config, instance.role), "router", None)
    if router is None:
        return
    parts = urlsplit(router)
    address = f"{parts.hostname}:{parts.port or 443}"
    tls, fill = config.tls, instance.fill
    begin = time.monotonic()
    try:
        found = probe_peer(address, ca=fill(tls.ca), cert=fill(tls.cert), key=fill(tls.key))
    except CertsError as e:
        cure = "Is the router running, and is the port open?  On its host: sdcpctl doctor"
        yield Finding("path", FAIL, f"{instance.label} -> router {router}: {e}.  {cure}")
        return
    took_ms = 1000 * (time.monotonic() - begin)
    yield Finding(
        "path",
        OK,
        f"{instance.label} -> router {router}: {found.tls_version}, connected in {took_ms:.1f} ms",
    )


def instance_findings(
    label: str, answer: dict[str, Any] | str, *, started: bool = True
) -> Iterator[Finding]:
    """What an instance says of itself at its admin socket, or why it says nothing.

    One that was never `started` has no socket, which is no fault of a host that is looked at first.
    """
    if isinstance(answer, str):
        yield Finding("running", FAIL if started else WARN, f"{label}: {answer}")
        return
    for reason in answer.get("reasons", ()):
        yield Finding("running", FAIL, f"{label} is not ready: {reason}")
    for reason in answer.get("degraded", ()):
        yield Finding("running", WARN, f"{label}: {reason}")
    if not answer.get("reasons"):
        yield Finding("running", OK, f"{label} is ready, version {answer['version']}")


def cluster_findings(answer: dict[str, Any], *, log: str = JOURNAL) -> Iterator[Finding]:
    """What a router sees of its verifiers and drafters; `log` says where a `{role}`'s log is."""
    instances = answer["instances"]
    for one in instances:
        yield from _seen(one, log)
    for base_uri in answer.get("missing_verifiers", ()):
        text = f"verifier {base_uri}, which [router] verifiers names, has never reported.  Is it"
        text += f" running, with this base_uri?  Its log: {log.format(role='verifier')}"
        yield Finding("cluster", WARN, text)
    for role in ("verifier", "drafter"):
        ready = [one for one in instances if (one["role"], one["state"]) == (role, "ready")]
        if ready:
            continue
        if role == "verifier":
            text = "no verifier is ready, so that no text can be generated.  Start one, and see"
        else:
            text = "no drafter is ready: verifiers decode alone, without speculation.  Start one,"
            text += " and see"
        level = FAIL if role == "verifier" else WARN
        yield Finding("cluster", level, f"{text} its log: {log.format(role=role)}")
    engines = {one["engine"] for one in instances if one["role"] == "verifier" and one["engine"]}
    if len(engines) > 1:
        yield Finding(
            "cluster",
            WARN,
            f"the verifiers compute in {len(engines)} different ways, so that a text may differ"
            " after a failover.  Give them the same device, dtype and version:"
            " sdcpctl instances list -o wide",
        )


def _seen(one: dict[str, Any], log: str) -> Iterator[Finding]:
    who = f"{one['role']} {one['instance']} at {one['base_uri']}"
    look = f"Look at its log: {log.format(role=one['role'])}"
    match one["state"]:
        case "expired":
            yield Finding("cluster", FAIL, f"{who}: no status for {one['seen_s']} s.  {look}")
        case "stuck":
            yield Finding("cluster", FAIL, f"{who}: its engine does not go on.  {look}")
        case "draining":
            undrain = f"Back with: sdcpctl instances undrain {one['instance']}"
            yield Finding("cluster", WARN, f"{who} is drained.  {undrain}")
        case "ready":
            yield Finding("cluster", OK, f"{who}: load {one['load']} %, seen {one['seen_s']} s ago")
    left_s = one.get("certificate_left_s")
    if left_s is not None and left_s < CERTIFICATE_LEFT_S:
        name = one["instance"].partition(".")[0]
        yield Finding(
            "cluster",
            WARN,
            f"{who}: its certificate expires in {duration_text(max(0, left_s))}.  Run, where"
            f" ca.key is: sdcpctl certs renew {one['role']}/{name}, and copy it there",
        )
    accept = one["accept"]
    if one["role"] == "drafter" and accept is not None and accept < ACCEPT_MIN:
        yield Finding(
            "cluster",
            WARN,
            f"{who}: {accept:.0%} of its tokens are accepted.  Is its model one of the target's"
            " family?  sdcpctl sessions watch shows what is rejected",
        )
