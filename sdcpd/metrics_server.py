"""The listener for monitoring: plain HTTP with GET /metrics, /health and /ready, and no more."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sdcpd.metrics import MEDIA_TYPE, Metrics, text_of_process
from sdcpd.parts import Parts, StartError, reason
from sdcpd.roles.health import Health
from sdcpd.transport.http import Request, Response
from sdcpd.transport.http1 import Http1Server

log = logging.getLogger("sdcpd")
BODY_BYTES_MAX = 4096  # nothing here takes one
STARTING = "the process is starting"


class Monitoring:
    """Answers for all roles of a process, from before the first of them has started."""

    def __init__(
        self,
        roles: Sequence[Metrics],
        healths: Mapping[str, Health],
        *,
        started: Callable[[], bool],
    ) -> None:
        """`roles` and `healths` are the process's own, which grow while it starts."""
        self._roles, self._healths, self._started = roles, healths, started
        self._answers = {
            "/metrics": self._metrics,
            "/health": lambda: _json(200, {"status": "ok"}),
            "/ready": self._ready,
        }

    async def handle(self, request: Request) -> Response:
        """Answer a request."""
        answer = self._answers.get(request.path)
        if answer is None:
            there = ", ".join(self._answers)
            return _json(404, {"error": f"no such resource; there are {there}"})
        if request.method not in ("GET", "HEAD"):
            response = _json(405, {"error": f"{request.path} takes GET and HEAD only"})
            return Response(405, (*response.headers, ("allow", "GET, HEAD")), response.body)
        return answer()

    def _metrics(self) -> Response:
        return Response(200, (("content-type", MEDIA_TYPE),), text_of_process(self._roles))

    def _ready(self) -> Response:
        reasons = [] if self._started() else [STARTING]
        degraded: list[str] = []
        several = len(self._healths) > 1
        for label, health in self._healths.items():
            named = f"{label}: " if several else ""
            reasons += [f"{named}{text}" for text in health.reasons]
            degraded += [f"{named}{text}" for text in health.degraded]
        state = {"ready": not reasons, "reasons": reasons, "degraded": degraded}
        return _json(503 if reasons else 200, state)


async def start_monitoring(parts: Parts, *, started: Callable[[], bool]) -> None:
    """Listen if `[metrics] listen` names a port; raises StartError."""
    host, port = parts.config.metrics.listen
    if not port:
        return
    monitoring = Monitoring(parts.metrics, parts.healths, started=started)
    server = Http1Server(monitoring.handle, host=host, port=port, body_bytes_max=BODY_BYTES_MAX)
    try:
        await server.start()
    except OSError as e:
        raise StartError(
            f"metrics: cannot listen on {host}:{port}: {reason(e)}; stop the other program or "
            "choose another [metrics] listen",
            status=1,
        ) from e
    parts.stack.push_async_callback(server.aclose)
    shown = f"[{host}]" if ":" in host else host
    log.info("metrics: http://%s:%d/metrics", shown, port)


def _json(status: int, value: dict[str, Any]) -> Response:
    octets = json.dumps(value, ensure_ascii=False).encode() + b"\n"
    return Response(status, (("content-type", "application/json"),), octets)
