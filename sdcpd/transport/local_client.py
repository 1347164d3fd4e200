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

from sdcpd.transport.http import Client, Headers, RequestTimeout, Response, TransportError
from sdcpd.transport.local_messages import Announcement, parse_announcement
from sdcpd.transport.local_place import (
    MEMORY_BYTES_MAX,
    AnswerLate,
    HelloRefused,
    LocalFailed,
    LocalPlace,
    NotThisTime,
    Question,
    TokenRefused,
    early,
    is_there,
)
from sdcpd.transport.local_server import FIELD, boot_id
from sdcpd.transport.local_tokens import LIFETIME_S

BODY_BYTES_MIN = 16 << 10  # less is as fast over TLS
ASK_BEFORE_S = 10.0  # a token that is about to be too old is asked for meanwhile
AGAIN_S = 60.0  # until a server that has no such socket is asked again
# How long a server that fails is left alone: each try costs a connection, and memory made for it.
PAUSE_FIRST_S = 1.0
PAUSE_MAX_S = 60.0
ORIGINS_MAX = 256
OPTIONS_S = 5.0
LEFT_MIN_S = 0.1  # for TLS, where the short way failed late

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Origin:
    """What is known of a server: None for a place means that it has none."""

    place: LocalPlace | None
    until: float
    """For a place, when its token is too old; else when to ask again."""

    pause_s: float = 0.0
    """How long it was left alone the last time, 0 since it has answered."""

    rests_until: float = 0.0

    def rest(self, now: float) -> None:
        """Leave it alone, twice as long as before; what fails meanwhile began before."""
        if now >= self.rests_until:
            self.pause_s = min(max(2 * self.pause_s, PAUSE_FIRST_S), PAUSE_MAX_S)
            self.rests_until = now + self.pause_s


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
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            answered = await self._locally(method, uri, headers, body, deadline)
        except AnswerLate as error:
            self._failed(uri, LocalFailed("no answer in time"))
            raise RequestTimeout(
                f"no answer to {method} {uri} over shared memory within {timeout_s:g} s; it may"
                " have been processed"
            ) from error
        except (LocalFailed, OSError) as error:
            answered = None
            self._failed(uri, error)
            # It may have been done: then the same octets are there, which is no conflict.
            headers = _repeatable(method, headers)
        if answered is not None:
            return answered
        left_s = max(deadline - asyncio.get_running_loop().time(), LEFT_MIN_S)
        return await self._inner.request(method, uri, headers=headers, body=body, timeout_s=left_s)

    def is_near(self, uri: str) -> bool:
        """Whether octets of objects there pass through memory."""
        known = self._origins.get(_origin(uri))
        if known is None or known.place is None:
            return False
        return self._clock() >= known.rests_until

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
        self, method: str, uri: str, headers: Headers, body: bytes, deadline: float
    ) -> Response | None:
        """The answer, None where there is no such way; raises what `LocalPlace.exchange` does."""
        place = await self._place(uri, within_s=early(deadline))
        if place is None:
            return None
        parts = urlsplit(uri)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        fields = tuple((name.lower(), value) for name, value in headers)
        question = Question(method, target, parts.netloc, fields, body)
        answer = await place.exchange(question, deadline=deadline)
        self.exchanges += 1
        if (known := self._origins.get(_origin(uri))) is not None:
            known.pause_s = known.rests_until = 0.0
        return answer

    async def _place(self, uri: str, *, within_s: float) -> LocalPlace | None:
        """Where a server's socket is; has the server asked where that is not known."""
        origin, now = _origin(uri), self._clock()
        known = self._origins.get(origin)
        if known is None or (known.place is None and known.until <= now):
            self._ask(origin, uri)  # meanwhile this one goes as ever
            return None
        if known.place is None or now < known.rests_until:
            return None
        if known.until <= now:
            done, _ = await asyncio.wait([self._ask(origin, uri)], timeout=within_s)
            known = self._origins.get(origin) if done else None
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
        pauses = (0.0, 0.0) if known is None else (known.pause_s, known.rests_until)
        self._origins[origin] = _Origin(place, self._clock() + lasts_s, *pauses)

    def _failed(self, uri: str, error: Exception) -> None:
        self.failures += 1
        origin = _origin(uri)
        logger.debug("%s goes over TLS: %s", origin, error or type(error).__name__)
        if isinstance(error, TokenRefused):
            self._ask(origin, uri)
        if not isinstance(error, LocalFailed):
            self._know(origin, None)  # a server that was started again may have another socket
        known = self._origins.get(origin)
        if known is not None and _costs(error):
            known.rest(self._clock())
            if known.place is None:
                known.until = known.rests_until


def _costs(error: Exception) -> bool:
    """Whether the next request would pay for the same again."""
    return isinstance(error, HelloRefused) or not isinstance(error, NotThisTime)


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
