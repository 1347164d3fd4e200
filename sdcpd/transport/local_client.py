"""A `Client` that passes objects through shared memory to servers on this host.

Servers say where in answers to HEAD and OPTIONS, over mutual TLS. Whatever does not work that way
goes over TLS as if this were not here, so nothing depends on it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from sdcpd.transport.http import Client, Headers, Response, TransportError
from sdcpd.transport.local_messages import Announcement, parse_announcement
from sdcpd.transport.local_place import (
    MEMORY_BYTES_MAX,
    LocalFailed,
    LocalPlace,
    Question,
    TokenRefused,
    is_there,
)
from sdcpd.transport.local_server import FIELD, boot_id
from sdcpd.transport.local_tokens import LIFETIME_S

BODY_BYTES_MIN = 16 << 10  # less is as fast over TLS
ASK_BEFORE_S = 10.0  # a token that is about to be too old is asked for meanwhile
AGAIN_S = 60.0  # until a server that has no such socket, or one that fails, is asked again
ORIGINS_MAX = 256
OPTIONS_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Origin:
    """What is known of a server: None for a place means that it has none."""

    place: LocalPlace | None
    until: float
    """For a place, when its token is too old; else when to ask again."""


class LocalClient:
    """Sends objects by the short way, and everything else by `inner`, which it does not close."""

    def __init__(
        self,
        inner: Client,
        *,
        boot: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner = inner
        self._boot = boot_id() if boot is None else boot
        self._clock = clock
        self._origins: dict[str, _Origin] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self.exchanges = self.failures = 0

    async def request(
        self,
        method: str,
        uri: str,
        *,
        headers: Headers = (),
        body: bytes = b"",
        timeout_s: float = 30.0,
    ) -> Response:
        """Send one request, as `Client.request` tells."""
        if not _is_worth(method, uri, body):
            answer = await self._inner.request(
                method, uri, headers=headers, body=body, timeout_s=timeout_s
            )
            self._learn(method, uri, answer)
            return answer
        begun = self._clock()
        try:
            # What is left is enough for the other way.
            async with asyncio.timeout(timeout_s / 2):
                answered = await self._locally(method, uri, headers, body)
        except (LocalFailed, OSError, TimeoutError) as error:
            answered = None
            self._failed(uri, error)
            # It may have been done: then the same octets are there, which is no conflict.
            headers = _repeatable(method, headers)
        if answered is not None:
            self.exchanges += 1
            return answered
        left_s = max(timeout_s - (self._clock() - begun), timeout_s / 2)
        return await self._inner.request(method, uri, headers=headers, body=body, timeout_s=left_s)

    def is_near(self, uri: str) -> bool:
        """Whether octets of objects there pass through memory."""
        known = self._origins.get(_origin(uri))
        return known is not None and known.place is not None

    def forget(self) -> None:
        """Ask every server again over TLS; for use after a reload of the certificates."""
        for known in self._origins.values():
            if known.place is not None:
                known.place.close()
        self._origins.clear()

    async def aclose(self) -> None:
        """Close the links; `inner` belongs to its maker."""
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        self.forget()

    async def _locally(
        self, method: str, uri: str, headers: Headers, body: bytes
    ) -> Response | None:
        """The answer, None where there is no such way; raises LocalFailed or OSError."""
        place = await self._place(uri)
        if place is None:
            return None
        parts = urlsplit(uri)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        fields = tuple((name.lower(), value) for name, value in headers)
        question = Question(method, target, parts.netloc, fields, body)
        return await place.exchange(question)

    async def _place(self, uri: str) -> LocalPlace | None:
        """Where a server's socket is; has the server asked where that is not known."""
        origin, now = _origin(uri), self._clock()
        known = self._origins.get(origin)
        if known is None or (known.place is None and known.until <= now):
            self._ask(origin, uri)  # meanwhile this one goes as ever
            return None
        if known.place is None:
            return None
        if known.until <= now:
            await asyncio.shield(self._ask(origin, uri))
            known = self._origins.get(origin)
        elif known.until - now < ASK_BEFORE_S:
            self._ask(origin, uri)
        return None if known is None else known.place

    def _ask(self, origin: str, uri: str) -> asyncio.Task[None]:
        task = self._asking.get(origin)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._options(origin, uri))
            self._asking[origin] = task
            task.add_done_callback(lambda _: self._asking.pop(origin, None))
        return task

    async def _options(self, origin: str, uri: str) -> None:
        try:
            answer = await self._inner.request("OPTIONS", uri, timeout_s=OPTIONS_S)
        except (TransportError, ValueError) as error:
            logger.debug("%s was not asked for a way on this host: %s", origin, error)
            self._know(origin, None)
            return
        self._learn("OPTIONS", uri, answer)

    def _learn(self, method: str, uri: str, answer: Response) -> None:
        if method not in ("HEAD", "OPTIONS") or "/objects/" not in uri:
            return
        announced = parse_announcement(answer.header(FIELD) or "")
        if announced is not None and not is_there(announced, boot=self._boot):
            announced = None
        self._know(_origin(uri), announced)

    def _know(self, origin: str, announced: Announcement | None) -> None:
        known = self._origins.pop(origin, None)
        place = known.place if known is not None else None
        if place is not None and announced is not None and place.announced.path == announced.path:
            place.announced = announced
        else:
            if place is not None:
                place.close()
            place = None if announced is None else LocalPlace(announced)
        while len(self._origins) >= ORIGINS_MAX:
            oldest = self._origins.pop(next(iter(self._origins)))
            if oldest.place is not None:
                oldest.place.close()
        # The server may have made the token a while before it said so.
        lasts_s = AGAIN_S if place is None else LIFETIME_S / 2
        self._origins[origin] = _Origin(place, self._clock() + lasts_s)

    def _failed(self, uri: str, error: Exception) -> None:
        self.failures += 1
        origin = _origin(uri)
        logger.debug("%s goes over TLS: %s", origin, error or type(error).__name__)
        if isinstance(error, TokenRefused):
            self._ask(origin, uri)
        elif not isinstance(error, LocalFailed):
            self._know(origin, None)


def _origin(uri: str) -> str:
    return "/".join(uri.split("/", 3)[:3])


def _repeatable(method: str, headers: Headers) -> Headers:
    """The fields of a request that may have been done already."""
    if method != "PUT":
        return headers
    return tuple(one for one in headers if (one[0].lower(), one[1]) != ("if-none-match", "*"))


def _is_worth(method: str, uri: str, body: bytes) -> bool:
    if "/objects/" not in uri:
        return False
    return method == "GET" or (method == "PUT" and BODY_BYTES_MIN <= len(body) <= MEMORY_BYTES_MAX)
