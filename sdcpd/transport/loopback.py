"""A `Client` that calls handlers in this process: two roles in one daemon, and tests.

The same Requests and Responses as over a socket, so that a role cannot tell the difference.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from urllib.parse import urlsplit

from sdcpd.transport.http import (
    Client,
    ConnectFailed,
    Handler,
    Headers,
    Peer,
    Request,
    RequestTimeout,
    Response,
)
from sdcpd.transport.problem import problem
from sdcpd.transport.shown import one_line

ORIGINS_KEPT = 1024
_logger = logging.getLogger(__name__)


class LoopbackClient:
    """Sends requests to handlers by base URI, and the rest to `fallback`."""

    def __init__(
        self,
        routes: Mapping[str, Handler],
        peer: Peer,
        *,
        fallback: Client | None = None,
        is_near: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Keep what is needed; `routes` may change later, `peer` is who the handlers see.

        `is_near` tells where nothing travels to by `fallback` either.
        """
        self._routes = routes
        self._peer = peer
        self._fallback = fallback
        self._fallback_is_near = is_near
        self._running: set[asyncio.Task[Response]] = set()

    async def request(
        self,
        method: str,
        uri: str,
        *,
        headers: Headers = (),
        body: bytes = b"",
        timeout_s: float = 30.0,
    ) -> Response:
        """Send one request, as `Client.request` tells.

        The handler runs in its own task: like a server's, it outlives a caller that gives up.
        """
        handler = self._route(uri)
        if handler is None:
            if self._fallback is None:
                raise ConnectFailed(f"no instance in this process serves {uri}")
            return await self._fallback.request(
                method, uri, headers=headers, body=body, timeout_s=timeout_s
            )
        parts = urlsplit(uri)
        request = Request(
            method,
            parts.path or "/",
            parts.query,
            headers=tuple((name.lower(), value) for name, value in headers),
            body=body,
            peer=self._peer,
            authority=parts.netloc,
        )
        task = asyncio.get_running_loop().create_task(answer(handler, request))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(task)
        except TimeoutError as error:
            raise RequestTimeout(
                f"no answer to {method} {uri} within {timeout_s:g} s; it may have been processed"
            ) from error

    def is_near(self, uri: str) -> bool:
        """Whether octets get there without travelling: in this process, or on this host."""
        return self._route(uri) is not None or self._fallback_is_near(uri)

    async def aclose(self) -> None:
        """Wait for the handlers that still run; the fallback belongs to its maker."""
        if self._running:
            await asyncio.wait(self._running)

    def _route(self, uri: str) -> Handler | None:
        wanted = _normal(uri)
        matches = [
            (base, handler)
            for base, handler in ((_normal(base), one) for base, one in self._routes.items())
            if wanted == base or wanted.startswith(base + "/")
        ]
        # The longest base URI wins: bases may be nested on one host.
        return max(matches, key=lambda match: len(match[0]))[1] if matches else None


async def answer(handler: Handler, request: Request) -> Response:
    """The answer of a handler as a server would send it: a failure is 500, HEAD has no content."""
    try:
        response = await handler(request)
    except Exception:
        _logger.exception("%s failed", one_line(f"{request.method} {request.path}"))
        response = problem(500, "internal error; the log of this instance tells more")
    if request.method == "HEAD":
        return Response(response.status, response.headers)
    return response


def _normal(uri: str) -> str:
    """A URI without query for comparison by D-H5: host in lower case, port explicit."""
    scheme, _, rest = uri.partition("://")
    path = rest.partition("#")[0].partition("?")[0]
    authority, slash, path = path.partition("/")
    path = slash + path
    return _origin(f"{scheme}://{authority}") + (path[:-1] if path.endswith("/") else path)


@lru_cache(maxsize=ORIGINS_KEPT)
def _origin(uri: str) -> str:
    """The same of scheme and authority alone, of which there are a few."""
    parts = urlsplit(uri)
    return f"{parts.scheme.lower()}://{parts.hostname or ''}:{parts.port or 443}"
