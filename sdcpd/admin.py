"""The admin socket: what `sdcpctl` and `sdcpd dev` ask an instance, as JSON over HTTP/1.1.

Whoever may open the socket may ask; its file mode and directory are the access control.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any, Protocol

import sdcpd
from sdcpd.admin_logs import LogsAdmin, LogsRefused
from sdcpd.engine.api import KvUsage
from sdcpd.engine.tokenizer import ChatTemplateError, TextModel
from sdcpd.metrics import MEDIA_TYPE as METRICS_TYPE
from sdcpd.metrics import Metrics
from sdcpd.protocol.digest import output_digest
from sdcpd.protocol.messages import InstanceRole, Sampling, Status
from sdcpd.protocol.uris import session_path_id
from sdcpd.roles.drafter import Drafter
from sdcpd.roles.generation import GenerationError, GenerationRequest
from sdcpd.roles.router import Router
from sdcpd.roles.verifier import Verifier
from sdcpd.transport.http import Request, Response

log = logging.getLogger("sdcpd.admin")
SCHEMA = "sdcpctl/v1"
Resource = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Admin(Protocol):
    """Answers the requests of one instance's socket."""

    async def handle(self, request: Request) -> Response: ...


class AdminError(Exception):
    """The request can't be met; one sentence for a person."""


class _JsonResources:
    """Dispatches `METHOD /path` to functions from JSON object to JSON object."""

    def __init__(
        self, resources: Mapping[tuple[str, str], Resource], *, metrics: Metrics | None = None
    ) -> None:
        """`metrics` is what GET /metrics shows, as Prometheus text."""
        self._resources, self._metrics = resources, metrics

    async def handle(self, request: Request) -> Response:
        """Answer a request; never raises."""
        if self._metrics is not None and (request.method, request.path) == ("GET", "/metrics"):
            return Response(200, (("content-type", METRICS_TYPE),), self._metrics.text())
        resource = self._resources.get((request.method, request.path))
        if resource is None:
            return _json(404, {"error": f"no such resource: {request.method} {request.path}"})
        try:
            body = json.loads(request.body) if request.body else {}
        except ValueError as e:
            return _json(400, {"error": f"the body is not JSON: {e}"})
        try:
            if not isinstance(body, dict):
                raise AdminError("the body must be a JSON object")
            return _json(200, {"schema": SCHEMA, **await resource(body)})
        except (AdminError, ChatTemplateError, GenerationError, LogsRefused) as e:
            return _json(409, {"error": str(e)})
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return _json(500, {"error": "the request failed; see the log of the instance"})


class RouterAdmin(_JsonResources):
    """The router's socket: the cluster as it sees it, and texts for `sdcpd dev --once`."""

    def __init__(
        self,
        name: str,
        router: Router,
        text: TextModel,
        *,
        api: str | None = None,
        metrics: Metrics | None = None,
        logs: LogsAdmin | None = None,
    ) -> None:
        """`api` is where clients reach the model, if they can."""
        self._name, self._router, self._text, self._api = name, router, text, api
        self._begun = time.monotonic()
        resources = {("GET", "/status"): self.status, ("POST", "/generate"): self.generate}
        super().__init__(resources | (logs.resources if logs else {}), metrics=metrics)

    async def status(self, _: dict[str, Any]) -> dict[str, Any]:
        """Instances, sessions and counts."""
        now = time.monotonic()
        readiness = self._router.readiness()
        instances = []
        for instance in self._router.board.all():
            status = instance.status
            instances.append(
                {
                    "instance": status.instance,
                    "role": InstanceRole(status.role).name.lower(),
                    "base_uri": instance.base,
                    "state": _state(status, fresh=now < instance.expires),
                    "load": status.load,
                    "queue": status.queue,
                    "accept": None if status.accept_milli is None else status.accept_milli / 1000,
                    "sessions": instance.sessions,
                    "engine": status.engine,
                    "seen_s": round(now - (instance.expires - status.ttl_ms / 1000), 1),
                }
            )
        return {
            **_about("router", self._name, self._begun),
            "base_uri": self._router.config.base_uri,
            "model": self._text.name,
            "api": self._api,
            "ready": readiness.ready,
            "reason": readiness.reason,
            "instances": instances,
            "sessions": [
                {
                    "session": session.label,
                    "phase": session.machine.phase.value,
                    "epoch": session.machine.epoch,
                    "verifier": session.machine.verifier,
                    "drafter": session.machine.drafter,
                    "committed": session.machine.committed,
                }
                for session in self._router.sessions
            ],
            "counts": dict(self._router.counts),
        }

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """One text, with what it took.

        Members: prompt, max_tokens, temperature (0 is greedy), seed, chat (the prompt is a user's
        message), ignore_eos.
        """
        prompt, max_tokens = body.get("prompt", ""), body.get("max_tokens", 64)
        temperature, seed = body.get("temperature", 0.0), body.get("seed")
        if not isinstance(prompt, str) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise AdminError("prompt must be text and max_tokens a number above 0")
        if not isinstance(temperature, int | float) or not 0 <= temperature <= 2:
            raise AdminError("temperature must be a number from 0 to 2")
        if not isinstance(seed, int | None):
            raise AdminError("seed must be a whole number")
        if body.get("chat"):
            rendered = self._text.chat_prompt([{"role": "user", "content": prompt}])
            ids = self._text.encode(rendered, special=False)
        else:
            ids = self._text.encode(prompt)
        room = self._text.context_max - len(ids)
        if max_tokens > room:
            raise AdminError(
                f"the prompt has {len(ids)} tokens and max_tokens is {max_tokens}; "
                f"together they must not exceed the model's context of {self._text.context_max}"
            )
        sampling = Sampling(
            temperature_milli=round(1000 * temperature),
            seed=None if seed is None else seed % (1 << 64),
        )
        stop = () if body.get("ignore_eos") else self._text.eos
        begin = time.monotonic()
        reader = await self._router.generate(
            GenerationRequest(tuple(ids), max_tokens, stop, sampling)
        )
        tokens: list[int] = []
        async for part in reader:
            tokens += part.tokens
        seconds = time.monotonic() - begin
        stats = reader.stats
        return {
            "text": self._text.decode(tokens),
            "tokens": tokens,
            "rounds": stats.rounds,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "self_decoded": stats.self_decoded,
            "tokens_per_pass": round(len(tokens) / stats.passes, 3) if stats.passes else 0.0,
            "seconds": round(seconds, 3),
            "digest": output_digest(tokens),
            "session": session_path_id(reader.session),
        }


