"""A server of this host as its client sees it: a few links, each with memory of its own.

The memory is the client's: it is charged to it, and goes with it. An exchange that fails in any way
costs its link, memory and all, so that nobody writes into what is in use again.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sdcpd.transport.http import Headers, Response
from sdcpd.transport.local_link import LocalLink, is_own_user, new_socket
from sdcpd.transport.local_memory import create
from sdcpd.transport.local_messages import (
    Announcement,
    Answer,
    Ask,
    Hello,
    Message,
    Ready,
    Refused,
    digest_of,
)

LINKS_MAX = 4
MEMORY_BYTES_MIN = 8 << 20
MEMORY_BYTES_MAX = 64 << 20
EARLY_S = 1.0  # for each step before the question is asked, of an eighth of the time at most


class LocalFailed(Exception):
    """Not this way; the same may go by HTTP, which may find it done already."""


class NotThisTime(LocalFailed):
    """The way is as good as ever, but not for this request, or not now."""


class TokenRefused(NotThisTime):
    """The server wants to see the certificate again."""


class HelloRefused(TokenRefused):
    """The same, at the price of a connection and its memory."""


class AnswerLate(Exception):
    """The question was asked, and the caller's time was over before the answer came."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request to a server that is known."""

    method: str
    target: str
    authority: str
    headers: Headers
    body: bytes


class _Link:
    """One connection; asks one thing at a time."""

    def __init__(self, path: str, *, memory_bytes: int) -> None:
        """Connect; raises OSError, and LocalFailed where another user listens."""
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[Message] | None = None
        connecting = new_socket()
        try:
            # That of a UNIX socket is done at once, or fails.
            connecting.connect(path)
            if not is_own_user(connecting):
                raise LocalFailed("another user listens there")
            self._memory, self._fd = create(memory_bytes, name="sdcpd-exchange")
        except BaseException:
            connecting.close()
            raise
        self._link = LocalLink(connecting, received=self._received, lost=self._lost)

    @property
    def memory_bytes(self) -> int:
        """The longest body that it can carry."""
        return self._memory.size_bytes

    @property
    def is_open(self) -> bool:
        """Whether it can be asked."""
        return self._link.is_open

    async def hello(self, token: str, *, within_s: float) -> None:
        """Have the server map the memory; raises LocalFailed."""
        try:
            async with asyncio.timeout(within_s):
                answer = await self._said(Hello(token), descriptors=(self._fd,))
        except TimeoutError as error:
            raise LocalFailed("the server did not answer the first message") from error
        finally:
            os.close(self._fd)
        if isinstance(answer, Refused):
            raise HelloRefused(answer.reason)
        if not isinstance(answer, Ready):
            raise LocalFailed("the server answered something else")

    async def ask(self, token: str, question: Question) -> Response | Refused:
        """Ask, and copy the answer out; raises LocalFailed."""
        body = question.body
        self._memory.write(0, body)
        answer = await self._said(
            Ask(
                token,
                question.method,
                question.target,
                question.authority,
                question.headers,
                len(body),
            )
        )
        if isinstance(answer, Refused):
            return answer
        if not isinstance(answer, Answer) or answer.size_bytes > self.memory_bytes:
            raise LocalFailed("the server answered something else")
        octets = self._memory.read(0, answer.size_bytes)
        if digest_of(octets) != answer.digest:
            raise LocalFailed("the answer is not what was announced")
        return Response(answer.status, answer.headers, octets)

    def close(self) -> None:
        """Close, and give the memory back."""
        self._link.close()
        self._memory.close()
        self._lost("the link was closed")

    async def _said(self, message: Message, *, descriptors: tuple[int, ...] = ()) -> Message:
        assert self._waiting is None, "one question at a time"
        self._waiting = self._loop.create_future()
        try:
            self._link.send(message, descriptors=descriptors)
            if not self._link.is_open and not self._waiting.done():
                raise LocalFailed("the link is closed")
            return await self._waiting
        finally:
            self._waiting = None

    def _received(self, message: Message, descriptor: int | None) -> None:
        if descriptor is not None:
            os.close(descriptor)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(message)
        else:
            self.close()  # not its turn

    def _lost(self, reason: str) -> None:
        if self._waiting is None:
            # The server closes what was idle: nobody may come to use it for hours.
            self._memory.close()
        elif not self._waiting.done():
            self._waiting.set_exception(LocalFailed(reason))


class LocalPlace:
    """A server's socket, and the links to it."""

    def __init__(self, announced: Announcement) -> None:
        self.announced = announced
        self._memory_bytes = MEMORY_BYTES_MIN
        self._idle: list[_Link] = []
        self._turns = asyncio.Semaphore(LINKS_MAX)
        self._is_closed = False

    async def exchange(self, question: Question, *, deadline: float) -> Response:
        """Ask and return the answer; raises LocalFailed or OSError, AnswerLate at the deadline.

        The deadline is of the loop's clock. Until the question is asked, failures are early, so
        that there is time for the other way; then all of the time is the server's.
        """
        self._make_larger(len(question.body))
        early_s = early(deadline)
        await self._take_turn(early_s)
        try:
            link = await self._link(early_s)
            answer = await self._asked(link, question, deadline)
        finally:
            self._turns.release()
        if isinstance(answer, Refused):
            if answer.size_bytes:
                self._make_larger(answer.size_bytes)
            if answer.reason == "token":
                raise TokenRefused(answer.reason)
            raise NotThisTime(answer.reason)
        return answer

    def close(self) -> None:
        """Close the links that are not in use; those that are close when they are done."""
        self._is_closed = True
        self._close_idle()

    async def _take_turn(self, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await self._turns.acquire()
        except TimeoutError as error:
            raise NotThisTime("all links are in use") from error

    async def _asked(self, link: _Link, question: Question, deadline: float) -> Response | Refused:
        """What the server says; the link is kept where nothing is wrong with it."""
        try:
            async with asyncio.timeout_at(deadline):
                answer = await link.ask(self.announced.token, question)
        except TimeoutError as error:
            link.close()
            raise AnswerLate from error
        except BaseException:
            link.close()
            raise
        if link.is_open and not self._is_closed:
            self._idle.append(link)
        else:
            link.close()
        return answer

    def _close_idle(self) -> None:
        for link in self._idle:
            link.close()
        self._idle.clear()

    def _make_larger(self, size_bytes: int) -> None:
        """Have links that carry so much, if any can."""
        if self._memory_bytes < size_bytes <= MEMORY_BYTES_MAX:
            self._memory_bytes = 1 << (size_bytes - 1).bit_length()
            self._close_idle()

    async def _link(self, within_s: float) -> _Link:
        """A link that nobody uses; new where there is none that is open and large enough."""
        while self._idle:
            link = self._idle.pop()
            if link.is_open and link.memory_bytes >= self._memory_bytes:
                return link
            link.close()
        link = _Link(self.announced.path, memory_bytes=self._memory_bytes)
        try:
            await link.hello(self.announced.token, within_s=within_s)
        except BaseException:
            link.close()
            raise
        return link


def early(deadline: float) -> float:
    """How long one step may take before a question is asked, in seconds."""
    return min(EARLY_S, (deadline - asyncio.get_running_loop().time()) / 8)


def is_there(announced: Announcement, *, boot: str) -> bool:
    """Whether an announced socket is on this host, as it is booted now."""
    with suppress(OSError):
        return bool(boot) and announced.boot == boot and Path(announced.path).is_socket()
    return False
