"""What all roles' listeners share: routes, the order of general checks, errors to HTTP (D-H13)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol
from urllib.parse import unquote, urlsplit

from sdcpd.protocol.codec import MEDIA_TYPE, encode
from sdcpd.protocol.limits import BODY_BYTES_MAX
from sdcpd.protocol.messages import Message
from sdcpd.protocol.problems import (
    PROBLEM_MEDIA_TYPE,
    InternalError,
    MethodNotAllowed,
    NotFound,
    Problem,
    TooLarge,
    UnsupportedMediaType,
    WrongRole,
    to_json,
)
from sdcpd.protocol.uris import parse_session_id
from sdcpd.roles.peers import Identity, PeerTable
from sdcpd.transport.http import Request, Response
from sdcpd.transport.refusal_log import RefusalLog
from sdcpd.transport.shown import one_line

log = logging.getLogger("sdcpd.roles")
NO_STORE = ("cache-control", "no-store")


@dataclass(frozen=True, slots=True)
class Call:
    """A request that has passed the general checks."""

    request: Request
    identity: Identity
    session: bytes = b""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """One resource and method; `path` may hold `{session}` or `{name}` as a whole segment."""

    method: str
    path: str
    handler: Callable[[Call], Awaitable[Response]]
    roles: tuple[str, ...] = ()
    """Roles of which the caller needs one; empty where authorization depends on the session."""
    body: bool = True
    body_bytes_max: int = BODY_BYTES_MAX
    segments: tuple[str, ...] = field(init=False, default=())
    places: tuple[tuple[int, str], ...] = field(init=False, default=())
    """Which of the segments stand for others."""

    def __post_init__(self) -> None:
        segments = tuple(self.path.split("/"))
        places = tuple(one for one in enumerate(segments) if one[1].startswith("{"))
        object.__setattr__(self, "segments", segments)
        object.__setattr__(self, "places", places)


class Mlc(Protocol):
    """The resource that serves objects and logs below a role's base URI."""

    async def handle(self, request: Request) -> Response: ...


class Listener:
    """Dispatches the requests of one role below its base URI."""

    def __init__(
        self, base_uri: str, routes: Sequence[Route], *, peers: PeerTable, mlc: Mlc | None = None
    ) -> None:
        self.base_path = urlsplit(base_uri).path.rstrip("/")
        self._routes: dict[tuple[int, str], list[Route]] = {}
        """By how many segments there are, and the first."""
        for route in routes:
            shape = (len(route.segments), route.segments[0])
            self._routes.setdefault(shape, []).append(route)
        self._peers = peers
        self._mlc = mlc
        self.refusals: RefusalLog | None = None

    async def handle(self, request: Request) -> Response:
        """Answer a request; never raises."""
        try:
            response = await self._dispatch(request)
        except WrongRole as problem:
            self._refused(request, problem)
            response = problem_response(problem)
        except Problem as problem:
            response = problem_response(problem)
        except Exception:
            log.exception("%s failed", one_line(f"{request.method} {request.path}"))
            response = problem_response(InternalError("the request failed; see the log"))
        return replace(response, headers=(*response.headers, NO_STORE))

    def body_bytes_max(self, method: str, path: str) -> int | None:
        """The body limit of a route, None if the path is not one of ours (the MLC has its own)."""
        for route, _ in self._matches(path):
            if route.method == method:
                return route.body_bytes_max
        return None

    def _refused(self, request: Request, problem: WrongRole) -> None:
        if self.refusals is not None:
            peer = request.peer
            who = f"{peer.address} ({peer.common_name})" if peer else "a peer"
            text = f"{request.method} {request.path[:120]!a}: {problem.detail}"
            self.refusals.note("wrong_role", who, text)

    async def _dispatch(self, request: Request) -> Response:
        found = self._matches(request.path)
        if not found:
            if self._mlc is not None and request.path.startswith(
                (f"{self.base_path}/objects/", f"{self.base_path}/logs")
            ):
                return await self._mlc.handle(request)
            raise NotFound("no such resource")
        allow = ", ".join(sorted({route.method for route, _ in found} | {"OPTIONS"}))
        if request.method == "OPTIONS":
            return Response(204, (("allow", allow),))
        for route, values in found:
            if route.method == request.method or (
                request.method == "HEAD" and route.method == "GET"
            ):
                return await self._call(route, values, request)
        raise MethodNotAllowed(f"allowed: {allow}", headers={"allow": allow})

    async def _call(self, route: Route, values: Mapping[str, str], request: Request) -> Response:
        identity = (
            self._peers.require(request.peer, *route.roles)
            if route.roles
            else self._peers.identify(request.peer)
        )
        if route.body:
            check_media_type(request)
            if len(request.body) > route.body_bytes_max:
                raise TooLarge(f"the body is larger than {route.body_bytes_max} octets")
        session = b""
        if "{session}" in values:
            parsed = parse_session_id(values["{session}"])
            assert parsed is not None, "matched before"
            session = parsed
        return await route.handler(
            Call(request, identity, session, unquote(values.get("{name}", "")))
        )

    def _matches(self, path: str) -> list[tuple[Route, dict[str, str]]]:
        if not path.startswith(self.base_path + "/"):
            return []
        segments = path[len(self.base_path) + 1 :].split("/")
        found = []
        for route in self._routes.get((len(segments), segments[0]), ()):
            values = _match(route, segments)
            if values is not None:
                found.append((route, values))
        return found


def _match(route: Route, segments: Sequence[str]) -> dict[str, str] | None:
    """What stands in the route's places, None for another path of as many segments."""
    values = {name: segments[at] for at, name in route.places}
    given = [*segments]
    for at, name in route.places:
        given[at] = name
    if tuple(given) != route.segments or not all(values.values()):
        return None
    session = values.get("{session}")
    return None if session is not None and parse_session_id(session) is None else values


def check_media_type(request: Request) -> None:
    """Raise UnsupportedMediaType unless the body is an SDCP message (D-H2)."""
    given = (request.header("content-type") or "").partition(";")[0].strip().lower()
    if given != MEDIA_TYPE:
        raise UnsupportedMediaType(
            f"the body must be {MEDIA_TYPE}",
            headers={"accept": MEDIA_TYPE, "accept-post": MEDIA_TYPE},
        )


def message_response(message: Message | None, *, status: int = 200) -> Response:
    """An answer with a message, or 204 without content."""
    if message is None:
        return Response(204)
    return Response(status, (("content-type", MEDIA_TYPE),), encode(message))


def problem_response(problem: Problem) -> Response:
    """The one place where errors become HTTP."""
    headers = (("content-type", PROBLEM_MEDIA_TYPE), *problem.headers.items())
    return Response(problem.status, headers, to_json(problem))