def _kv(usage: KvUsage | None) -> dict[str, int] | None:
    return None if usage is None else asdict(usage)


class VerifierAdmin(_JsonResources):
    """A verifier's socket."""

    def __init__(self, name: str, verifier: Verifier, *, metrics: Metrics | None = None) -> None:
        self._name, self._verifier = name, verifier
        self._begun = time.monotonic()
        super().__init__({("GET", "/status"): self.status}, metrics=metrics)

    async def status(self, _: dict[str, Any]) -> dict[str, Any]:
        """Sessions and counts."""
        verifier = self._verifier
        return {
            **_about("verifier", self._name, self._begun),
            "base_uri": verifier.config.base_uri,
            "instance": verifier.instance,
            "load": verifier.load(),
            "engine": verifier.status().engine,
            "kv": _kv(verifier.kv_usage()),
            "sessions": [
                {
                    "session": served.label,
                    "epoch": served.machine.epoch,
                    "round": served.machine.round,
                    "committed": served.machine.committed,
                    "state": served.machine.state_message().state,
                    "fenced": served.machine.fenced,
                    "drafter": served.machine.drafter,
                }
                for served in verifier.sessions
            ],
            "counts": {**verifier.counts, **verifier.rounds.as_json()},
        }


class DrafterAdmin(_JsonResources):
    """A drafter's socket."""

    def __init__(self, name: str, drafter: Drafter, *, metrics: Metrics | None = None) -> None:
        self._name, self._drafter = name, drafter
        self._begun = time.monotonic()
        super().__init__({("GET", "/status"): self.status}, metrics=metrics)

    async def status(self, _: dict[str, Any]) -> dict[str, Any]:
        """Sessions and counts."""
        drafter = self._drafter
        return {
            **_about("drafter", self._name, self._begun),
            "base_uri": drafter.config.base_uri,
            "kv": _kv(drafter.kv_usage()),
            "instance": drafter.instance,
            "sessions": [
                {
                    "session": session.label,
                    "epoch": session.machine.epoch,
                    "round": session.machine.round,
                    "committed": session.machine.committed,
                    "alpha": round(session.machine.alpha.value, 3),
                }
                for session in drafter.sessions
            ],
            "counts": {**drafter.counts, **drafter.rounds.as_json()},
        }


def _state(status: Status, *, fresh: bool) -> str:
    if status.ttl_ms == 0:
        return "gone"  # it has withdrawn (D-R1)
    if not fresh:
        return "expired"
    return "loading" if status.ready is False else "ready"


def _about(role: str, name: str, begun: float) -> dict[str, Any]:
    return {
        "role": role,
        "name": name,
        "version": sdcpd.__version__,
        "up_s": round(time.monotonic() - begun, 1),
    }


def _json(status: int, value: dict[str, Any]) -> Response:
    octets = json.dumps(value, ensure_ascii=False).encode() + b"\n"
    return Response(status, (("content-type", "application/json"),), octets)
