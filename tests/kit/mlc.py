"""An MLC in memory that a test can make slow, deaf or forgetful; enforces fences like ours (D-M7)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from sdcpd.protocol.commit_log import decode_log, read_log
from sdcpd.transport.http import (
    Client,
    ConnectFailed,
    ConnectionLost,
    Headers,
    Request,
    Response,
)

Hook = Callable[[Request], Awaitable[Response | None]]


class MemoryMlc:
    """Serves objects/ and logs/ below any base; `before` may answer or fail a request first."""

    def __init__(self, *, enforcing: bool = True) -> None:
        self.objects: dict[str, bytes] = {}
        self.logs: dict[str, tuple[int, bytes]] = {}
        self.requests: list[Request] = []
        self.before: Hook | None = None
        self.enforcing = enforcing

    async def handle(self, request: Request) -> Response:
        """Answer a request below the base."""
        self.requests.append(request)
        if self.before is not None and (answer := await self.before(request)) is not None:
            return answer
        name = request.path.split("/objects/")[-1]
        if "/objects/" in request.path:
            return self._object(request, name)
        return self._log(request, request.path.rsplit("/", 1)[-1])

    def _object(self, request: Request, name: str) -> Response:
        if request.method == "PUT":
            self.objects[name] = request.body
            return Response(201, (("etag", '"o"'),))
        if request.method == "POST":
            if request.header("sdcp-lease") == "0":
                self.objects.pop(name, None)
            return Response(204)
        if name not in self.objects:
            return Response(404)
        return Response(200, (("etag", '"o"'),), self.objects[name])

    def _log(self, request: Request, name: str) -> Response:
        known = self.logs.get(name)
        if request.method == "GET":
            if known is None:
                return Response(404)
            return Response(200, (("etag", f'"{known[0]}"'), ("sdcp-append", "1")), known[1])
        version, old = known or (0, b"")
        if known is None and request.header("if-none-match") != "*":
            return Response(412)
        if known is not None and request.header("if-match") != f'"{version}"':
            return Response(412)
        new = old + request.body if request.header("content-range") else request.body
        if not new.startswith(old):
            return Response(409)
        highest = read_log(decode_log(old)).highest_epoch
        if self.enforcing and any(r.epoch < highest for r in decode_log(new[len(old) :])):
            return Response(409)
        self.logs[name] = (version + 1, new)
        return Response(204 if known else 201, (("etag", f'"{version + 1}"'),))

    def append(self, name: str, octets: bytes) -> None:
        """Append behind everybody's back."""
        version, old = self.logs.get(name, (0, b""))
        self.logs[name] = (version + 1, old + octets)

    def tokens(self, name: str) -> tuple[int, ...]:
        """The committed tokens of a log."""
        return read_log(decode_log(self.logs[name][1])).tokens


class LossyClient:
    """A client whose answers to PUT are lost, or that reaches nobody, as a test says."""

    def __init__(self, inner: Client) -> None:
        self.inner = inner
        self.lose_answers = 0
        self.unreachable = False

    async def request(
        self,
        method: str,
        uri: str,
        *,
        headers: Headers = (),
        body: bytes = b"",
        timeout_s: float = 30.0,
    ) -> Response:
        """See Client."""
        if self.unreachable:
            raise ConnectFailed("nobody listens")
        answer = await self.inner.request(
            method, uri, headers=headers, body=body, timeout_s=timeout_s
        )
        if method == "PUT" and self.lose_answers:
            self.lose_answers -= 1
            raise ConnectionLost("the connection was lost after the request")
        return answer

    async def aclose(self) -> None:
        """See Client."""
        await self.inner.aclose()


async def never(_: Request) -> Response | None:
    """Hold a request for ever."""
    await asyncio.Event().wait()
    return None
