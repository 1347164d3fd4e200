"""What all admin sockets share: JSON over HTTP/1.1, GET /health, /ready and /metrics."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from sdcpd.admin_cluster import ClusterRefused, ClusterUnknown
from sdcpd.admin_logs import LogsRefused
from sdcpd.engine.tokenizer import ChatTemplateError
from sdcpd.metrics import MEDIA_TYPE as METRICS_TYPE
from sdcpd.metrics import Metrics
from sdcpd.roles.generation import GenerationError
from sdcpd.roles.health import Health
from sdcpd.transport.http import Request, Response
from sdcpd.transport.http1 import StreamingResponse

log = logging.getLogger("sdcpd.admin")
SCHEMA = "sdcpctl/v1"
Resource = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
Stream = Callable[[Request], Awaitable[Response | StreamingResponse]]


class Admin(Protocol):
    """Answers the requests of one instance's socket."""

    def add(self, resources: Mapping[tuple[str, str], Resource]) -> None: ...

    async def handle(self, request: Request) -> Response | StreamingResponse: ...


class AdminError(Exception):
    """The request can't be met; one sentence for a person."""


class JsonResources:
    """Dispatches `METHOD /path` to functions from JSON object to JSON object."""

    def __init__(
        self,
        resources: Mapping[tuple[str, str], Resource],
        *,
        health: Health,
        metrics: Metrics | None = None,
    ) -> None:
        """`metrics` is what GET /metrics shows, as Prometheus text."""
        self._resources = {**resources, ("GET", "/health"): self._alive}
        self._streams: dict[tuple[str, str], Stream] = {}
        self._health, self._metrics = health, metrics

    def add(self, resources: Mapping[tuple[str, str], Resource]) -> None:
        """Have more resources, such as those of the whole process."""
        self._resources |= resources

    async def handle(self, request: Request) -> Response | StreamingResponse:
        """Answer a request; never raises."""
        if (stream := self._streams.get((request.method, request.path))) is not None:
            return await stream(request)
        if self._metrics is not None and (request.method, request.path) == ("GET", "/metrics"):
            return Response(200, (("content-type", METRICS_TYPE),), self._metrics.text())
        if (request.method, request.path) == ("GET", "/ready"):
            return self._ready()
        resource = self._resources.get((request.method, request.path))
        if resource is None:
            return _json(405, {"error": f"no such resource: {request.method} {request.path}"})
        try:
            body = json.loads(request.body) if request.body else {}
        except ValueError as e:
            return _json(400, {"error": f"the body is not JSON: {e}"})
        try:
            if not isinstance(body, dict):
                raise AdminError("the body must be a JSON object")
            return _json(200, {"schema": SCHEMA, **await resource(body)})
        except ClusterUnknown as e:
            return _json(404, {"error": str(e)})
        except (AdminError, ChatTemplateError, ClusterRefused, GenerationError, LogsRefused) as e:
            return _json(409, {"error": str(e)})
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return _json(500, {"error": "the request failed; see the log of the instance"})

    def readiness(self) -> dict[str, Any]:
        """Whether the instance can serve, why not, and what it does without."""
        reasons = self._health.reasons
        return {"ready": not reasons, "reasons": reasons, "degraded": self._health.degraded}

    async def _alive(self, _: dict[str, Any]) -> dict[str, Any]:
        """That somebody answers is the answer."""
        return {"status": "ok"}

    def _ready(self) -> Response:
        state: dict[str, Any] = {"schema": SCHEMA, **self.readiness()}
        if state["ready"]:
            return _json(200, state)
        return _json(503, {**state, "error": f"not ready: {'; '.join(state['reasons'])}"})


def _json(status: int, value: dict[str, Any]) -> Response:
    octets = json.dumps(value, ensure_ascii=False).encode() + b"\n"
    return Response(status, (("content-type", "application/json"),), octets)
