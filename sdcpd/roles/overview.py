"""The cluster as its router sees it: all of it for operators, for clients what names no place."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import sdcpd
from sdcpd.protocol.instances import Board, Instance
from sdcpd.protocol.messages import InstanceRole
from sdcpd.roles.generation import Generator


def instances_of(board: Board) -> list[dict[str, Any]]:
    """Every instance that ever reported, as any holder of a key may see it."""
    now = time.monotonic()
    return [_instance(one, now, board) for one in board.all()]


def instances_in_full(board: Board) -> list[dict[str, Any]]:
    """The same with what operators need beside it: where each is, and its engine."""
    more = [
        {
            "base_uri": one.base,
            "engine": one.status.engine,
            "certificate_left_s": _left_s(one.status.certificate_until),
            "model": None if one.status.model is None else digest_text(one.status.model),
        }
        for one in board.all()
    ]
    return [short | full for short, full in zip(instances_of(board), more, strict=True)]


def _left_s(until: int | None) -> int | None:
    """How long a certificate is still good, by this host's clock."""
    return None if until is None else until - int(time.time())


def digest_text(digest: bytes) -> str:
    """A digest as the configuration has it."""
    return f"sha256:{digest.hex()}"


def overview_of(board: Board, *, sessions: int, counts: Mapping[str, int]) -> dict[str, Any]:
    """What a router answers `Generator.overview` with."""
    return {
        "sessions": sessions,
        "instances": instances_of(board),
        "counts": dict(counts),
    }


def status_for_clients(generator: Generator, model: str) -> dict[str, Any]:
    """`GET /v1/sdcp/status`: no base URI, session or certificate is in it."""
    found = generator.readiness()
    return {
        "model": model,
        "version": sdcpd.__version__,
        "ready": found.ready,
        "reason": found.reason,
        **generator.overview(),
    }


def _instance(instance: Instance, now: float, board: Board) -> dict[str, Any]:
    status = instance.status
    return {
        "instance": status.instance,
        "role": InstanceRole(status.role).name.lower(),
        "state": state_of(instance, now, board),
        "load": status.load,
        "queue": status.queue,
        "accept": None if status.accept_milli is None else status.accept_milli / 1000,
        "sessions": instance.sessions,
        "seen_s": round(now - (instance.expires - status.ttl_ms / 1000), 1),
    }


STATES = ("ready", "draining", "loading", "expired", "stuck", "gone")


def state_of(instance: Instance, now: float, board: Board) -> str:
    """What an instance is like, as one of STATES."""
    status = instance.status
    if status.ttl_ms == 0:  # it has withdrawn (D-R1): at its end, or because it is stuck
        return "stuck" if status.ready is False else "gone"
    if now >= instance.expires:
        return "expired"
    if status.ready is False:
        return "loading"
    return "draining" if board.drained(instance.base, status.role) else "ready"
