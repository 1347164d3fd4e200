"""The multi-level cache over HTTP, below one base (D-M1 to D-M12, D-Z3): paths and general checks.

objects/{scope}/{name}   GET HEAD PUT DELETE; POST renews or releases a lease
logs/{session id}        GET HEAD PUT (whole, or an append by Content-Range); routers only
logs                     POST: a group of appends
"""

from __future__ import annotations

import re
from collections.abc import Callable

from sdcpd.protocol.limits import BODY_BYTES_MAX
from sdcpd.protocol.problems import MethodNotAllowed, NotFound
from sdcpd.protocol.uris import parse_session_id
from sdcpd.transport.http import Request, Response
from tiers import log_resource, object_resource
from tiers.api import Key, LogStore, Tier
from tiers.log_resource import GROUP_BYTES_MAX, LOG_BYTES_MAX, AuthorizeFence, LogResource
from tiers.object_resource import ObjectResource

NAME_CHARS_MAX = 255
_SCOPE = re.compile(r"[A-Za-z0-9_-]{1,64}")
# One or more segments as they may stand in a trusted reference (D-M2), never decoded: what is
# spelled differently is another name.
_NAME = re.compile(
    r"[A-Za-z0-9._~!$&'()*+,;=:@%{}-]+(?:/[A-Za-z0-9._~!$&'()*+,;=:@%{}-]+)*", re.ASCII
)
_HIDDEN = re.compile(r"%(?:2e|2f|5c)", re.IGNORECASE)
_READING = ("GET", "HEAD", "OPTIONS")

Authorize = Callable[[Request, str, bool], None]


class MlcResource:
    """Answers requests below a base; errors are raised as Problem, for the caller to send."""

    def __init__(
        self,
        *,
        base_path: str,
        objects: Tier,
        logs: LogStore | None,
        authorize: Authorize,
        object_bytes_max: int,
        authorize_fence: AuthorizeFence | None = None,
    ) -> None:
        """Serve `objects` and, where given, `logs` (only routers have them, D-M3).

        `authorize(request, kind, write)` raises Problem for who may not read or write, kind being
        "object" or "log"; `authorize_fence(request)` for who may not write fences (D-M11).
        `object_bytes_max` bounds one object in octets.
        """
        self._base_path = base_path.rstrip("/")
        self._authorize = authorize
        self._object_bytes_max = object_bytes_max
        self._objects = ObjectResource(
            objects, base_path=self._base_path, bytes_max=object_bytes_max
        )
        self._logs = None if logs is None else LogResource(logs, authorize_fence=authorize_fence)

    async def handle(self, request: Request) -> Response:
        """Answer one request; raises Problem."""
        kind, _, rest = self._below(request.path).partition("/")
        if kind == "objects":
            return await self._object(_key(rest), request)
        if kind == "logs" and self._logs is not None:
            return await self._log(self._logs, request)
        raise NotFound("no such resource")

    def body_bytes_max(self, method: str, path: str) -> int:
        """Return how many octets a request body may have, before it is read (D-H7)."""
        try:
            kind, _, rest = self._below(path).partition("/")
        except NotFound:
            return BODY_BYTES_MAX
        if method == "PUT" and kind == "objects":
            return self._object_bytes_max
        if kind == "logs" and self._logs is not None:
            return LOG_BYTES_MAX if rest else GROUP_BYTES_MAX
        return BODY_BYTES_MAX

    async def _object(self, key: Key, request: Request) -> Response:
        self._check(request, "object", object_resource.METHODS)
        if request.method == "OPTIONS":
            allow = ("allow", ", ".join(object_resource.METHODS))
            return Response(204, (allow, ("accept-encoding", ", ".join(object_resource.TAKEN))))
        return await self._objects.handle(key, request)

    async def _log(self, logs: LogResource, request: Request) -> Response:
        below = self._below(request.path)
        group = below == "logs"
        log_id = below.removeprefix("logs/")
        if not group and parse_session_id(log_id) is None:
            raise NotFound("no such resource")
        methods = log_resource.GROUP_METHODS if group else log_resource.METHODS
        self._check(request, "log", methods)
        if request.method == "OPTIONS":
            return Response(204, (("allow", ", ".join(methods)), *log_resource.APPEND))
        return await (logs.append_group(request) if group else logs.handle(log_id, request))

    def _check(self, request: Request, kind: str, methods: tuple[str, ...]) -> None:
        if request.method not in methods:
            allow = ", ".join(methods)
            raise MethodNotAllowed(f"allowed: {allow}", headers={"allow": allow})
        self._authorize(request, kind, request.method not in _READING)

    def _below(self, path: str) -> str:
        if not path.startswith(self._base_path + "/"):
            raise NotFound("no such resource")
        return path[len(self._base_path) + 1 :]


def _key(rest: str) -> Key:
    scope, _, name = rest.partition("/")
    if (
        _SCOPE.fullmatch(scope) is None
        or len(name) > NAME_CHARS_MAX
        or _NAME.fullmatch(name) is None
        or _HIDDEN.search(name)
        or not {".", ".."}.isdisjoint(name.split("/"))
    ):
        raise NotFound("no such resource")
    return Key(scope, name)
