"""A real router with its MLC, between scripted verifiers and drafters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

from sdcpd.protocol.codec import MEDIA_TYPE, encode
from sdcpd.protocol.commit_log import CommitRecord, FenceRecord, decode_log, encode_record, read_log
from sdcpd.protocol.digest import extend
from sdcpd.protocol.messages import (
    Action,
    Assignment,
    Event,
    InstanceRole,
    Resume,
    Sampling,
    SessionOpen,
    Status,
)
from sdcpd.protocol.router import RouterSettings
from sdcpd.protocol.uris import session_path_id
from sdcpd.roles.contracts import RouterConfig
from sdcpd.roles.generation import GenerationRequest
from sdcpd.roles.objects import Objects
from sdcpd.roles.output_reader import OutputReader
from sdcpd.roles.router import Router
from sdcpd.roles.router_session import RoutedSession
from sdcpd.transport.http import Client, Response
from tests.kit.cluster import PEERS
from tests.kit.mlc import MemoryMlc
from tests.kit.network import MemoryNetwork, Network
from tests.kit.scripted import ScriptedPeer, ScriptedVerifier, Seen

GREEDY = GenerationRequest((1, 2), 40, (), Sampling(temperature_milli=0))
SAMPLED = GenerationRequest((1, 2), 40, (), Sampling(temperature_milli=700))
TARGET = b"\x11" * 32
BRISK = RouterSettings(switch_grace_s=0.05, failover_after_s=0.006)
"""Calls that fail are repeated after 2 ms."""
ROLES = {"v": "verifier", "d": "drafter"}


class RouterRig:
    """The router r0, verifiers v0 and v1, drafters d0 and d1; `journal` has all they are asked."""

    def __init__(self, network: Network, config: dict[str, Any]) -> None:
        self.network = network
        self.base = network.base("router", "r0")
        self.mlc = MemoryMlc()
        self.journal: list[tuple[str, Seen]] = []
        self.verifiers = [self._verifier(name) for name in ("v0", "v1")]
        self.drafters = [
            ScriptedPeer(network.base("drafter", name), journal=self.journal)
            for name in ("d0", "d1")
        ]
        self.v0, self.v1 = self.verifiers
        self.d0, self.d1 = self.drafters
        client = self.own_client = network.client("router", "r0")
        config.setdefault("machine", RouterSettings(switch_grace_s=0.05))
        self.router = Router(
            RouterConfig(self.base, bytes(32), **config),
            client=client,
            objects=Objects(client, bases=(self.base,), own=self.base),
            peers=PEERS,
            mlc=self.mlc,
        )
        self._clients: dict[str, Client] = {}
        self._watch: asyncio.Task[None] | None = None

    def _verifier(self, name: str) -> ScriptedVerifier:
        made = ScriptedVerifier(self.network.base("verifier", name), journal=self.journal)
        made.mlc = self.mlc
        return made

    async def start(self) -> None:
        """Serve all of them."""
        await self.network.serve("router", "r0", self.router.listener.handle)
        for role, name, made in (
            ("verifier", "v0", self.v0),
            ("verifier", "v1", self.v1),
            ("drafter", "d0", self.d0),
            ("drafter", "d1", self.d1),
        ):
            await self.network.serve(role, name, made.handle)

    def watch(self) -> None:
        """Have the router look for statuses that expire, as its daemon does."""
        self._watch = asyncio.ensure_future(self.router.run())

    async def aclose(self) -> None:
        """Stop the router."""
        if self._watch is not None:
            self._watch.cancel()
        await self.router.aclose()

    # ---- what instances tell

    def client(self, name: str) -> Client:
        """What the instance of that name (its first letter tells the role) sends with."""
        if name not in self._clients:
            self._clients[name] = self.network.client(ROLES.get(name[0], "front_end"), name)
        return self._clients[name]

    async def report(
        self, name: str, *, who: str = "", path: str | None = None, **changes: Any
    ) -> int:
        """PUT instances/{id}/status; the status of the answer."""
        role = InstanceRole.VERIFIER if name.startswith("v") else InstanceRole.DRAFTER
        members: dict[str, Any] = {
            "instance": f"{name}.1",
            "role": role,
            "load": 0,
            "queue": 0,
            "ttl_ms": 60_000,
            "rules": (1, 2, 200),
            "model": TARGET if role == InstanceRole.VERIFIER else name.encode() * 16,
        }
        octets = encode(Status(**{**members, **changes}))
        label = path if path is not None else {**members, **changes}["instance"]
        return await self.put_status(who or name, label, octets)

    async def put_status(self, who: str, label: str, octets: bytes) -> int:
        """PUT instances/{id}/status with any body."""
        uri = f"{self.base}instances/{quote(label, safe='')}/status"
        headers = (("content-type", MEDIA_TYPE),)
        answer = await self.client(who).request("PUT", uri, headers=headers, body=octets)
        assert answer.status != 204 or answer.body == b""
        return answer.status

    async def event(
        self, kind: int, *, who: str = "v0", session: bytes | None = None, **changes: Any
    ) -> Response:
        """POST events about the session that v0 serves."""
        members: dict[str, Any] = {
            "session": session or self.v0.session,
            "epoch": 1,
            "kind": Action.SWITCH,
            "committed": len(self.v0.tokens),
            "digest": self.v0.digest,
        }
        octets = encode(Event(**{**members, **changes}))
        # Kinds that nobody knows can't be encoded by a role; here they must be.
        octets = octets.replace(b"\x64kind\x02", b"\x64kind" + _uint(kind))
        return await self.post_event(who, octets)

    async def post_event(self, who: str, octets: bytes) -> Response:
        """POST events with any body."""
        headers = (("content-type", MEDIA_TYPE),)
        return await self.client(who).request(
            "POST", self.base + "events", headers=headers, body=octets
        )

    # ---- sessions

    async def generate(self, request: GenerationRequest = GREEDY) -> OutputReader:
        """Begin a text."""
        return await self.router.generate(request)

    async def running(self, request: GenerationRequest = GREEDY) -> OutputReader:
        """A text that v0 serves, with d0 named and assigned; what led there is not unread."""
        await self.report("v0")
        await self.report("d0")
        reader = await self.generate(request)
        await self.v0.next("POST", "sessions")
        await self.v0.next("PUT", ".*/drafter")
        await self.d0.next("POST", "assignments")
        await self.until(lambda: self.session.machine.drafter == self.d0.base)
        return reader

    async def lost(self, *rounds: tuple[int, ...]) -> None:
        """v0 commits these rounds of a text and is gone; v1 is there."""
        await self.running()
        await self.report("v1")
        for tokens in rounds:
            self.commit(tokens)
        await self.report("v0", ttl_ms=0)

    @property
    def session(self) -> RoutedSession:
        """The one session that is open."""
        (found,) = self.router.sessions
        return found

    def commit(
        self, tokens: tuple[int, ...], *, epoch: int = 1, finish: Action | None = None
    ) -> None:
        """v0 commits a round: record first, then output."""
        self.append(self.record(tokens, epoch=epoch))
        self.v0.commit(tokens, finish=finish)

    def record(self, tokens: tuple[int, ...], *, epoch: int = 1) -> CommitRecord:
        """The record of v0's next round."""
        return CommitRecord(
            epoch=epoch,
            round=self.v0.round + 1,
            emitted=tokens,
            committed=len(self.v0.tokens) + len(tokens),
            digest=extend(self.v0.digest, tokens),
        )

    @property
    def log_name(self) -> str:
        """The session's commit log at the MLC."""
        return session_path_id(self.v0.session)

    def append(self, record: CommitRecord | FenceRecord) -> None:
        """Append to the session's log behind everybody's back."""
        self.mlc.append(self.log_name, encode_record(record))

    def log(self) -> tuple[CommitRecord | FenceRecord, ...]:
        """The records of the session's log."""
        _, octets = self.mlc.logs.get(self.log_name, (0, b""))
        return read_log(decode_log(octets)).records

    def asked(self) -> list[str]:
        """What verifiers and drafters were asked to do so far, in order, without reading."""
        labels = {v.base: f"v{i}" for i, v in enumerate(self.verifiers)}
        labels |= {d.base: f"d{i}" for i, d in enumerate(self.drafters)}
        return [
            f"{labels[base]} {seen.method} {seen.path.rpartition('/')[2]}"
            for base, seen in self.journal
            if seen.method != "GET"
        ]

    async def until(self, what: Any) -> None:
        """Wait until a condition holds."""
        async with asyncio.timeout(10):
            while not what():
                await asyncio.sleep(0.001)


def opened(seen: Seen) -> SessionOpen:
    """The session-open of a request."""
    return seen.as_(SessionOpen)


def resume_of(seen: Seen) -> Resume:
    """The resume of a session-open, which must have one."""
    found = opened(seen).resume
    assert found is not None
    return found


def assigned(seen: Seen) -> Assignment:
    """The assignment of a request."""
    return seen.as_(Assignment)


async def texts(reader: OutputReader) -> list[int]:
    """All tokens that a front end gets."""
    return [token async for part in reader for token in part.tokens]


def _uint(value: int) -> bytes:
    return bytes([value]) if value < 24 else bytes([0x18, value])


@asynccontextmanager
async def router_rig(network: Network | None = None, **config: Any) -> AsyncIterator[RouterRig]:
    """A rig that serves; `config` are members of RouterConfig."""
    made = RouterRig(network or MemoryNetwork(), config)
    await made.start()
    try:
        yield made
    finally:
        await made.aclose()
    assert [peer.errors for peer in (*made.verifiers, *made.drafters)] == [[]] * 4
