"""Peers by script: each notes what it is asked, and answers as a test says, else as a role would.

An answer is a message, a problem, a response, `DROP` (the request is processed, its answer lost),
or a function of the request that returns one of these, at once or later.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from sdcpd.protocol.codec import MEDIA_TYPE, decode, decode_tokens, encode
from sdcpd.protocol.contract import contract_digest
from sdcpd.protocol.digest import extend, prefix_digest0
from sdcpd.protocol.messages import (
    Action,
    Assignment,
    Contract,
    Event,
    Message,
    Output,
    Policy,
    Proposal,
    SessionOpen,
    SessionState,
    Status,
    Verdict,
)
from sdcpd.protocol.problems import TYPE_PREFIX, Problem
from sdcpd.roles.base import problem_response
from sdcpd.transport.http import Request, Response
from tests.kit.mlc import MemoryMlc

DROP = Response(0)
PATIENCE_S = 10.0  # a request that never comes fails the test instead of holding it
M = TypeVar("M", bound=Message)
Answer = Message | Problem | Response
Script = Answer | Callable[["Seen"], Answer | Awaitable[Answer]]

_KINDS: tuple[tuple[str, str, type[Message]], ...] = (
    ("POST", r"sessions", SessionOpen),
    ("PUT", r"sessions/[^/]+/drafter", Assignment),
    ("POST", r"sessions/[^/]+/policy", Policy),
    ("POST", r"proposals", Proposal),
    ("POST", r"assignments", Assignment),
    ("PUT", r"instances/[^/]+/status", Status),
    ("POST", r"events", Event),
)


@dataclass(frozen=True, slots=True)
class Seen:
    """One request as it arrived; `message` is its decoded body, if the resource has one."""

    method: str
    path: str
    request: Request
    message: Message | None

    def as_(self, kind: type[M]) -> M:
        """The message, which must be of that kind."""
        assert isinstance(self.message, kind), self.message
        return self.message


def problem(status: int, suffix: str | None = None, **members: Any) -> Response:
    """An error answer; `suffix` None sends a type that nobody registered."""
    kind = TYPE_PREFIX + suffix if suffix else "https://verifier.example/private"
    document = {"type": kind, "title": "x", "status": status, **members}
    octets = json.dumps(document).encode()
    return Response(status, (("content-type", "application/problem+json"),), octets)


async def hold(_: Seen) -> Answer:
    """An answer that never comes."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets this event")


async def quiet() -> None:
    """Give everything that could still happen in this process the chance to."""
    for _ in range(200):
        await asyncio.sleep(0)


class ScriptedPeer:
    """A handler below one base URI; `journal` may be shared to see the order among peers."""

    def __init__(self, base: str, *, journal: list[tuple[str, Seen]] | None = None) -> None:
        self.base = base
        self._path = urlsplit(base).path
        self.seen: list[Seen] = []
        self.mlc = MemoryMlc()
        self.errors: list[Exception] = []
        """What went wrong in the script itself, which the role sees as 500; rigs look at the end."""
        self._journal = journal if journal is not None else []
        self._scripts: list[tuple[str, str, deque[Script]]] = []
        self._always: list[tuple[str, str, Script]] = []
        self._unread: list[Seen] = []
        self._arrived = asyncio.Event()

    def script(self, method: str, path: str, *answers: Script) -> None:
        """Answer the next requests that match (path is a regular expression), one each."""
        self._scripts.append((method, path, deque(answers)))

    def always(self, method: str, path: str, answer: Script) -> None:
        """Answer all requests that match from now on, unless something is queued for them."""
        self._always.insert(0, (method, path, answer))

    async def next(self, method: str, path: str) -> Seen:
        """The next request that matches and was not returned before; waits for it."""
        async with asyncio.timeout(PATIENCE_S):
            while (found := self._find(method, path)) is None:
                self._arrived.clear()
                await self._arrived.wait()
        self._unread.remove(found)
        return found

    def unread(self, method: str, path: str) -> int:
        """How many requests that match have not been returned by `next`."""
        return sum(_matches(seen, method, path) for seen in self._unread)

    async def handle(self, request: Request) -> Response:
        """Answer one request."""
        path = request.path.removeprefix(self._path)
        if path.startswith(("objects/", "logs/")):
            return await self.mlc.handle(request)
        try:
            return await self._handle(request, path)
        except Exception as error:
            self.errors.append(error)
            raise

    async def _handle(self, request: Request, path: str) -> Response:
        seen = Seen(request.method, path, request, _decoded(request, path))
        for known in (self.seen, self._unread):
            known.append(seen)
        self._journal.append((self.base, seen))
        self._arrived.set()
        return await self._answer(self._script_for(seen), seen)

    def _find(self, method: str, path: str) -> Seen | None:
        return next((seen for seen in self._unread if _matches(seen, method, path)), None)

    def _script_for(self, seen: Seen) -> Script:
        for method, path, queue in self._scripts:
            if queue and _matches(seen, method, path):
                return queue.popleft()
        for method, path, answer in self._always:
            if _matches(seen, method, path):
                return answer
        return self.default

    async def _answer(self, answer: Script, seen: Seen) -> Response:
        while callable(answer):
            result = answer(seen)
            answer = await result if inspect.isawaitable(result) else result
        if isinstance(answer, Problem):
            return problem_response(answer)
        if isinstance(answer, Message):
            return Response(200, (("content-type", MEDIA_TYPE),), encode(answer))
        return answer

    def default(self, seen: Seen) -> Answer | Awaitable[Answer]:
        """What a router and a drafter answer to all that is right."""
        return Response(204)


