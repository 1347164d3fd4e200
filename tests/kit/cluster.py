"""A whole cluster in memory: the real roles, the fake engine, and loopback between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from sdcpd.engine.api import DraftEngine, TargetEngine
from sdcpd.engine.fake import FakeDrafter, FakeModel, FakeTarget
from sdcpd.protocol.drafter import DrafterSettings
from sdcpd.protocol.messages import Sampling
from sdcpd.protocol.router import RouterSettings
from sdcpd.protocol.verifier_state import VerifierSettings
from sdcpd.roles.base import Mlc
from sdcpd.roles.contracts import RouterConfig
from sdcpd.roles.drafter import Drafter, DrafterConfig
from sdcpd.roles.generation import GenerationRequest
from sdcpd.roles.health import Health
from sdcpd.roles.objects import Objects
from sdcpd.roles.peers import PeerTable
from sdcpd.roles.router import Router
from sdcpd.roles.status import StatusReporter
from sdcpd.roles.verifier import Verifier, VerifierConfig
from sdcpd.traces import Tracer
from sdcpd.transport.http import Handler, Peer
from sdcpd.transport.loopback import LoopbackClient
from tests.kit.mlc import MemoryMlc
from tests.kit.records import MemoryRecords
from tiers.api import Records, Tier

DOMAIN = "test.example"
ROUTER = "https://r0.test/"
PEERS = PeerTable(DOMAIN)


def peer(role: str, name: str, base: str | None = None) -> Peer:
    """The peer that a certificate of that role would show."""
    uris = (f"spiffe://{DOMAIN}/sdcp/{role}/{name}",) + ((base,) if base else ())
    return Peer("127.0.0.1", uris, (), name, "00")


@dataclass
class Cluster:
    """Roles by base URI; all reach each other through `network`."""

    model: FakeModel = field(default_factory=FakeModel)
    network: dict[str, Handler] = field(default_factory=dict)
    mlc: MemoryMlc = field(default_factory=MemoryMlc)
    records: Records = field(default_factory=MemoryRecords)
    """What a restarted router finds."""
    status_ttl_s: float = 0.6
    verifiers: dict[str, Verifier] = field(default_factory=dict)
    drafters: dict[str, Drafter] = field(default_factory=dict)
    tracer: Callable[[str, str], Tracer | None] = lambda role, name: None
    """What an instance of a role tells its spans to."""
    router: Router = field(init=False)
    _tasks: dict[str, list[asyncio.Task[None]]] = field(default_factory=dict)

    def client(self, role: str, name: str, base: str) -> LoopbackClient:
        """A client that others see as that instance."""
        return LoopbackClient(self.network, peer(role, name, base))

    def add_router(
        self, *, mlc: Mlc | None = None, health: Health | None = None, **config: object
    ) -> Router:
        """The one router, with the MLC and the commit logs; in memory unless one is given."""
        client = self.client("router", "r0", ROUTER)
        settings = config.pop("machine", RouterSettings(switch_grace_s=0.2))
        self.router = Router(
            RouterConfig(
                ROUTER,
                FakeTarget(self.model).info.tokenizer,
                machine=settings,  # type: ignore[arg-type]
                **config,  # type: ignore[arg-type]
            ),
            client=client,
            objects=Objects(client, bases=(ROUTER,), own=ROUTER),
            peers=PEERS,
            mlc=mlc or self.mlc,
            records=self.records,
            health=health,
        )
        self.router.restore()
        self.network[ROUTER] = self.router.listener.handle
        self._tasks[ROUTER] = [asyncio.ensure_future(self.router.run())]
        return self.router

    def add_verifier(
        self,
        name: str = "v0",
        *,
        pass_time_s: float = 0.0,
        mlc: Mlc | None = None,
        kv_tier: Tier | None = None,
        engine: TargetEngine | None = None,
        **config: object,
    ) -> Verifier:
        """A verifier of the cluster's model; its cache is in memory unless one is given."""
        base = f"https://{name}.test/"
        client = self.client("verifier", name, base)
        settings = config.pop("machine", VerifierSettings(0.1, 1.0))
        verifier = Verifier(
            VerifierConfig(base, ROUTER, machine=settings, enforcing_logs=True, **config),  # type: ignore[arg-type]
            engine=engine or FakeTarget(self.model, pass_time_s=pass_time_s),
            client=client,
            objects=Objects(client, bases=(ROUTER, base), own=base),
            peers=PEERS,
            mlc=mlc or MemoryMlc(),
            name=f"{name}.{id(client):x}",
            status_ttl_s=self.status_ttl_s,
            kv_tier=kv_tier,
            tracer=self.tracer("verifier", name),
        )
        self.network[base] = verifier.listener.handle
        self.verifiers[base] = verifier
        reporter = StatusReporter(client, [ROUTER], verifier.status, interval_s=0.1)
        self._tasks[base] = [asyncio.ensure_future(reporter.run())]
        return verifier

    def add_drafter(
        self,
        name: str = "d0",
        *,
        noise: float = 0.0,
        engine: DraftEngine | None = None,
        kv_tier: Tier | None = None,
        predraft: bool | None = None,
    ) -> Drafter:
        """A drafter whose model is the target's with some noise."""
        base = f"https://{name}.test/"
        client = self.client("drafter", name, base)
        own = FakeModel(vocab=self.model.vocab, noise=noise)
        drafter = Drafter(
            DrafterConfig(
                base,
                machine=DrafterSettings(predraft=predraft),
                status_ttl_s=self.status_ttl_s,
            ),
            engine=engine or FakeDrafter(own, name=name),
            client=client,
            objects=Objects(client, bases=(ROUTER, base), own=base),
            peers=PEERS,
            mlc=MemoryMlc(),
            name=f"{name}.{id(client):x}",
            kv_tier=kv_tier,
            tracer=self.tracer("drafter", name),
        )
        self.network[base] = drafter.listener.handle
        self.drafters[base] = drafter
        reporter = StatusReporter(client, [ROUTER], drafter.status, interval_s=0.1)
        self._tasks[base] = [asyncio.ensure_future(reporter.run())]
        return drafter

    def kill(self, base: str) -> None:
        """As kill -9: nobody answers there any more, and nothing is said."""
        self.network.pop(base)
        for task in self._tasks.pop(base):
            task.cancel()
        role = (
            self.router if base == ROUTER else self.verifiers.get(base) or self.drafters.get(base)
        )
        assert role is not None
        if base == ROUTER:
            for session in self.router.sessions:
                session.close()
        for task in list(role._tasks._tasks):
            task.cancel()

    async def ready(self) -> None:
        """Wait until all instances have reported."""
        wanted = len(self.verifiers) + len(self.drafters)
        while len(self.router.board.all()) < wanted:
            await asyncio.sleep(0)

    async def text(
        self, prompt: tuple[int, ...] = (1, 2, 3), count: int = 40, **sampling: int
    ) -> list[int]:
        """Generate a text; greedy unless a profile is given."""
        profile = Sampling(**(sampling or {"temperature_milli": 0}))
        reader = await self.router.generate(GenerationRequest(prompt, count, (), profile))
        tokens: list[int] = []
        async for part in reader:
            tokens += part.tokens
        return tokens

    async def aclose(self) -> None:
        """Stop everything."""
        for tasks in self._tasks.values():
            for task in tasks:
                task.cancel()
        for role in (*self.verifiers.values(), *self.drafters.values(), self.router):
            await role.aclose()


@asynccontextmanager
async def cluster(
    *, drafters: int = 1, noise: float = 0.0, verifiers: int = 1, **router: object
) -> AsyncIterator[Cluster]:
    """A cluster that has started."""
    made = Cluster()
    made.add_router(**router)
    for index in range(verifiers):
        made.add_verifier(f"v{index}")
    for index in range(drafters):
        made.add_drafter(f"d{index}", noise=noise)
    try:
        await made.ready()
        yield made
    finally:
        await made.aclose()
