"""Messages between nodes in virtual time, and what happens to them on their way."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from sdcpd.transport.http import (
    ConnectFailed,
    ConnectionLost,
    Handler,
    Headers,
    Peer,
    Request,
    RequestTimeout,
    Response,
)
from tests.sim.plan import STORE, Crash, Cut, MessageFault, Plan, Silence

LATENCY_S = (0.0005, 0.004)
QUIET_S = 12.0  # longer than any message is late
NOTICE_S = (0.05, 2.0)  # until a client notices that its connection is dead


class Observer(Protocol):
    """Sees every request before it is handled, and its answer before that travels."""

    def before(self, request: Request) -> None: ...

    def message(self, dest: str, request: Request, response: Response) -> None: ...


@dataclass
class Node:
    """One process: its handler, and the tasks that die with it."""

    name: str
    base: str
    handler: Handler
    tasks: dict[asyncio.Task[Any], None] = field(default_factory=dict)
    alive: bool = True

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        """A task of this process."""
        task = asyncio.ensure_future(coroutine)
        self.tasks[task] = None  # in order: a set's order is not the same in every run
        task.add_done_callback(lambda done: self.tasks.pop(done, None))
        return task

    def die(self) -> None:
        """As kill -9."""
        self.alive = False
        for task in list(self.tasks):
            task.cancel()


class Network:
    """Carries requests; the plan says which of them fare badly."""

    def __init__(self, plan: Plan, observer: Observer, begin_s: float) -> None:
        self.nodes: dict[str, Node] = {}
        self.begin_s = begin_s
        self._observer = observer
        self._rng = random.Random(f"network {plan.seed}")
        self._number = 0
        self._carried: dict[asyncio.Task[Response], Request] = {}
        self._fates = {f.number: f for f in plan.faults if isinstance(f, MessageFault)}
        self._cuts = [f for f in plan.faults if isinstance(f, Cut)]
        self._silences = [f for f in plan.faults if isinstance(f, Silence)]

    def client(self, node: Node, peer: Peer) -> SimClient:
        """A client that others see as that peer."""
        return SimClient(self, node, peer)

    async def exchange(
        self, source: Node, request: Request, base: str, timeout_s: float
    ) -> Response:
        """One request and its answer, or what became of it."""
        if not source.alive:
            raise ConnectFailed("this process is dead")
        # What is on its way arrives, whether or not anybody still waits for the answer.
        carried = asyncio.ensure_future(self._carry(source, request, base, timeout_s))
        self._carried[carried] = request
        carried.add_done_callback(self._arrived)
        await asyncio.wait({carried}, timeout=timeout_s)
        if not carried.done():
            raise RequestTimeout("no answer in time")
        return carried.result()

    async def quiet(self) -> None:
        """Wait until what is still on its way has arrived; its time has passed, its harm may not."""
        late = {task for task, request in self._carried.items() if request.header("prefer") is None}
        if late:
            await asyncio.wait(late, timeout=QUIET_S)

    def _arrived(self, carried: asyncio.Task[Response]) -> None:
        del self._carried[carried]
        if not carried.cancelled():
            carried.exception()  # for the client, if it is still there

    async def _carry(self, source: Node, request: Request, base: str, timeout_s: float) -> Response:
        name = self._destination(base, request.path)
        fate = self._fate(request)
        cut = self._cut(source.name, name)
        await self._travel(fate.seconds if fate and fate.what == "late" else 0.0)
        if cut or self._cut(source.name, name):
            await self._notice(timeout_s)
            raise ConnectFailed("no route")
        dest = self.nodes.get(name)
        if dest is None or self._silenced(source.name, request):
            raise ConnectFailed("nobody listens")
        if fate and fate.what == "dropped":
            await self._notice(timeout_s)
            raise ConnectionLost("lost on the way")
        task = dest.spawn(self._deliver(dest, request))
        if fate and fate.what == "twice":
            dest.spawn(self._again(dest, request, fate.seconds))
        await asyncio.wait({task})
        if task.cancelled():
            await self._travel(0.0)
            raise ConnectionLost("the peer died")
        await self._travel(fate.seconds if fate and fate.what == "answered late" else 0.0)
        if (fate and fate.what == "unanswered") or self._cut(source.name, dest.name):
            await self._notice(timeout_s)
            raise ConnectionLost("the answer was lost")
        return task.result()

    async def _deliver(self, dest: Node, request: Request) -> Response:
        self._observer.before(request)
        response = await dest.handler(request)
        self._observer.message(dest.name, request, response)
        return response

    async def _again(self, dest: Node, request: Request, seconds: float) -> None:
        await self._travel(seconds)
        await self._deliver(dest, request)

    async def _travel(self, more_s: float) -> None:
        await asyncio.sleep(self._rng.uniform(*LATENCY_S) + more_s)

    async def _notice(self, timeout_s: float) -> None:
        await asyncio.sleep(min(timeout_s, self._rng.uniform(*NOTICE_S)))

    def _destination(self, base: str, path: str) -> str:
        host = urlsplit(base).hostname or ""
        if path.startswith(("/logs/", "/objects/")) and host == "r0.test":
            return STORE
        return host.removesuffix(".test")

    def _fate(self, request: Request) -> MessageFault | None:
        if request.path.endswith("/status"):
            return None
        self._number += 1
        return self._fates.get(self._number - 1)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() - self.begin_s

    def _cut(self, one: str, other: str) -> bool:
        now, ends = self._now_s(), {one, other}
        return any(
            cut.at_s <= now < cut.at_s + cut.for_s
            and cut.one in ends
            and (cut.other in ends or (cut.other == "*" and one != other))
            for cut in self._cuts
        )

    def _silenced(self, source: str, request: Request) -> bool:
        now = self._now_s()
        return request.path.endswith("/status") and any(
            s.node == source and s.at_s <= now < s.at_s + s.for_s for s in self._silences
        )


class SimClient:
    """A `Client` of one process."""

    def __init__(self, network: Network, node: Node, peer: Peer) -> None:
        self._network, self._node, self._peer = network, node, peer

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
        parts = urlsplit(uri)
        request = Request(
            method,
            parts.path,
            parts.query,
            headers=tuple((name.lower(), value) for name, value in headers),
            body=body,
            peer=self._peer,
            authority=parts.netloc,
        )
        base = f"{parts.scheme}://{parts.netloc}/"
        return await self._network.exchange(self._node, request, base, timeout_s)

    async def aclose(self) -> None:
        """See Client."""


def crashes(plan: Plan) -> list[Crash]:
    """The crashes of a plan, in the order of time."""
    return sorted((f for f in plan.faults if isinstance(f, Crash)), key=lambda f: f.at_s)