class ScriptedVerifier(ScriptedPeer):
    """Commits whatever it is told to; by default every proposed token and one more."""

    def __init__(self, base: str, **options: Any) -> None:
        super().__init__(base, **options)
        self.session = bytes(16)
        self.epoch = 1
        self.round = 0
        self.tokens: tuple[int, ...] = ()
        self.digest = bytes(32)
        self.finish: Action | None = None
        self.m_cap = 4
        self._start = bytes(32)
        self._more = asyncio.Event()

    def holds(
        self, contract: Contract, prompt: Sequence[int], tokens: Sequence[int] = (), round_: int = 0
    ) -> None:
        """Be in the middle of a session without having been asked to open it."""
        self._start = prefix_digest0(contract_digest(contract), prompt)
        self.tokens, self.round = tuple(tokens), round_
        self.digest = extend(self._start, self.tokens)

    def commit(self, tokens: Sequence[int], *, finish: Action | None = None) -> None:
        """Commit one round's tokens; readers that wait get them."""
        self.tokens += tuple(tokens)
        self.digest = extend(self.digest, tokens)
        self.round += 1
        self.finish = finish
        waiting, self._more = self._more, asyncio.Event()
        waiting.set()

    def verdict(self, proposal: Proposal, tokens: Sequence[int], **changes: Any) -> Verdict:
        """Commit tokens, and return the verdict that emits them; `changes` may make it a lie."""
        self.commit(tokens)
        members: dict[str, Any] = {
            "session": proposal.session,
            "epoch": self.epoch,
            "round": self.round,
            "accepted": len(tokens) - 1,
            "emitted": tuple(tokens),
            "committed": len(self.tokens),
            "digest": self.digest,
            "action": Action.CONTINUE,
            "m_cap": self.m_cap,
            "low": 0,
            "load": 0,
        }
        return Verdict(**{**members, **changes})

    def accepts(self, proposal: Proposal, count: int, extra: int, **changes: Any) -> Verdict:
        """The verdict that keeps `count` proposed tokens and adds `extra`."""
        return self.verdict(proposal, (*proposal.tokens[:count], extra), **changes)

    def state(self, **changes: Any) -> SessionState:
        """The session-state of the moment."""
        members: dict[str, Any] = {
            "session": self.session,
            "epoch": self.epoch,
            "round": self.round,
            "committed": len(self.tokens),
            "digest": self.digest,
        }
        return SessionState(**{**members, **changes})

    def output(self, from_: int, **changes: Any) -> Output:
        """Committed tokens from an index on."""
        members: dict[str, Any] = {
            "session": self.session,
            "epoch": self.epoch,
            "from_": from_,
            "tokens": self.tokens[from_:],
            "final": self.finish is not None,
            "finish": self.finish,
        }
        return Output(**{**members, **changes})

    def default(self, seen: Seen) -> Answer | Awaitable[Answer]:
        """The protocol, without any of a verifier's checks."""
        match seen.message:
            case SessionOpen() as opened:
                return self._opened(opened)
            case Proposal() as proposal:
                self.session = proposal.session
                return self.accepts(proposal, len(proposal.tokens), 1)
            case Assignment() | Policy():
                return self.state()
        return self._read(seen) if seen.method == "GET" else Response(204)

    def _opened(self, opened: SessionOpen) -> SessionState:
        self.session, self.epoch = opened.session, opened.epoch
        assert not isinstance(opened.prompt, str), "this project's router sends tokens"
        self.holds(opened.contract, opened.prompt)
        if (resume := opened.resume) is not None:
            name = resume.committed_tokens.rpartition("/objects/")[2]
            self.tokens, self.round = self.resumed(name), resume.round
            self.digest = extend(self._start, self.tokens)
            assert (len(self.tokens), self.digest) == (resume.committed, resume.digest)
        return self.state()

    def resumed(self, name: str) -> tuple[int, ...]:
        """The tokens of a resume; set `mlc` to the cache that holds them."""
        return decode_tokens(self.mlc.objects[name])

    async def _read(self, seen: Seen) -> Answer:
        from_ = int(seen.request.query.removeprefix("from="))
        while len(self.tokens) <= from_ and self.finish is None:
            if seen.request.header("prefer") == "wait=0":
                break
            await self._more.wait()
        return self.output(from_)


def _matches(seen: Seen, method: str, path: str) -> bool:
    return seen.method == method and re.fullmatch(path, seen.path) is not None


def _decoded(request: Request, path: str) -> Message | None:
    for method, pattern, kind in _KINDS:
        if request.method == method and re.fullmatch(pattern, path):
            return decode(kind, request.body)
    return None
