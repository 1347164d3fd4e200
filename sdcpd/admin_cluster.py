"""What a router's admin socket does to instances and sessions: drain, show, follow, cancel."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import asdict
from typing import Any

from sdcpd.engine.tokenizer import TextModel, TextStream
from sdcpd.protocol.instances import Instance
from sdcpd.protocol.messages import InstanceRole
from sdcpd.protocol.router_io import DrafterLost, VerifierLost
from sdcpd.protocol.uris import base_uri_equal, parse_session_id
from sdcpd.roles.api_stream import EventBody
from sdcpd.roles.api_tokens import Rounds
from sdcpd.roles.generation import GenerationError, closing_parts
from sdcpd.roles.router import Router
from sdcpd.roles.router_session import RoutedSession
from sdcpd.transport.http import Request, Response
from sdcpd.transport.http1 import StreamingResponse

LAST = "last"
WATCH = "/sessions/watch"


class ClusterRefused(Exception):
    """The request can't be met; one sentence for a person."""


class ClusterUnknown(ClusterRefused):
    """There is no such instance or session; one sentence for a person."""


class ClusterAdmin:
    """Answers for one router."""

    def __init__(self, router: Router, text: TextModel) -> None:
        self._router, self._text = router, text

    @property
    def resources(self) -> dict[tuple[str, str], Callable[[dict[str, Any]], Awaitable[Any]]]:
        """By method and path."""
        return {
            ("POST", "/instances/drain"): self.drain,
            ("POST", "/sessions/show"): self.show,
            ("POST", "/sessions/cancel"): self.cancel,
        }

    async def drain(self, body: dict[str, Any]) -> dict[str, Any]:
        """Give an instance no more sessions, or again (`on` false).

        A drafter's sessions get another at once; a verifier's go on there to their end, or, with
        `move`, elsewhere at once.
        """
        instance = self._instance(body.get("instance"))
        on, move = body.get("on") is not False, body.get("move") is True
        role = InstanceRole(instance.status.role)
        if on and move and role is InstanceRole.VERIFIER:
            self._check_other(instance)
        self._router.board.drain(instance.base, role, on=on)
        leaves = on and (move or role is InstanceRole.DRAFTER)
        moving = self._sessions_of(instance, role) if leaves else []
        for one in moving:
            if role is InstanceRole.DRAFTER:
                one.step(DrafterLost(instance.base))
            else:
                one.step(VerifierLost(instance.base, "it is drained"))
        return {
            "instance": instance.status.instance,
            "draining": on,
            "sessions": len(self._sessions_of(instance, role)),
            "moving": len(moving),
        }

    async def show(self, body: dict[str, Any]) -> dict[str, Any]:
        """One session as its router knows it."""
        routed = self._session(body.get("session"))
        machine = routed.machine
        sampling = machine.profile or machine.contract.sampling
        return {
            "session": routed.label,
            "open": not machine.closed,
            "phase": machine.phase.value,
            "epoch": machine.epoch,
            "verifier": machine.verifier,
            "drafter": machine.drafter,
            "prompt_tokens": len(machine.prompt) or None,
            "committed": machine.committed,
            "max_new": machine.contract.max_new,
            "rule": int(machine.contract.rule),
            "sampling": None if sampling is None else asdict(sampling),
            "failovers": machine.failovers,
            "readers": routed.readers,
            "failed": None if routed.failed is None else str(routed.failed),
        }

    async def cancel(self, body: dict[str, Any]) -> dict[str, Any]:
        """End a session early; its client is told."""
        routed = self._session(body.get("session"))
        if routed.machine.closed:
            raise ClusterRefused(f"session {routed.label} has ended already")
        await routed.cancel(by_operator=True)
        return {"session": routed.label, "committed": routed.machine.committed}

    async def watch(self, request: Request) -> Response | StreamingResponse:
        """What a session writes, as JSON lines: each with the rounds that its text is of."""
        try:
            routed = self._session(json.loads(request.body or b"{}").get("session"))
            output = await self._router.output(routed.machine.session)
        except (ClusterRefused, GenerationError, ValueError, AttributeError) as e:
            return _json(404 if isinstance(e, ClusterUnknown) else 409, {"error": str(e)})
        assert output is not None, "the router knows it"
        lines = EventBody(self._lines(routed, output), ping_s=0)
        return StreamingResponse(200, (("content-type", "application/x-ndjson"),), lines)

    async def _lines(self, routed: RoutedSession, output: Any) -> AsyncGenerator[bytes, None]:
        stream, rounds = TextStream(self._text), Rounds(self._text)
        stop, begin, count = frozenset(output.stop or ()), time.monotonic(), 0
        yield _line({"session": routed.label})
        try:
            async with closing_parts(aiter(output)) as parts:
                async for part in parts:
                    texts = ["" if token in stop else stream.add(token) for token in part.tokens]
                    rounds.add(texts, part.parts)
                    count += sum(map(len, texts))
                    shown = [asdict(one) for one in rounds.release(count, ended=False)]
                    seconds = round(time.monotonic() - begin, 3)
                    yield _line({"rounds": shown, "tokens": len(part.tokens), "seconds": seconds})
            yield _line({"end": "finished", "rest": stream.finish()})
        except GenerationError as e:
            yield _line({"end": str(e), "rest": stream.finish()})

    def _check_other(self, instance: Instance) -> None:
        other = self._router.board.choose_verifier(now=time.monotonic(), exclude={instance.base})
        if other in (None, instance.base):
            raise ClusterRefused(
                f"there is no other verifier to which the sessions of {instance.status.instance}"
                " could move; leave --move out and they go on there to their end"
            )

    def _sessions_of(self, instance: Instance, role: InstanceRole) -> list[RoutedSession]:
        which = "drafter" if role is InstanceRole.DRAFTER else "verifier"
        return [
            one for one in self._router.sessions if getattr(one.machine, which) == instance.base
        ]

    def _instance(self, name: object) -> Instance:
        """An instance by the name in `status`, the beginning of one, or its base URI."""
        if not isinstance(name, str) or not name:
            raise ClusterRefused("name an instance, as sdcpctl status shows it")
        everyone = self._router.board.all()
        found = [
            one for one in everyone if one.status.instance == name or base_uri_equal(one.base, name)
        ]
        found = found or [one for one in everyone if one.status.instance.startswith(f"{name}.")]
        if len(found) == 1:
            return found[0]
        known = ", ".join(one.status.instance for one in found or everyone) or "none"
        if found:
            raise ClusterRefused(f"{name} is the name of several; there are: {known}")
        raise ClusterUnknown(f"{name} is no instance here; there are: {known}")

    def _session(self, name: object) -> RoutedSession:
        sessions = [*self._router.ended_sessions, *self._router.sessions]
        if name == LAST:
            if not sessions:
                raise ClusterUnknown("there has been no session since the router's start")
            return sessions[-1]
        session = parse_session_id(name) if isinstance(name, str) else None
        found = next((one for one in sessions if one.machine.session == session), None)
        if found is None:
            raise ClusterUnknown(
                f"session {name} is not known to this router; sdcpctl sessions list shows those"
                " that are open, and sdcpctl log show reads a log"
            )
        return found


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def _json(status: int, value: dict[str, Any]) -> Response:
    return Response(status, (("content-type", "application/json"),), _line(value))
