"""Serves the objects of a handler to processes of the same user on this host, beside TLS.

Whoever comes must run as this user, say a token that it was told over mutual TLS, and bring the
memory to exchange through. Its requests go to the same handler as all others, as those of the peer
that the token was given to. Nothing here is needed: whoever is not served goes by HTTP.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

from sdcpd.transport.http import Handler, Peer, Request, Response
from sdcpd.transport.local_link import is_own_user
from sdcpd.transport.local_listener import LocalListener
from sdcpd.transport.local_messages import Announcement, parse_announcement
from sdcpd.transport.local_serving import LocalServing
from sdcpd.transport.local_tokens import LocalTokens

FIELD = "sdcp-local"
CONNECTIONS_MAX = 32  # each holds at most MEMORY_BYTES_MAX, which is charged to who made it
BODIES_BYTES_MAX = 256 << 20  # copied out and not answered yet, of all connections together
ACCEPT_PAUSE_S = 1.0  # without descriptors to spare
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ANNOUNCED_WITH = (200, 204, 304, 404)

logger = logging.getLogger(__name__)


def boot_id() -> str:
    """What identifies this boot of this machine, "" where the system doesn't say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def is_on_this_host(peer: Peer) -> bool:
    """Whether a peer's address is one of this host's; a socket can be bound to no other."""
    host = peer.address.rpartition(":")[0].strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return bool(host)


class LocalServer:
    """Listens on a UNIX socket, and tells peers of this host of it in answers of `announcing`."""

    def __init__(
        self,
        handler: Handler,
        *,
        path: Path,
        objects_path: str,
        body_bytes_max: Callable[[str, str], int],
        is_near: Callable[[Peer], bool] = is_on_this_host,
        is_allowed: Callable[[socket.socket], bool] = is_own_user,
        boot: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep what is needed; below `objects_path`, as "/objects/", requests are taken.

        `is_near` tells who is told, `is_allowed` whose connections are served.
        """
        self._handler = handler
        self._path = path
        self.objects_path = objects_path
        self.body_bytes_max = body_bytes_max
        self._is_near = is_near
        self._is_allowed = is_allowed
        self._boot = boot_id() if boot is None else boot
        self.tokens = LocalTokens(clock=clock)
        self._listener: LocalListener | None = None
        self._connections: set[LocalServing] = set()
        self._bodies_bytes = 0
        self.exchanges = 0

    def start(self) -> None:
        """Listen; raises OSError where the path cannot be used, or is in use."""
        announcement = Announcement(str(self._path), self._boot, "x" * 32)
        if parse_announcement(announcement.field()) is None:
            raise OSError(errno.ENAMETOOLONG, "the path is too long, or has unusual characters")
        self._listener = LocalListener(self._path, backlog=CONNECTIONS_MAX)
        self._accepting(self._listener.socket)

    def announcing(self, handler: Handler) -> Handler:
        """A handler that gives the same answers, and tells of this server in some of them."""

        async def handle(request: Request) -> Response:
            response = await handler(request)
            if self._is_told(request, response):
                assert request.peer is not None, "nobody else is told"
                token = self.tokens.issue(request.peer)
                field = Announcement(str(self._path), self._boot, token).field()
                return Response(response.status, (*response.headers, (FIELD, field)), response.body)
            return response

        return handle

    def take(self, size_bytes: int) -> bool:
        """Whether there is room for a body of that many octets; if so, it is taken."""
        if self._bodies_bytes + size_bytes > BODIES_BYTES_MAX:
            return False
        self._bodies_bytes += size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        """Give it back."""
        self._bodies_bytes -= size_bytes

    async def answer(self, request: Request) -> Response:
        """Answer a request that came this way; counts it."""
        self.exchanges += 1
        response = await self._handler(request)
        logger.debug(
            "%s %s over shared memory: %d, %d octets in, %d out",
            request.method,
            request.path[:200],
            response.status,
            len(request.body),
            len(response.body if response.view is None else response.view),
        )
        return response

    def forget_tokens(self) -> None:
        """Have every peer show its certificate again; for use after a reload."""
        self.tokens.forget()

    async def aclose(self) -> None:
        """Stop listening, let what is being answered finish, and drop the connections."""
        if self._listener is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener.socket.fileno())
            self._listener.close()
            self._listener = None
        await asyncio.gather(*(connection.aclose() for connection in self._connections))

    def _is_told(self, request: Request, response: Response) -> bool:
        return (
            request.method in ("HEAD", "OPTIONS")
            and request.path.startswith(self.objects_path)
            and response.status in _ANNOUNCED_WITH
            and request.peer is not None
            and bool(request.peer.fingerprint)
            and self._listener is not None
            and self._is_near(request.peer)
        )

    def _accepting(self, listener: socket.socket) -> None:
        if self._listener is not None and listener is self._listener.socket:
            asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            came, _ = listener.accept()
        except OSError as error:
            if error.errno in _SCARCE:
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener.fileno())
                loop.call_later(ACCEPT_PAUSE_S, self._accepting, listener)
            return
        came.setblocking(False)
        try:
            is_welcome = len(self._connections) < CONNECTIONS_MAX and self._is_allowed(came)
        except OSError:
            is_welcome = False
        if not is_welcome:
            logger.debug("a connection to %s was closed at once", self._path)
            came.close()
            return
        connection = LocalServing(self, came, closed=self._connections.discard)
        self._connections.add(connection)
