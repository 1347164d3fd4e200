"""A cluster in this process: the real roles around engines that are given, joined by loopback."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from sdcpd.engine.api import DraftEngine, TargetEngine
from sdcpd.protocol.drafter import DrafterSettings
from sdcpd.protocol.router import RouterSettings
from sdcpd.protocol.verifier_state import VerifierSettings
from sdcpd.roles.contracts import RouterConfig
from sdcpd.roles.drafter import Drafter, DrafterConfig
from sdcpd.roles.generation import Generation, GenerationRequest
from sdcpd.roles.objects import Objects
from sdcpd.roles.peers import PeerTable
from sdcpd.roles.router import Router
from sdcpd.roles.status import StatusReporter
from sdcpd.roles.verifier import Verifier, VerifierConfig
from sdcpd.transport.http import Handler, Peer, Request, Response
from sdcpd.transport.loopback import LoopbackClient
from tiers.api import Tier
from tiers.build import open_logs
from tiers.host import HostTier
from tiers.resource import MlcResource

DOMAIN = "exact.invalid"
ROUTER = f"https://r0.{DOMAIN}/"
REPORT_S, TTL_S = 0.1, 0.5  # a verifier that is killed is replaced within a second
LOW_ROUNDS = 1 << 16  # drafters that are wrong on purpose go on
LOG_BYTES, OBJECT_BYTES = 1 << 30, 256 << 20


class LocalCluster:
    """One router, two verifiers of one engine, and at most one drafter."""

    def __init__(self, target: TargetEngine, folder: Path, *, m_max: int, kv: Tier | None) -> None:
        """`folder` is for the commit logs; `kv` keeps KV for later texts, None keeps none."""
        self._peers = PeerTable(DOMAIN)
        self._kv = kv
        self._network: dict[str, Handler] = {}
        self._stack = AsyncExitStack()
        self._reports: dict[str, asyncio.Task[None]] = {}
        self._asked = asyncio.Event()
        """The router was asked for something, perhaps to take a report."""
        self._logs = open_logs(folder, LOG_BYTES)
        self._stack.push_async_callback(self._logs.aclose)
        self.router = self._add_router(target, m_max)
        self.verifiers = {
            f"https://v{n}.{DOMAIN}/": self._add_verifier(n, target, kv) for n in (0, 1)
        }
        self.drafters: dict[str, Drafter] = {}

    def add_drafter(self, engine: DraftEngine, *, m: int) -> None:
        """A drafter that always proposes `m` tokens where it may."""
        base = f"https://d0.{DOMAIN}/"
        client = self._client("drafter", "d0", base)
        drafter = Drafter(
            DrafterConfig(base, machine=DrafterSettings(m=m), status_ttl_s=TTL_S),
            engine=engine,
            client=client,
            objects=Objects(client, bases=(ROUTER, base), own=base),
            peers=self._peers,
            mlc=None,
            name="d0.exact",
            kv_tier=self._kv,
        )
        self._network[base] = drafter.listener.handle
        self.drafters[base] = drafter
        self._report(base, client, drafter)
        self._stack.push_async_callback(drafter.aclose)

    async def begin(self, request: GenerationRequest) -> Generation:
        """Begin a text; raises GenerationError."""
        return await self.router.generate(request)

    async def ready(self) -> None:
        """Wait until all have reported."""
        wanted = len(self.verifiers) + len(self.drafters)
        while len(self.router.board.all()) < wanted:
            self._asked.clear()
            await self._asked.wait()

    async def kill(self, role: Verifier | Drafter) -> None:
        """It answers nobody any more, and says nothing."""
        base = next(
            base for base, one in {**self.verifiers, **self.drafters}.items() if one is role
        )
        del self._network[base]
        self._reports[base].cancel()
        await role.aclose()

    def serving_of(self, session: bytes) -> Verifier:
        """The verifier that has a session."""
        return next(
            one
            for one in self.verifiers.values()
            if any(served.machine.session == session for served in one.sessions)
        )

    async def aclose(self) -> None:
        """Stop everything; the engines belong to their maker."""
        for task in self._reports.values():
            task.cancel()
        await self._stack.aclose()

    def _client(self, role: str, name: str, base: str) -> LoopbackClient:
        uris = (f"spiffe://{DOMAIN}/sdcp/{role}/{name}", base)
        return LoopbackClient(self._network, Peer("loopback", uris, (), "", ""))

    def _mlc(self, objects: Tier, *, logs: bool = False) -> MlcResource:
        return MlcResource(
            base_path="",
            objects=objects,
            logs=self._logs if logs else None,
            authorize=lambda *_: None,  # nobody else is here
            object_bytes_max=OBJECT_BYTES,
        )

    def _add_router(self, target: TargetEngine, m_max: int) -> Router:
        client = self._client("router", "r0", ROUTER)
        router = Router(
            RouterConfig(
                ROUTER,
                target.info.tokenizer,
                machine=RouterSettings(switch_grace_s=0.2),
                sampling_rule="race",
                m_max=m_max,
                low_rounds=LOW_ROUNDS,
            ),
            client=client,
            objects=Objects(client, bases=(ROUTER,), own=ROUTER),
            peers=self._peers,
            mlc=self._mlc(HostTier(OBJECT_BYTES), logs=True),
        )

        async def handle(request: Request) -> Response:
            answer = await router.listener.handle(request)
            self._asked.set()
            return answer

        self._network[ROUTER] = handle
        self._reports[ROUTER] = asyncio.ensure_future(router.run())
        self._stack.push_async_callback(router.aclose)
        return router

    def _add_verifier(self, number: int, target: TargetEngine, kv: Tier | None) -> Verifier:
        name, base = f"v{number}", f"https://v{number}.{DOMAIN}/"
        client = self._client("verifier", name, base)
        settings = VerifierSettings(self_decode_after_s=0.1, drafter_silence_s=0.5)
        verifier = Verifier(
            VerifierConfig(base, ROUTER, machine=settings, enforcing_logs=True, round_rate=1e9),
            engine=target,
            client=client,
            objects=Objects(client, bases=(ROUTER, base), own=base),
            peers=self._peers,
            mlc=self._mlc(HostTier(OBJECT_BYTES)),
            name=f"{name}.exact",
            status_ttl_s=TTL_S,
            kv_tier=kv,
        )
        self._network[base] = verifier.listener.handle
        self._report(base, client, verifier)
        self._stack.push_async_callback(verifier.aclose)
        return verifier

    def _report(self, base: str, client: LoopbackClient, role: Verifier | Drafter) -> None:
        reporter = StatusReporter(client, [ROUTER], role.status, interval_s=REPORT_S)
        self._reports[base] = asyncio.ensure_future(reporter.run())
