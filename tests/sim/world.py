"""The real roles, their engines faked, in a world where a plan goes wrong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sdcpd.engine.fake import FakeDrafter, FakeModel, FakeTarget
from sdcpd.protocol.codec import decode
from sdcpd.protocol.commit_log import FenceRecord, decode_log
from sdcpd.protocol.drafter import DrafterSettings
from sdcpd.protocol.messages import Action, Event, Output, Rule, Sampling
from sdcpd.protocol.router import RouterSettings
from sdcpd.protocol.uris import session_path_id
from sdcpd.protocol.verifier_state import VerifierSettings
from sdcpd.roles.contracts import RouterConfig
from sdcpd.roles.drafter import Drafter, DrafterConfig
from sdcpd.roles.generation import GenerationError, GenerationRequest
from sdcpd.roles.objects import Objects
from sdcpd.roles.output_reader import OutputReader
from sdcpd.roles.router import Router
from sdcpd.roles.status import StatusReporter, instance_name
from sdcpd.roles.verifier import Verifier, VerifierConfig
from sdcpd.transport.http import Request, Response
from sdcpd.transport.loopback import answer
from tests.kit.cluster import PEERS, peer
from tests.kit.cluster import ROUTER as ROUTER_BASE
from tests.kit.mlc import MemoryMlc
from tests.kit.records import MemoryRecords
from tests.sim.checks import Broken, Checker
from tests.sim.network import Network, Node, crashes
from tests.sim.plan import ROUTER, STORE, Crash, Full, Plan, Text

PASS_S = 0.05
STATUS_S, TTL_S = 1.0, 3.0
RELEASE_S = 40.0  # after the last text has ended, until nobody holds its session
PATIENCE_S = 200.0  # until every text must have ended


class Store(MemoryMlc):
    """The log store and cache of the cluster; it outlives every process.

    One that does not enforce fences may let one in between the check of a tag and the append: that
    is what its writers read the log for (D-M7).
    """

    def __init__(
        self,
        *,
        enforcing: bool,
        changed: Callable[[str, bytes], None],
        slipped: Callable[[], None],
        seed: int,
    ) -> None:
        super().__init__(enforcing=enforcing)
        self._changed, self._slipped = changed, slipped
        self._rng = random.Random(f"store {seed}")

    async def handle(self, request: Request) -> Response:
        """See MemoryMlc."""
        slow = not self.enforcing and request.header("content-range") and self._rng.random() < 0.1
        name = request.path.rsplit("/", 1)[-1]
        known = self.logs.get(name)
        if not slow or known is None or request.header("if-match") != f'"{known[0]}"':
            return await super().handle(request)
        await asyncio.sleep(self._rng.choice((0.001, 0.3, 3.0)))
        version, old = self.logs[name]
        fences = [r for r in decode_log(old[len(known[1]) :]) if isinstance(r, FenceRecord)]
        if version != known[0] and not fences:
            return Response(412)
        if fences:
            self._slipped()
        self.logs[name] = (version + 1, old + request.body)
        self._changed(name, self.logs[name][1])
        return Response(204, (("etag", f'"{version + 1}"'), ("sdcp-append", "1")))

    def _log(self, request: Request, name: str) -> Response:
        before = self.logs.get(name)
        response = super()._log(request, name)
        if self.logs.get(name) != before:
            self._changed(name, self.logs[name][1])
        return response


@dataclass
class Outcome:
    """What became of a text."""

    tokens: list[int] = field(default_factory=list)
    ended: str | None = None
    label: str | None = None


class World:
    """One simulated cluster; `run` raises Broken if an invariant does not hold."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.model = FakeModel()
        self._draft_models = [FakeModel(noise=noise) for noise in plan.noise]
        drafters = {f"https://d{i}.test/": model for i, model in enumerate(self._draft_models)}
        self.checker = Checker(self.model, drafters)
        self.outcomes = [Outcome() for _ in plan.texts]
        self.prepared = {"used": 0, "discarded": 0}
        """What became of the proposals that drafters prepared (D-D4)."""
        self._failed: set[str] = set()
        self._store = Store(
            enforcing=plan.enforcing,
            changed=self._log_changed,
            slipped=self._slipped,
            seed=plan.seed,
        )
        self._records = MemoryRecords(write_s=0.001)
        self._broken: Broken | None = None
        self._roles: dict[str, Any] = {}

    async def run(self) -> None:
        """Until every text has ended."""
        loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self.network = Network(self.plan, self, loop.time())
        self.network.nodes[STORE] = Node(STORE, "", self._store.handle)
        for name in self._names():
            self._start(name)
        while len(self.router.board.all()) < len(self._names()) - 1:
            await asyncio.sleep(0.01)
        self.network.begin_s = loop.time()
        texts = [
            asyncio.ensure_future(self._text(text, outcome))
            for text, outcome in zip(self.plan.texts, self.outcomes, strict=True)
        ]
        fates = [asyncio.ensure_future(self._crash(fault)) for fault in crashes(self.plan)]
        full = [fault for fault in self.plan.faults if isinstance(fault, Full)]
        fates += [asyncio.ensure_future(self._fill(fault)) for fault in full]
        over = asyncio.ensure_future(self._over.wait())
        left: set[asyncio.Task[Any]] = set(texts)
        end_s = loop.time() + PATIENCE_S
        while left and not over.done() and loop.time() < end_s:
            await asyncio.wait({over, *left}, timeout=PATIENCE_S, return_when="FIRST_COMPLETED")
            left = {text for text in left if not text.done()}
        await self.network.quiet()
        await self._released(loop.time() + RELEASE_S)
        if self._broken is None and not all(text.done() for text in texts):
            self._break(f"not all texts ended: {self.outcomes}")
        for task in texts:
            if task.done() and not task.cancelled() and (error := task.exception()):
                self._break(f"a text failed with {error!r}")
        for task in (*texts, *fates, over):
            task.cancel()
        for name in list(self._roles):
            await self._stop(name)
        if self._broken is not None:
            raise self._broken

    async def _released(self, until_s: float) -> None:
        """The end of a session gets about, in its time."""
        while self._broken is None and asyncio.get_running_loop().time() < until_s:
            try:
                self._all_released()
            except Broken:
                await asyncio.sleep(0.5)
            else:
                return
        if self._broken is None:
            self._guarded(self._all_released)

    def _all_released(self) -> None:
        """Nobody holds a session that has ended, but for those whose end cannot be known there."""
        if ROUTER in self._roles and self.router.sessions:
            raise Broken(f"the router still holds {[s.label for s in self.router.sessions]}")
        for name, role in self._roles.items():
            for one in role.sessions if name.startswith("v") else ():
                machine = one.machine
                log = self.checker.sessions[session_path_id(machine.session)].log
                if machine.closed or machine.fenced or machine.epoch < log.highest_epoch:
                    continue  # the last: another has taken over, and nobody has told it yet
                raise Broken(f"{name} still serves {one.label}: {machine.state_message().state}")

    def _names(self) -> list[str]:
        verifiers = [f"v{i}" for i in range(self.plan.verifiers)]
        return [ROUTER, *verifiers, *(f"d{i}" for i in range(len(self.plan.noise)))]

    @property
    def router(self) -> Router:
        """The router that lives now."""
        router: Router = self._roles[ROUTER]
        return router

    # ---- what the network and the logs show

    def before(self, request: Request) -> None:
        """See Observer."""
        self._guarded(lambda: self.checker.before(request))

    def message(self, dest: str, request: Request, response: Response) -> None:
        """See Observer."""
        self._guarded(lambda: self.checker.message(dest, request, response))
        if request.path == "/events" and decode(Event, request.body).kind == Action.FAIL:
            self._failed.add(session_path_id(decode(Event, request.body).session))
        if request.path.endswith("/output") and response.status == 200:
            self._guarded(lambda: self._may_fail(dest, decode(Output, response.body)))

    def _may_fail(self, dest: str, output: Output) -> None:
        """A session fails by the ladder or because its client has gone, and by nothing else."""
        if output.finish != Action.FAIL:
            return
        served = [
            one for one in self._roles[dest].sessions if one.machine.session == output.session
        ]
        reason = served[0].machine.end_reason if served else "it is gone"
        if reason not in ("escalation exhausted", "cancelled"):
            raise Broken(f"a session failed: {reason}")
        self._failed.add(session_path_id(output.session))

    def _slipped(self) -> None:
        self.checker.slips += 1

    def _log_changed(self, label: str, octets: bytes) -> None:
        self._guarded(lambda: self.checker.log_changed(label, octets))

    def _guarded(self, check: Callable[[], None]) -> None:
        try:
            check()
        except Broken as broken:
            self._break(str(broken))
        except Exception as error:  # a check must not pass for want of being made
            self._break(f"a check failed with {error!r}")

    def _break(self, why: str) -> None:
        if self._broken is None:
            self._broken = Broken(why)
        self._over.set()

    # ---- texts

    async def _text(self, text: Text, outcome: Outcome) -> None:
        await asyncio.sleep(text.at_s)
        greedy = self.plan.rule == Rule.GREEDY
        request = GenerationRequest(
            text.prompt,
            text.max_new,
            text.stop,
            Sampling(temperature_milli=text.temperature_milli, seed=None if greedy else text.seed),
        )
        while outcome.ended is None:
            await self._read(request, text, outcome)

    async def _read(self, request: GenerationRequest, text: Text, outcome: Outcome) -> None:
        """Read from the router that lives now, which may die meanwhile."""
        node = await self._router_node()
        reading = node.spawn(self._read_here(request, text, outcome))
        await asyncio.wait({reading})
        if not reading.cancelled():
            reading.result()

    async def _read_here(self, request: GenerationRequest, text: Text, outcome: Outcome) -> None:
        try:
            reader = await self._reader(request, outcome)
            if reader is None:
                self._guarded(lambda: self._gone(text, outcome))
                return
            async for part in reader:
                outcome.tokens += part.tokens
                self._seen(reader.session, outcome)
                if text.cancel_after is not None and len(outcome.tokens) >= text.cancel_after:
                    await reader.cancel()
                    outcome.ended = "cancelled"
                    return
        except GenerationError as error:
            outcome.ended = f"failed: {error}"
            if "failed at its verifier" not in outcome.ended:
                # All that this world does to them heals in time.
                self._break(f"a text {outcome.ended}")
            self._guarded(lambda: self._all_seen(outcome))
            return
        outcome.ended = "finished"
        self._guarded(lambda: self._complete(text, outcome))

    async def _reader(self, request: GenerationRequest, outcome: Outcome) -> OutputReader | None:
        """A new session; after a restart of the router the same one from where it was read."""
        if outcome.label is not None:
            session = self.checker.sessions[outcome.label].session
            return self.router.reader(session, len(outcome.tokens))
        reader = await self._begun(request)
        outcome.label = session_path_id(reader.session)
        return reader

    def _gone(self, text: Text, outcome: Outcome) -> None:
        """A restarted router knows every session that was open: this one had ended."""
        assert outcome.label is not None, "a session that was never begun is begun anew"
        watched = self.checker.sessions[outcome.label]
        tokens = watched.log.tokens
        ended = len(tokens) == text.max_new or any(token in text.stop for token in tokens)
        if not ended and outcome.label not in self._failed:
            raise Broken("a router that was restarted has lost a session")
        outcome.tokens, outcome.ended = list(tokens), "finished without its reader"

    async def _router_node(self) -> Node:
        while ROUTER not in self.network.nodes:
            await asyncio.sleep(0.05)
        return self.network.nodes[ROUTER]

    async def _begun(self, request: GenerationRequest) -> OutputReader:
        """As a client does: what says that it can be tried again later is tried again."""
        while True:
            try:
                return await self.router.generate(request)
            except GenerationError as error:
                if error.retry_after_s is None and "cannot be kept" not in str(error):
                    raise
                await asyncio.sleep(error.retry_after_s or 1.0)

    def _seen(self, session: bytes, outcome: Outcome) -> None:
        def check() -> None:
            log = self._watched(session).log
            if log.tokens[: len(outcome.tokens)] != tuple(outcome.tokens):
                raise Broken("the front end has seen what the log does not hold")

        self._guarded(check)

    def _complete(self, text: Text, outcome: Outcome) -> None:
        """A finished text is as long as it should be: to a stop token or max_new."""
        stopped = bool(outcome.tokens) and outcome.tokens[-1] in text.stop
        if not stopped and len(outcome.tokens) != text.max_new:
            raise Broken(f"a finished text has {len(outcome.tokens)} of {text.max_new} tokens")
        self._all_seen(outcome)

    def _all_seen(self, outcome: Outcome) -> None:
        assert outcome.label is not None, "a text that ended was begun"
        if len(self.checker.sessions[outcome.label].log.tokens) != len(outcome.tokens):
            raise Broken("the front end has not seen all that the log holds")

    def _watched(self, session: bytes) -> Any:
        return self.checker.sessions[session_path_id(session)]

    # ---- processes

    async def _crash(self, fault: Crash) -> None:
        await asyncio.sleep(fault.at_s)
        if fault.node not in self._roles:
            return  # dead already
        await self._stop(fault.node)
        await asyncio.sleep(fault.down_s)
        self._start(fault.node)

    async def _fill(self, fault: Full) -> None:
        await asyncio.sleep(fault.at_s)
        self._records.failing = True
        await asyncio.sleep(fault.for_s)
        self._records.failing = False

    async def _stop(self, name: str) -> None:
        self.network.nodes.pop(name).die()
        role = self._roles.pop(name)
        if isinstance(role, Drafter):
            self.prepared["used"] += role.rounds.prepared_used
            self.prepared["discarded"] += role.rounds.prepared_discarded
        if isinstance(role, Verifier):
            self._guarded(lambda: self._load_is_counted(role))
        await role.aclose()

    def _load_is_counted(self, verifier: Verifier) -> None:
        """What is kept of how many sessions have work is what looking at all of them says."""
        busy = sum(one.machine.busy for one in verifier.sessions if not one.machine.closed)
        if verifier.status().queue != busy:
            raise Broken(f"{busy} sessions are busy, and the load is of {verifier.status().queue}")

    def _start(self, name: str) -> None:
        base = f"https://{name}.test/"
        node = Node(name, base, self._refuse)
        kind = {"r": "router", "v": "verifier", "d": "drafter"}[name[0]]
        client = self.network.client(node, peer(kind, name, base))
        objects = Objects(
            client, bases=(ROUTER_BASE, base), own=ROUTER_BASE if kind == "router" else base
        )
        make = {"router": self._router, "verifier": self._verifier, "drafter": self._drafter}[kind]
        role = make(name, base, client, objects)

        async def handle(request: Request) -> Response:
            return await answer(role.listener.handle, request)

        node.handler = handle
        self.network.nodes[name], self._roles[name] = node, role
        if kind == "router":
            role.restore()
            node.spawn(role.run())
        else:
            reporter = StatusReporter(client, [ROUTER_BASE], role.status, interval_s=STATUS_S)
            node.spawn(reporter.run())

    async def _refuse(self, _: Request) -> Response:
        raise AssertionError("a node is not reached before its role is there")

    def _router(self, name: str, base: str, client: Any, objects: Objects) -> Router:
        plan = self.plan
        return Router(
            RouterConfig(
                base,
                FakeTarget(self.model).info.tokenizer,
                machine=RouterSettings(switch_grace_s=0.5, progress_s=5.0),
                sampling_rule="race" if plan.rule == Rule.RACE else "rejection",
                m_max=plan.m_max,
                low_rounds=plan.low_rounds,
                fallback=plan.fallback,
                self_load=plan.self_load,
                self_max=plan.self_max,
                trust_drafters=True,
            ),
            client=client,
            objects=objects,
            peers=PEERS,
            mlc=None,
            records=self._records,
        )

    def _verifier(self, name: str, base: str, client: Any, objects: Objects) -> Verifier:
        return Verifier(
            VerifierConfig(
                base,
                ROUTER_BASE,
                machine=VerifierSettings(0.5, 3.0),
                enforcing_logs=self.plan.enforcing,
            ),
            engine=FakeTarget(self.model, pass_time_s=PASS_S),
            client=client,
            objects=objects,
            peers=PEERS,
            mlc=MemoryMlc(),
            name=instance_name(name),
            status_ttl_s=TTL_S,
        )

    def _drafter(self, name: str, base: str, client: Any, objects: Objects) -> Drafter:
        return Drafter(
            DrafterConfig(
                base, machine=DrafterSettings(predraft=self.plan.predraft), status_ttl_s=TTL_S
            ),
            engine=FakeDrafter(
                self._draft_models[int(name[1:])], name=name, token_time_s=self.plan.token_s
            ),
            client=client,
            objects=objects,
            peers=PEERS,
            mlc=MemoryMlc(),
            name=instance_name(name),
        )
